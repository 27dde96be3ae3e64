"""wgmma_split_sm90 by name: heads that share a tile of rows, keys in pieces, teams of blocks; and when it is chosen."""

from __future__ import annotations

from dataclasses import replace

import accuracy
import numpy as np
import pytest
import test_kvcache
from conftest import CUDA, NO_CUDA, Kernel
from kvcache_cases import Case, check

import flash_attn_minimal as fa
from flash_attn_lab import reference

NAME = "wgmma_split_sm90"
LONG = Case(
    lengths=(1300, None, 0, 64, 517), rows=1400, seqlen_q=4, seqlen_new=0, nheads=8, nheads_k=2, headdim=128,
    dtype="bfloat16", causal=True,
)  # fmt: skip


@pytest.fixture
def kernel() -> Kernel:
    if NO_CUDA:
        pytest.skip(NO_CUDA)
    if NAME not in [k["name"] for k in fa.kernels()]:
        pytest.skip("a build without Hopper")
    q = CUDA.array(np.zeros((1, 1, 1, 64), np.float32), "float16")
    if (plan := fa.query(q, q, q, kernel=NAME)).status != "FA_OK":
        pytest.skip(plan.error)
    return Kernel(CUDA, NAME)


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 1), (8, 1), (14, 2), (64, 1), (70, 1), (128, 1)])
def test_groups_and_rows(kernel, heads, headdim):
    """A warpgroup has whole queries: 63 rows with groups of 3 or 7 heads, 60 with groups of 5. 70 heads are cut into
    two parts of 35."""
    case = replace(LONG, nheads=heads[0], nheads_k=heads[1], headdim=headdim, lengths=(700, None, 0, 130), rows=760)
    for seqlen_q in (1, 2, 7, 17, 64):
        check(kernel, replace(case, seqlen_q=seqlen_q))
    check(kernel, replace(case, seqlen_q=33, causal=False, dtype="float16"))


@pytest.mark.parametrize("page_size", [8, 16, 24, 64, 80, 256])
@pytest.mark.parametrize("headdim", [(64, None), (128, None), (256, None), (40, 72), (192, 128)], ids=str)
def test_pages(kernel, page_size, headdim):
    case = replace(LONG, headdim=headdim[0], headdim_v=headdim[1], rows=page_size, pages=-(-1400 // page_size))
    check(kernel, case)
    check(kernel, replace(case, seqlen_q=40, seqlen_new=40, dtype="float16"))
    check(kernel, replace(case, seqlen_q=130, nheads=4, lengths=(1300, 60)))


@pytest.mark.parametrize("headdim", [(8, 8), (72, 40), (96, 96), (128, 64), (160, 160), (256, 32)])
def test_head_dims(kernel, headdim):
    check(kernel, replace(LONG, headdim=headdim[0], headdim_v=headdim[1]))
    check(kernel, replace(LONG, headdim=headdim[0], headdim_v=headdim[1], seqlen_q=50, nheads=6, nheads_k=2))


@pytest.mark.parametrize("scores", [{}, {"causal": True}, {"sinks": True}, {"softmax_scale": 0.3}], ids=str)
@pytest.mark.parametrize("new", [0, 5])
def test_scores(kernel, scores, new):
    case = replace(LONG, **{"causal": False, "seqlen_new": new, **scores})
    check(kernel, replace(case, batch_idx=True))
    check(kernel, replace(case, seqlen_q=20, rotary_dim=24 * bool(new)))


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 256])
def test_num_splits(kernel, splits):
    check(kernel, replace(LONG, num_splits=splits))
    check(kernel, replace(LONG, num_splits=splits, seqlen_q=70, sinks=True))


@pytest.mark.parametrize("batch", [1, 2, 33, 70, 300])
def test_batches(kernel, batch):
    """Lengths that no number of blocks divides evenly, and one length for all sequences."""
    lengths = np.random.default_rng(batch).integers(-40, 700, batch)
    uneven = tuple(None if x < 0 else int(x) for x in lengths)
    for case in (replace(LONG, lengths=uneven, rows=720), replace(LONG, lengths=(300,) * batch, rows=320)):
        case = replace(case, headdim=64, nheads=4, spare=0)
        check(kernel, case)
        check(kernel, replace(case, seqlen_q=33, batch_invariant=True))


