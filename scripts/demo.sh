#!/usr/bin/env bash
# A clone -> heads for the embedded model, trained, exported and compared: bash scripts/demo.sh [--from-scratch] [--fresh]
# Leaves everything in outputs/demo; a second run repeats no finished work. The last line of stdout is bench's JSON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

out=outputs/demo
config=configs/train/smollm2_finetune_cpu.yaml
name=fine-tuned # also the name of the row in the comparison: heads:fine-tuned
train_options=()
fresh=

for option in "$@"; do
    case $option in
        --from-scratch)
            name=from-scratch
            train_options=(--init-heads None --learning-rate 1e-3)
            ;;
        --fresh) fresh=yes ;;
        *)
            say "error: unknown option $option; known are --from-scratch (new heads instead of the shipped ones) and --fresh (repeat everything)"
            exit 2
            ;;
    esac
done

num_cores() { nproc 2>/dev/null || sysctl -n hw.ncpu; }

step() { printf '\n' >&2 && say "=== $* ==="; }

# What earlier results were made from: when it changes, they are made anew.
fingerprint() { cat scripts/demo.sh scripts/demo_prompts.jsonl "$config" medusa_heads/pretrained/*/model.safetensors | cksum; }

if [ -n "$fresh" ] || [ "$(cat "$out/made-from" 2>/dev/null)" != "$(fingerprint)" ]; then
    rm -rf "$out"
    mkdir -p "$out"
    fingerprint >"$out/made-from"
fi

step "0/4 environment"
make_environment .venv dev
PATH="$PWD/.venv/bin:$PATH"

step "1/4 the base model answers $(wc -l <scripts/demo_prompts.jsonl) prompts: the training data"
medusa-heads regenerate --base embedded --prompts scripts/demo_prompts.jsonl --max-new-tokens 128 --output "$out/answers.jsonl" >&2

step "2/4 training heads ($name) on these answers"
if [ -f "$out/$name/config.json" ]; then
    say "$out/$name is already trained"
else
    # accelerate's launcher would otherwise allow one thread
    accelerate launch --quiet --config_file configs/accelerate/single.yaml --num_cpu_threads_per_process "$(num_cores)" \
        -m train --config "$config" --output-dir "$out/$name" ${train_options[@]+"${train_options[@]}"} >&2
fi

step "3/4 exporting the heads; the files are read back and compared"
for target in vllm medusa-v2; do
    medusa-heads export --base embedded --heads "$out/$name" --to "$target" --output "$out/$name-$target" >&2
done

step "4/4 comparing the base, the shipped heads (heads) and those just trained (heads:$name) on $(wc -l <scripts/demo_bench_prompts.jsonl) other prompts"
say "picture: $out/benchmark.png   texts: $out/texts.html   figures: $out/bench.json"
medusa-heads bench --base embedded --heads pretrained "$out/$name" --prompts scripts/demo_bench_prompts.jsonl \
    --max-new-tokens 64 --dtype bfloat16 --plot "$out/benchmark.png" --html "$out/texts.html" --json "$out/bench.json"
