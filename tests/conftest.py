# SPDX-License-Identifier: Apache-2.0
"""Session fixtures: an engine takes time to start, so tests share a few."""

from __future__ import annotations

import datetime
import json
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import forked_workers
import pytest
import slices
from distribution import BLOCK_SIZE
from helpers import MAX_MODEL_LEN
from recorded import RecordedLLM, recorded_name

# Read by vLLM when it is imported and inherited by every engine the tests start.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault(
    "VLLM_ALLOW_INSECURE_SERIALIZATION", "1"
)  # a mutation is sent to a worker as a function

# Go with those that share engines, so that both lanes (Makefile) take equally long.
BESIDE_SHARED = {"test_bench.py", "test_sampling_rules.py", "test_steering.py"}
SHUTDOWN_SECONDS = 30  # after which an engine is killed; it takes 5 to 10
# What thinking budgets go by: two of the model's special tokens that nobody uses, and what is put behind the second.
THINKING = {"reasoning_start_str": "<issue_start>", "reasoning_end_str": "<issue_closed>\n"}
ENGINE_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "disable_log_stats": False,
    # 8,700 tokens of the model in float32. vLLM writes all of it at the start, and ten engines may live at once.
    "kv_cache_memory_bytes": 384 << 20,
    "reasoning_config": THINKING,
}


