"""Same bits on the CPU: which calls give the same bits as a training step's forward pass. The table in docs/contract.md
lists the ways; every way is tried with random shapes and options."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
from conftest import CPU, ROOT, SEED, Device, cpu_kernels, ml_dtypes, torch

import flash_attn_minimal as fa
from flash_attn_minimal import distributed as fad

PAGE = ROOT / "docs/contract.md"
LAST = 8  # the most rows at the end that a call may compute in another order
CASES = 12  # the sixth and the twelfth are long
STEP = 64  # rows of the widest group of the CPU's tiles


@dataclass
class Case:
    """Sequences that one model call holds. The first one is looked at."""

    q: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]
    options: dict
    rng: np.random.Generator
    exact: np.ndarray = field(init=False)  # the first sequence, alone and padded

    def __post_init__(self):
        self.exact = self.alone(padded=True)

    @property
    def rows(self) -> int:
        return len(self.q[0])

    @property
    def group(self) -> int:
        return self.q[0].shape[1] // self.k[0].shape[1]

    def alone(self, padded: bool, **more) -> np.ndarray:
        """The first sequence by itself. Padding comes after its rows, so no row of it sees any."""
        arrays = self.q[0], self.k[0], self.v[0]
        more = self.options | more
        if padded:
            arrays = [np.concatenate([x, np.ones((-len(x) % STEP, *x.shape[1:]), x.dtype)]) for x in arrays]
        return fa.flash_attn_func(*(x[None] for x in arrays), causal=True, **more)[0][: self.rows]


def draw(seed: int, kernel: str | None = None) -> Case:
    rng = np.random.default_rng([SEED, seed])
    every_way = seed % 6 == 0  # two key heads and no options: all ways apply
    heads_k, group = 2 if every_way else int(rng.integers(1, 3)), int(rng.choice([1, 2, 3, 4, 8]))
    dim = int(rng.choice([16, 32, 64, 80]))
    dim_v = int(rng.choice([dim, 48]))
    lengths = rng.integers(3300, 3700, 2) if seed % 6 == 5 else rng.integers(9, 500, 3)  # above 3072: pieces
    halves = [dtype for dtype in ("float16", "bfloat16") if dtype == "float16" or ml_dtypes]
    dtype = "bfloat16" if kernel == "cpu_amx" else str(rng.choice(["float32", *halves]))

    def arrays(heads, dim):
        return [CPU.array(rng.standard_normal((int(n), heads, dim), dtype=np.float32), dtype) for n in lengths]

    options: dict = {} if kernel is None else {"kernel": kernel}
    if every_way:
        return Case(arrays(heads_k * group, dim), arrays(heads_k, dim), arrays(heads_k, dim_v), options, rng)
    if rng.random() < 0.3:
        options["window_size"] = (int(rng.integers(1, 300)), 0)
    elif rng.random() < 0.3:
        options["attention_chunk"] = int(rng.integers(5, 200))
    if rng.random() < 0.3:
        options["softcap"] = 5.0
    if rng.random() < 0.3:
        options["sinks"] = rng.standard_normal(heads_k * group, dtype=np.float32)
    if rng.random() < 0.3:
        options["alibi_slopes"] = rng.random(heads_k * group, dtype=np.float32)
    return Case(arrays(heads_k * group, dim), arrays(heads_k, dim), arrays(heads_k, dim_v), options, rng)


def cached(case: Case, cuts: list[int], kind: str = "", pages: bool = False, leftpad: int = 0, **more) -> np.ndarray:
    """The first sequence over a cache, rows cuts[i] .. cuts[i + 1] - 1 in call i."""
    q, k, v = case.q[0], case.k[0], case.v[0]
    capacity = leftpad + len(k) + int(case.rng.integers(0, 80))
    entries, rows = 1, capacity
    if pages:
        rows = int(case.rng.integers(1, 70))
        used = -(-capacity // rows)
        entries = used + 3
        more["block_table"] = case.rng.permutation(entries)[None, :used].astype(np.int32)
    k_cache, v_cache = (np.zeros((entries, rows, *x.shape[1:]), kind or x.dtype) for x in (k, v))
    if kind:
        more |= {name: np.ones((entries, rows, k.shape[1]), np.float32) for name in ("k_scale", "v_scale")}
    if leftpad:
        more["cache_leftpad"] = np.array([leftpad], np.int32)
    more = case.options | more
    outs = []
    for a, b in zip(cuts, cuts[1:], strict=False):
        arrays = q[None, a:b], k_cache, v_cache, k[None, a:b], v[None, a:b]
        lengths = np.array([leftpad + a], np.int32)
        outs.append(fa.flash_attn_with_kvcache(*arrays, cache_seqlens=lengths, causal=True, **more)[0])
    return np.concatenate(outs)


def chunks(case: Case, step: int = 1) -> list[int]:
    inner = step * case.rng.integers(1, max(2, case.rows // step), 4)
    return [0, *sorted({int(x) for x in inner if x < case.rows}), case.rows]


def tokens(case: Case) -> list[int]:
    """A prompt, then its last tokens one by one."""
    return [0, *range(max(case.rows - 4, 1), case.rows + 1)]


def steps_of_all(case: Case, **more) -> np.ndarray:
    """The last token of every sequence in one call, for the first sequence: (1, heads, dim)."""
    most = max(map(len, case.k))
    caches = [np.zeros((len(x), most, *x[0].shape[1:]), x[0].dtype) for x in (case.k, case.v)]
    for cache, arrays in zip(caches, (case.k, case.v), strict=True):
        for b, x in enumerate(arrays):
            cache[b, : len(x) - 1] = x[:-1]
    last = [np.stack([x[-1:] for x in arrays]) for arrays in (case.q, case.k, case.v)]
    lengths = np.array([len(x) - 1 for x in case.k], np.int32)
    more = case.options | more
    return fa.flash_attn_with_kvcache(
        last[0], *caches, *last[1:], cache_seqlens=lengths, causal=True, **more
    )[0]  # fmt: skip


def batch(case: Case) -> np.ndarray:
    arrays = [x[0] for x in (case.q, case.k, case.v)]
    others = [np.stack([x, x[::-1]]) for x in arrays]
    return fa.flash_attn_func(*others, causal=True, **case.options)[0]


def packed(case: Case) -> np.ndarray:
    starts = np.cumsum([0, *map(len, case.q)]).astype(np.int32)
    longest = max(map(len, case.q))
    arrays = (np.concatenate(x) for x in (case.q, case.k, case.v))
    out = fa.flash_attn_varlen_func(*arrays, starts, starts, longest, longest, causal=True, **case.options)
    return out[: case.rows]


def one_head(case: Case) -> np.ndarray:
    """Each key head with its query heads in a call of its own."""
    outs = []
    for head in range(case.k[0].shape[1]):
        mine = slice(head * case.group, (head + 1) * case.group)
        options = {name: x[mine] if isinstance(x, np.ndarray) else x for name, x in case.options.items()}
        arrays = case.q[0][None, :, mine], case.k[0][None, :, head : head + 1], case.v[0][None, :, head : head + 1]
        outs.append(fa.flash_attn_func(*arrays, causal=True, **options)[0])
    return np.concatenate(outs, 1)


def recorded(case: Case) -> np.ndarray:
    if torch is None:
        pytest.skip("PyTorch is not installed")
    dtype = str(case.q[0].dtype)
    arrays = [Device("cpu", "torch").array(CPU.numpy(x[0][None]), dtype) for x in (case.q, case.k, case.v)]
    arrays = [x.requires_grad_() for x in arrays]
    options = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in case.options.items()}
    out = fa.flash_attn_func(*arrays, causal=True, **options)[0].detach()
    return CPU.array(Device("cpu", "torch").numpy(out), dtype)


def across(case: Case, mode: str) -> np.ndarray:
    """Two ranks that share the first sequence."""
    if "attention_chunk" in case.options or case.q[0].shape[1] < 2:
        pytest.skip("ranks take no chunks, and ulysses a head for each rank")
    groups, starts = fad.thread_groups(2), np.array([0, case.rows], np.int32)
    out, errors = np.empty((*case.q[0].shape[:2], case.v[0].shape[2]), case.q[0].dtype), []

    def rank(group, number):
        try:
            mine = fad.indices("zigzag", number, 2, starts)
            arrays = (x[0][mine] for x in (case.q, case.k, case.v))
            where = {"cu_seqlens_q": starts, "layout": "zigzag", "mode": mode}
            out[mine] = fad.forward(group, *arrays, **where, causal=True, **case.options)
        except Exception as error:
            errors.append(error)
            group.abort("a rank has failed")

    threads = [threading.Thread(target=rank, args=(group, number)) for number, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return out


def halves(case: Case) -> np.ndarray:
    """The last row over two halves of its keys, merged."""
    if {"window_size", "attention_chunk", "alibi_slopes", "sinks"} & set(case.options):
        pytest.skip("the halves would need other positions")
    half, last = case.rows // 2, case.q[0][None, -1:]
    parts = [
        fa.flash_attn_func(last, case.k[0][None, keys], case.v[0][None, keys], return_lse=True, **case.options)
        for keys in (slice(half), slice(half, None))
    ]
    return fa.merge(*parts[0], *parts[1])[0][0]


INVARIANT = {"batch_invariant": True}
# Way -> the rows of the sequence that it computes: all, or the last ones. The names are those of the table.
PLAIN = {
    "alone, not padded": lambda case: case.alone(padded=False),
    "in a batch": batch,
    "packed with others": packed,
    "recorded for gradients": recorded,
    "with lse": lambda case: fa.flash_attn_func(
        *(x[0][None] for x in (case.q, case.k, case.v)), causal=True, return_lse=True, **case.options
    )[0][0],
    "any number of threads": lambda case: case.alone(padded=False, num_threads=3),
    "some of the heads, in whole groups": one_head,
    "ranks with ulysses": lambda case: across(case, "ulysses"),
    "over a cache or pages, in one piece": lambda case: cached(case, [0, case.rows], pages=bool(case.rows % 2)),
    "over a cache, in chunks of a multiple of 64 rows, num_splits=1": lambda case: cached(
        case, chunks(case, STEP), num_splits=1
    ),
}
SAME = {
    "batch_invariant: in one piece": lambda case: cached(case, [0, case.rows], **INVARIANT),
    "batch_invariant: in chunks": lambda case: cached(case, chunks(case), **INVARIANT),
    "batch_invariant: token by token": lambda case: cached(case, tokens(case), **INVARIANT),
    "batch_invariant: several sequences in a step": lambda case: steps_of_all(case, **INVARIANT),
    "batch_invariant: over pages": lambda case: cached(case, chunks(case), pages=True, **INVARIANT),
    "batch_invariant: after padding": lambda case: cached(
        case, chunks(case), leftpad=int(case.rng.integers(1, 40)), **INVARIANT
    ),
}
OTHER = {
    "token by token": lambda case: cached(case, tokens(case)),
    "in chunks of other lengths": lambda case: cached(case, chunks(case)),
    "num_splits above 1": lambda case: cached(case, tokens(case), num_splits=3),
    "two halves of the keys, merged": halves,
    "ranks with gather": lambda case: across(case, "gather"),
    "another kernel": lambda case: case.alone(padded=True, kernel="cpu_portable"),
}


def same(one: np.ndarray, two: np.ndarray) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


TILED = [name for name in cpu_kernels() if name != "cpu_naive"]
USUAL = [name for name in TILED if name != "cpu_amx"][:1] + ["cpu_amx"]  # of float32 and float16, and of bfloat16


@pytest.fixture(scope="module", params=TILED)
def cases(request):
    return [draw(seed, request.param) for seed in range(CASES if request.param in USUAL else CASES // 2)]


@pytest.fixture(scope="module")
def usual():
    """The cases for the kernel that calls get by default."""
    return [draw(seed) for seed in range(CASES)]


def tried(cases, way) -> list:
    """(case, result) of a way; cases to which it does not apply are left out."""
    results = []
    for case in cases:
        try:
            results.append((case, way(case)))
        except pytest.skip.Exception:
            pass
    if not results:
        pytest.skip("no case to which this way applies")
    return results


@pytest.mark.parametrize("name", PLAIN)
def test_all_but_the_last_rows_have_the_same_bits(cases, name):
    for case, got in tried(cases, PLAIN[name]):
        rows = max(case.rows - LAST, 0)
        assert same(got[:rows], case.exact[:rows])
        assert same(got, case.alone(padded=False)) or "ulysses" in name  # which may cut a group of heads


@pytest.mark.parametrize("name", SAME)
def test_every_row_has_the_same_bits(cases, name):
    for case, got in tried(cases, SAME[name]):
        assert same(got, case.exact[case.rows - len(got) :])


@pytest.mark.parametrize("name", TILED)
def test_where_the_first_key_of_a_window_lies(name):
    """A row's sums do not depend on where the windows of the other rows of its tile begin."""
    rng = np.random.default_rng([SEED, 2])
    dtype = "bfloat16" if name == "cpu_amx" else "float32"
    q, k, v = ([CPU.array(rng.standard_normal((1024, heads, 32), dtype=np.float32), dtype)] for heads in (8, 1, 1))
    for left in (95, 300):
        case = Case(q, k, v, {"kernel": name, "window_size": (left, 0)}, rng)
        for step in (1, STEP):
            assert same(cached(case, chunks(case, step), **INVARIANT), case.exact)


