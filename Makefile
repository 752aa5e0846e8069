# Every target makes .venv when it is missing or out of date; nothing needs to be installed by hand.
# PYTHON picks the interpreter (3.11), VLLM_EXT_CACHE the folder of the unpacked model (~/.cache/vllm-ext).
PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/.installed

export HF_HUB_OFFLINE := 1
export VLLM_CPU_KVCACHE_SPACE ?= 1

.PHONY: demo test lint bench venv clean

demo: $(INSTALLED)  ## plain vLLM beside Token Recycling: real server, real model, real prompts
	$(BIN)/vllm-ext demo

# An engine works on one core, so there are two lanes of engine tests, each bound to its own. What starts no engine
# comes behind the shorter lane; the other one is shown when both are done.
test: $(INSTALLED)  ## the whole test suite
	@log=$$(mktemp); \
	VLLM_CPU_OMP_THREADS_BIND=1 $(BIN)/python -m pytest -m "engine and not shared" >"$$log" 2>&1 & others=$$!; \
	VLLM_CPU_OMP_THREADS_BIND=0 $(BIN)/python -m pytest -m "engine and shared"; shared=$$?; \
	$(BIN)/python -m pytest -m "not engine"; rest=$$?; \
	wait $$others; others=$$?; \
	cat "$$log"; rm -f "$$log"; \
	exit $$((shared | rest | others))

lint: $(INSTALLED)  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(INSTALLED)  ## the README's table (half an hour at 51 tokens/s of plain, two hours at 12)
	scripts/readme_bench.sh

venv: $(INSTALLED)

# torch comes as its CPU build (2.13.0+cpu). Where the package index has none, pip stops here: name PyTorch's
# CPU wheel index in PIP_EXTRA_INDEX_URL and run make again.
$(INSTALLED): requirements/cpu.txt requirements/dev.txt requirements/vllm-name/pyproject.toml pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation ./requirements/vllm-name --editable .
	touch $@

clean:
	rm -rf .venv
