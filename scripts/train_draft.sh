#!/usr/bin/env bash
# A draft model for SmolLM2-135M-Instruct from prompts that the README's table does not ask: its answers, which took one
# core 16 minutes, then 25 minutes of training.
# VLLM_EXT_DATA: a folder with spec_bench.jsonl, human_eval.jsonl and gsm8k.jsonl.
# Arguments: folder of the draft (draft), further options of `vllm-ext train draft`.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-draft}
mkdir -p "$output"
.venv/bin/python - "${VLLM_EXT_DATA:-../shared/data}" "$output/prompts.jsonl" <<'PYTHON'
import json
import sys
from pathlib import Path

from vllm_ext.data.prompts import load_prompts

data, file = Path(sys.argv[1]), Path(sys.argv[2])
asked = {prompt.source for prompt in load_prompts([data / "spec_bench.jsonl:10", data / "human_eval.jsonl:20"])}
prompts = load_prompts([data / f"{name}.jsonl" for name in ("spec_bench", "human_eval", "gsm8k")])
kept = [prompt for prompt in prompts if prompt.source not in asked]
file.write_text("".join(json.dumps({"messages": prompt.messages}) + "\n" for prompt in kept))
print(f"{len(kept)} prompts; {len(prompts) - len(kept)} are the benchmark's")
PYTHON
model=$(.venv/bin/python -c 'from vllm_ext.demo.embedded_model import ensure_model; print(ensure_model())' | tail -1)
.venv/bin/vllm-ext train draft --model "$model" --prompts "$output/prompts.jsonl" --output "$output" \
    --samples 4 --max-tokens 192 --minutes 25 "${@:2}"
