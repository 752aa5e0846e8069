#!/usr/bin/env bash
# The exactness tests of vLLM's V2 runner, in Triton's interpreter, once for every method that runs on it: four minutes
# each on one core. Arguments: methods, as names or JSON objects without spaces; none: every one of the registry.
# RECORD: a file that gets a line of each, for scripts/runner_page.py.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}tests/v2_on_cpu TRITON_INTERPRET=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 HF_HUB_OFFLINE=1
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} OMP_NUM_THREADS=1
python=${PYTHON:-.venv/bin/python}
tests=$(printf 'tests/engine/test_v2_%s.py ' lossless request_states scheduling)
registered='from vllm_ext.proposers.registry import METHODS, load_method
print(*(name for name in METHODS if load_method(name).on_v2))'
with_options='import json, sys
from vllm_ext.proposers.registry import load_method
print(json.dumps({"method": sys.argv[1], **load_method(sys.argv[1]).tested_with}))'
for method in ${*:-$("$python" -c "$registered")}; do
    case $method in
        {*) given=$method ;;
        *) given=$("$python" -c "$with_options" "$method") ;;
    esac
    echo "== $given"
    # shellcheck disable=SC2086
    "$python" -m pytest -q -m v2 $tests -k v2_trees --v2-method "$given" ${RECORD:+--record "$RECORD"}
done
