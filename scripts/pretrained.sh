#!/usr/bin/env bash
# Prompt files -> the heads that ship, on one GPU (an H100 takes about 15 minutes):
#   bash scripts/pretrained.sh OUTPUT PROMPTS.jsonl[.gz] ..
# The base answers the prompts, writes and answers 40,000 of its own, and heads are trained on all
# answers but 300 held-out conversations, on which their acceptance is measured.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -lt 2 ]; then
    echo "usage: bash scripts/pretrained.sh OUTPUT PROMPTS.jsonl[.gz] .." >&2
    exit 2
fi
output=$1
shift
python3 -m medusa_heads.cli regenerate --base embedded --prompts "$@" --max-new-tokens 512 --output "$output/open.jsonl.gz"
python3 -m medusa_heads.cli regenerate --base embedded --self-prompts 40000 --seed 1 --max-new-tokens 512 --output "$output/own.jsonl.gz"
accelerate launch --config_file configs/accelerate/single.yaml -m train --config configs/train/smollm2_medusa.yaml \
    --data "$output/open.jsonl.gz" "$output/own.jsonl.gz" --output-dir "$output/heads"
