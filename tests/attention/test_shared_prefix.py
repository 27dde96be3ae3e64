"""shared_prefix: sequences whose rows of the block table begin with the same pages. On the CPU the option changes
nothing. On a GPU decode_prefix_sm90 or decode_prefix_sm80 reads these pages once; with num_splits it does so wherever
two sequences share keys, so that small calls are tested, too. tests/native/test_sharing.cpp checks the plan by itself.

Pages that a sequence does not use because it shares others hold NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import CUDA, NO_CUDA, SEED, Kernel, torch
from kvcache_cases import Case, make, on_device
from kvcache_cases import check as check_call

import flash_attn_minimal as fa

SM80, SM90 = NAMES = "decode_prefix_sm80", "decode_prefix_sm90"
LENGTHS = (900, 500, None, 1030, 0, 900, 257, 128, 1030, 640)
CASE = Case(
    lengths=LENGTHS, seqlen_new=0, rows=16, pages=70, nheads=8, nheads_k=2, dtype="bfloat16", shared_prefix=True,
    shares=(((0, 3, 5, 8), 40), ((1, 6, 9), 31)), num_splits=3,
)  # fmt: skip
CACHES = pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn", "int8"])


@pytest.fixture(params=NAMES)
def prefix(request) -> Kernel:
    if NO_CUDA:
        pytest.skip(NO_CUDA)
    name = request.param
    if name not in {k["name"] for k in fa.kernels()}:
        pytest.skip("a build without GPU kernels")
    if name == SM90 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU is no Hopper")
    return Kernel(CUDA, name)


def check(kernel: Kernel, case: Case):
    """As check_call. decode_prefix_sm90 refuses some calls that decode_prefix_sm80 takes."""
    if kernel.name == SM90 and (case.cache_dtype or case.rows % 8 or case.softcap):
        plan = fa.kvcache_query(**on_device(kernel, case, make(case)))
        assert plan.status == "FA_UNSUPPORTED", plan
        return None
    return check_call(kernel, case)


def on_pages(case: Case, page: int, longest: int = 1040) -> Case:
    """The case with pages of another size that hold as many keys; the sequences share about as many keys."""
    scale = case.rows / page
    shares = tuple((members, int(pages * scale)) for members, pages in case.shares)
    return replace(case, rows=page, pages=-(-longest // page), shares=shares)


# ---- every kernel: the option is a hint ----


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_hint(kernel, dtype):
    """Kernels that cannot share, those of the CPU among them, give the bits of a call without the option."""
    if kernel.name in NAMES:
        pytest.skip("it shares")
    case = replace(CASE, dtype=dtype, num_splits=0, headdim=32)
    out, lse = check(kernel, case)
    plain_out, plain_lse = check(kernel, replace(case, shared_prefix=False))
    np.testing.assert_array_equal(out, plain_out)
    np.testing.assert_array_equal(lse, plain_lse)


def test_repeated_calls_keep_the_option():
    """A call is remembered with the option: the next call without it is another one."""
    case = replace(CASE, dtype="float32", num_splits=0, headdim=16)
    arrays = on_device(Kernel(fa_cpu(), "cpu_naive"), case, make(case))
    del arrays["shared_prefix"]
    for _ in range(3):
        fa.flash_attn_with_kvcache(**arrays)
        fa.flash_attn_with_kvcache(**arrays, shared_prefix=True)
        with pytest.raises(fa.Unsupported, match="shared_prefix=True with batch_invariant=True"):
            fa.flash_attn_with_kvcache(**{**arrays, "batch_invariant": True}, shared_prefix=True)


def fa_cpu():
    from conftest import CPU

    return CPU


# ---- the kernels that share against float64 ----


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("headdim", [(64, None), (128, None), (256, None), (16, 32), (96, None), (192, 128)], ids=str)
@pytest.mark.parametrize("page", [16, 7])  # with pages of 7 keys decode_split_sm80 attends to the other keys
def test_head_dims(prefix, dtype, headdim, page):
    case = replace(on_pages(CASE, page), dtype=dtype, headdim=headdim[0], headdim_v=headdim[1])
    check(prefix, case)
    check(prefix, replace(case, seqlen_q=3, seqlen_new=3, causal=True))


@CACHES
@pytest.mark.parametrize("page", [1, 16, 48, 64, 100, 256])
@pytest.mark.parametrize("headdim", [64, 128])
def test_pages(prefix, page, headdim, cache_dtype):
    case = replace(on_pages(CASE, page), headdim=headdim, cache_dtype=cache_dtype)
    for scales in ("heads", "entries", "tokens") if cache_dtype else ("heads",):
        if page > 1 or scales != "entries":
            check(prefix, replace(case, scales=scales))


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (8, 1), (16, 2), (5, 1), (32, 1)])
@pytest.mark.parametrize("seqlen_q", [1, 2, 4, 12])
def test_rows_and_heads(prefix, heads, seqlen_q):
    """Rows of a key head up to 64: members that share a tile of rows, that end at its edge, and that cross it."""
    if seqlen_q * heads[0] // heads[1] > 64:
        pytest.skip("more than 64 rows of a key head")
    case = replace(CASE, nheads=heads[0], nheads_k=heads[1], seqlen_q=seqlen_q, seqlen_new=seqlen_q, causal=True)
    check(prefix, case)
    check(prefix, replace(case, causal=False, seqlen_new=0, headdim=128))


@pytest.mark.parametrize("splits", [1, 2, 7, 64, 256])
@pytest.mark.parametrize("headdim", [64, 128])
def test_pieces(prefix, splits, headdim):
    check(prefix, replace(CASE, num_splits=splits, headdim=headdim))


@CACHES
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 20.0},
        {"sinks": True},
        {"causal": True, "seqlen_q": 5, "seqlen_new": 5},
        {"window_size": (-1, 3), "seqlen_q": 4},
        {"softmax_scale": -0.3},
        {"rotary_dim": 32, "seqlen_new": 1},
        {"seqlen_new": 2, "seqlen_q": 2, "causal": True, "sinks": True},
    ],
    ids=str,
)
def test_options(prefix, options, cache_dtype):
    check(prefix, replace(CASE, cache_dtype=cache_dtype, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (300, 0), "seqlen_q": 2},
        {"alibi": 2},
        {"leftpads": tuple(0 if x is None else x // 3 for x in LENGTHS), "shares": ()},
        {"causal": True, "attention_chunk": 200},
    ],
    ids=str,
)
def test_options_that_it_refuses(prefix, options):
    """Other kernels serve them, without sharing."""
    case = replace(CASE, **options)
    plan = fa.kvcache_query(**on_device(prefix, case, make(case)))
    assert plan.status == "FA_UNSUPPORTED", plan
    arrays = on_device(prefix, case, make(case))
    arrays["kernel"] = None
    chosen = fa.kvcache_query(**arrays)
    assert chosen.status == "FA_OK" and chosen.kernel not in NAMES, chosen
    check(Kernel(CUDA, chosen.kernel), case)


SHARES = {
    "nothing": (),
    "all of it": ((tuple(range(10)), 70),),
    "one pair": (((6, 0), 16),),
    "the last sequences": (((8, 9), 70),),
    "one that ends early": (((7, 0, 3, 5, 8), 40),),  # the first sequence has 128 keys
    "one that differs early": (((0, 3, 8), 56), ((0, 5), 8)),
    "five pairs": tuple(((b, b + 5), 30) for b in range(5)),
    "a tree": ((tuple(range(10)), 16), ((0, 2, 4, 6, 8), 50), ((1, 3, 5, 7, 9), 50)),
    "less than a step of keys": (((0, 3, 5), 7),),
}


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("lengths", [LENGTHS, (1024,) * 10, (896,) * 9 + (37,)], ids=["ragged", "equal", "one short"])
def test_groups(prefix, shares, lengths):
    for headdim, splits in ((64, 2), (128, 2), (128, 9)):
        check(prefix, replace(CASE, shares=SHARES[shares], lengths=lengths, headdim=headdim, num_splits=splits))


@pytest.mark.parametrize("seed", range(SEED, SEED + 40))
def test_random_batches(prefix, seed):
    """Random groups whose members lie anywhere in the batch, some of which leave their group early."""
    rng = np.random.default_rng(seed)
    batch = int(rng.choice([1, 2, 5, 33, 64, 130, 300]))
    lengths = tuple(None if x < 0 else int(x) for x in rng.integers(-60, 700, batch))
    order, groups = rng.permutation(batch), []
    for members in np.array_split(order, int(rng.integers(1, max(batch // 3, 1) + 1))):
        leader = int(members[0])
        page_counts = rng.integers(0, 44, 2)
        for b in members[1:]:
            groups.append(((leader, int(b)), int(rng.choice(page_counts))))
    heads = int(rng.choice([1, 2, 8]))
    new = int(rng.integers(0, 3))
    case = replace(
        CASE, lengths=lengths, pages=44, shares=tuple(groups), nheads_k=int(rng.choice([1, 2])), dtype="float16",
        headdim=int(rng.choice([64, 128])), num_splits=int(rng.choice([1, 2, 3, 20])), seqlen_new=new, spare=0,
        seqlen_q=max(new, 1), causal=bool(rng.integers(2)), seed=seed,
    )  # fmt: skip
    check(prefix, replace(on_pages(case, int(rng.choice([16, 64, 7])), 710), nheads=heads * case.nheads_k))


def test_more_sequences_than_the_planner_takes(prefix):
    case = replace(CASE, lengths=(20,) * 1025, pages=2, shares=())
    plan = fa.kvcache_query(**on_device(prefix, case, make(case)))
    assert plan.status == "FA_UNSUPPORTED" and "batch=1025" in plan.error


def test_choice(prefix):
    """One is chosen where so many keys can be shared that it may pay, and only if the call asks for it."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    many = replace(CASE, lengths=(8000,) * 32, pages=502, num_splits=0, nheads_k=4, headdim=128, spare=0)
    few = replace(many, lengths=(200,) * 4, pages=13)
    for case, shared_prefix, page, chosen in (
        (many, True, 16, SM90 if hopper else SM80), (many, True, 4, SM80),
        (many, False, 16, None), (few, True, 16, None),
    ):  # fmt: skip
        q = torch.zeros(len(case.lengths), 1, 8, 128, dtype=torch.bfloat16, device="cuda")
        cache = torch.zeros(64, page, 4, 128, dtype=torch.bfloat16, device="cuda")
        table = torch.zeros(len(case.lengths), case.pages * 16 // page, dtype=torch.int32, device="cuda")
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
        options = {"cache_seqlens": lengths, "block_table": table, "shared_prefix": shared_prefix}
        plan = fa.kvcache_query(q, cache, cache.clone(), **options)
        assert plan.status == "FA_OK" and (plan.kernel == chosen if chosen else plan.kernel not in NAMES), plan


def test_keys_are_shared(prefix):
    """The bits of lse show that the keys of a group are added up in another order, without num_splits, too."""
    case = replace(CASE, lengths=(3000,) * 24, pages=190, shares=((tuple(range(24)), 180),), num_splits=0, nheads_k=4)
    case = replace(case, headdim=128, spare=0)
    shared = check(prefix, case)
    alone = check(prefix, replace(case, shares=()))
    arrays = on_device(prefix, case, make(case))
    plain = fa.flash_attn_with_kvcache(**{**arrays, "shared_prefix": False, "kernel": None}, return_softmax_lse=True)
    assert not np.array_equal(shared[1], prefix.device.numpy(plain[1]))
    arrays = on_device(prefix, case, make(replace(case, shares=())))
    other = "decode_ring_sm90" if torch.cuda.get_device_capability() == (9, 0) else "decode_split_sm80"
    plain = fa.flash_attn_with_kvcache(**{**arrays, "shared_prefix": False, "kernel": other}, return_softmax_lse=True)
    np.testing.assert_array_equal(
        alone[1], prefix.device.numpy(plain[1])
    )  # nothing is shared: the kernel that attends to the other keys has done all


def test_graph_whose_tables_and_lengths_change(prefix):
    """A captured call is replayed with other groups: none, one, several, longer and shorter prefixes, idle rows."""
    case = replace(CASE, lengths=(1000,) * 12, pages=64, seqlen_new=1, headdim=128, spare=0, shares=(), causal=True)
    call = make(case)
    own = np.arange(12 * 64, dtype=np.int32).reshape(12, 64)
    call.where["block_table"] = own.copy()
    arrays = on_device(prefix, case, call)
    for name in ("k_cache", "v_cache"):
        arrays[name].normal_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fa.flash_attn_with_kvcache(**arrays, return_softmax_lse=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa.flash_attn_with_kvcache(**arrays, return_softmax_lse=True)
    rng = np.random.default_rng(0)
    for step in range(20):
        table, lengths = own.copy(), rng.integers(-1 if step % 2 else 0, 1023, 12)
        for members in np.array_split(rng.permutation(12), int(rng.integers(1, 7))):
            common = int(min(lengths[members])) // 16 if step % 5 else 0
            for b in members[1:] if common > 0 else ():
                table[b, :common] = table[members[0], :common]
        arrays["block_table"].copy_(torch.from_numpy(table))
        arrays["cache_seqlens"].copy_(torch.from_numpy(lengths.astype(np.int32)))
        for name in ("q", "k", "v"):
            arrays[name].normal_()
        out.fill_(float("nan")), lse.fill_(float("nan"))
        graph.replay()
        plain = {**arrays, "kernel": "minimal", "shared_prefix": False, "num_splits": 0}
        want, want_lse = fa.flash_attn_with_kvcache(**plain, return_softmax_lse=True)
        torch.testing.assert_close(out, want, atol=1e-2, rtol=2e-2)
        torch.testing.assert_close(lse, want_lse, atol=2e-3, rtol=1e-3)
        again, again_lse = fa.flash_attn_with_kvcache(**arrays, return_softmax_lse=True)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)


def test_programmatic(prefix):
    """Steps that may start while the ones before them run, each with other queries, in one workspace."""
    case = replace(CASE, headdim=128, num_splits=2)
    arrays = on_device(prefix, case, make(case))
    queries = [torch.randn_like(arrays["q"]) for _ in range(20)]
    want = [fa.flash_attn_with_kvcache(**{**arrays, "q": q}) for q in queries]
    torch.cuda.synchronize()
    for _ in range(5):
        got = [fa.flash_attn_with_kvcache(**{**arrays, "q": q}, programmatic=True) for q in queries]
        assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))
