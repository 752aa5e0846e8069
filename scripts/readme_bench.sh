#!/usr/bin/env bash
# The README's table, and its page beside the JSON. VLLM_EXT_DATA: a folder with spec_bench.jsonl, the questions
# of hemingkx/Spec-Bench, and human_eval.jsonl, the problems of openai/human-eval.
# Arguments: batch sizes (1), JSON file (bench.json), methods.
set -euo pipefail
cd "$(dirname "$0")/.."
data=${VLLM_EXT_DATA:-../shared/data}
for file in spec_bench human_eval; do
    if [ ! -f "$data/$file.jsonl" ]; then
        echo "$data/$file.jsonl is not there; set VLLM_EXT_DATA to a folder with Spec-Bench's and HumanEval's" >&2
        exit 1
    fi
done
# vLLM's ngram at three settings, the best of which counts; "chain" is the paper's table without trees.
ngram='ngram(num_speculative_tokens=3),ngram(num_speculative_tokens=5),ngram(num_speculative_tokens=5,prompt_lookup_max=3,prompt_lookup_min=1)'
ours='token_recycling(num_speculative_tokens=16),token_recycling(num_speculative_tokens=16,tree=chain,context_tokens=1)'
json=${2:-bench.json}
model=$(.venv/bin/python -c 'from vllm_ext import demo_model; print(demo_model.ensure_model())' | tail -1)
.venv/bin/vllm-ext bench --model "$model" --prompts "$data/spec_bench.jsonl" --prompts "$data/human_eval.jsonl" \
    --methods "${3:-plain,$ours,$ngram}" --batch-size "${1:-1}" --limit 80 --max-tokens 128 --rounds 3 \
    --dtype bfloat16 --json "$json" --html "${json%.json}.html"