@pytest.mark.parametrize("name", OTHER)
def test_other_bits_within_rounding(usual, name):
    """Right, but some case of many differs: otherwise the table would be too modest."""
    differs = False
    for case, got in tried([*usual, *(draw(CASES + seed) for seed in range(12))], OTHER[name]):
        want = case.exact[case.rows - len(got) :]
        differs |= not same(got, want)
        tolerance = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[str(got.dtype)]
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=tolerance, rtol=tolerance)
    assert differs or name == "another kernel"  # which may be the only one of this machine


def test_a_step_without_batch_invariant_has_bits_of_its_own(cases):
    """A token's bits depend neither on the other sequences, nor on the capacity, pages and padding of the cache."""
    for case in cases:
        want = cached(case, tokens(case))[-1:]
        assert same(steps_of_all(case), want)
        assert same(cached(case, tokens(case), pages=True)[-1:], want)
        assert same(cached(case, tokens(case), leftpad=7)[-1:], want)


def test_an_8_bit_cache_in_pieces(usual):
    """An 8-bit cache has other values, but with batch_invariant the same for every way to fill it."""
    for case in usual:
        want = cached(case, [0, case.rows], kind="int8", **INVARIANT)
        assert same(cached(case, chunks(case), kind="int8", **INVARIANT), want)
        assert same(cached(case, tokens(case), kind="int8", pages=True, **INVARIANT), want)


