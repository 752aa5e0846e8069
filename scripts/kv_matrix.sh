#!/usr/bin/env bash
# The engine tests of encoded KV caches, once for every method: four minutes each on one core. Arguments: JSON objects;
# none: all methods, with the EXAMPLES of their codecs.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} OMP_NUM_THREADS=1
python=${PYTHON:-.venv/bin/python}
methods=("$@")
if [ $# -eq 0 ]; then
    registered=$("$python" -c '
import json
from vllm_ext.codecs.registry import CODECS, load_codec
for name in CODECS:
    for options in load_codec(name).EXAMPLES:
        print(json.dumps({"method": name, **options}))
')
    mapfile -t methods <<<"$registered"
fi
for kv in "${methods[@]}"; do
    echo "== $kv"
    "$python" -m pytest -q tests/engine/test_kv_cache_engine.py --kv "$kv"
done
