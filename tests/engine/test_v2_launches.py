# SPDX-License-Identifier: Apache-2.0
"""What a step launches outside the forward pass, which a graph replays: counted here, as the host's time goes with it.

Triton launches, and operators of torch that start a kernel or a copy on a GPU. What has only a view of memory, or makes
room, starts none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import v2_engine
from engine_heads import options_of
from torch.utils._python_dispatch import TorchDispatchMode
from v2_requests import generate, prompts, sampling

pytestmark = pytest.mark.v2

MOST, MOST_WITHOUT_DRAFTS = 20, 6  # more than plain's
MOST_WITH_GRAPHS = 12  # of a model that drafts
# Heads are handed rows of the step: where they are, and a copy of each layer's.
HANDED = {"eagle_tree": 4, "clover_tree": 5.5, "medusa_tree": 5.5, "hybrid+eagle_tree": 4.5}
# Kernel by kernel, with six nodes: of a greedy request, and of one that samples.
MOST_OF_MODEL = {
    "dyspec": (375, 778),
    "rsd_c": (375, 280),
    "rsd_s": (375, 298),
    "spectr": (375, 225),
    "static_tree": (138, 280),
    "layerskip": (384, 510),
    "unified_skip": (384, 510),
    "eagle_tree": (408, 811),
    "clover_tree": (462, 865),
    "medusa_tree": (196, 437),
    "hybrid+eagle_tree": (588, 714),
}
STEPS = 6
STARTS_NONE = (
    "alias",
    "as_strided",
    "detach",
    "detach_",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "flatten",
    "lift_fresh",
    "new_empty",
    "permute",
    "reshape",
    "resolve_conj",
    "resolve_neg",
    "select",
    "set_",
    "slice",
    "split",
    "squeeze",
    "t",
    "to",  # a copy is _to_copy
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
    "_reshape_alias",
    "_unsafe_view",
    "is_pinned",
    "pin_memory",
    "_pin_memory",
)


class Launched:
    """Instead of `DraftGraphs`: what graphs would hold is launched."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def covering(self, number: int) -> int:
        return number

    def run(self, size: int, *args: Any) -> None:
        (self._step.grow if args else self._step.read)(size, *args)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is, here
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()
        self.paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.paused and name not in STARTS_NONE:
            self.found[f"aten.{name}"] += 1
        return func(*args, **(kwargs or {}))

    def pausing(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.paused += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.paused -= 1

        return call


@contextmanager
def counted(llm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Counter[str]]]:
    """Of each step from now on, by name."""
    from triton.runtime.interpreter import GridExecutor

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    counting, steps = _Counting(), list[Counter[str]]()
    launch = GridExecutor.__call__

    def launching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not counting.paused:
            counting.found[self.fn.__name__] += 1
        return counting.pausing(launch)(self, *args, **kwargs)

    def stepping(name: str) -> Any:
        function = getattr(runner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with counting:
                result = function(*args, **kwargs)
            if name == "sample_tokens":
                steps.append(Counter(counting.found))
                counting.found.clear()
            return result

        return call

    def moving(mover: tuple[int, Any]) -> tuple[int, Any]:
        # One launch on a GPU, whose backends have a kernel for it.
        group, move = mover

        def call(*args: Any) -> None:
            counting.found["move"] += 1
            counting.pausing(move)(*args)

        return group, call

    def replaying(run: Any) -> Any:
        def call(*args: Any) -> bool:
            counting.found["graph"] += 1
            counting.pausing(run)(*args)
            return True

        return call

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launching)
        patch.setattr(runner.model, "forward", counting.pausing(runner.model.forward))
        patch.setattr(runner.model, "compute_logits", counting.pausing(runner.model.compute_logits))
        if passes := getattr(getattr(runner, "speculator", None), "passes", None):
            of_model = passes.reads and not passes.follows
            model = passes.model if of_model else passes
            names = ("forward", "compute_logits") if of_model else ("_run", "_logits")
            for name in filter(partial(hasattr, model), names):  # heads without layers have none
                patch.setattr(model, name, counting.pausing(getattr(model, name)))
        if graphs := getattr(getattr(runner, "speculator", None), "graphs", None):
            patch.setattr(graphs, "run", replaying(graphs.run))
        if hasattr(runner, "kv_movers"):
            patch.setattr(runner, "kv_movers", tuple(map(moving, runner.kv_movers)))
        for name in ("execute_model", "sample_tokens"):
            patch.setattr(runner, name, stepping(name))
        yield steps


def steady(llm: Any, monkeypatch: pytest.MonkeyPatch, kind: Any = None) -> list[Counter[str]]:
    """Steps of one request, a greedy one if nothing else is said, the first ones left out."""
    with counted(llm, monkeypatch) as steps:
        generate(llm, prompts(1, seed=5), kind or sampling(max_tokens=60))
    return steps[3 : 3 + STEPS]


def most(steps: list[Counter[str]], plain: list[Counter[str]]) -> tuple[float, str]:
    """Launches of a step more than plain's, and which these are."""
    own, others = (sum(map(Counter.total, part)) / len(part) for part in (steps, plain))
    extra = {
        name: (sum(step[name] for step in steps) / len(steps))
        - sum(step[name] for step in plain) / len(plain)
        for name in sorted({name for step in (*steps, *plain) for name in step})
    }
    return own - others, ", ".join(f"{name} {count:+.2g}" for name, count in extra.items() if count)


@pytest.mark.quick
def test_launches_of_a_step(v2_plain: Any, v2_trees: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = steady(v2_plain, monkeypatch)
    more, which = most(steady(v2_trees, monkeypatch), plain)
    assert more <= MOST, f"{more:.1f}: {which}"
    scheduler = v2_trees.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "dynamic_sd_lookup", [0] * 9)
    more, which = most(steady(v2_trees, monkeypatch), plain)
    assert more <= MOST_WITHOUT_DRAFTS, f"{more:.1f}: {which}"


@pytest.mark.parametrize("method", MOST_OF_MODEL)
def test_launches_of_a_model_that_drafts(
    v2_plain: Any, v2_dir: str, method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside the models' forward passes; docs/draft-models.md has them."""
    options = {**options_of(method, v2_dir, tmp_path), "num_speculative_tokens": 6, "budget": "fixed"}
    llm = v2_engine(v2_dir, options)
    found = []
    for kind in (sampling(max_tokens=60), sampling(temperature=1.0, max_tokens=60)):
        plain, own = (steady(engine, monkeypatch, kind) for engine in (v2_plain, llm))
        found.append(most(own, plain))
    counts = [round(more) for more, _ in found]
    assert all(a <= b for a, b in zip(counts, MOST_OF_MODEL[method], strict=True)), f"{counts}: {found}"
    speculator = llm.llm_engine.model_executor.driver_worker.worker.model_runner.speculator
    speculator.graphs = Launched(speculator.step)
    for kind in (sampling(max_tokens=60), sampling(temperature=1.0, max_tokens=60)):
        plain, own = (steady(engine, monkeypatch, kind) for engine in (v2_plain, llm))
        more, which = most(own, plain)
        assert more <= MOST_WITH_GRAPHS + HANDED.get(method, 0), f"{more:.1f}: {which}"
