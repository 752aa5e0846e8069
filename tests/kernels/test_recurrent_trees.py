# SPDX-License-Identifier: Apache-2.0
"""Trees in recurrent layers: every form against a float64 scan of each row's own path, and against vLLM's own scans.

The triton form runs through the interpreter: see `test_triton_forms`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import IN_INTERPRETER
from recurrent_cases import MIXED_LAYERS, Layer, conv, convolved, layer, right, scanned
from tree_cases import SENTINEL, binary, chain, ints, random_tree, star

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.recurrent_trees import recurrent_trees

FORMS: list[Backend] = ["triton"] if IN_INTERPRETER or torch.cuda.is_available() else ["torch", "numba"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ORDERS = [(0, 1, 2), (0, 2, 1), (2, 1, 0)]  # vLLM's on a GPU; with values side by side, as on CPUs; any other
# Of the largest value. In 16 bits outputs and states are rounded once, by the interpreter downwards.
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def check(case: Layer, form: Backend) -> None:
    (out, state), (want_out, want_state) = case.run(form, DEVICE), right(case)
    assert torch.equal(out == SENTINEL, want_out == SENTINEL)
    assert ((out.double() - want_out).abs().max() / want_out.abs().max()) < LIMIT[out.dtype]
    assert ((state.double() - want_state).abs().max() / want_state.abs().max()) < LIMIT[state.dtype]
    used = {block for *_, block in case.requests()}
    others = [block for block in range(len(state)) if block not in used]
    assert torch.equal(state[others], case.state[others])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("delta", [False, True], ids=["mamba", "delta"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_batch_of_different_trees(order: tuple[int, ...], delta: bool, form: Backend) -> None:
    check(layer(MIXED_LAYERS, delta=delta, order=order), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("delta", [False, True], ids=["mamba", "delta"])
@pytest.mark.parametrize("state_dtype", LIMIT, ids=str)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_dtypes(dtype: torch.dtype, state_dtype: torch.dtype, delta: bool, form: Backend) -> None:
    for order in ORDERS[: 1 if IN_INTERPRETER else 3]:
        trees = [(2, random_tree(6)), (0, [-1])]
        check(layer(trees, delta=delta, dtype=dtype, state_dtype=state_dtype, order=order), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape", [(24, 1, 64, 128), (4, 2, 128, 128), (3, 3, 80, 16), (6, 2, 16, 32)], ids=str
)
def test_sizes(shape: tuple[int, int, int, int], form: Backend) -> None:
    if IN_INTERPRETER:
        shape = min(shape[0], 4), *shape[1:]
    for delta in (False, True):
        check(layer([(1, binary(7)), (0, star(3))], shape, delta), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [chain, star, binary, random_tree])
def test_the_largest_trees(shape, form: Backend) -> None:  # type: ignore[no-untyped-def]
    check(layer([(0, shape(64))], (1, 1, 16, 16), delta=True), form)


@pytest.mark.parametrize("form", FORMS)
def test_padding_is_skipped(form: Backend) -> None:
    case = layer(MIXED_LAYERS, delta=True)
    case.blocks[1] = case.blocks[3] = 0
    check(case, form)
    case.blocks[:] = 0
    out, state = case.run(form, DEVICE)
    assert (out == SENTINEL).all()
    assert torch.equal(state, case.state)


@pytest.mark.parametrize("form", FORMS)
def test_strided_rows(form: Backend) -> None:
    """As they are in the convolution's output, one beside the other."""
    case = layer(MIXED_LAYERS, delta=True)
    packed = torch.cat([each.flatten(1) for each in (case.q, case.k, case.v)], 1)
    sides = packed.split_with_sizes([each[0].numel() for each in (case.q, case.k, case.v)], 1)
    q, k, v = (side.view(each.shape) for side, each in zip(sides, (case.q, case.k, case.v), strict=True))
    assert q.stride(0) == packed.shape[1]
    check(replace(case, q=q, k=k, v=v), form)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=10 if IN_INTERPRETER else 60, deadline=None)
