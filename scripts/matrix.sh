#!/usr/bin/env bash
# The engine tests of exactness, once for every method: six minutes each, or twenty of a slow core. Arguments: methods, as
# names or JSON objects without spaces; none: every method of the registry. `hybrid+METHOD` is that beside tables,
# `hybrid+vllm:draft_model` vLLM's own, `METHOD+cascade` with a cascade. What plain vLLM answers is computed once.
# RECORD: a file that gets a line of each, for scripts/runner_page.py.
# PLAIN_ANSWERS: a folder that keeps it for the next call, on the same machine and vLLM.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} OMP_NUM_THREADS=1
tests=$(printf 'tests/engine/test_%s.py ' lossless sampling_matrix invariants stress slice structured)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
store=$work/store
embedded() {
    .venv/bin/python -c 'from vllm_ext.demo.embedded_model import ensure_model; print(ensure_model())' | tail -1
}
methods=${*:-$(.venv/bin/python -c 'from vllm_ext.proposers.registry import METHODS; print(*METHODS)')}
with_options='import json, sys
from vllm_ext.proposers.registry import load_method
more = json.loads(sys.argv[2]) if sys.argv[2:] else {}
print(json.dumps({"method": sys.argv[1], **load_method(sys.argv[1]).tested_with, **more}))'
beside_tables='import json, sys
from vllm_ext.proposers.registry import load_method
of_whole = load_method("hybrid").Options.model_fields
given = load_method(sys.argv[1]).tested_with
own = {"method": sys.argv[1], **{name: value for name, value in given.items() if name not in of_whole}}
print(json.dumps({"method": "hybrid", "drafters": ["token_recycling", "suffix_tree", own]}))'
for method in $methods; do
    case $method in
        {*) given=$method ;;
        rest)
            # English, and code: the tests' prompts ask for both.
            .venv/bin/vllm-ext datastore build --model "$(embedded)" --output "$store" docs README.md vllm_ext tests
            given="{\"method\": \"rest\", \"datastore\": \"$store\"}"
            ;;
        clover_tree | eagle_tree | medusa_tree)
            .venv/bin/vllm-ext train heads --model "$(embedded)" --kind "${method%_tree}" --own-prompts 64 --samples 1 --minutes 1 --output "$work/$method"
            given="{\"method\": \"$method\", \"model\": \"$work/$method\"}"
            ;;
        hybrid+*_tree)
            heads=${method#hybrid+}
            .venv/bin/vllm-ext train heads --model "$(embedded)" --kind "${heads%_tree}" --own-prompts 64 --samples 1 --minutes 1 --output "$work/$heads"
            given="{\"method\": \"hybrid\", \"drafters\": [\"token_recycling\", \"suffix_tree\", {\"method\": \"$heads\", \"model\": \"$work/$heads\"}]}"
            ;;
        ppd)
            .venv/bin/vllm-ext train heads --kind ppd --model "$(embedded)" --own-prompts 64 --samples 1 --minutes 1 --output "$work/prompts"
            given="{\"method\": \"ppd\", \"model\": \"$work/prompts\"}"
            ;;
        hybrid+vllm:*)
            chain="{\"method\": \"vllm\", \"speculative_config\": {\"method\": \"${method#*:}\", \"model\": \"$(embedded)\", \"num_speculative_tokens\": 3}}"
            given="{\"method\": \"hybrid\", \"drafters\": [\"token_recycling\", \"suffix_tree\", $chain]}"
            ;;
        hybrid+*) given=$(.venv/bin/python -c "$beside_tables" "${method#*+}") ;;
        *+cascade) given=$(.venv/bin/python -c "$with_options" "${method%+*}" '{"cascade": "token_recycling"}') ;;
        *) given=$(.venv/bin/python -c "$with_options" "$method") ;;
    esac
    # Of a test of 16 and of 40 prompts, the one.
    # shellcheck disable=SC2086
    .venv/bin/python -m pytest -q -m engine $tests tests/engine/test_state_engine.py::test_a_second_start_is_warm_and_lossless \
        --deselect 'tests/engine/test_lossless.py::test_mixed_prompts_at_batch_1_and_4[16]' \
        --method "$given" --plain-answers "${PLAIN_ANSWERS:-$work/plain}" ${RECORD:+--record "$RECORD"}
done
