#!/usr/bin/env bash
# Answers of the embedded base -> what Medusa-2 gains over heads on the frozen base, on one GPU (two trainings, then measurements):
#   bash scripts/medusa2.sh OUTPUT MT_BENCH.jsonl GSM8K_TEST.jsonl[.gz] ANSWERS.jsonl[.gz] ..
# Paths are relative to the repository. ANSWERS are the files that scripts/pretrained.sh makes. STEPS are those of both trainings; MEDUSA2
# holds further options of the second, FROZEN_HEADS names heads trained on the same data for as long, in place of the first. Interrupted, it
# goes on where it stopped.
# Left in OUTPUT: frozen/ and tuned/ (heads), merged/ (the tuned base), frozen_figures/ and tuned_figures/ (acceptance over 64 nodes),
# report.json (perplexities, right GSM8K answers).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -lt 4 ]; then
    echo "usage: bash scripts/medusa2.sh OUTPUT MT_BENCH.jsonl GSM8K_TEST.jsonl[.gz] ANSWERS.jsonl[.gz] .." >&2
    exit 2
fi
output=$1 mt_bench=$2 gsm8k=$3
shift 3
train() { # NAME CONFIG [options]
    [ -f "$output/$1/config.json" ] || accelerate launch --quiet --config_file configs/accelerate/single.yaml -m train \
        --config "configs/train/$2.yaml" --max-steps "${STEPS:-700}" "${@:3}" --output-dir "$output/$1"
}
figures() { # NAME BASE HEADS
    python3 scripts/figures.py --mt-bench "$mt_bench" --gsm8k "$gsm8k" --base "$2" --heads "$3" \
        --parts acceptance --device cuda --batch-size 100 --output "$output/$1"
}
made_from=$(echo "${STEPS:-700} ${MEDUSA2:-} ${FROZEN_HEADS:-}" && cksum "$mt_bench" "$gsm8k" "$@")
if [ -f "$output/made-from" ] && [ "$(cat "$output/made-from")" != "$made_from" ]; then
    echo "error: $output was begun with other files, STEPS, MEDUSA2 or FROZEN_HEADS: choose another folder" >&2
    exit 2
fi
mkdir -p "$output"
echo "$made_from" >"$output/made-from"
frozen=${FROZEN_HEADS:-$output/frozen}
[ -n "${FROZEN_HEADS:-}" ] || train frozen smollm2_medusa --data "$@"
# shellcheck disable=SC2086  # options are words
train tuned smollm2_medusa2 --data "$@" ${MEDUSA2:-}
[ -f "$output/merged/config.json" ] || python3 -m medusa_heads.cli merge --adapter "$output/tuned/adapter" --output "$output/merged"
[ -f "$output/report.json" ] || python3 scripts/medusa2_report.py --tuned "$output/merged" --answers "$@" --held-out 300 \
    --references "$gsm8k" --device cuda --output "$output/report.json"
figures frozen_figures embedded "$frozen"
figures tuned_figures "$output/merged" "$output/tuned"