@given(data=st.data())
def test_any_trees(form: Backend, data: st.DataObject) -> None:
    trees = []
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.integers(1, 12))
        parents = [-1, *(data.draw(st.integers(0, row - 1)) for row in range(1, rows))]
        trees.append((data.draw(st.integers(0, 5)), parents))
    order, delta = data.draw(st.sampled_from(ORDERS)), data.draw(st.booleans())
    check(layer(trees, (2, 1, 16, 32), delta, order=order, seed=data.draw(st.integers(0, 99))), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("delta", [False, True], ids=["mamba", "delta"])
def test_a_visible_sibling_would_be_noticed(delta: bool, form: Backend) -> None:
    """The checks above are worth something: a chain's mask instead of a tree's changes each row behind a sibling."""
    case = layer([(1, [-1, 0, 0, 1, 2])], delta=delta)
    tree, _ = case.run(form, DEVICE)
    triangle, _ = replace(case, parents=ints(chain(6))).run(form, DEVICE)
    differ = (tree - triangle).abs().amax((1, 2)) > 1e-3
    assert differ.tolist() == [False, False, False, True, True, True]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("delta", [False, True], ids=["mamba", "delta"])
def test_steps_replayed_are_one_scan_of_the_text(delta: bool, form: Backend) -> None:
    """Convolution and recurrence step after step, what was accepted pending, beside a scan over the accepted text."""
    generator = torch.Generator().manual_seed(3)
    heads, groups, values, keys, nodes = 2, 1, 16, 16, 7
    channels = 2 * groups * keys + heads * values
    steps = conv([([], [-1])], channels, nodes=nodes)
    whole = layer([(0, [-1])], (heads, groups, values, keys), delta)
    block = int(steps.blocks[0])
    whole.blocks[:] = block
    first_state, inputs = whole.state[block].clone(), [steps.state[block, :, j] for j in range(3)]
    text: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # input, decay and beta of each token

    def gates(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return -torch.rand(rows, heads, generator=generator), torch.rand(rows, heads, generator=generator)

    def cut(mixed: torch.Tensor) -> list[torch.Tensor]:
        sides = mixed.split_with_sizes([groups * keys, groups * keys, heads * values], 1)
        sizes = (groups, keys), (groups, keys), (heads, values)
        return [side.view(len(side), *size) / size[1] ** 0.5 for side, size in zip(sides, sizes, strict=True)]

    accepted: list[int] = []
    decay, beta = gates(0)
    for step in range(12):
        parents = random_tree(1 + step % (nodes + 1), step)
        x = torch.randn(len(parents), channels, generator=generator)
        count = len(accepted)
        now = replace(
            steps,
            x=x,
            row_start=ints([0, len(parents)]),
            parents=ints(parents),
            pending=ints(accepted + [-9] * (nodes - count)).view(1, nodes),
            num_pending=ints([count]),
            out_start=ints([0]),
            total=count + len(parents),
        )
        mixed, steps.state = now.run(form, DEVICE)
        # The gates of pending rows are the last step's.
        new_decay, new_beta = gates(len(parents))
        decay, beta = torch.cat([decay[accepted], new_decay]), torch.cat([beta[accepted], new_beta])
        q, k, v = cut(mixed)
        rows = chain(count) + [count + parent if parent >= 0 else count - 1 for parent in parents]
        whole = replace(
            whole,
            q=q,
            k=k,
            v=v,
            decay=decay,
            beta=beta if delta else None,
            row_start=ints([0, len(rows)]),
            certain=ints([count + 1]),
            parents=ints(rows),
        )
        out, whole.state = whole.run(form, DEVICE)
        decay, beta = new_decay, new_beta

        text.append((x[0], decay[0], beta[0]))
        path = _random_path(parents, generator)
        for row in [0, *path]:
            if row:
                text.append((x[row], decay[row], beta[row]))
            known = [*inputs, *(token[0] for token in text)]
            flat = torch.stack([convolved(known[: 4 + i], steps) for i in range(len(text))])
            plain = replace(whole, **dict(zip("qkv", cut(flat), strict=True)))
            plain = replace(plain, decay=torch.stack([token[1] for token in text]))
            plain.beta = torch.stack([token[2] for token in text]) if delta else None
            want, _ = scanned(plain, range(len(text)), first_state)
            assert (out[count + row] - want).abs().max() / want.abs().max() < 1e-4
        accepted = path


def _random_path(parents: list[int], generator: torch.Generator) -> list[int]:
    """Some node's path from behind the root, ascending; of the root: none."""
    node, path = int(torch.randint(len(parents), (1,), generator=generator)), list[int]()
    while node > 0:
        path.insert(0, node)
        node = parents[node]
    return path


@pytest.mark.skipif(IN_INTERPRETER or DEVICE == "cuda", reason="vLLM's CPU operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chain_is_vllms_scan_of_mamba_2(dtype: torch.dtype) -> None:
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    heads, groups, values, keys = 24, 1, 64, 128
    case = layer([(2, chain(6))], (heads, groups, values, keys), dtype=dtype)
    a, dt = -torch.rand(heads) - 0.1, torch.rand(8, heads) * 2 - 1
    step = torch.nn.functional.softplus(dt)
    x = case.v
    case = replace(case, v=(x.float() * step[..., None]).to(dtype), decay=step * a)
    out, state = case.run("numba")
    theirs, block = case.state.clone(), int(case.blocks[0])
    for row in range(8):
        want = selective_state_update(
            theirs,
            x[row][None],
            dt[row][None, :, None].expand(1, heads, values),
            a[:, None, None].expand(heads, values, keys),
            case.k[row][None],
            case.q[row][None],
            dt_softplus=True,
            state_batch_indices=case.blocks,
        )[0]
        if row >= 2:
            assert (out[row] - want).abs().max() / want.abs().max() < (
                1e-5 if dtype == torch.float32 else 1e-2
            )
        if row == 2:
            error = (state[block] - theirs[block]).abs().max() / theirs[block].abs().max()
            assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.skipif(IN_INTERPRETER or DEVICE == "cuda", reason="vLLM's CPU operators")
def test_a_chain_is_vllms_scan_of_the_gated_delta_net() -> None:
    import vllm._custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    heads, groups, values, keys = 32, 16, 128, 128
    shape = heads, groups, values, keys
    case = layer([(2, chain(6))], shape, True, torch.bfloat16, order=(0, 2, 1))
    a, b = torch.randn(8, heads).bfloat16(), torch.randn(8, heads).bfloat16()
    a_log, dt_bias = torch.randn(heads), torch.randn(heads).bfloat16()
    # Queries are normalised and scaled in their operator; ours takes them so.
    q, k = (torch.nn.functional.normalize(side.float(), dim=-1) for side in (case.q, case.k))
    ours = replace(
        case,
        q=(q * keys**-0.5).bfloat16(),
        k=k.bfloat16(),
        decay=-a_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias.float()),
        beta=torch.sigmoid(b.float()),
    )
    out, state = ours.run("numba")
    block = int(case.blocks[0])
    theirs = case.state.transpose(2, 3).contiguous()
    for row in range(8):
        want = ops.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=a_log,
            dt_bias=dt_bias,
            q=case.q[None, row : row + 1],
            k=case.k[None, row : row + 1],
            v=case.v[None, row : row + 1],
            a=a[row : row + 1],
            b=b[row : row + 1],
            initial_state_source=theirs,
            initial_state_indices=case.blocks,
            cu_seqlens=ints([0, 1]),
            use_qk_l2norm_in_kernel=True,
        ).view(heads, values)
        if row >= 2:
            assert (out[row].float() - want.float()).abs().max() / want.float().abs().max() < 2e-2
        if row == 2:
            want_state = theirs[block].transpose(1, 2)
            assert (state[block] - want_state).abs().max() / want_state.abs().max() < 1e-2


def test_what_does_not_fit_is_refused() -> None:
    case = layer([(0, [-1, 0])])
    out = torch.empty_like(case.v)

    def call(**others: Any) -> None:
        recurrent_trees(**(vars(case) | {"out": out, "backend": FORMS[0]} | others))

    call()
    for name, value, message in [
        ("k", case.k[:1], r"k: torch.float32 \(1, 2, 48\)"),
        ("v", case.v.half(), "v: torch.float16"),
        ("v", case.v[:, :3], "H a multiple of G"),
        ("decay", case.decay.half(), "decay: torch.float16"),
        ("beta", case.decay[:, :1], r"beta: .*\(2, 1\)"),
        ("state", case.state[:, :, :16], r"state: .*must be \[num_blocks, 4, 32, 48\]"),
        ("state", case.state.double(), "dtypes of q torch.float32 and state torch.float64"),
        ("out", out.transpose(1, 2).contiguous().transpose(1, 2), "last dimension contiguous"),
        ("certain", case.certain.long(), "certain: torch.int64"),
        ("parents", case.parents[:1], r"parents: .*int32 \[2\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**{name: value})
    with pytest.raises(ValueError, match="max_rows=0"):
        call(max_rows=0)
