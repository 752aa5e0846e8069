#!/usr/bin/env bash
# The engine tests of encoded KV caches, once for every method: four minutes each on one core. Arguments: JSON objects
# without spaces; none: all methods, with windows and budgets that the tests' texts outgrow.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
python=${PYTHON:-.venv/bin/python}
methods=("$@")
if [ $# -eq 0 ]; then
    methods=(
        '{"method":"kivi"}' '{"method":"kivi","bits":2,"window":128}' '{"method":"gear"}' '{"method":"mustafar"}'
        '{"method":"streaming_llm","window":128}' '{"method":"chelsea","window":128,"ratio":2}'
        '{"method":"spherical"}' '{"method":"snapkv","budget":256}' '{"method":"critic","budget":256}' '{"method":"actqkv","budget":192}'
    )
fi
for kv in "${methods[@]}"; do
    echo "== $kv"
    "$python" -m pytest -q tests/engine/test_kv_cache_engine.py --kv "$kv"
done
