# SPDX-License-Identifier: Apache-2.0
"""Trees of structured requests and the masks of their rows, beside every path looked at alone; no engine is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import GrammarOutput

from vllm_ext import plugin
from vllm_ext.engine.structured_output.grammar import Grammar, Grammars
from vllm_ext.engine.structured_output.known_trees import KnownTrees, tree_of_rows
from vllm_ext.proposers.tree import DraftTree

REGEX = "(ab|ac|b)[0-9]x?[0-9][0-9](end){8}"
END = 2
PROMPT = [3, 4, 5]


class Watched(KnownTrees):
    """With what it counts."""

    def __init__(self, config: Any) -> None:
        self.counted: list[str] = []
        self.faults: list[str] = []
        super().__init__(config, self.counted.append, self.faults.append)

    def encode(self, text: str) -> list[int]:
        """A token for each character."""
        tokenizer = self._grammars._manager.tokenizer
        return [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in text]


@pytest.fixture(scope="module")
def config(slice_dir: str) -> Any:
    plugin.register()
    made = EngineArgs(
        model=slice_dir,
        dtype="float32",
        max_model_len=256,
        speculative_config={"method": "suffix_tree", "num_speculative_tokens": 8},
    ).create_engine_config()
    made.parallel_config.world_size = 2  # compiled before anybody asks
    return made


@pytest.fixture(params=["xgrammar", "guidance"])
def known(config: Any, request: pytest.FixtureRequest) -> Watched:
    """Of request "r", which has put out nothing, beside "free"."""
    made = Watched(config)
    made.start(admitted("r", backend=request.param))
    made.start(admitted("free", regex=None))
    return made


def admitted(
    name: str, output: list[int] | None = None, *, regex: str | None = REGEX, backend: str = "xgrammar"
) -> Any:
    structured = None if regex is None else StructuredOutputsParams(regex=regex)
    params = SamplingParams(structured_outputs=structured)
    if params.structured_outputs is not None:
        params.structured_outputs._backend = backend
        params.update_from_generation_config({}, END)
    return SimpleNamespace(
        req_id=name,
        sampling_params=params,
        prompt_token_ids=PROMPT,
        prefill_token_ids=PROMPT + (output or []),
    )


def rows_alone(known: Watched, output: list[int], paths: list[list[int]]) -> npt.NDArray[np.int32]:
    """The mask behind each path, of a grammar of its own."""
    grammars: Grammars = known._grammars
    params = known._texts["r"].params
    found = []
    for path in paths:
        grammars.start("alone", params)
        grammar = grammars.of("alone", output + path)
        assert grammar is not None
        bitmask = grammars.rows(1)
        grammar.fill(bitmask, 0)
        found.append(bitmask[0].numpy().copy())
    return np.stack(found)


def branching(known: Watched) -> DraftTree:
    """a, b and c below the root; b below a, c below a, 1 below ab; c and 2 below c are not allowed."""
    a, b, c, one, two = known.encode("abc12")
    return DraftTree(
        np.array([a, b, c, b, c, one, two], np.int32),
        np.array([-1, -1, -1, 0, 0, 3, 2], np.int32),
        np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], np.float32),
    )


def step(roots: npt.NDArray[np.int32], counts: list[int], total: int | None = None) -> Any:
    """What the scheduler sends: each root's mask, then rows that allow all."""
    lengths = [1 + count if total is None else total for count in counts]
    masks = np.full((sum(lengths), roots.shape[1]), -1, np.int32)
    masks[np.cumsum([0, *lengths[:-1]])] = roots
    masks.flags.writeable = False  # memory of the scheduler's process
    return GrammarOutput(["other", "r"][-len(counts) :], masks, [0] * len(counts))


