# SPDX-License-Identifier: Apache-2.0
"""EAGLE and Medusa heads on vLLM's V2 runner: the same tokens as without, and each row made of what it should be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny_clover
import tiny_eagle
import tiny_heads
import torch
from conftest import v2_engine
from engine_heads import PROMPTS, along, assert_cycle, beside_tables, options_of
from helpers import assert_same_outputs
from v2_requests import counters, generate, prompts, sampling, tokens

from vllm_ext.kernels.recycling import UNIT
from vllm_ext.proposers.calibration import PRIOR_TRIALS
from vllm_ext.proposers.joint_device import MIDDLES
from vllm_ext.proposers.sampled import ROOT
from vllm_ext.training.eagle import Head

pytestmark = pytest.mark.v2
NODES = 6
KINDS = [
    sampling(),
    sampling(temperature=0.8, seed=5),
    sampling(temperature=0.9, seed=6, top_p=0.9, top_k=50),
    sampling(repetition_penalty=1.3, logprobs=2),
    sampling(temperature=0.7, seed=9, min_p=0.05),
]


def method(model: str, kind: str = "eagle_tree", nodes: int = NODES) -> dict[str, Any]:
    return {"method": kind, "model": model, "num_speculative_tokens": nodes, "budget": "fixed"}


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@pytest.fixture(scope="module")
def cycle(v2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return tiny_heads.successors(tmp_path_factory.mktemp("cycle"), Path(v2_dir))


@pytest.fixture(scope="module")
def random_eagle(v2_dir: str, v2_plain: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A head of some rows, and an engine with it: of so few blocks that it preempts."""
    head = tmp_path_factory.mktemp("eagle")
    model = tiny_eagle.random(head, Path(v2_dir), num_rows=512)
    return head, v2_engine(v2_dir, method(model), num_gpu_blocks_override=9)


@pytest.fixture(scope="module")
def random_fused(v2_dir: str, random_eagle: tuple[Path, Any]) -> tuple[Path, Any]:
    """The same head in a hybrid."""
    head = random_eagle[0]
    return head, v2_engine(v2_dir, beside_tables(method(str(head))), num_gpu_blocks_override=9)


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        pytest.param("token", 4, marks=pytest.mark.quick),
        ("feature", 1),
        ("sampling", 4),
        pytest.param("trigram", 4, marks=pytest.mark.quick),
        ("late", 1),
        ("first", 4),
        pytest.param("medusa", 4, marks=pytest.mark.quick),
        ("clover", 4),
        ("clover hidden", 1),
        ("second", 1),
        ("second medusa", 1),
        pytest.param("fused token", 4, marks=pytest.mark.quick),
        pytest.param("fused model", 4, marks=pytest.mark.quick),
        ("fused clover", 4),
        ("fused medusa", 4),
    ],
)
def test_a_head_that_knows_everything(
    cycle: tuple[str, Any], v2_plain: Any, tmp_path: Path, kind: str, depth: int
) -> None:
    """All that it drafts is accepted, chosen or drawn; of a row or a token beside it nothing is.

    Where the second choice is right, the next draft is made of what the second of the drafts' rows has.
    """
    folder, after = cycle
    target, head = Path(folder), tmp_path / "head"
    beside, _, kind = kind.rpartition("fused ")
    match kind:
        case "medusa":
            given = method(tiny_heads.knowing(head, target, after), "medusa_tree", depth)
        case "clover" | "clover hidden":
            by = "token" if kind == "clover" else "hidden"
            model = tiny_clover.knowing(head, target, after, by)
            given = method(model, "clover_tree", depth)
        case "model":  # the target itself
            given = method(folder, "dyspec", depth)
        case "second":
            model = tiny_eagle.knowing(head, target, after, "feature", naming=tiny_heads.second_choice)
            given = method(model, nodes=2) | {"max_depth": 1}
        case "second medusa":
            model = tiny_heads.knowing(head, target, after, naming=tiny_heads.second_choice)
            given = method(model, "medusa_tree", 2) | {"max_depth": 1}
        case "first":
            given = method(tiny_eagle.first(head, target), nodes=depth)
        case _:
            by = kind if kind in ("token", "sampling", "trigram") else "feature"
            given = method(tiny_eagle.knowing(head, target, after, by, int(kind == "late")), nodes=depth)
    llm = v2_engine(folder, beside_tables(given) if beside else given)
    texts = along(after) if kind == "trigram" else PROMPTS
    params = [sampling(max_tokens=41), sampling(max_tokens=41, temperature=0.05)] * 2
    assert_cycle(texts, tokens(generate(llm, texts, params)), after)
    totals = counters(llm)
    assert totals["fallbacks:proposer_error"] == 0
    if beside:  # what both say is counted by what the head gives it
        calibration = runner_of(llm).speculator.tables.drafter.calibration
        shared = calibration.trials[-1, len(MIDDLES) : 2 * len(MIDDLES)]
        assert (shared > PRIOR_TRIALS * UNIT).any()
    if kind == "late":
        assert totals["spec_accepted_tokens"] == 0 < totals["spec_draft_tokens"]
    else:
        assert totals["spec_steps"] == 4 * (1 + math.ceil(40 / (depth + 1)))