@pytest.mark.parametrize("options", [{}, {"num_splits": 5}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("seqlen_q", [3, 100])
def test_same_bits_again(kernel, options, seqlen_q):
    case = replace(LONG, seqlen_q=seqlen_q, **options)
    first, again = (test_kvcache.run(kernel, case, test_kvcache.make(case))[:2] for _ in range(2))
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("seqlen_q", [2, 40, 100])
def test_batch_invariant(kernel, seqlen_q):
    """A sequence gives the same bits alone and in a batch."""
    call = test_kvcache.make(replace(LONG, lengths=(1300, 900, 517, 64, 1), seqlen_q=seqlen_q))
    lengths = call.where["cache_seqlens"]

    def attend(rows):
        on = {n: kernel.device.array(x[rows], "bfloat16") for n, x in {"q": call.q, **call.cache}.items()}
        on["cache_seqlens"] = kernel.device.array(lengths[rows])
        return kernel.device.numpy(fa.flash_attn_with_kvcache(**on, kernel=NAME, batch_invariant=True, causal=True))

    together = attend(slice(0, 5))
    for b in range(5):
        np.testing.assert_array_equal(attend(slice(b, b + 1))[0], together[b])


@pytest.mark.parametrize("alignment", [{}, {"causal": True}, {"causal": True, "top_left": True}], ids=str)
@pytest.mark.parametrize(
    "shape", [(985, 2000, 3, 3), (300, 1111, 16, 2), (512, 1000, 8, 1), (300, 70, 6, 2), (5, 3000, 4, 4)], ids=str
)
def test_plain_calls(kernel, shape, alignment):
    """Teams of several blocks; more queries than keys; rows without keys."""
    seqlen_q, seqlen_k, nheads, nheads_k = shape
    case = accuracy.Case(seqlen_q, seqlen_k, 128, nheads=nheads, nheads_k=nheads_k, dtype="bfloat16", **alignment)
    kernel.check(case)
    kernel.check(replace(case, headdim=64, dtype="float16", sinks=True))
    if seqlen_q < 500:
        kernel.check(replace(case, headdim=256, batch=2))
        kernel.check(replace(case, window_size=(-1, 7)))


def test_strides_and_hidden_values(kernel):
    """Heads before rows in memory, and NaN in values that no row sees."""
    rng = np.random.default_rng(0)
    q, k, v = (
        accuracy.round_to(rng.standard_normal(shape, dtype=np.float32), "float16")
        for shape in ((2, 10, 6, 64), (2, 500, 2, 64), (2, 500, 2, 64))
    )
    exact, _ = reference.standard_attention(q, k, v, causal=True, top_left=True)
    plain, _ = accuracy.plain_attention(q, k, v, "float16", causal=True, top_left=True)
    v[:, 10:] = np.nan
    on = [kernel.device.array(np.ascontiguousarray(x.swapaxes(1, 2)), "float16").swapaxes(1, 2) for x in (q, k, v)]
    out = fa.flash_attn_func(*on, causal=True, top_left=True, kernel=NAME)
    accuracy.check("out", kernel.device.numpy(out), exact, plain, "float16")


def test_workspace(kernel):
    """Partial results need a workspace; whole units need none, and the query says so."""
    q, k = (kernel.device.array(np.zeros(shape, np.float32), "float16") for shape in ((1, 4, 8, 64), (1, 4096, 2, 64)))
    assert fa.query(q, k, k, kernel=NAME).workspace_bytes > 2 * 132 * 4 * 64
    assert fa.query(q, k[:, :50], k[:, :50], kernel=NAME).workspace_bytes == 0
    assert fa.kvcache_query(q, k, k, cache_seqlens=9, num_splits=1, kernel=NAME).workspace_bytes == 0


def test_refusals(kernel):
    q, k = (kernel.device.array(np.zeros(shape, np.float32), "float16") for shape in ((1, 4, 8, 64), (1, 64, 2, 64)))
    for options, reason in (
        ({"window_size": (5, 0)}, "takes no window_size[0]"),
        ({"softcap": 1.0}, "takes no softcap"),
        ({"softmax_scale": -1.0}, "softmax_scale=-1"),
    ):
        plan = fa.query(q, k, k, kernel=NAME, **options)
        assert plan.status == "FA_UNSUPPORTED" and reason in plan.error, plan
    table = kernel.device.array(np.zeros((1, 8), np.int32))
    pages = kernel.device.array(np.zeros((9, 4, 2, 64), np.float32), "float16")
    plan = fa.kvcache_query(q, pages, pages, cache_seqlens=9, block_table=table, kernel=NAME)
    assert plan.status == "FA_UNSUPPORTED" and "page_size=4" in plan.error


# seqlen_q, seqlen_k, batch, nheads, nheads_k
CHOSEN = [
    (512, 65536, 1, 8, 1), (512, 65536, 1, 16, 2), (985, 62000, 1, 9, 9), (2048, 62000, 1, 9, 9),
    (4, 131072, 1, 64, 8), (16, 131072, 1, 64, 8), (16, 8192, 8, 64, 8), (16, 4096, 64, 32, 8), (64, 131072, 1, 64, 8),
    (4, 512, 1, 64, 8),
]  # fmt: skip
NOT_CHOSEN = [(1, 131072, 1, 64, 8), (2, 8192, 1, 64, 8), (4096, 4096, 2, 32, 8)]


@pytest.mark.parametrize("shape", [*CHOSEN, *NOT_CHOSEN], ids=str)
def test_choice(kernel, shape):
    """The choice for calls with a cache and for plain calls. A query reads no array."""
    seqlen_q, seqlen_k, batch, nheads, nheads_k = shape
    sizes = ((batch, seqlen_q, nheads, 128), (batch, seqlen_k, nheads_k, 128))
    on = [unwritten(kernel, size) for size in sizes]
    plans = [fa.query(on[0], on[1], on[1], causal=True), fa.kvcache_query(on[0], on[1], on[1], cache_seqlens=seqlen_k)]
    for plan in plans if seqlen_q < 900 else plans[:1]:
        assert (plan.kernel == NAME) == (shape in CHOSEN), plan
        assert shape in CHOSEN or NAME not in plan.kernel


def unwritten(kernel, size):
    if kernel.device.framework != "torch":
        pytest.skip("needs PyTorch to make arrays without writing them")
    import torch

    return torch.empty(size, dtype=torch.bfloat16, device="cuda")
