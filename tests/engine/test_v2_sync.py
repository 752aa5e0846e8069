# SPDX-License-Identifier: Apache-2.0
"""Nothing in a V2 step waits for the device: no value of a tensor is asked for, no shape depends on one. Where drafts
are made on the host a step waits once, in one place; one that holds a structured request waits once more.

Once by running steps with everything noted that would wait on a GPU, where it does not; once by reading the code.
Triton's interpreter and vLLM's own backend for CPUs read tensors as numpy arrays: within these nothing is noted.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import v2_steering
from conftest import V2_METHOD, v2_engine
from engine_heads import options_of
from torch.utils._python_dispatch import TorchDispatchMode
from v2_requests import counters, generate, prompts, sampling

pytestmark = pytest.mark.v2
ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "vllm_ext" / "engine"
OURS = tuple(str(ROOT / name) for name in ("vllm_ext", "kernels", "proposers", "tests"))

METHODS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "nonzero",
)
# What a tensor's values decide the shape of, or the host's way.
OPERATORS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "unique",
    "bincount",
    "equal",
    "is_nonzero",
)

# The step, by file; each of these is trapped from outside, what it calls with it.
STEPS = {
    "vllm_ext.engine.v2.model_state": ("TreeState.preprocess_state",),
    "vllm_ext.engine.v2.rejection_sampler": ("LearningSampler.__call__", "TreeVerifier.__call__"),
    "vllm_ext.engine.v2.model_runner": ("SpeculativeRunner._settle",),
    "vllm_ext.engine.v2.speculators.base": ("TreeSpeculator.admit", "TreeSpeculator.propose"),
}


class _NoSync(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is, here
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if _trapping and name in OPERATORS:
            _waits.append(f"aten.{name}")
        if (
            _trapping
            and name in ("index", "index_put", "index_put_")
            and any(index is not None and index.dtype == torch.bool for index in args[1])
        ):
            _waits.append(f"aten.{name} by a mask")
        if _trapping and name == "repeat_interleave" and not (kwargs or {}).get("output_size"):
            _waits.append("aten.repeat_interleave without output_size")
        return func(*args, **(kwargs or {}))


_trapping = 0
_waits: list[str] = []


@contextmanager
def _state(change: int) -> Iterator[None]:
    global _trapping
    before, _trapping = _trapping, change
    try:
        yield
    finally:
        _trapping = before


def _within(change: int) -> Callable[[Any], Any]:
    def wrap(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _state(change):
                return function(*args, **kwargs)

        return call

    return wrap


def _waits_for_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether such a ``Tensor.to`` would: to the host, and not one that goes on meanwhile."""
    return "cpu" in (*args, kwargs.get("device")) and not kwargs.get("non_blocking")


@pytest.fixture
def trapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from importlib import import_module

    from triton.runtime.interpreter import GridExecutor

    from vllm_ext.engine.v2 import model_runner

    for name in (*METHODS, "to"):
        original = getattr(torch.Tensor, name)

        def noting(self: Any, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            if _trapping:
                caller = traceback.extract_stack(limit=2)[0]
                # vLLM's own asks tensors that are on the host.
                if caller.filename.startswith(OURS) and (_name != "to" or _waits_for_copy(args, kwargs)):
                    _waits.append(f"Tensor.{_name} in {Path(caller.filename).name}, {caller.name}")
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, noting)
    assign = torch.Tensor.__setitem__

    def assigning(self: Any, index: Any, value: Any) -> None:
        # A number goes to the device as a copy from memory that is not pinned. Seen on a GPU: 5 ms a step.
        indices = index if isinstance(index, tuple) else (index,)
        by_tensor = any(isinstance(part, torch.Tensor) for part in indices)
        if _trapping and by_tensor and not isinstance(value, torch.Tensor):
            caller = traceback.extract_stack(limit=2)[0]
            if caller.filename.startswith(OURS):
                _waits.append(f"a number assigned by a tensor in {Path(caller.filename).name}, {caller.name}")
        assign(self, index, value)

    monkeypatch.setattr(torch.Tensor, "__setitem__", assigning)
    for module, names in STEPS.items():
        for name in names:
            cls = getattr(import_module(module), name.partition(".")[0])
            method = name.partition(".")[2]
            monkeypatch.setattr(cls, method, _within(1)(getattr(cls, method)))
    monkeypatch.setattr(GridExecutor, "__call__", _within(0)(GridExecutor.__call__))
    settle: Any = model_runner.SpeculativeRunner._settle

    def with_free_movers(self: Any, *args: Any) -> None:
        movers, self.kv_movers = self.kv_movers, tuple((g, _within(0)(move)) for g, move in self.kv_movers)
        try:
            settle(self, *args)
        finally:
            self.kv_movers = movers

    monkeypatch.setattr(model_runner.SpeculativeRunner, "_settle", with_free_movers)
    with _NoSync():  # type: ignore[no-untyped-call]
        yield
    _waits.clear()


