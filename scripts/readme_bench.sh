#!/usr/bin/env bash
# The README's table. VLLM_EXT_DATA: the folder with spec_bench.jsonl (github.com/hemingkx/Spec-Bench).
set -euo pipefail
cd "$(dirname "$0")/.."
data=${VLLM_EXT_DATA:-../shared/data}
model=$(.venv/bin/python -c 'from vllm_ext import demo_model; print(demo_model.ensure_model())' | tail -1)
.venv/bin/vllm-ext bench --model "$model" --prompts "$data/spec_bench.jsonl" \
    --methods plain,ngram,token_recycling --batch-size "${1:-1,4}" --limit 40 --max-tokens 128 --rounds 3 \
    --dtype bfloat16 --json "${2:-bench.json}"