def test_gradients_of_a_sequence(usual):
    """dq, dk and dv alone, in a batch and packed."""
    for case in usual:
        if case.rows > 1000:
            continue

        def gradients(q, k, v, case=case, **lengths):
            attend = fa.flash_attn_varlen_func if lengths else fa.flash_attn_func
            out, lse = attend(q, k, v, *lengths.values(), causal=True, return_lse=True, **case.options)
            dout = np.ones_like(out)
            return fa.backward(dout, q, k, v, out, lse, causal=True, **lengths, **case.options)

        arrays = case.q, case.k, case.v
        alone = gradients(*(x[0][None] for x in arrays))
        in_batch = gradients(*(np.stack([x[0], x[0][::-1]]) for x in arrays))
        starts, longest = np.cumsum([0, *map(len, case.q)]).astype(np.int32), max(map(len, case.q))
        lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        joined = gradients(*map(np.concatenate, arrays), **lengths)
        for x, y, z in zip(alone, in_batch, joined, strict=True):
            assert same(y[0], x[0]) and same(z[: case.rows], x[0])


@pytest.mark.parametrize(
    "rows,keys,heads,batch", [(5, 600, 8, 8), (40, 600, 8, 8), (130, 300, 2, 20), (1, 1000, 4, 40)]
)
def test_gradients_in_a_large_batch(rows, keys, heads, batch):
    """dq is summed tile by tile, so tiles may follow neither the batch nor the longest sequence."""
    rng = np.random.default_rng(0)
    q, dout = (rng.standard_normal((batch, rows, heads, 32), dtype=np.float32) for _ in range(2))
    k, v = (rng.standard_normal((batch, keys, heads, 32), dtype=np.float32) for _ in range(2))
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True)
    together = fa.backward(dout, q, k, v, out, lse)
    alone = fa.backward(*(x[:1] for x in (dout, q, k, v, out)), lse[:1])
    beside = [np.concatenate([x[0], *x[1:], x[1]]) for x in (dout, q, k, v, out)]
    starts = [np.r_[np.arange(batch) * n, (batch + 1) * n].astype(np.int32) for n in (rows, keys)]  # the last is longer
    packed_lse = np.concatenate([lse[0], *lse[1:], lse[1]], axis=1)
    packed = fa.backward(
        *beside,
        packed_lse,
        cu_seqlens_q=starts[0],
        cu_seqlens_k=starts[1],
        max_seqlen_q=2 * rows,
        max_seqlen_k=2 * keys,
    )
    for x, y, z in zip(alone, together, packed, strict=True):
        assert same(y[0], x[0]) and same(z[: x.shape[1]], x[0])


def test_the_table_lists_the_ways():
    table = re.search(r"^### Same bits on the CPU\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    found: dict[str, list[str]] = {}
    for way, bits in rows:
        found.setdefault(bits, []).append(way.replace("`", ""))
    assert found["same, except the last rows"] == list(PLAIN)
    assert found["same"] == list(SAME)
    assert found["other"] == list(OTHER)
