# SPDX-License-Identifier: Apache-2.0
"""Every backend of `tree_attention` against the reference, and the reference against a float64 loop.

Without a GPU the triton form runs through triton's interpreter: see `test_triton_forms`.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import IN_INTERPRETER
from tree_cases import (
    CPU_LAYOUTS,
    DTYPES,
    MIXED,
    NAN,
    SENTINEL,
    TOLERANCE,
    Case,
    binary,
    chain,
    check,
    dense,
    each,
    ints,
    make,
    move,
    random_tree,
    star,
)

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.kv_layouts import amx_layout, in_order, tokens_at, vec_layout
from vllm_ext.kernels.tree_attention import Scoring, TreeRows, tree_attention

BACKENDS: list[Backend] = ["numba"]
if IN_INTERPRETER:
    BACKENDS = ["triton"]
elif torch.cuda.is_available():
    BACKENDS.append("triton")
BLOCK_SIZES = [16] if IN_INTERPRETER else [32, 128]

# What each backend takes.
LAYOUTS = [("vec", dtype) for dtype in DTYPES]
if not IN_INTERPRETER:
    LAYOUTS.append(("amx", torch.bfloat16))

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty comes filled with NaN: what is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS, ids=str)
def test_the_reference_is_the_definition(layout: str, dtype: torch.dtype) -> None:
    case = make(MIXED, dtype, heads=(6, 2), block_size=32, layout=layout)
    torch.testing.assert_close(case.run("torch"), dense(case).to(dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS, ids=str)
def test_a_batch_of_different_trees(
    layout: str, dtype: torch.dtype, block_size: int, backend: Backend
) -> None:
    if backend == "triton" and layout == "amx":
        pytest.skip("a CPU's layout")
    check(make(MIXED, dtype, block_size=block_size, layout=layout), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (4, 1), (16, 2)], ids=str)
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128])
def test_head_sizes_and_groups(head_size: int, heads: tuple[int, int], backend: Backend) -> None:
    for dtype in DTYPES[:1] if IN_INTERPRETER else DTYPES:
        check(make([(60, binary(5)), (40, star(3))], dtype, heads, head_size), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_contexts_around_a_block(block_size: int, backend: Backend) -> None:
    for context in (0, 1, block_size - 1, block_size, block_size + 1, 60, 700):
        for rows in (1, 6):
            check(make([(context, random_tree(rows))], block_size=block_size), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [chain, star, binary, random_tree])
def test_the_largest_trees(shape: Any, backend: Backend) -> None:
    for context in (200,) if IN_INTERPRETER else (0, 200):
        check(make([(context, shape(129)), (3, shape(2)), (1, shape(129))]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("past", [[15, 0, 3, 1, 11], [0, 1, 7, 0, 0]], ids=str)
def test_rows_that_were_computed_before(past: list[int], backend: Backend) -> None:
    """Also all of a request's, and of trees without a root: several rows may have no parent."""
    forest = [-1, -1, 0, 1, 1, -1, 4, 2, 3, 0, 7, 5]
    check(make([*MIXED[:4], (33, forest)], heads=(9, 3), past=past), backend)


def test_the_reference_is_the_definition_with_rows_computed_before() -> None:
    case = make([(60, binary(16)), (5, [-1, -1, 1])], past=[9, 1])
    torch.testing.assert_close(case.run("torch").double(), dense(case), atol=2e-6, rtol=2e-6)


SCORINGS = {
    **{f"window {window}": Scoring(window) for window in (1, 2, 5, 17, 40, 300)},
    "cap": Scoring(soft_cap=3.0),
    "small cap": Scoring(soft_cap=0.05),
    "sinks": Scoring(sinks=torch.tensor([0.5, -2.0, 6.0, -40.0, 1.0, 0.0])),
    "all": Scoring(20, 5.0, torch.tensor([1.0, 2.0, -1.0, 0.0, 3.0, 30.0])),
    **{f"chunks of {chunk}": Scoring(chunk=chunk) for chunk in (1, 5, 17, 64, 1000)},
    "chunks and all": Scoring(0, 5.0, torch.tensor([1.0, 2.0, -1.0, 0.0, 3.0, 30.0]), 24),
}


def first_seen(scoring: Scoring, context: int) -> int:
    """The first token of a request that any row sees."""
    if scoring.chunk:
        return context // scoring.chunk * scoring.chunk
    return max(0, context + 1 - scoring.window) if scoring.window else 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCORINGS)
