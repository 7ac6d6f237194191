#!/usr/bin/env bash
# Prompt files -> the heads that ship, on one GPU (an H200 takes less than half an hour):
#   bash scripts/pretrained.sh OUTPUT GSM8K_TRAIN.jsonl[.gz] OTHER_PROMPTS.jsonl[.gz] ..
# Paths are relative to the repository. The base answers the prompts, 40,000 of its own, and 66,000 that it writes from the first words of
# the given ones; heads are trained on all answers but 300 held-out conversations, on which their acceptance is measured.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -lt 3 ]; then
    echo "usage: bash scripts/pretrained.sh OUTPUT GSM8K_TRAIN.jsonl[.gz] OTHER_PROMPTS.jsonl[.gz] .." >&2
    exit 2
fi
output=$1 gsm8k=$2
shift 2
regenerate() {
    python3 -m medusa_heads.cli regenerate --base embedded --max-new-tokens 512 "$@"
}
regenerate --prompts "$gsm8k" "$@" --output "$output/open.jsonl.gz"
regenerate --self-prompts 40000 --seed 1 --output "$output/own.jsonl.gz"
regenerate --self-prompts 26000 --seed 5 --self-prompts-like "$gsm8k" --output "$output/like_gsm8k.jsonl.gz"
regenerate --self-prompts 40000 --seed 6 --self-prompts-like "$@" --output "$output/like_others.jsonl.gz"
accelerate launch --quiet --config_file configs/accelerate/single.yaml -m train --config configs/train/smollm2_medusa.yaml \
    --data "$output"/{open,own,like_gsm8k,like_others}.jsonl.gz --output-dir "$output/heads" --hidden-states device
