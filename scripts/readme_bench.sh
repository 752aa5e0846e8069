#!/usr/bin/env bash
# The README's table. VLLM_EXT_DATA: a folder with spec_bench.jsonl, the questions of hemingkx/Spec-Bench.
set -euo pipefail
cd "$(dirname "$0")/.."
data=${VLLM_EXT_DATA:-../shared/data}
if [ ! -f "$data/spec_bench.jsonl" ]; then
    echo "$data/spec_bench.jsonl is not there; set VLLM_EXT_DATA to a folder with Spec-Bench's questions" >&2
    exit 1
fi
model=$(.venv/bin/python -c 'from vllm_ext import demo_model; print(demo_model.ensure_model())' | tail -1)
.venv/bin/vllm-ext bench --model "$model" --prompts "$data/spec_bench.jsonl" \
    --methods plain,ngram,token_recycling --batch-size "${1:-1,4}" --limit 40 --max-tokens 128 --rounds 3 \
    --dtype bfloat16 --json "${2:-bench.json}"
