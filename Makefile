# Every target makes .venv when it is missing or out of date; nothing needs to be installed by hand.
# PYTHON picks the interpreter (3.11), VLLM_EXT_CACHE the folder of the unpacked model (~/.cache/vllm-ext).
PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/.installed

# vLLM's V2 runner on a CPU: Triton finds a backend in the folder, and interprets what vLLM and we have written for it.
V2 := PYTHONPATH=tests/v2_on_cpu TRITON_INTERPRET=1 VLLM_ENABLE_V1_MULTIPROCESSING=0

GPU_DRY ?= /tmp/vllm-ext-gpu-dry-run

export HF_HUB_OFFLINE := 1
export VLLM_CPU_KVCACHE_SPACE ?= 1

.PHONY: demo test test-all test-v2 test-033 kernels gpu-dry-run lint bench venv clean

demo: $(INSTALLED)  ## plain vLLM beside Token Recycling: real server, real model, real prompts
	$(BIN)/vllm-ext demo

test: $(INSTALLED)  ## the test suite: half an hour on two cores
	PYTHON=$(BIN)/python scripts/test.sh

test-all: $(INSTALLED)  ## with what tests the same by another method, all of V2, and a part of test-033: an hour
	PYTHON=$(BIN)/python scripts/test.sh all

test-v2: $(INSTALLED)  ## vLLM's V2 model runner, in Triton's interpreter: a few minutes
	$(V2) $(BIN)/python -m pytest -m v2

test-033: $(INSTALLED)  ## vLLM 0.33's Python files on the CPU kernels that are here: every method, V1 and V2; hours
	scripts/test_033.sh

gpu-dry-run: $(INSTALLED)  ## the suite of scripts/gpu on this CPU, in Triton's interpreter: five minutes
	rm -rf $(GPU_DRY) && mkdir -p $(GPU_DRY)
	$(BIN)/python scripts/gpu/traces.py --out $(GPU_DRY)/traces.npz
	$(V2) $(BIN)/python scripts/gpu/suite.py --dry --traces $(GPU_DRY)/traces.npz --out $(GPU_DRY)/results.jsonl --work $(GPU_DRY) \
		--seconds 900 --batches 1,2 --rounds 1 --stages correct,8b,smol,kv
	$(BIN)/python scripts/gpu/page.py $(GPU_DRY)/results.jsonl

kernels: $(INSTALLED)  ## every kernel beside its reference: error, time, share of what this machine can do
	$(BIN)/python scripts/kernels

lint: $(INSTALLED)  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(INSTALLED)  ## the README's table (half an hour at 51 tokens/s of plain, two hours at 12)
	scripts/readme_bench.sh

venv: $(INSTALLED)

# torch comes as its CPU build (2.13.0+cpu). Where the package index has none, pip stops here: name PyTorch's
# CPU wheel index in PIP_EXTRA_INDEX_URL and run make again. Python compiles what it imports; pip would compile it all.
$(INSTALLED): requirements/cpu.txt requirements/dev.txt requirements/vllm-name/pyproject.toml pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-compile -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation ./requirements/vllm-name --editable .
	touch $@

clean:
	rm -rf .venv
