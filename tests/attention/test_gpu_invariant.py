"""batch_invariant on a GPU: the bits of a sequence depend only on its keys, not on the capacity of the cache, the width
of the block table or the other sequences of the batch."""

import pytest
from conftest import CUDA, NO_CUDA, torch

import flash_attn_minimal as fa

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]

PAGE, WIDTH = 16, 640  # keys of a page; pages of a row of the widest table
SHAPES = {  # nheads, nheads_k, headdim, headdim_v, seqlen_q, dtype
    "one row": (8, 8, 64, 64, 1, "bfloat16"),
    "group of 4": (8, 2, 128, 128, 1, "bfloat16"),
    "group of 8, 2 rows": (16, 2, 128, 128, 2, "float16"),
    "wide": (8, 2, 256, 256, 1, "bfloat16"),
    "40 rows": (4, 2, 128, 128, 40, "bfloat16"),
    "prompt": (4, 2, 64, 64, 140, "bfloat16"),
    "latent": (16, 1, 576, 512, 1, "bfloat16"),
    "latent, 128 heads": (128, 1, 576, 512, 1, "bfloat16"),
    "float32": (4, 2, 64, 64, 2, "float32"),
}
LENGTHS = (30, 700, 2900)
FORCED = [None, *(row["name"] for row in fa.kernels() if row["device"] == "cuda")]


def arrays_of(shape, sequences=1):
    """q of each sequence, and a pool with WIDTH pages for each. Values are columns of the keys."""
    nheads, nheads_k, headdim, headdim_v, seqlen_q, dtype = SHAPES[shape]
    torch.manual_seed(len(shape))
    kind = {"device": "cuda", "dtype": getattr(torch, dtype)}
    q = torch.randn(sequences, seqlen_q, nheads, headdim, **kind)
    k = torch.randn(sequences * WIDTH, PAGE, nheads_k, headdim, **kind)
    return q, k, k[..., :headdim_v] if headdim > 256 else torch.randn_like(k)


def same(one, two):
    """Whether the arrays are equal bit for bit, including the sign of zeros."""
    bits = torch.int32 if one.dtype == torch.float32 else torch.int16
    return torch.equal(one.contiguous().view(bits), two.contiguous().view(bits))


def attend(q, k, v, kernel, **where):
    """Returns (out, lse, name of the kernel)."""
    options = {"causal": q.shape[1] > 1, "batch_invariant": True, "kernel": kernel, **where}
    plan = fa.kvcache_query(q, k, v, **options)
    if plan.status == "FA_UNSUPPORTED":
        pytest.skip(plan.error)
    assert plan.status == "FA_OK", plan.error
    return *fa.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options), plan.kernel


@pytest.mark.parametrize("kernel", FORCED)
@pytest.mark.parametrize("shape", SHAPES)
def test_width_of_the_table(shape, kernel):
    q, k, v = arrays_of(shape)
    for length in LENGTHS:
        lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
        narrow = -(-length // PAGE)
        results = []
        for width in (narrow, narrow + 1, 65, 129, 257, WIDTH):
            if width < narrow:
                continue
            table = torch.arange(width, dtype=torch.int32, device="cuda")[None]
            results.append(attend(q, k, v, kernel, cache_seqlens=lengths, block_table=table))
        (out, lse, name), *others = results
        for other in others:
            assert other[2] == name
            assert same(other[0], out) and same(other[1], lse), f"{length} keys"


@pytest.mark.parametrize("kernel", FORCED)
@pytest.mark.parametrize("shape", SHAPES)
def test_capacity(shape, kernel):
    q, k, v = arrays_of(shape)
    k, v = (x.flatten(0, 1)[None] for x in (k, v))  # one entry with all rows
    for length in LENGTHS:
        lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
        capacities = (length, length + 1, 3000, 4100, 8192, WIDTH * PAGE)
        results = [attend(q, k[:, :n], v[:, :n], kernel, cache_seqlens=lengths) for n in capacities]
        (out, lse, name), *others = results
        for other in others:
            assert other[2] == name
            assert same(other[0], out) and same(other[1], lse), f"{length} keys"


@pytest.mark.parametrize("kernel", FORCED)
@pytest.mark.parametrize("shape", ["one row", "group of 4", "wide", "40 rows", "latent", "float32"])
def test_many_other_sequences(shape, kernel):
    """So many rows that a different number of blocks merges their pieces than for one sequence."""
    q, k, v = arrays_of(shape)
    k, v = (x.flatten(0, 1)[None] for x in (k, v))
    batch, length = 300, 5000
    many = q.expand(batch, -1, -1, -1).contiguous()
    many[1:] = torch.randn_like(many[1:])
    lengths = torch.randint(1, WIDTH * PAGE, (batch,), dtype=torch.int32, device="cuda")
    lengths[0] = length
    entries = torch.zeros(batch, dtype=torch.int32, device="cuda")
    alone = attend(q, k, v, kernel, cache_seqlens=lengths[:1].contiguous(), cache_batch_idx=entries[:1].contiguous())
    among = attend(many, k, v, kernel, cache_seqlens=lengths, cache_batch_idx=entries)
    assert alone[2] == among[2]
    assert same(among[0][:1], alone[0]) and same(among[1][:1], alone[1])