def paths_of(tree: DraftTree) -> list[list[int]]:
    """From the root to each node, the root's first."""
    found: list[list[int]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return [[], *found]


def test_each_row_has_the_mask_of_its_own_path(known: Watched) -> None:
    """Found: masks of the flat list, a path that is not taken back, the mask before a node instead of behind it."""
    tree = known.draft("r", [], branching(known), 6, 6, False)
    a, b, c, one = known.encode("abc1")
    assert sorted(map(tuple, paths_of(tree))) == [(), (a,), (a, b), (a, b, one), (a, c), (b,)]
    expected = rows_alone(known, [], paths_of(tree))
    assert len(np.unique(expected, axis=0)) >= 4
    sent = step(expected[:1], [6])  # one row more than the tree has
    masked = known.masked(sent, {"r": 6})
    assert (masked.grammar_bitmask[:-1] == expected).all()
    assert (masked.grammar_bitmask[-1] == -1).all()
    assert masked.num_acceptable_drafts == [6]
    assert (sent.num_acceptable_drafts, sent.grammar_bitmask[1].max()) == ([0], -1)
    # Fewer rows than there are nodes: the first ones; and again, so nothing has moved.
    fewer = known.masked(step(expected[:1], [3]), {"r": 3})
    assert (fewer.grammar_bitmask == expected[:4]).all()
    assert not known.counted


@pytest.mark.parametrize("total", [None, 8])
def test_rows_lie_as_either_vllm_has_them(known: Watched, total: int | None) -> None:
    """0.32: of each request as many as were scheduled; 0.33: of each as many as there may be. Found: the other's."""
    tree = known.draft("r", [], branching(known), 6, 6, False)
    expected = rows_alone(known, [], paths_of(tree))
    roots = np.stack([np.full_like(expected[0], 77), expected[0]])
    masked = known.masked(step(roots, [4, 6], total), {"r": 6, "other": 4})
    first = 5 if total is None else total
    assert (masked.grammar_bitmask[0] == 77).all()
    assert (masked.grammar_bitmask[1:first] == -1).all()
    assert (masked.grammar_bitmask[first : first + len(expected)] == expected).all()
    assert masked.num_acceptable_drafts == [0, 6]


def test_nothing_is_accepted_where_the_root_is_not_vllms(known: Watched) -> None:
    """Whatever is wrong with the worker's text or grammar. Found: its masks taken for right without a look."""
    tree = known.draft("r", known.encode("a"), branching(known), 6, 6, False)
    assert len(tree) >= 2
    before = rows_alone(known, [], [[]])
    sent = step(before, [6])
    masked = known.masked(sent, {"r": 6})
    assert (masked.grammar_bitmask == sent.grammar_bitmask).all()
    assert masked.num_acceptable_drafts == [0]
    assert known.counted == ["fallbacks:no_grammar"]


def test_requests_whose_trees_are_not_known_are_left_alone(known: Watched) -> None:
    """Found: a tree of the step before, of a request that was preempted, and of one that has ended."""
    root = rows_alone(known, [], [[]])
    sent = step(root, [6])
    assert known.masked(sent, {"r": 6}) is sent
    for gone in (known.forget, known.finish, lambda names: known.start(admitted("r"))):
        known.start(admitted("r"))
        assert len(known.draft("r", [], branching(known), 6, 6, False))
        assert known.masked(sent, {"r": 6}) is not sent
        gone(["r"])
        assert known.masked(sent, {"r": 6}) is sent


def test_a_request_that_comes_back_goes_on_behind_its_output(known: Watched) -> None:
    backend = known._texts["r"].params.structured_outputs._backend
    known.draft("r", known.encode("ac"), branching(known), 6, 6, False)
    assert known.length("r") == 5
    known.start(admitted("r", known.encode("ac1"), backend=backend))
    assert known.length("r") == 6
    tree = known.draft("r", known.encode("2"), DraftTree.chain(*_chain(known, "37")), 6, 6, False)
    assert paths_of(tree)[1] == known.encode("3")
    expected = rows_alone(known, known.encode("ac12"), paths_of(tree))
    masked = known.masked(step(expected[:1], [6]), {"r": 6})
    assert (masked.grammar_bitmask[: len(expected)] == expected).all()


def test_what_is_forced_is_drafted_as_deep_as_may_be(known: Watched) -> None:
    """And is a chain where one is asked for."""
    output = known.encode("b123")
    forced = known.draft("r", output, DraftTree.empty(), 6, 2, False)
    assert forced.is_chain
    assert 1 <= len(forced) <= 2
    other = DraftTree.chain(*_chain(known, "en"))
    assert known.draft("r", [], other, 6, 6, True).is_chain
    assert len(known.draft("r", [], other, 1, 6, False)) == 1


def test_behind_the_end_nothing_is_drafted(known: Watched) -> None:
    output = [*known.encode("b123" + 8 * "end"), END, *known.encode("aaa")]
    assert len(known.draft("r", output, branching(known), 6, 6, False)) == 0
    assert not known.faults


def test_output_that_breaks_the_grammar_has_no_drafts(known: Watched) -> None:
    assert len(known.draft("r", known.encode("xyz"), branching(known), 6, 6, False)) == 0
    assert known.counted == ["fallbacks:no_grammar"]


def test_embeddings_have_no_drafts(known: Watched) -> None:
    request = admitted("r")
    request.prompt_token_ids = None
    known.start(request)
    assert known.length("r") == len(PROMPT)
    assert len(known.draft("r", [], branching(known), 6, 6, False)) == 0


@pytest.mark.parametrize("name", ["tree", "fill"])
def test_a_fault_costs_one_request_its_drafts(
    known: Watched, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may stand anywhere in a tree then, and is asked no more."""

    def fail(*args: Any) -> Any:
        raise RuntimeError("no")

    root = rows_alone(known, [], [[]])
    sent = step(root, [6])
    if name == "fill":
        known.draft("r", [], branching(known), 6, 6, False)
    monkeypatch.setattr(Grammars if name == "tree" else Grammar, name, fail)
    drafted = known.draft("r", [], branching(known), 6, 6, False) if name == "tree" else None
    assert known.masked(sent, {"r": 6}).num_acceptable_drafts == [0]
    assert known.faults == ["a grammar failed for request r; it goes on without drafts"]
    monkeypatch.undo()
    assert not drafted
    assert len(known.draft("r", known.encode("a"), branching(known), 6, 6, False)) == 0


def _chain(known: Watched, text: str) -> tuple[Any, Any]:
    tokens = np.array(known.encode(text), np.int32)
    return tokens, np.linspace(0.9, 0.5, len(tokens), dtype=np.float32)


def test_rows_of_a_slot_are_a_tree() -> None:
    """Padding among nodes, as some drafters leave it."""
    tokens, parents = np.array([7, 0, 8, 9, 0], np.int32), np.array([0, -1, 1, 0, -1], np.int32)
    tree = tree_of_rows(tokens, parents, 5)
    tree.validate()
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([7, 8, 9], [-1, 0, -1])
    assert len(tree_of_rows(tokens, parents, 2)) == 2
    assert len(tree_of_rows(tokens, np.full(5, -1, np.int32), 5)) == 0