@pytest.fixture(scope="module")
def fused_model(v2_dir: str) -> tuple[Path, Any]:
    """The target's first layer, likewise."""
    return Path(v2_dir), v2_engine(v2_dir, beside_tables(method("self", "dyspec")), num_gpu_blocks_override=9)


@pytest.fixture(scope="module")
def fused_exit(v2_dir: str) -> tuple[Path, Any]:
    """The same layer as an early exit, over the target's own KV."""
    given = beside_tables(method("", "layerskip"))
    given["drafters"][0] = {"method": "layerskip", "exit_layer": 1}
    return Path(v2_dir), v2_engine(v2_dir, given, num_gpu_blocks_override=9)


@pytest.fixture(params=["random_eagle", "random_fused", "fused_model", "fused_exit"])
def random(request: pytest.FixtureRequest) -> tuple[Path, Any]:
    """Either of them."""
    found: tuple[Path, Any] = request.getfixturevalue(request.param)
    return found


def test_greedy_and_seeded_requests(v2_plain: Any, random: tuple[Path, Any]) -> None:
    """Preempted ones, in chunks, over prefixes that are cached."""
    llm = random[1]
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    texts = [text * 3 for text in prompts(5)]
    wanted = tokens(generate(v2_plain, texts, KINDS))
    for _ in range(2):
        assert_same_outputs(wanted, tokens(generate(llm, texts, KINDS)))
    totals = counters(llm)
    assert totals["spec_draft_tokens"] > 100
    assert totals["spec_accepted_tokens"] > 5
    assert totals["fallbacks:proposer_error"] == totals["fallbacks:model_chain"] == 0


@pytest.mark.parametrize("kind", ["clover_tree", "medusa_tree"])
def test_heads_on_the_last_rows(v2_dir: str, v2_plain: Any, tmp_path: Path, kind: str) -> None:
    llm = v2_engine(v2_dir, {**options_of(kind, v2_dir, tmp_path), "num_speculative_tokens": NODES})
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    texts = prompts(5)
    assert_same_outputs(tokens(generate(v2_plain, texts, KINDS)), tokens(generate(llm, texts, KINDS)))
    # Drawn ones beside them.
    kinds = [sampling(), sampling(temperature=1.0, top_k=20), sampling(temperature=1.2)]
    found = tokens(generate(llm, texts[:3], kinds))
    assert_same_outputs([tokens(generate(v2_plain, texts[:1], kinds[:1]))[0]], [found[0]])


