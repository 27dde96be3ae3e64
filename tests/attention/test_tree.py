"""A tree of draft tokens over a cache: every kernel that serves it against float64, and the refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace

import accuracy
import kvcache_cases
import numpy as np
import pytest
from conftest import Kernel

import flash_attn_minimal as fa
from flash_attn_lab import reference

ALL = np.uint64(2**64 - 1)


def chain(drafts: int) -> np.ndarray:
    """Row i sees drafts 0 .. i: causal."""
    return np.array([(2 << i) - 1 for i in range(drafts)], np.uint64)


def from_parents(parents: list[int]) -> np.ndarray:
    """Row i sees itself and everything that its parent sees. A parent of -1 makes a root."""
    rows: list[int] = []
    for i, parent in enumerate(parents):
        rows.append(1 << i | (rows[parent] if parent >= 0 else 0))
    return np.array(rows, np.uint64)


def wide(drafts: int, children: int) -> np.ndarray:
    return from_parents([(i - 1) // children if i else -1 for i in range(drafts)])


def alone(drafts: int) -> np.ndarray:
    """Every row sees itself, and no other draft."""
    return from_parents([-1] * drafts)


TREES = {
    "one": chain(1),
    "chain8": chain(8),
    "wide16": wide(16, 3),
    "alone32": alone(32),
    "chain64": chain(64),
    "wide64": wide(64, 4),
    "nothing5": np.zeros(5, np.uint64),
}


@dataclass(frozen=True)
class TreeCase:
    """A cache in which the last tokens are drafts; `tree` is a name of TREES."""

    tree: str
    cache: kvcache_cases.Case


def cases() -> dict[str, TreeCase]:
    base = kvcache_cases.Case(dtype="bfloat16", headdim=128, headdim_v=128, seqlen_new=0, nheads=8, nheads_k=1)
    found = {}
    for name, rows in TREES.items():
        n = len(rows)
        # Lengths at which the tree ends a tile of keys, begins a tile, crosses an edge of tiles, or is the whole
        # sequence.
        lengths = (n, 128, 128 + n, 200, None, 64 + n // 2, 1000)
        found[name] = TreeCase(name, replace(base, lengths=lengths, seqlen_q=n, rows=1024))
    n = 64
    for name, changes in {
        "appended": {"seqlen_new": 16, "lengths": (0, 37, 496), "seqlen_q": 16},
        "pages": {"rows": 16, "pages": 32},
        "small_pages": {"rows": 3, "pages": 170},
        "entries": {"batch_idx": True},
        "group1": {"nheads": 2, "nheads_k": 2},
        "group7": {"nheads": 14, "nheads_k": 2},
        "float16": {"dtype": "float16"},
        "float32": {"dtype": "float32"},
        "headdim64": {"headdim": 64, "headdim_v": 64},
        "headdim256": {"headdim": 256, "headdim_v": 256},
        "splits": {"num_splits": 5},
        "invariant": {"batch_invariant": True},
        "sinks": {"sinks": True},
        "softcap": {"softcap": 3.0},
        "int8": {"cache_dtype": "int8", "scales": "tokens"},
        "short": {"lengths": (0, 1, 5, 63)},
    }.items():
        tree = "wide16" if changes.get("seqlen_q") == 16 else "wide64"
        cache = replace(base, lengths=(64, 130, 500), rows=512, seqlen_q=n)
        found[name] = TreeCase(tree, replace(cache, **changes))
    return found


CASES = cases()


def run(kernel: Kernel, case: kvcache_cases.Case, call: kvcache_cases.Call, tree: np.ndarray, keys: int = 0):
    """out and lse of a call with a tree, and the caches after it."""
    arrays = kvcache_cases.on_device(kernel, case, call)
    arrays |= {"tree_mask": kernel.device.array(tree.view(np.int64)), "tree_keys": keys}
    plan = fa.kvcache_query(**arrays)
    if plan.status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip(plan.error)
    assert plan.status == "FA_OK" and plan.kernel == kernel.name, plan
    out, lse = fa.flash_attn_with_kvcache(**arrays, return_softmax_lse=True)
    after = {n: kvcache_cases.from_device(kernel, arrays[n]) for n in call.arrays if n.startswith(("k_", "v_"))}
    return kernel.device.numpy(out), kernel.device.numpy(lse), after


def judge(case: kvcache_cases.Case, call: kvcache_cases.Call, tree, keys, out, lse, after) -> None:
    lengths = [-1 if n is None else n + case.seqlen_new for n in case.lengths]
    cache = {n: np.asarray(after[n], np.float32) for n in ("k_cache", "v_cache")}
    rest = {**call.where, **{n: after[n] for n in after if "scale" in n}, **call.options, "cache_seqlens": lengths}

    def plain(*arrays, **options):
        return accuracy.plain_attention(*arrays, dtype=case.dtype, **options)

    want, rounded = (
        reference.kvcache_attention(call.q, **cache, **rest, tree_mask=tree, tree_keys=keys, attention=attention)
        for attention in (reference.standard_attention, plain)
    )
    accuracy.check("lse", lse, want[1], rounded[1], "float32", floor=4e-5)
    accuracy.check("out", out, want[0], rounded[0], case.dtype, floor=4e-5)


@pytest.mark.parametrize("name", CASES)
def test_against_float64(kernel, name):
    case = CASES[name].cache
    tree, call = TREES[CASES[name].tree], kvcache_cases.make(case)
    out, lse, after = run(kernel, case, call, tree)
    judge(case, call, tree, 0, out, lse, after)


@pytest.mark.parametrize("keys", (3, 40, 64))
def test_fewer_and_more_drafts_than_rows(kernel, keys):
    """A tree of random bits for every sequence. Bits from tree_keys on have no meaning."""
    case = replace(CASES["group7"].cache, seqlen_q=9, seed=keys)
    call = kvcache_cases.make(case)
    tree = np.random.default_rng(keys).integers(0, 2**64 - 1, (case.batch, 9), np.uint64, endpoint=True)
    results = run(kernel, case, call, tree, keys)
    judge(case, call, tree, keys, *results)
    if keys < 64:
        again = run(kernel, case, call, tree ^ (ALL << np.uint64(keys)), keys)
        for one, other in zip(results[:2], again[:2], strict=True):
            np.testing.assert_array_equal(one, other)


def test_more_than_64_rows(kernel):
    """The words of the rows repeat; the drafts are still the last 64 keys."""
    case = replace(CASES["group7"].cache, seqlen_q=150)
    call = kvcache_cases.make(case)
    tree = np.resize(wide(64, 2), 150)
    judge(case, call, tree, 64, *run(kernel, case, call, tree, 64))


def test_a_chain_is_causal(kernel):
    """A kernel that serves both gives the same bits for a chain and for a causal call."""
    case = replace(CASES["group1"].cache, seqlen_q=32)
    call = kvcache_cases.make(case)
    out, lse, _ = run(kernel, case, call, chain(32))
    arrays = kvcache_cases.on_device(kernel, case, call)
    want, want_lse = fa.flash_attn_with_kvcache(**arrays, causal=True, return_softmax_lse=True)
    np.testing.assert_allclose(lse, kernel.device.numpy(want_lse), atol=1e-5)
    np.testing.assert_allclose(out, kernel.device.numpy(want), atol=2e-2 * np.abs(out).max())


@pytest.mark.parametrize("drafts", (16, 64))
@pytest.mark.parametrize("pages", (0, 40))
def test_drafts_that_no_row_sees_may_hold_nan(kernel, drafts, pages):
    case = replace(
        CASES["headdim64"].cache, lengths=(64, 100, 128, 300, 321), seqlen_q=8, rows=8 if pages else 330, pages=pages
    )
    case = replace(case, pages=42 if pages else 0)
    call = kvcache_cases.make(case)
    seen = np.random.default_rng(drafts).integers(0, 2**64 - 1, 1, np.uint64, endpoint=True)[0]
    tree = np.random.default_rng(1).integers(0, 2**64 - 1, 8, np.uint64, endpoint=True) & seen
    union = int(np.bitwise_or.reduce(tree))
    for b, length in enumerate(case.lengths):
        for j in range(drafts):
            if not union >> j & 1:
                at = kvcache_cases.place(case, call.where, b, length - drafts + j)
                call.cache["k_cache"][at], call.cache["v_cache"][at] = np.nan, np.nan
    judge(case, call, tree, drafts, *run(kernel, case, call, tree, drafts))


def small(**options):
    q, cache = np.zeros((2, 4, 4, 64), np.float32), np.zeros((2, 40, 2, 64), np.float32)
    return fa.flash_attn_with_kvcache(q, cache, cache, **{"tree_mask": chain(4), **options})


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"causal": True}, fa.BadArgument, "causal=True with tree_keys=4"),
        ({"window_size": (3, 0)}, fa.BadArgument, r"window_size=\(3, 0\) with tree_keys=4"),
        ({"alibi_slopes": np.zeros(4, np.float32)}, fa.Unsupported, "alibi_slopes is set with tree_keys=4"),
        ({"tree_keys": 65}, fa.BadArgument, "tree_keys=65 is outside 0 .. 64"),
        ({"tree_keys": -1}, fa.BadArgument, "tree_keys=-1 is outside 0 .. 64"),
        ({"tree_keys": True}, fa.BadArgument, "tree_keys"),
        ({"tree_mask": None, "tree_keys": 3}, fa.BadArgument, "tree_keys=3 without a tree_mask"),
        ({"tree_mask": np.zeros(4, np.int32)}, fa.BadArgument, "tree_mask is int32: expected uint64 or int64"),
        (
            {"tree_mask": np.zeros(5, np.int64)},
            fa.BadArgument,
            r"tree_mask has shape \(5,\): expected \(2, 4\) or \(4,\)",
        ),
        ({"tree_mask": np.zeros((1, 4), np.int64)}, fa.BadArgument, r"tree_mask has shape \(1, 4\)"),
    ],
)
def test_refusals(options, error, text):
    with pytest.raises(error, match=text):
        small(**options)


def test_rotary_is_refused():
    new, table = np.zeros((2, 4, 2, 64), np.float32), np.ones((40, 16), np.float32)
    with pytest.raises(fa.Unsupported, match="rotary_cos is set with tree_keys=4"):
        q, k_cache, v_cache = np.zeros((2, 4, 4, 64), np.float32), *np.zeros((2, 2, 40, 2, 64), np.float32)
        turn = {"rotary_cos": table, "rotary_sin": table.copy(), "cache_seqlens": 0}
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, new, new.copy(), **turn, tree_mask=chain(4))


def test_too_many_rows_without_a_number_of_drafts():
    q, cache = np.zeros((1, 65, 1, 8), np.float32), np.zeros((1, 100, 1, 8), np.float32)
    with pytest.raises(fa.BadArgument, match="tree_keys=0 means seqlen_q=65"):
        fa.flash_attn_with_kvcache(q, cache, cache, tree_mask=np.zeros(65, np.int64))


def test_strides_and_both_types():
    """Words of uint64 and int64, with any stride between rows, also 0."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 4, 64), np.float32)
    cache = rng.standard_normal((2, 40, 2, 64), np.float32)
    tree = wide(4, 2)
    want = fa.flash_attn_with_kvcache(q, cache, cache, tree_mask=np.stack([tree, tree]))
    apart = np.repeat(tree, 3)[::3].view(np.int64)
    for same in (apart, np.broadcast_to(apart, (2, 4))):
        np.testing.assert_array_equal(fa.flash_attn_with_kvcache(q, cache, cache, tree_mask=same), want)