def pytest_configure(config: pytest.Config) -> None:
    """With TESTED_VLLM, as scripts/test_033.sh sets it: no other vLLM is tested by mistake."""
    wanted = os.environ.get("TESTED_VLLM")
    if wanted is not None and (found := metadata.version("vllm").partition("+")[0]) != wanted:
        pytest.exit(f"TESTED_VLLM={wanted}, but vLLM {found} is here; run scripts/test_033.sh", returncode=3)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--method",
        help="name or JSON object: what the engine tests test instead of Token Recycling, see scripts/matrix.sh",
    )
    parser.addoption(
        "--v2-method",
        help="likewise, for the tests that all drafters of the V2 runner share, see scripts/matrix_v2.sh",
    )
    parser.addoption(
        "--plain-answers",
        type=Path,
        help="folder: what plain vLLM has answered here is not asked again, see scripts/matrix.sh",
    )
    parser.addoption(
        "--record",
        type=Path,
        help="file: a line of how many of these tests of exactness have passed goes there, for scripts/runner_page.py",
    )
    parser.addoption(
        "--kv",
        default='{"method": "kivi"}',
        help="JSON object: how tests/engine/test_kv_cache_engine.py keep KV",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = {*getattr(item, "fixturenames", ()), *_parameters(item)}
        if {"plain_llm", "tested_llm", "hybrid_llm"} & fixtures or item.path.name in BESIDE_SHARED:
            item.add_marker("shared")
        if "hybrid_llm" in fixtures and config.getoption("--method"):
            item.add_marker(pytest.mark.skip("has a method of its own, whatever --method is"))


def _parameters(item: pytest.Item) -> list[str]:
    """Those of a test that are text: some name a fixture."""
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [each for each in given if isinstance(each, str)]


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Commands hide vLLM's log; what a test of one has hidden is there for the next."""
    logger = logging.getLogger("vllm")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(scope="session")
def tested_method(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The method of `tested_llm`."""
    given: str = request.config.getoption("--method") or "token_recycling"
    method = json.loads(given) if given.startswith("{") else {"method": given}
    # A fixed budget: the outcome of a test depends on no clock, and every tree is verified whole.
    return {"num_speculative_tokens": 12, "budget": "fixed", **method}


@pytest.fixture(scope="session")
def enough(tested_method: dict[str, Any]) -> int:
    """Of Token Recycling's accepted drafts, what part others must have for a comparison to mean something: one in.."""
    return 1 if tested_method["method"] == "token_recycling" else 25


@pytest.fixture(scope="session")
def drafts_by_model(tested_method: dict[str, Any]) -> bool:
    """Whether a model drafts: beside it structured requests have chains, which the engine core masks."""
    from vllm_ext.proposers.draft_model import DraftModelProposer
    from vllm_ext.proposers.registry import load_method

    return issubclass(load_method(tested_method["method"]), DraftModelProposer)


@pytest.fixture(scope="session")
def model_dir() -> str:
    """The embedded model, unpacked for real when the cache does not hold it."""
    from vllm_ext.demo import embedded_model

    return str(embedded_model.ensure_model())


@pytest.fixture(scope="session")
def slice_dir(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers of the model and 8 of its 9 heads, which two workers can share."""
    return slices.write(Path(model_dir), tmp_path_factory.mktemp("slice"), layers=2, heads=8, kv_heads=2)


def engine(
    model_dir: str,
    method: dict[str, Any] | None = None,
    *,
    own_core: bool = False,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[Any]:
    """An engine for as long as a fixture that yields from this lives.

    Args:
        model_dir: of the target.
        method: vLLM's ``speculative_config``.
        own_core: scheduler and all that goes with it in a process of their own, vLLM's default. Here only where that
            is the test: it takes 7 seconds more to start, and 0.7 GB. Servers have one in any case.
        environment: variables for its start.
        options: others than `ENGINE_OPTIONS`.
    """
    from vllm import LLM, envs

    # vLLM keeps the variables that it has read for the process's first engine, and gives them to those after it.
    envs.disable_envs_cache()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        if not own_core:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            options = {"distributed_executor_backend": "mp", **options}  # the worker stays in its own
            forked_workers.use(patch)
        llm = LLM(model_dir, speculative_config=method, **{**ENGINE_OPTIONS, **options})
    yield llm
    # Time to save what it has learnt, also beside other engines: vLLM gives a script's engine five seconds.
    llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_SECONDS)


V2_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "disable_log_stats": False,
    # In this process: a test can put something in a step's way.
    "distributed_executor_backend": "uni",
    "block_size": 32,
    # 17 MB. By bytes on a CPU one has VLLM_CPU_KVCACHE_SPACE, a whole GiB, and twenty engines live at once.
    "num_gpu_blocks_override": 170,
    "max_num_batched_tokens": 48,  # longer prompts are computed in chunks
    "reasoning_config": THINKING,
    "logits_processors": ["v2_requests:NoEcho"],
}
V2_METHOD = {"method": "token_recycling", "num_speculative_tokens": 6, "budget": "fixed"}
# Two drafters on the host, one of which wants logits.
V2_HOST_METHOD = {**V2_METHOD, "method": "hybrid", "drafters": ["token_recycling", "aded"]}
# The target's first layer drafts.
V2_MODEL_METHOD = {**V2_METHOD, "method": "dyspec", "model": "self", "self_layers": 1}


_v2_engines: list[Any] = []


def v2_engine(v2_dir: str, method: dict[str, Any] | None = None, **options: Any) -> Any:
    """An engine of this process, until that ends: the first to go takes vLLM's process groups from all others."""
    from vllm import LLM

    _v2_engines.append(LLM(v2_dir, speculative_config=method, **{**V2_OPTIONS, **options}))
    return _v2_engines[-1]


def v2_engine_ahead(v2_dir: str, method: dict[str, Any], **options: Any) -> Any:
    """An engine that schedules a step before it knows the last one's tokens: vLLM's default, except on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
        llm = v2_engine(v2_dir, method, async_scheduling=True, **options)
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    return llm


@contextmanager
def v2_attention(backend: str) -> Iterator[None]:
    """Engines that are made have this attention backend of vLLM's, with trees; those of GPUs are interpreted."""
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(
            CpuPlatform,
            "get_attn_backend_cls",
            classmethod(lambda *_, **__: AttentionBackendEnum[backend].get_path()),
        )
        selector._cached_get_attn_backend.cache_clear()
        yield
    selector._cached_get_attn_backend.cache_clear()


@pytest.fixture(scope="session")
def cycle(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """See `tiny_heads.successors`: a target, and its tokens' successors."""
    import tiny_heads

    return tiny_heads.successors(tmp_path_factory.mktemp("cycle"), Path(model_dir))


@pytest.fixture(scope="session")
def v2_dir(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers of the model and few tokens: the interpreter takes a logits row in blocks."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("vLLM's V2 runner needs Triton's interpreter here: make test-v2")
    return slices.write(Path(model_dir), tmp_path_factory.mktemp("v2"), layers=2, vocabulary=1024)


@pytest.fixture(scope="session")
def v2_plain(v2_dir: str) -> Any:
    """vLLM's V2 runner without speculation: the reference of its tests."""
    return v2_engine(v2_dir)


@pytest.fixture(scope="session")
def v2_trees(v2_dir: str, v2_plain: Any) -> Any:
    """The same with trees that are grown on the device."""
    return v2_engine(v2_dir, V2_METHOD)


@pytest.fixture(scope="session")
def v2_host(v2_dir: str, v2_plain: Any) -> Any:
    """The same with trees that are made on the host."""
    return v2_engine(v2_dir, V2_HOST_METHOD)


@pytest.fixture(scope="session")
def v2_model(v2_dir: str, v2_plain: Any) -> Any:
    """The same with trees of a draft model."""
    return v2_engine(v2_dir, V2_MODEL_METHOD)


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """What was tested, for the page of what runs where."""
    if (file := config.getoption("--record")) is None:
        return
    on_v2 = config.getoption("--v2-method")
    given = on_v2 or config.getoption("--method")
    method = json.loads(given) if given.startswith("{") else {"method": given}
    entry = {
        "method": recorded_name(method),
        "runner": "V2, interpreter" if on_v2 else "V1, CPU",
        "vllm": metadata.version("vllm").partition("+")[0],
        "date": datetime.date.today().isoformat(),
        **{kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed", "error")},
    }
    with file.open("a") as lines:
        lines.write(json.dumps(entry) + "\n")


@pytest.fixture(scope="session")
def v2_given(
    v2_dir: str, v2_plain: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """The same with the method that ``--v2-method`` names; a corpus is the docs and digits, in the slice's tokens."""
    given = request.config.getoption("--v2-method")
    method = json.loads(given) if given.startswith("{") else {"method": given}
    if method["method"] == "rest":
        from vllm_ext.data.datastore_build import build

        folder = tmp_path_factory.mktemp("corpus")
        store, digits = folder / "store", folder / "digits.md"
        digits.write_text("".join(random.Random(1).choices("123", k=5000)))  # each is a token
        build([Path("docs"), digits], store, v2_dir, "text", False, lambda *_: None, include=["*.md"])
        method["datastore"] = str(store)
    elif method["method"].endswith(("eagle_tree", "clover_tree", "medusa_tree")):  # or in a hybrid
        from engine_heads import options_of

        method |= options_of(method["method"], v2_dir, tmp_path_factory.mktemp("heads"))
    return v2_engine(v2_dir, {**method, "num_speculative_tokens": 6, "budget": "fixed"})


@pytest.fixture(params=["v2_trees", "v2_host", "v2_model"])
def v2_either(request: pytest.FixtureRequest) -> Any:
    """One after the other."""
    if request.config.getoption("--v2-method") is None:
        return request.getfixturevalue(request.param)
    if request.param != "v2_trees":
        pytest.skip("another method was asked for")
    return request.getfixturevalue("v2_given")


@pytest.fixture
def accepted_at_least(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """How many drafts must be accepted: the number of the methods whose tests these are, one of any other; none of
    those that find what these prompts lead to neither there nor in a corpus. Of digits any method accepts some.
    """
    given = request.config.getoption("--v2-method")
    least = 0 if given is not None and ("input_copy" in given or "rest" in given) else 1
    return lambda number: number if given is None else least


@pytest.fixture(scope="session")
def plain_engine(model_dir: str) -> Iterator[Any]:
    """A float32 engine without speculation."""
    yield from engine(model_dir)


@pytest.fixture(scope="session")
def plain_llm(model_dir: str, request: pytest.FixtureRequest) -> Any:
    """What it answers: the reference of every comparison."""
    folder = request.config.getoption("--plain-answers")
    if folder is None:
        return request.getfixturevalue("plain_engine")
    return RecordedLLM(folder, model_dir, lambda: request.getfixturevalue("plain_engine"))


@pytest.fixture(scope="session")
def plain_slice_llm(slice_dir: str) -> Iterator[Any]:
    """The same of the two layers."""
    yield from engine(slice_dir, block_size=BLOCK_SIZE)


@pytest.fixture(scope="session")
def tested_llm(model_dir: str, tested_method: dict[str, Any]) -> Iterator[Any]:
    """A float32 engine with `tested_method`."""
    yield from engine(model_dir, tested_method)


@pytest.fixture(scope="session")
def hybrid_llm(model_dir: str) -> Iterator[Any]:
    """A float32 engine with the drafters that need nothing, fused: four at most, and `tested_llm` has the fifth."""
    yield from engine(
        model_dir,
        {
            "method": "hybrid",
            "drafters": ["suffix_tree", "stand", "aded", "input_copy"],
            "num_speculative_tokens": 12,
            "budget": "fixed",
        },
    )