class Reference:
    """A head without a cache: each row is computed from all rows before it.

    Args:
        folder: of its checkpoint.
        target: of the target's.
    """

    def __init__(self, folder: Path, target: Path) -> None:
        from safetensors.torch import load_file

        stored, of_target = load_file(folder / "model.safetensors"), load_file(target / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        rows = stored["d2t"] + torch.arange(len(stored["d2t"]))
        config["eagle_aux_hidden_state_layer_ids"] = config["eagle_config"][
            "eagle_aux_hidden_state_layer_ids"
        ]
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        embedding = of_target["model.embed_tokens.weight"].float()
        self.head = Head(config, embedding, rows.numpy().astype("int32")).eval()
        missing = self.head.load_state_dict(
            {name: value.float() if value.is_floating_point() else value for name, value in stored.items()},
            strict=False,
        )
        assert set(missing.missing_keys) == {"t2d"}
        assert not missing.unexpected_keys

    @torch.no_grad()
    def __call__(self, rows: list[tuple[int, int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of the last row, and what rows below it take; of position, token and feature of all."""
        head = self.head
        positions = torch.tensor([position for position, _, _ in rows])
        features = torch.stack([feature for *_, feature in rows]).float()
        inputs = head.inputs(torch.tensor([token for _, token, _ in rows]), features)
        turns = head.turns(positions)
        queries = head.queries(inputs, turns)[-1:]
        keys, values = (
            part.repeat_interleave(head.num_heads // head.num_kv_heads, 1)
            for part in head.keys_values(inputs, turns)
        )
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(head.head_dim)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(2), values).flatten(1)
        output = head.output(features[-1:], attended)
        return head.logits(output)[0], output[0]


def test_rows_see_what_they_should(
    v2_dir: str, random: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of the head, beside one without a cache: after chunks of a prompt, after accepted drafts, below drafts.

    Found: features of rejected rows, of the row before, of another parent; places one too far.
    """
    folder, llm = random
    reference, runner = Reference(folder, Path(v2_dir)), runner_of(llm)
    passes = runner.speculator.passes
    size = passes._head.hidden_size
    committed: dict[int, tuple[int, int, torch.Tensor]] = {}  # by place
    nodes: list[
        tuple[tuple[int, int, torch.Tensor], int, torch.Tensor]
    ] = []  # with the parent, and what came out
    seen: list[tuple[Any, ...]] = []
    run, found, ask, take = passes._run, passes._found, passes.nodes, passes.take
    compared = [0, 0]
    after_root: list[torch.Tensor] = []
    batch: list[Any] = []

    def running(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        features = passes._features[: len(ids)].clone()
        result: torch.Tensor = run(ids, positions)
        seen.append((ids.clone(), positions.clone(), features, result.clone()))
        return result

    def taking(input_batch: Any, step: Any) -> None:
        seen.clear()
        nodes.clear()
        batch[:] = [input_batch]
        take(input_batch, step)

    def finding(hidden: torch.Tensor) -> Any:
        assert len(hidden) == 1
        slot = int(batch[0].idx_mapping_np[0])
        done = int(batch[0].num_computed_tokens_np[0] + batch[0].num_scheduled_tokens[0])
        complete = done >= batch[0].prefill_len_np[0]
        end = int(runner.req_states.total_len.gpu[slot]) - 1 if complete else done
        for ids, positions, features, _ in seen:
            for token, place, feature in zip(ids.tolist(), positions.tolist(), features, strict=True):
                if place < end:
                    committed[place] = place, token, feature
        text = runner.req_states.all_token_ids.gpu[slot]
        assert sorted(committed) == list(range(end))
        assert all(token == int(text[place + 1]) for place, token, _ in committed.values())
        logits, stream = reference([committed[place] for place in range(len(committed))])
        assert torch.allclose(stream, hidden[0, size:], atol=2e-4, rtol=2e-3)
        assert torch.allclose(logits, passes._logits(hidden)[0], atol=2e-3, rtol=2e-3)
        after_root[:] = [hidden[0, size:].clone()]
        compared[0] += 1
        return found(hidden)

    def asking(texts: Any, room: Any, ids: torch.Tensor, parents: torch.Tensor, past: int) -> Any:
        seen.clear()
        result = ask(texts, room, ids, parents, past)
        _, positions, features, came_out = seen[-1]
        for row, parent in enumerate(parents[0, past:].tolist()):
            own = int(positions[row]), int(ids[0, row]), features[row]
            above = after_root[0] if parent == ROOT else nodes[parent][2]
            assert torch.equal(own[2], above)
            nodes.append((own, parent, came_out[row, size:]))
            if past and parent == ROOT:
                continue  # no node, of a depth that has fewer than there may be
            path = [own]
            while parent != ROOT:
                path.insert(0, nodes[parent][0])
                parent = nodes[parent][1]
            before = [committed[place] for place in range(len(committed))]
            assert [place for place, *_ in path] == [len(before) + depth for depth in range(len(path))]
            _, stream = reference([*before, *path])
            assert torch.allclose(stream, came_out[row, size:], atol=2e-4, rtol=2e-3)
            compared[1] += 1
        return result

    for name, own in (("_run", running), ("_found", finding), ("nodes", asking), ("take", taking)):
        monkeypatch.setattr(passes, name, own)
    before = counters(llm)["spec_accepted_tokens"]
    text = [*range(40, 160)]
    text += tokens(generate(llm, [text], sampling(max_tokens=40)))[0]
    assert counters(llm)["spec_accepted_tokens"] > before
    assert compared[0] > 10
    assert compared[1] > 100
    # What was taken of rows that were drafts is what the text itself has.
    decoded = {place: row for place, row in committed.items() if place < len(text) - 1}
    committed.clear()
    assert llm.reset_prefix_cache()
    generate(llm, [text], sampling(max_tokens=1))
    assert len(decoded) == len(committed) - 1 == len(text) - 1
    for place, (_, token, feature) in decoded.items():
        assert committed[place][1] == token
        assert torch.allclose(committed[place][2], feature, atol=2e-4, rtol=2e-3)
