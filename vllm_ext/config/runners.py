# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's two model runners a method of ours runs on, and why.

vLLM's own choice is V2 wherever there is Triton; its way for a drafter of the user's own leads back to V1, without
asynchronous scheduling. A method that drafts without a model takes V2: on the device, where nothing waits for
anything, or on the host, which waits for each step's tokens; draft models and early exits draft on the device. What
V2's form does not have yet runs on V1 as before: the same output, and the reason is logged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm_ext.config import processors, schedulers
from vllm_ext.config.head_files import block_of
from vllm_ext.proposers.draft_model import DraftModelOptions, DraftModelProposer
from vllm_ext.proposers.eagle import EagleOptions
from vllm_ext.proposers.hybrid import DraftOptions, HybridOptions, draft_of, make_options
from vllm_ext.proposers.sampled import MOST_NODES_ON_DEVICE

if TYPE_CHECKING:
    from vllm_ext.config.rules import RuleSettings
    from vllm_ext.config.speculative import Settings

# What these cost; for the log and `vllm-ext doctor`.
WAITS = (
    "drafts made on the host, which waits for each step's tokens: async scheduling stays on, but loses its overlap. "
    "token_recycling drafts on the device and keeps it"
)


WITHOUT_WHOLE_STEPS = """--compilation-config '{"cudagraph_mode": "PIECEWISE"}' runs them on V2"""
# What the device's form of `hybrid` is made of.
DEVICE_DRAFTERS = {"token_recycling", "suffix_tree"}


def is_on_device(settings: Settings) -> bool:
    """Whether a method drafts on the device on V2, and not on the host."""
    if isinstance(settings.options, HybridOptions):
        return _is_of_tables(settings.options)
    return settings.proposer_class.on_v2 == "device"


def _is_of_tables(options: HybridOptions) -> bool:
    """Whether the drafters without passes are those of the device's form."""
    others = [each for each in options.drafters if not isinstance(make_options(each)[1], DraftOptions)]
    return all(isinstance(each, str) for each in others) and set(others) == DEVICE_DRAFTERS


@dataclass(frozen=True)
class RunnerChoice:
    """The runner of one engine."""

    runner: Literal["V1", "V2"]
    reason: str


def vllms_own() -> RunnerChoice:
    """What vLLM runs without our methods: by its environment variable, or by what it finds."""
    import vllm.envs as envs

    forced = envs.VLLM_USE_V2_MODEL_RUNNER
    if not _has_triton():
        return RunnerChoice("V1", "V2 needs Triton, which finds no driver for this platform")
    if forced is not None:
        return RunnerChoice("V2" if forced else "V1", f"VLLM_USE_V2_MODEL_RUNNER={int(forced)}")
    return RunnerChoice("V2", "vLLM's default where there is Triton")


def captures_whole_steps(args: Any) -> bool:
    """Whether an engine may replay graphs of whole steps, by its ``EngineArgs``: V2 then makes no metadata of trees."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms import current_platform

    mode = args.compilation_config.cudagraph_mode
    few = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE)
    return not (args.enforce_eager or current_platform.is_cpu() or mode in few)


def choose(args: Any, settings: Settings, ruled: RuleSettings | None, *, kv_why_v1: str = "") -> RunnerChoice:
    """The runner for a method.

    Args:
        args: the engine's ``EngineArgs``.
        settings: the method and its options.
        ruled: sampling rules that go with it.
        kv_why_v1: why the method of the KV cache needs V1; "": it does not, or there is none.
    """
    own = vllms_own()
    if own.runner == "V1":
        return own
    need_v1 = [] if ruled is None else ruled.need_v1
    reasons = (
        (
            settings.proposer_class.on_v2 is None,
            f"method {settings.method!r} {settings.proposer_class.why_v1}",
        ),
        *_of_drafters(settings.options),
        *_of_passes(settings),
        (bool(need_v1), f"sampling rules {need_v1} go with it"),
        (
            ruled is not None and ruled.companion is not None and captures_whole_steps(args),
            f"rules read a second model, and graphs of whole steps may be captured: {WITHOUT_WHOLE_STEPS}",
        ),
        (bool(kv_why_v1), f"the KV cache's method {kv_why_v1}"),
        (settings.options.verify != "exact", f"verify={settings.options.verify!r} is lossy"),
        *((True, reason) for reason in _of_the_users_classes(args)),
        (getattr(args, "enable_batch_sharded_sampling", False), "enable_batch_sharded_sampling is on"),
    )
    for there, reason in reasons:
        if there:
            return RunnerChoice("V1", reason)
    return RunnerChoice("V2", own.reason)


def _of_drafters(options: Any) -> Iterator[tuple[bool, str]]:
    """What of a hybrid cannot be on V2, as in `choose`."""
    if isinstance(options, HybridOptions):
        for proposer, _ in map(make_options, options.drafters):
            yield proposer.on_v2 is None, f"a drafter {proposer.why_v1}"
        tables = " and ".join(sorted(DEVICE_DRAFTERS))
        yield (
            draft_of(options) is not None and not _is_of_tables(options),
            f"heads and draft models go with {tables} on V2, named and without options, and with nothing else",
        )


def _of_passes(settings: Settings) -> Iterator[tuple[bool, str]]:
    """What models that draft cannot do on V2, as in `choose`."""
    options = settings.options
    if isinstance(options, DraftModelOptions):
        for name in ("export_dir", "online"):
            yield (
                getattr(options, name) is not None,
                f"{name} is set: drafts on the device do not see answers",
            )
        yield options.cascade is not None, "cascade is set: the draft model's own drafter is on the host"
    drafting = draft_of(options)
    if isinstance(drafting, EagleOptions):
        yield block_of(drafting.model) > 1, "its head says two tokens a pass (Falcon)"
    if issubclass(settings.proposer_class, DraftModelProposer) or drafting is not None:
        nodes = options.num_speculative_tokens
        yield (
            nodes > MOST_NODES_ON_DEVICE,
            f"num_speculative_tokens={nodes} is more than {MOST_NODES_ON_DEVICE}",
        )


def _has_triton() -> bool:
    from vllm.triton_utils import HAS_TRITON

    return bool(HAS_TRITON)


def _of_the_users_classes(args: Any) -> list[str]:
    """Why V2 cannot have what the user has named, or another package has registered."""
    problems = (schedulers.problem(args.scheduler_cls), processors.of(args).problem)
    return [problem for problem in problems if problem is not None]
