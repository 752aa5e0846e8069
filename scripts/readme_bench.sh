#!/usr/bin/env bash
# The README's table, and its page beside the JSON. VLLM_EXT_DATA: a folder with spec_bench.jsonl, the questions
# of hemingkx/Spec-Bench, and human_eval.jsonl, the problems of openai/human-eval.
# Arguments: JSON file (bench.json), methods, further options of `vllm-ext bench`, which go before those here.
#
# vLLM's suffix takes part where arctic-inference is installed: pip install --no-deps arctic-inference==0.3.0
set -euo pipefail
cd "$(dirname "$0")/.."
data=${VLLM_EXT_DATA:-../shared/data}
for file in spec_bench human_eval; do
    if [ ! -f "$data/$file.jsonl" ]; then
        echo "$data/$file.jsonl is not there; set VLLM_EXT_DATA to a folder with Spec-Bench's and HumanEval's" >&2
        exit 1
    fi
done
model=$(.venv/bin/python -c 'from vllm_ext.demo.embedded_model import ensure_model; print(ensure_model())' | tail -1)
# The datastore: the source code of all that is installed here.
store=${VLLM_EXT_CACHE:-$HOME/.cache/vllm-ext}/site-packages-store
if ! .venv/bin/vllm-ext datastore info "$store" >/dev/null 2>&1; then
    .venv/bin/vllm-ext datastore build --model "$model" --output "$store" .venv/lib/python*/site-packages
fi
rest="{\"method\": \"rest\", \"datastore\": \"$store\"}"
methods='plain,ngram(num_speculative_tokens=3),ngram(num_speculative_tokens=5)'
methods+=',ngram(num_speculative_tokens=5,prompt_lookup_max=3,prompt_lookup_min=1)'
if .venv/bin/python -c 'import arctic_inference' 2>/dev/null; then
    methods+=',suffix(num_speculative_tokens=24)'
else
    echo "vLLM's suffix is left out: pip install --no-deps arctic-inference==0.3.0 adds it" >&2
fi
methods+=",token_recycling(num_speculative_tokens=16),rest(num_speculative_tokens=16,datastore=$store)"
methods+=",hybrid(num_speculative_tokens=16),hybrid(num_speculative_tokens=16,drafters=[\"token_recycling\",\"suffix_tree\",$rest])"
json=${1:-bench.json}
methods=${2:-$methods}
# Other packages' plugins stay out of the engines. 256 MiB hold 11,000 tokens, and nine engines fit into 24 GB.
VLLM_PLUGINS=vllm_ext .venv/bin/vllm-ext bench --model "$model" --prompts "$data/spec_bench.jsonl:10" \
    --prompts "$data/human_eval.jsonl:20" --methods "$methods" --batch-size 1 --max-tokens 128 --rounds 3 \
    --dtype bfloat16 --kv-cache-memory-bytes 268435456 --json "$json" --html "${json%.json}.html" "${@:3}"
