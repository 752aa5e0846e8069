#!/usr/bin/env bash
# On the machine with the GPU: unpack stock vLLM, run the suite. Arguments: a folder for what comes back, seconds, and
# more of `suite.py`'s.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$1 seconds=$2
shift 2
began=$SECONDS
site=$(python3 .vbox/setup.py | tail -n 1)
python3 -m compileall -q -j 0 "$site/vllm" >"$out/unpack.log" 2>&1
# As if `pip install .` had been run: vLLM finds the plugin by what is installed.
info=$site/vllm_ext-0.1.0.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm-ext\nVersion: 0.1.0\n' >"$info/METADATA"
python3 - >"$info/entry_points.txt" <<'PYTHON'
import tomllib

for group, names in tomllib.load(open("pyproject.toml", "rb"))["project"]["entry-points"].items():
    print(f"[{group}]")
    for name, value in names.items():
        print(f"{name} = {value}")
PYTHON
echo "unpacked: $((SECONDS - began)) s"
# No sampler of FlashInfer: it is not in the bundle.
export PYTHONPATH=$site:$PWD HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
work=/tmp/gpu-suite
keep() { tar -czf "$out/logs.tgz" -C "$work" --exclude='*.safetensors' . 2>/dev/null; }
trap keep EXIT
python3 scripts/gpu/suite.py --traces "${TRACES:-.vbox/traces.npz}" --out "$out/results.jsonl" --work "$work" \
    --seconds "$((seconds - (SECONDS - began)))" "$@"