def test_windows_chunks_caps_and_sinks(name: str, backend: Backend) -> None:
    """Found: windows by slot, where siblings have one place in the text, and blocks that vLLM has freed."""
    trees = [*MIXED, (400, chain(30)), (70, random_tree(40, seed=3))]
    some = [15, 0, 3, 1, 11, 29, 20]
    for past in (some,) if IN_INTERPRETER else (None, some):
        case = replace(make(trees, heads=(6, 2), past=past), scoring=SCORINGS[name])
        # vLLM's, of any content: here a block that nothing was written to.
        null = next(block for block in range(len(case.keys)) if block not in case.trees.block_table)
        assert case.keys[null].isnan().all()
        for request, (context, _) in enumerate(trees):
            gone = first_seen(case.scoring, context) // case.keys.shape[2]
            case.trees.block_table[request, :gone] = null
        wanted = dense(case)
        torch.testing.assert_close(case.run("torch").double(), wanted, atol=2e-6, rtol=2e-6)
        check(case, backend)
        assert (case.run(backend).double() - wanted).abs().max() < 4e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["all", "chunks and all"])
@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS[1:], ids=str)
def test_windows_and_chunks_of_16_bits(layout: str, dtype: torch.dtype, name: str, backend: Backend) -> None:
    if backend == "triton" and layout == "amx":
        pytest.skip("a CPU's layout")
    check(replace(make(MIXED, dtype, heads=(6, 2), layout=layout), scoring=SCORINGS[name]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=10 if IN_INTERPRETER else 60, deadline=None)
@given(data=st.data())
def test_any_trees_in_any_chunks(backend: Backend, data: st.DataObject) -> None:
    """Also those whose rows lie in several."""
    chunk = data.draw(st.sampled_from([1, 3, 8, 16, 50, 128]))
    trees, past = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        rows = data.draw(st.integers(1, 24))
        parents = [-1] + [data.draw(st.integers(max(-1, row - 3), row - 1)) for row in range(1, rows)]
        trees.append((chunk * data.draw(st.integers(0, 3)) + data.draw(st.integers(0, 9)), parents))
        past.append(data.draw(st.integers(0, rows - 1)))
    case = replace(make(trees, past=past), scoring=Scoring(chunk=chunk))
    torch.testing.assert_close(case.run("torch").double(), dense(case), atol=2e-6, rtol=2e-6)
    check(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_with_and_without_windows_and_chunks_share_the_trees(backend: Backend) -> None:
    case = make(MIXED, heads=(6, 2))
    windows_and_chunks = Scoring(7), Scoring(chunk=7), SCORINGS["sinks"], Scoring(9), Scoring(chunk=9)
    for scoring in (Scoring(), *windows_and_chunks, Scoring(soft_cap=2.0), Scoring()):
        got = replace(case, scoring=scoring).run(backend)
        want = replace(case, trees=replace(case.trees), scoring=scoring).run("torch")
        torch.testing.assert_close(got, want, **TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("scoring", "message"),
    [
        (Scoring(-1), "window=-1"),
        (Scoring(chunk=-1), "chunk=-1"),
        (Scoring(8, chunk=64), "window=8 and chunk=64 do not go together"),
        (Scoring(soft_cap=float("inf")), "soft_cap=inf"),
        (Scoring(sinks=torch.zeros(2)), "sinks: torch.float32"),
        (Scoring(sinks=torch.zeros(3, dtype=torch.bfloat16)), "sinks.float"),
    ],
)
def test_scoring_that_is_no_layers(scoring: Scoring, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make(MIXED), scoring=scoring).run("torch")


@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_across_blocks(backend: Backend) -> None:
    check(make([(29 + n, binary(40)) for n in range(5)]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_is_exact_enough_for_token_identity(backend: Backend) -> None:
    case = make([(700, binary(16))], heads=(6, 2))
    assert (case.run(backend).double() - dense(case)).abs().max() < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend: Backend) -> None:
    case = make(MIXED)
    # Scores up to 3e4 have 0.002 between them and the next float32, and sums in another order differ by that.
    check(replace(case, query=case.query * 1e4), backend, atol=5e-3, rtol=5e-3)
    # Scores that rise along the context, so that every step of the online softmax rescales; and that fall.
    for sign in (1, -1):
        case = make([(600, binary(9))], heads=(1, 1))
        for i in range(600 // case.keys.shape[2]):
            block = int(case.trees.block_table[0, i])
            case.keys[block] = torch.sign(case.query[2, 0]) * sign * i
        # Scores up to 240: likewise 1.5e-5.
        level = replace(case, query=case.query[2:3, :].expand_as(case.query).clone())
        check(level, backend, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_strided_query(backend: Backend) -> None:
    case = make(MIXED, torch.bfloat16)
    packed = torch.full((len(case.query), 5 * 3 * 64 + 8), NAN, dtype=torch.bfloat16)
    view = packed.as_strided(case.query.shape, (packed.stride(0), 128, 1), 8)
    view.copy_(case.query)
    check(replace(case, query=view), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_strided_output(backend: Backend) -> None:
    case = make(MIXED)
    output = torch.full((len(case.query), 4, 80), SENTINEL)
    device = "cuda" if backend == "triton" and not IN_INTERPRETER else "cpu"
    view = output.to(device)[:, 1:, :64]
    trees = each(case.trees, lambda tensor: tensor.to(device))
    caches = move(case.keys, device), move(case.values, device)
    tree_attention(case.query.to(device), *caches, view, trees, case.scale, backend)
    torch.testing.assert_close(view.cpu(), case.run("torch"), **TOLERANCE[torch.float32])
    full = view._base.cpu()  # type: ignore[union-attr]
    assert (full[:, 0] == SENTINEL).all()
    assert (full[..., 64:] == SENTINEL).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_different_forms_share_the_trees(backend: Backend) -> None:
    """What is kept from one call to the next is kept for tensors of its form."""
    case = make(MIXED, block_size=32)
    others = [
        case,
        replace(case, query=case.query.flip(0).contiguous(), scale=0.1),
        replace(make(MIXED, block_size=32, gap=9), trees=case.trees),  # its rows elsewhere: other values
        replace(make(MIXED, torch.float16, block_size=32), trees=case.trees),
        replace(make(MIXED, heads=(6, 3), block_size=32), trees=case.trees),
        replace(case, query=case.query.repeat(1, 1, 2)[..., :64]),
        case,
    ]
    on_device = [other.run(backend) for other in others]
    for other, got in zip(others, on_device, strict=True):
        want = replace(other, trees=replace(other.trees)).run("torch")
        torch.testing.assert_close(got, want, **TOLERANCE[got.dtype])
    with pytest.raises(ValueError, match="query's head_size 32"):
        replace(case, query=case.query[..., :32]).run(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_request(backend: Backend) -> None:
    case = make([(5, [-1])])
    none = each(case.trees, lambda tensor: tensor[:0])
    assert (replace(case, trees=none).run(backend) == SENTINEL).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_visible_sibling_would_be_noticed(backend: Backend) -> None:
    """The checks above are worth something: one wrong edge, in the last tree of a batch, fails them."""
    case = make([*MIXED, (60, star(4))])
    parents = case.trees.parents.clone()
    parents[-1] = 2  # row 3 now sees its sibling
    got, want = replace(case, trees=replace(case.trees, parents=parents)).run(backend), case.run("torch")
    last = int(case.trees.first_row[-1]) + 3
    different = [
        row for row in range(len(got)) if not torch.allclose(got[row], want[row], **TOLERANCE[torch.float32])
    ]
    assert different == [last]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=10 if IN_INTERPRETER else 60, deadline=None)
@given(data=st.data())
def test_any_trees(backend: Backend, data: st.DataObject) -> None:
    trees, past = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.integers(1, 24))
        parents = [-1] + [data.draw(st.integers(-1, row - 1)) for row in range(1, rows)]
        trees.append((data.draw(st.integers(0, 300)), parents))
        past.append(data.draw(st.integers(0, rows)))
    dtype, block_size = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(BLOCK_SIZES))
    check(make(trees, dtype, block_size=block_size, past=past), backend)


@pytest.mark.skipif(BACKENDS == ["numba"], reason="numba takes the vec layout only")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_layout(dtype: torch.dtype) -> None:
    check(make(MIXED, dtype, heads=(6, 2), layout="flash"), "triton")


GOOD = make([(5, [-1, 0])], head_size=32, block_size=32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"query": GOOD.query[0]},
            r"query: shape \(3, 32\).* must be \[num_tokens.*pass query\.contiguous\(\)",
        ),
        ({"query": GOOD.query.transpose(1, 2)}, r"query: shape .*contiguous"),
        ({"query": GOOD.query.double()}, r"query torch\.float64.* must be one of torch\.float32"),
        ({"keys": GOOD.keys.half()}, r"key_cache torch\.float16.* the same for all"),
        ({"keys": GOOD.keys[0]}, r"key_cache\.shape=\(1, 32, 32\)"),
        ({"values": GOOD.values[..., :16]}, r"value_cache\.shape=.*must both be"),
        ({"query": GOOD.query[..., :16]}, r"query's head_size 16"),
        (
            {"keys": GOOD.keys.expand(-1, 2, -1, -1), "values": GOOD.values.expand(-1, 2, -1, -1)},
            r"divides .* 3",
        ),
    ],
)
def test_what_it_refuses(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GOOD, **changes).run("auto")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parents": GOOD.trees.parents.long()}, r"parents: torch\.int64 .*must be torch\.int32"),
        ({"block_table": GOOD.trees.block_table.T}, r"(block_table|first_row): shape"),
        ({"first_row": GOOD.trees.first_row.repeat(2)}, r"first_row: shape \(2,\).*\[num_requests=1\]"),
        ({"context_len": GOOD.trees.context_len[0]}, r"context_len: shape \(\)"),
    ],
)
def test_what_rows_of_trees_refuse(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GOOD.trees, **changes)


