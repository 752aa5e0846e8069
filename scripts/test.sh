#!/usr/bin/env bash
# The test suite, for `make test`, or with the argument `all` for `make test-all`. An engine works on one core, so two
# lanes, each bound to its own, take the parts in turn, the longest first. Each part's output comes whole when it is done.
# One thread a process: two would wait for each other's turn on a core that the other lane keeps busy, a hundred times as long.
# PYTHON: the environment's python.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
parts=( # marker | where
    "engine and not shared|tests/engine"
    "engine and shared|tests/engine"
    "not engine and not v2|tests --ignore=tests/kernels"
    "v2|tests/engine"
    "not engine and not v2|tests/kernels --ignore=tests/kernels/test_triton_forms.py"
    "not engine and not v2|tests/kernels/test_triton_forms.py"
)
left_out=$([ "${1:-}" = all ] || echo " and not slow and (quick or not v2)")

run() { # part: its tests
    local environment=()
    if [[ $1 == v2* ]]; then
        # vLLM's V2 runner on a CPU: Triton finds a backend in the folder, and interprets what is written for it.
        environment=(PYTHONPATH=tests/v2_on_cpu TRITON_INTERPRET=1 VLLM_ENABLE_V1_MULTIPROCESSING=0)
    fi
    # shellcheck disable=SC2086
    env "${environment[@]}" "$python" -m pytest -m "${1%|*}$left_out" ${1#*|}
}

lane() { # core
    export VLLM_CPU_OMP_THREADS_BIND=$1 OMP_NUM_THREADS=1
    for number in "${!parts[@]}"; do
        mkdir "$work/$number" 2>/dev/null || continue # the other lane has it
        echo "begun: ${parts[number]}"
        run "${parts[number]}" >"$work/$number/log" 2>&1 || touch "$work/failed"
        flock "$work" cat "$work/$number/log"
    done
}

lane 1 &
lane 0
wait
if [ "${1:-}" = all ]; then
    scripts/test_033.sh short || touch "$work/failed"
fi
[ ! -e "$work/failed" ]
