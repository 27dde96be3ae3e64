"""Decode over a cache in shards, and merging, against float64."""

from dataclasses import dataclass

import accuracy
import kvcache_cases
import numpy as np
import pytest
from conftest import CPU, Device, torch
from ranks import LEAST, devices, on, shared_groups, watchdog

import flash_attn_minimal as fa
from flash_attn_lab import reference
from flash_attn_minimal import distributed as fad


@dataclass(frozen=True)
class Step:
    """One step over a whole cache. Token t is on rank t // page % size."""

    size: int = 3
    lengths: tuple[int, ...] = (37, 0, 65)
    page: int = 4
    form: str = "contiguous"  # or "paged", "integer" (one length for all), "full" (no lengths at all), "zero_rows"
    seqlen_q: int = 1
    seqlen_new: int = 0
    owner: int = 1  # the rank that appends
    nheads: int = 4
    nheads_k: int = 2
    headdim: int = 32
    headdim_v: int = 32
    dtype: str = "float32"
    cache_dtype: str | None = None
    causal: bool = False
    sinks: bool = False
    softcap: float = 0.0
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "size", max(self.size, LEAST))


class Whole:
    """q, the keys and values of all ranks, and the new tokens; result() is the right answer."""

    def __init__(self, step: Step):
        rng = np.random.default_rng(step.seed)

        def normal(*shape):
            return accuracy.round_to(rng.standard_normal(shape, dtype=np.float32), step.dtype)

        self.step, batch = step, len(step.lengths)
        dims = (step.headdim, step.headdim_v)
        self.q = normal(batch, step.seqlen_q, step.nheads, step.headdim)
        self.new = [normal(batch, step.seqlen_new, step.nheads_k, dim) for dim in dims]
        self.keys, self.values = ([normal(length, step.nheads_k, dim) for length in step.lengths] for dim in dims)
        self.scales: list[np.ndarray] = []
        if step.cache_dtype:
            most = 127 if step.cache_dtype == "int8" else 448
            self.scales = [rng.uniform(2, 4, step.nheads_k).astype(np.float32) / most for _ in dims]
            self.keys, self.values = (
                [self.stored(x, scale).astype(np.float32) * scale[:, None] for x in every]
                for every, scale in zip((self.keys, self.values), self.scales, strict=True)
            )
        self.sinks = rng.standard_normal(step.nheads, dtype=np.float32)

    def stored(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return kvcache_cases.quantised(x, scale[:, None], self.step.cache_dtype)

    def result(self) -> list[tuple]:
        """(exact, plain), each (out, lse)."""
        step, parts = self.step, []
        options = {"softcap": step.softcap} if step.softcap else {}
        if step.sinks:
            options["sinks"] = self.sinks
        for b, length in enumerate(step.lengths):
            new = [x[b] for x in self.new]
            if step.cache_dtype:
                new = [self.stored(x, s).astype(np.float32) * s[:, None] for x, s in zip(new, self.scales, strict=True)]
            k, v = (np.concatenate([old[b], x])[None] for old, x in zip((self.keys, self.values), new, strict=True))
            mask = np.ones((step.seqlen_q, k.shape[1]), bool)
            if step.causal and step.seqlen_new:
                i, j = np.indices((step.seqlen_q, step.seqlen_new))
                mask[:, length:] = j <= i + step.seqlen_new - step.seqlen_q
            arrays = self.q[b : b + 1], k, v
            parts.append(
                [
                    reference.standard_attention(*arrays, mask=mask, **options),
                    accuracy.plain_attention(*arrays, dtype=step.dtype, mask=mask, **options),
                ]
            )
        return [tuple(np.concatenate(x) for x in zip(*(part[i] for part in parts), strict=True)) for i in (0, 1)]

    def shard(self, rank: int, device: Device) -> dict:
        """The arguments of one rank. Values that must not be read are NaN."""
        step, batch = self.step, len(self.step.lengths)
        mine = [[t for t in range(n) if t // step.page % step.size == rank] for n in step.lengths]
        room = max(map(len, mine)) + step.seqlen_new + (0 if step.form in ("full", "zero_rows") else 2)
        given = {"q": device.array(self.q, step.dtype)}
        lengths = np.array([len(tokens) for tokens in mine], np.int32)
        rows = 4 if step.form == "paged" else room
        table = np.random.default_rng(rank).permutation(batch * -(-room // rows) if rows else batch).reshape(batch, -1)
        for name, every, scale in zip(("k", "v"), (self.keys, self.values), self.scales or (None, None), strict=True):
            cache = np.full((table.size, rows, *every[0].shape[1:]), np.nan, np.float32)
            for b, tokens in enumerate(mine):
                for j, t in enumerate(tokens):
                    entry, row = (table[b, j // rows], j % rows) if step.form == "paged" else (b, j)
                    cache[entry, row] = every[b][t]
            if scale is None:
                given[f"{name}_cache"] = device.array(cache, step.dtype)
            else:
                given[f"{name}_cache"] = eight_bits(device, self.stored(np.nan_to_num(cache), scale))
                given[f"{name}_scale"] = device.array(scale)
        if step.form == "paged":
            given["block_table"] = device.array(table.astype(np.int32))
        if step.form == "integer":
            given["cache_seqlens"] = int(lengths[0])
        elif step.form != "full":
            given["cache_seqlens"] = device.array(lengths)
        if step.seqlen_new and rank == step.owner:
            given |= {name: device.array(x, step.dtype) for name, x in zip(("k", "v"), self.new, strict=True)}
        if step.sinks:
            given["sinks"] = device.array(self.sinks)
        return given | {"causal": step.causal, "softcap": step.softcap}


def eight_bits(device: Device, x: np.ndarray):
    if device is CPU:
        return x
    raw = torch.tensor(x.view(np.uint8), device=device.name)
    return raw.view(torch.int8 if x.dtype == np.int8 else torch.float8_e4m3fn)


def check(step: Step, device: Device = CPU, times: int = 1) -> None:
    whole = Whole(step)
    headdim_v = step.headdim_v
    groups = shared_groups(step.size, device)

    def rank(group: fad.Group):
        here = on(device, group.rank)
        given = whole.shard(group.rank, here)
        out = here.nans((*whole.q.shape[:3], headdim_v), step.dtype)
        if here is CPU:
            given["num_threads"] = 1
        for _ in range(times):
            got, lse = fad.decode(group, **given, out=out, return_softmax_lse=True)
            assert got is out
        return here.numpy(out), here.numpy(lse)

    with watchdog(60, groups):
        results = fad.run(groups, rank)
    for out, lse in results[1:]:
        assert np.array_equal(out, results[0][0]) and np.array_equal(lse, results[0][1])
    exact, plain = whole.result()
    accuracy.check("lse", results[0][1], exact[1], plain[1], "float32", floor=4e-5)
    accuracy.check("out", results[0][0], exact[0], plain[0], step.dtype, floor=4e-5)


STEPS = {
    "contiguous": Step(),
    "paged": Step(form="paged"),
    "one_length": Step(form="integer", lengths=(48, 48)),
    "full": Step(form="full", lengths=(48, 48)),
    "rows": Step(seqlen_q=3, nheads=6, softcap=2.0),
    "half": Step(dtype="float16", sinks=True),
    "bfloat16": Step(dtype="bfloat16", form="paged", headdim_v=16, nheads_k=1),
    "int8": Step(cache_dtype="int8", form="paged"),
    "float8": Step(cache_dtype="float8_e4m3fn", sinks=True),
    "append": Step(seqlen_new=1),
    "append_on_rank_0": Step(seqlen_new=1, owner=0, sinks=True, form="paged", dtype="float16"),
    "append_causal": Step(seqlen_new=3, seqlen_q=3, causal=True),
    "append_more_than_rows": Step(seqlen_new=5, seqlen_q=2, causal=True, form="paged"),
    "append_int8": Step(seqlen_new=2, seqlen_q=2, causal=True, cache_dtype="int8", form="paged", owner=2),
    "empty_shards": Step(size=4, lengths=(3, 2)),
    "no_rows": Step(size=4, lengths=(3, 2), form="zero_rows"),
    "no_keys": Step(lengths=(0, 0), sinks=True),
    "one_rank": Step(size=1),
    "two_ranks": Step(size=2, lengths=(100,), page=16),
}


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("step", STEPS)
def test_decode(step, device):
    step = STEPS[step]
    if step.cache_dtype == "float8_e4m3fn" or (step.dtype == "bfloat16" and device is CPU):
        pytest.importorskip("ml_dtypes")
    check(step, device, times=1 if step.seqlen_new else 3)


@pytest.mark.parametrize("device", devices)
def test_a_growing_cache(device):
    """One token a step, appended on the ranks in turn: repeated calls with one signature and growing lengths."""
    rng = np.random.default_rng(0)
    groups, steps, heads, dim = shared_groups(3, device), 20, 2, 16
    q, k, v = rng.standard_normal((3, steps, heads, dim), dtype=np.float32)
    exact, _ = reference.standard_attention(q[None], k[None], v[None], causal=True)

    def rank(group: fad.Group):
        here = on(device, group.rank)
        caches = [here.array(np.full((1, steps, heads, dim), np.nan, np.float32)) for _ in "kv"]
        length, outs = 0, []
        for t in range(steps):
            new = {}
            if t // 2 % 3 == group.rank:
                new = {name: here.array(x[None, t : t + 1]) for name, x in (("k", k), ("v", v))}
            outs.append(fad.decode(group, here.array(q[None, t : t + 1]), *caches, cache_seqlens=length, **new))
            length += len(new) // 2
        return np.concatenate([here.numpy(out) for out in outs], axis=1)

    with watchdog(60, groups):
        for out in fad.run(groups, rank):
            np.testing.assert_allclose(out, exact, atol=1e-5)


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dense", [False, True])
def test_merge(dense, dtype, device):
    """Each rank has attention over a third of the keys. One rank has no keys, and nonsense in its out."""
    rng = np.random.default_rng(0)
    rows, heads, dim, size = 24, 3, 16, max(4, LEAST)
    q = accuracy.round_to(rng.standard_normal((1, rows, heads, dim), dtype=np.float32), dtype)
    k, v = (accuracy.round_to(rng.standard_normal((1, 60, heads, dim), dtype=np.float32), dtype) for _ in "kv")
    exact = reference.standard_attention(q, k, v)

    def rank(group: fad.Group):
        here = on(device, group.rank)
        out, lse = here.nans((rows, heads, dim), dtype), here.array(np.full((heads, rows), -np.inf, np.float32))
        if group.rank != 2:
            third = slice(20 * (group.rank - (group.rank > 2)), 20 * (group.rank + (group.rank < 2)))
            arrays = (here.array(x, dtype) for x in (q, k[:, third], v[:, third]))
            out, lse = (x[0] for x in fa.flash_attn_func(*arrays, return_lse=True))
        given = out.reshape(2, rows // 2, heads, dim) if dense else out
        results = fad.merge(group, given, lse)
        assert results[0] is given and results[1] is lse
        return here.numpy(given).reshape(1, rows, heads, dim), here.numpy(lse)[None]

    groups = shared_groups(size, device)
    with watchdog(60, groups):
        results = fad.run(groups, rank)
    for out, lse in results:
        assert np.array_equal(out, results[0][0]) and np.array_equal(lse, results[0][1])
        np.testing.assert_allclose(out, exact[0], atol=2e-6 if dtype == "float32" else 2e-3)
        np.testing.assert_allclose(lse, exact[1], atol=1e-5)


def refused(error, text, call, size=2):
    """The call raises the same kind of error on all ranks, and the group stays usable."""
    groups = shared_groups(size, CPU)

    def rank(group: fad.Group):
        with pytest.raises(error, match=text):
            call(group)
        out, lse = np.ones((1, 1, 4), np.float32), np.zeros((1, 1), np.float32)
        fad.merge(group, out, lse)
        return float(lse[0, 0])

    with watchdog(60, groups):
        assert fad.run(groups, rank) == [pytest.approx(np.log(size))] * size


Q, CACHE = np.zeros((2, 1, 4, 16), np.float32), np.zeros((2, 8, 2, 16), np.float32)
SLOPES, TABLE = np.ones(4, np.float32), np.ones((8, 8), np.float32)


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"window_size": (3, 0)}, fa.Unsupported, "window_size is set: it needs positions in the whole sequence"),
        ({"alibi_slopes": SLOPES}, fa.Unsupported, "alibi_slopes is set: it needs positions"),
        (
            {"rotary_cos": TABLE, "rotary_sin": TABLE, "k": CACHE[:, :1], "v": CACHE[:, :1], "cache_seqlens": 3},
            fa.Unsupported,
            "rotary_cos is set: it needs positions",
        ),
        ({"cache_leftpad": np.zeros(2, np.int32)}, fa.Unsupported, "cache_leftpad is set: it needs positions"),
        ({"cache_seqlens": 9}, fa.BadArgument, "cache_seqlens=9 and 0 new keys are more than the 8"),
        ({"cache_seqlens": np.array([3, 9], np.int32)}, fa.BadArgument, r"cache_seqlens\[1\]=9"),
        ({"k": CACHE[:, :1]}, fa.BadArgument, "v is None and k is not"),
        ({"softmax_scale": "x"}, fa.BadArgument, "softmax_scale='x' is not a number"),
        ({"num_splits": 1000}, fa.BadArgument, "num_splits=1000"),
    ],
)
def test_refusals_of_decode(options, error, text):
    refused(error, text, lambda group: fad.decode(group, Q, CACHE, CACHE, **options))


def test_ranks_that_decode_different_things():
    refused(
        fa.BadArgument,
        "nheads=2 on rank 1, but 4 on rank 0",
        lambda g: fad.decode(g, Q[:, :, : 4 - 2 * g.rank], CACHE, CACHE),
    )
    refused(
        fa.BadArgument,
        "softmax_scale=1 on rank 1, but 0.5",
        lambda g: fad.decode(g, Q, CACHE, CACHE, softmax_scale=(1 + g.rank) / 2),
    )


def test_several_causal_queries_need_one_rank_that_appends_them():
    q, text = np.repeat(Q, 2, axis=1), "causal=True with seqlen_q=2: one rank appends at least that many tokens"
    room = CACHE[:, :-1]

    def step(group, new):
        given = {"k": CACHE[:, :new].copy(), "v": CACHE[:, :new].copy()} if new else {}
        return fad.decode(group, q, room.copy(), room.copy(), cache_seqlens=1, causal=True, **given)

    refused(fa.BadArgument, text, lambda group: step(group, 0))
    refused(fa.BadArgument, text, lambda group: step(group, 1 if group.rank == 1 else 0))
    refused(fa.BadArgument, text, lambda group: step(group, 2))


@pytest.mark.parametrize(
    "out, lse, text",
    [
        (np.zeros((4, 2, 8)), np.zeros((2, 4), np.float32), "out is float64: expected float32"),
        (np.zeros((4, 2, 8), np.float32), np.zeros((4, 2), np.float32), r"lse is float32 \(4, 2\): .* \(2, 4\)"),
        (np.zeros((8, 2, 8), np.float32)[::2], np.zeros((2, 4), np.float32), "out has strides .* must be contiguous"),
        (np.zeros((0, 2, 8), np.float32), np.zeros((2, 0), np.float32), "rows=0"),
    ],
)  # fmt: skip
def test_refusals_of_merge(out, lse, text):
    refused(fa.BadArgument, text, lambda group: fad.merge(group, out, lse))