def test_refusals_of_backends() -> None:
    with pytest.raises(ValueError, match=r"backend='cuda' must be 'auto', 'torch', 'numba' or 'triton'"):
        GOOD.run("cuda")  # type: ignore[arg-type]


class TestInTheParentProcess:
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("heads", [(2, 2), (9, 3), (16, 2)], ids=str)
    @pytest.mark.parametrize("head_size", [32, 64, 80, 128])
    def test_both_layouts_give_the_same_bits(
        self, head_size: int, heads: tuple[int, int], block_size: int
    ) -> None:
        """Contexts that end in the first and in the second half of a pair, too."""
        trees = [*MIXED, (700, binary(40)), (block_size - 1, [-1]), (block_size - 2, chain(3)), (1, [-1])]
        outputs = [
            make(trees, torch.bfloat16, heads, head_size, block_size, layout=layout).run("numba")
            for layout in ("vec", "amx")
        ]
        assert torch.equal(*outputs)

    def test_single_tokens_of_both_layouts(self) -> None:
        blocks, offsets = torch.tensor([3, 0, 3]), torch.tensor([31, 6, 17])
        slots = blocks * 32 + offsets
        for layout in (vec_layout, amx_layout):
            kv_cache = torch.randn(4, 2, 32, 2 * 64)
            for cache in layout(kv_cache):
                assert torch.equal(tokens_at(cache, slots), in_order(cache)[blocks, :, offsets])
            # Each place once.
            assert sorted(torch.cat([in_order(c).flatten() for c in layout(kv_cache)]).tolist()) == sorted(
                kv_cache.flatten().tolist()
            )

    def test_numba_refuses_other_layouts_and_sizes(self) -> None:
        refused = [make(MIXED, layout="flash"), make(MIXED, head_size=40), make(MIXED, layout="amx")]
        for case in refused * 2:  # the last: float32 has no pairs
            with pytest.raises(
                ValueError, match=r"backend='numba' takes the views of vec_layout or.*'torch'"
            ):
                case.run("numba")

    def test_triton_refuses_cpu_tensors_without_the_interpreter(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(ValueError, match=r"'triton' takes CUDA .* cpu; .*TRITON_INTERPRET=1"):
            tree_attention(
                GOOD.query, GOOD.keys, GOOD.values, torch.empty_like(GOOD.query), GOOD.trees, 1.0, "triton"
            )

    def test_two_threads_give_the_same_bits(self) -> None:
        case = make([(700, binary(129)), *MIXED], torch.bfloat16, heads=(9, 3))
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            alone = case.run("numba")
            torch.set_num_threads(2)
            together = [case.run("numba") for _ in range(5)]
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(alone, other) for other in together)

    @pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP name")
    def test_the_threads_are_those_of_torch(self) -> None:
        """A thread that torch's OpenMP made takes part, so whatever vLLM binds it to holds here too."""
        from vllm_ext.kernels import attention_parts_numba

        parallel = attention_parts_numba._openmp()
        assert parallel is not None
        libc = ctypes.CDLL(None)

        def team() -> set[int]:
            seen: list[int] = []
            body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(libc.gettid()))
            parallel(body, None, 2, 0)
            return set(seen)

        before = torch.get_num_threads()
        try:
            torch.set_num_threads(2)
            torch.ones(512, 512) @ torch.ones(512, 512)
            tasks = set(map(int, os.listdir("/proc/self/task")))
            assert len(team()) == 2
            assert team() <= tasks
        finally:
            torch.set_num_threads(before)

    def test_import_and_use_on_the_cpu_load_no_other_backend(self) -> None:
        code = """
import sys, torch
before = set(sys.modules)
import vllm_ext.kernels.tree_attention
loaded = set(sys.modules) - before
assert not {m for m in loaded if m.startswith(("numba", "triton"))}, loaded
"""
        subprocess.run([sys.executable, "-c", code], check=True)

    @pytest.mark.parametrize("block_size", [32, 128])
    @pytest.mark.parametrize(
        ("layout", "dtype", "head_size"),
        [*[(*kind, 64) for kind in LAYOUTS], ("vec16", torch.float32, 80), ("vec16", torch.bfloat16, 112)],
        ids=str,
    )
    def test_the_layout_and_the_result_are_vllms(
        self, layout: str, dtype: torch.dtype, head_size: int, block_size: int
    ) -> None:
        """A chain is causal attention: vLLM's writer fills the cache, its kernel gives what to expect."""
        pytest.importorskip("vllm")
        from vllm import _custom_ops as ops
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            pytest.skip("the writer of vLLM's CPU cache")
        if layout == "amx" and not torch.cpu._init_amx():  # asks the system for it, too
            pytest.skip("a CPU with AMX")
        current_platform.import_kernels()
        heads, kv_heads, context, rows = 9, 3, 150, 12
        length = context + rows
        num_blocks = -(-length // block_size) + 1
        # Zeros, as vLLM allocates it: its kernel multiplies what is behind the last token by 0.
        kv_cache = torch.zeros(num_blocks, kv_heads, block_size, 2 * head_size, dtype=dtype)
        theirs = kv_cache.view(num_blocks, kv_heads, 2 * block_size, head_size).chunk(2, dim=2)
        table = torch.randperm(num_blocks, dtype=torch.int32)[None]
        t = torch.arange(length)
        slots = table[0, t // block_size].long() * block_size + t % block_size
        key, value = (torch.randn(length, kv_heads, head_size).to(dtype) for _ in range(2))
        cache_arguments = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
        ops.cpu_attn_reshape_and_cache(key, value, *theirs, slots, layout, **cache_arguments)

        keys, values = CPU_LAYOUTS[layout](kv_cache)
        assert torch.equal(tokens_at(keys, slots), key)
        assert torch.equal(tokens_at(values, slots), value)

        query = torch.randn(rows, heads, head_size).to(dtype)
        start, lengths = ints([0, rows]), ints([length])
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_size,
            seq_lens=lengths,
            dtype=dtype,
            query_start_loc=start,
            causal=True,
            sliding_window_size=-1,
            isa=layout,
            enable_kv_split=True,
            dynamic_causal=None,
            kv_cache_dtype="auto",
        )
        stock = torch.full_like(query, SENTINEL)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=theirs[0],
            value_cache=theirs[1],
            output=stock,
            query_start_loc=start,
            seq_lens=lengths,
            scale=head_size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0,
            scheduler_metadata=metadata,
            s_aux=None,
            dynamic_causal=None,
            **cache_arguments,
        )
        trees = TreeRows(table, ints([0]), ints([rows]), ints([0]), ints([context]), ints(chain(rows)))
        case = Case(query, keys, values, trees, head_size**-0.5)
        # vLLM rounds the weights of 16-bit dtypes to those 16 bits.
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
        torch.testing.assert_close(case.run("numba"), stock, atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_a_row_does_not_depend_on_the_rows_beside_it(self, dtype: torch.dtype) -> None:
        """Bit for bit: what was drafted does not change what is put out, as far as attention goes."""
        for rows, context in ((1, 40), (2, 255), (9, 60), (17, 500)):
            case = make([(context, chain(rows))], dtype, heads=(9, 3), block_size=128)
            together = case.run("numba")
            for row in range(rows):
                alone = replace(
                    case.trees,
                    first_row=case.trees.first_row + row,
                    num_rows=ints([1]),
                    context_len=ints([context + row]),
                    parents=ints([-1]),
                )
                at = int(alone.first_row[0])
                assert torch.equal(replace(case, trees=alone).run("numba")[at], together[at])