@pytest.mark.quick
def test_no_step_asks_for_a_value(v2_trees: Any, trapped: None) -> None:
    before = counters(v2_trees)["spec_accepted_tokens"]
    kinds = [sampling(max_tokens=8), sampling(temperature=0.7, seed=1, top_k=20, max_tokens=8)]
    kinds += [sampling(repetition_penalty=1.2, logprobs=1, max_tokens=5)]
    generate(v2_trees, prompts(3, seed=12), kinds)
    assert not _waits
    assert counters(v2_trees)["spec_accepted_tokens"] > before


@pytest.mark.parametrize(
    "method",
    [
        "dyspec",
        "rsd_c",
        "rsd_s",
        "spectr",
        "static_tree",
        "layerskip",
        "unified_skip",
        "eagle_tree",
        "clover_tree",
        "medusa_tree",
        "hybrid+eagle_tree",
    ],
)
def test_no_step_of_a_model_that_drafts_does(
    v2_plain: Any,
    v2_dir: str,
    method: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Drawn trees, chosen ones, and both in a batch."""
    options = {**options_of(method, v2_dir, tmp_path), "num_speculative_tokens": 6, "budget": "fixed"}
    v2_model = v2_engine(v2_dir, options)
    request.getfixturevalue("trapped")
    passes = v2_model.llm_engine.model_executor.driver_worker.worker.model_runner.speculator.passes
    # vLLM's, with kernels for CPUs.
    models = [(passes, name) for name in ("_run", "_logits") if hasattr(passes, name)]
    if not passes.follows and method not in ("clover_tree", "medusa_tree"):
        model = passes.model if passes.reads else passes._target
        models = [(model, "forward"), (model, "compute_logits")]
        models += [] if passes.reads else [(passes, "_slice")]
    for owner, name in models:
        monkeypatch.setattr(owner, name, _within(0)(getattr(owner, name)))
    before = counters(v2_model)["spec_accepted_tokens"]
    for kinds in (
        [sampling(max_tokens=5), sampling(temperature=0.7, seed=1, max_tokens=5)],
        [sampling(temperature=0.7, top_p=0.8, max_tokens=5)] * 2,
        [sampling(max_tokens=5), sampling(temperature=1.0, min_p=0.1, max_tokens=5)],
    ):
        generate(v2_model, prompts(2, seed=12), kinds)
    assert not _waits
    assert counters(v2_model)["spec_accepted_tokens"] > before


@pytest.mark.quick
def test_drafts_of_the_host_wait_once_a_step(
    v2_host: Any, trapped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what the step has put out; the drafts go back without a wait. Found: a second copy, of the top ids."""
    drafts = v2_host.llm_engine.model_executor.driver_worker.worker.model_runner.speculator.drafts
    step, steps = drafts.step, list[int]()

    def counting(names: Any, verified: Any, level: int) -> Any:
        steps.append(level)
        with _state(0):  # on the host alone
            return step(names, verified, level)

    monkeypatch.setattr(drafts, "step", counting)
    before = counters(v2_host)["spec_accepted_tokens"]
    generate(v2_host, prompts(2, seed=12), sampling(max_tokens=8))
    assert len(steps) > 2
    assert _waits == ["Tensor.numpy in base.py, _wait"] * len(steps)
    assert counters(v2_host)["spec_accepted_tokens"] > before


@pytest.mark.quick
def test_steps_with_a_structured_request_wait_once(
    v2_trees: Any, trapped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its text and tree; those behind its end, and of its prompt, not at all."""
    from vllm.sampling_params import StructuredOutputsParams

    runner = v2_trees.llm_engine.model_executor.driver_worker.worker.model_runner
    known, propose, steps = runner.speculator.known_trees, runner.speculator.propose, list[bool]()
    for name in ("draft", "start"):
        monkeypatch.setattr(known, name, _within(0)(getattr(known, name)))  # on the host alone

    def counting(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        done = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        structured = runner.speculator.structured[input_batch.idx_mapping_np]
        steps.append(bool((structured & (done >= input_batch.prefill_len_np)).any()))
        return propose(input_batch, *args, **kwargs)

    monkeypatch.setattr(runner.speculator, "propose", counting)
    structured = StructuredOutputsParams(regex="[a-z]{6}")
    kinds = [
        sampling(max_tokens=20, temperature=1.0, seed=1),
        sampling(max_tokens=4, structured_outputs=structured, temperature=1.0, seed=2),
    ]
    generate(v2_trees, [prompts(1, seed=14)[0], [*range(30, 130)]], kinds)
    assert _waits == ["Tensor.numpy in base.py, _wait"] * sum(steps)
    assert 1 < sum(steps) < len(steps) - 3


@pytest.mark.quick
def test_rules_that_read_no_tokens_wait_once_or_never(
    v2_dir: str, model_dir: str, v2_plain: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """`dola`, `contrastive` and `lol` for whether more tokens than were looked up are plausible."""
    rules = v2_steering.options_of(v2_dir, model_dir, tmp_path)
    llm = v2_engine(v2_dir, V2_METHOD, additional_config={"vllm_ext": {"rules": rules}})
    request.getfixturevalue("trapped")
    for name in ("svdecode", "caad", "dola", "contrastive", "cad", "lol"):
        kinds = [sampling(max_tokens=6, extra_args=v2_steering.ASKED[name]), sampling(max_tokens=6)]
        generate(llm, prompts(2, seed=12), kinds)
        # Noted as what asks, and as the operator that it takes.
        asks = {"Tensor.__bool__ in plausible.py, plausible", "aten.is_nonzero"}
        assert set(_waits) == (asks if name in ("dola", "contrastive", "lol") else set()), name
        assert len(_waits) <= 2 * 8  # a step each
        _waits.clear()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("module", "name", "waits"),
    [
        ("vllm_ext.engine.v2.rejection_sampler", "walk", lambda *a: a[5].max().item()),
        ("vllm_ext.proposers.token_recycling_device", "grow", lambda *a: bool((a[3] > 0).all())),
        ("vllm_ext.engine.v2.speculators.base", "lay_out", lambda *a: a[4][a[4] > 3]),
        ("vllm_ext.engine.v2.rejection_sampler", "walk", lambda *a: a[5].to("cpu")),
        ("vllm_ext.engine.v2.rejection_sampler", "walk", lambda *a: a[5].__setitem__(a[5].long() * 0, 7)),
    ],
    ids=["item", "bool", "mask", "copy", "number"],
)
def test_the_trap_finds_what_waits(
    v2_trees: Any, trapped: None, monkeypatch: pytest.MonkeyPatch, module: str, name: str, waits: Any
) -> None:
    from importlib import import_module

    of = import_module(module)
    honest = getattr(of, name)

    def waiting(*args: Any) -> Any:
        waits(*args)
        return honest(*args)

    monkeypatch.setattr(of, name, waiting)
    generate(v2_trees, prompts(1, seed=13), sampling(max_tokens=4))
    assert _waits


FILES = (
    # Rules read their requests' tokens on the host, and wait for these.
    *(
        file
        for file in sorted(ENGINE.glob("v2/**/*.py"))
        if file.name not in ("logits_processor.py", "host_drafter.py")
    ),
    ENGINE / "recurrent/device_rows.py",
    ENGINE / "steering/paired_steps.py",
    ENGINE / "steering/step_deferrals.py",
    ENGINE / "scheduler/budget.py",
    *sorted(ENGINE.glob("attention/*_captured.py")),
    *sorted(ROOT.glob("proposers/*_device.py")),
    *sorted(ENGINE.glob("draft_model/device/*.py")),
    *(ROOT / "kernels" / name for name in ("drawn_rows.py", "drawn_rows_triton.py")),
    *(ROOT / "kernels" / name for name in ("device_trees.py", "device_trees_triton.py")),
    *(
        ROOT / "kernels" / name
        for name in ("path_move.py", "path_move_triton.py", "path_penalties.py", "path_penalties_triton.py")
    ),
    *(
        ROOT / "kernels" / name
        for name in ("kept_blocks.py", "kept_blocks_triton.py", "block_mass.py", "block_mass_triton.py")
    ),
    *(ROOT / "kernels" / f"recycling{part}.py" for part in ("", "_triton", "_grow_triton", "_places_triton")),
)
# Of the host's own arrays, of constants, or not in a step; by the function they are in.
KNOWN = {
    "Counts._take",  # what has arrived on the host
    "Counts.totals",  # asked for from outside
    "DeviceTokenRecycling.state_dict",  # a save's, in another thread
    "TreeSpeculator._wait",  # the one wait there is, of either kind
    "TreeSpeculator._texts_and_trees",  # numpy: what has arrived on the host
    "HostSpeculator._unpacked",  # numpy: what has arrived on the host
    "_Arriving.is_here",  # an event's answer
    "TreeVerifier._get_logprobs_tensors",  # numpy: row_start_np
    "TreeState.prepare_attn",  # numpy: query_start_loc_np
    "_trees",  # numpy
    "_part",  # numpy
    "DeviceRows.rows",  # numpy: num_rows
    "DeviceSteps.mark",  # numpy: num_scheduled_tokens
    "SpeculativeRunner.sample",  # numpy: structured
    "ModelSpeculator.has_drawn",  # numpy
    "_most_rows",  # at start-up
    "Calibration.of_prior",  # at start-up
    "TreeBadWords.apply",  # numpy: num_bad_words
    "LearningSampler.__call__",  # numpy: prefill_len_np
    "ReadingPasses.read",  # numpy: lengths
    "ReadingPasses._read_some",  # numpy: query_start
    "KeptState._keep",  # of the host: seq_lens_cpu_upper_bound
    "StepDeferrals.begin",  # numpy: prefill_len_np
    "PairedSteps.begin",  # numpy: cu_num_logits_np, prefill_len_np
    "Choices._asked_of",  # numpy: num_computed_tokens_np, num_scheduled_tokens, query_start_loc_np
    "Choices._nodes_of",  # numpy: part_start, cu_num_logits_np
    "parts_at",  # numpy: first, rows
    "Choices.settle",  # what has arrived on the host
}


def waiting_calls(source: str) -> list[tuple[str, int, str]]:
    """Function, line and name of calls that may ask a tensor for a value."""
    found = []

    def visit(node: ast.AST, where: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = where
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = f"{where}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call):
                called = child.func
                if isinstance(called, ast.Attribute) and called.attr in METHODS:
                    found.append((where, child.lineno, called.attr))
                of_a_value = not (child.args and isinstance(child.args[0], ast.Constant))
                if isinstance(called, ast.Name) and called.id in ("int", "bool", "float") and of_a_value:
                    found.append((where, child.lineno, called.id))
            visit(child, inside)

    visit(ast.parse(source), "")
    return found


@pytest.mark.quick
def test_the_code_asks_for_no_value() -> None:
    assert len(FILES) >= 12
    found = {file: waiting_calls(file.read_text()) for file in FILES}
    for name, calls in found.items():
        assert not [call for call in calls if call[0] not in KNOWN], f"{name}: {calls}"
    assert {call[0] for calls in found.values() for call in calls} >= KNOWN, "no longer there"


@pytest.mark.quick
def test_the_reading_finds_what_waits() -> None:
    source = "class A:\n    def b(self, x):\n        if bool(x.any()):\n            return x.cpu()\n"
    assert waiting_calls(source) == [("A.b", 3, "bool"), ("A.b", 4, "cpu")]
