"""The distribution of tokens over ranks: every token is on one rank; arrays are cut and joined; refusals."""

import numpy as np
import pytest
from conftest import jax, torch
from ranks import LAYOUTS

import flash_attn_minimal as fa
from flash_attn_minimal import distributed as fad

LENGTHS = ([0, 41], [0, 8, 12, 12, 13, 57], [0, 0, 1, 3], [0])


def chunk(length: int, i: int, count: int) -> range:
    return range(i * length // count, (i + 1) * length // count)


def expected(layout: str, rank: int, size: int, cu: list[int]) -> list[tuple[int, int]]:
    """(sequence, position) of each row of the rank, from the definition."""
    tokens = [(b, i) for b in range(len(cu) - 1) for i in range(cu[b + 1] - cu[b])]
    if layout == "flat":
        return [tokens[i] for i in chunk(len(tokens), rank, size)]
    chunks = [(rank, size)] if layout == "contiguous" else [(rank, 2 * size), (2 * size - 1 - rank, 2 * size)]
    return [(b, i) for b in range(len(cu) - 1) for c in chunks for i in chunk(cu[b + 1] - cu[b], *c)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("cu", LENGTHS, ids=str)
def test_every_token_has_one_place(cu, size, layout):
    seen = []
    for rank in range(size):
        right = expected(layout, rank, size, cu)
        segments = fad.segments(layout, rank, size, cu)
        assert segments.dtype == np.int32 and (segments[:, 1] < segments[:, 2]).all()
        assert [(b, i) for b, begin, end in segments.tolist() for i in range(begin, end)] == right
        assert fad.indices(layout, rank, size, cu).tolist() == [cu[b] + i for b, i in right]
        assert fad.positions(layout, rank, size, cu).tolist() == [i for _, i in right]
        counts = [sum(b == sequence for b, _ in right) for sequence in range(len(cu) - 1)]
        assert fad.local_cu_seqlens(layout, rank, size, cu).tolist() == np.cumsum([0, *counts]).tolist()
        seen += right
    assert sorted(seen) == expected("contiguous", 0, 1, cu)


def test_zigzag_shares_out_the_work_of_a_causal_mask():
    work = [fad.positions("zigzag", rank, 4, [0, 800]).sum() for rank in range(4)]
    assert len(set(work)) == 1


FRAMEWORKS = ["numpy", *[name for name, module in (("torch", torch), ("jax", jax)) if module]]


def make(framework: str, x: np.ndarray):
    return {"numpy": np.asarray, "torch": lambda x: torch.tensor(x), "jax": lambda x: jax.numpy.asarray(x)}[framework](
        x
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip(layout, framework):
    rng = np.random.default_rng(0)
    cu = [0, 8, 12, 12, 13, 57]
    for x, lengths, axis in (
        (rng.standard_normal((57, 2, 4)), cu, None),
        (rng.standard_normal((2, 57)), cu, 1),
        (rng.standard_normal((1 if layout == "flat" else 3, 41, 2, 4)), None, None),
        (rng.standard_normal((3, 4, 41, 2)) if layout != "flat" else rng.standard_normal((1, 4, 41, 2)), None, 2),
    ):
        array = make(framework, x.astype(np.float32))
        parts = [fad.shard(array, layout, rank, 3, lengths, axis) for rank in range(3)]
        assert all(type(part) is type(array) for part in parts)
        where = (1 if lengths is None else 0) if axis is None else axis
        whole = [0, x.shape[where]] if lengths is None else lengths
        for rank, part in enumerate(parts):
            rows = fad.indices(layout, rank, 3, whole)
            np.testing.assert_array_equal(np.asarray(part), np.take(np.asarray(array), rows, where))
        joined = fad.unshard(parts, layout, lengths, axis)
        assert type(joined) is type(array)
        np.testing.assert_array_equal(np.asarray(joined), np.asarray(array))


def test_shards_of_numpy_are_contiguous():
    x = np.zeros((2, 40, 3, 8), np.float32)
    assert fad.shard(x, "zigzag", 0, 2).flags.c_contiguous and not np.shares_memory(fad.shard(x, "zigzag", 0, 1), x)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("zig", 0, 2, [0, 4]), "layout='zig' is not one of 'contiguous', 'zigzag', 'flat'"),
        (("zigzag", 2, 2, [0, 4]), "rank=2 is outside 0 .. 1"),
        (("zigzag", 0, 0, [0, 4]), "size=0 is outside 1 .. 1024"),
        (("zigzag", 0, 2, [1, 4]), r"cu_seqlens\[0\]=1 is not 0"),
        (("zigzag", 0, 2, [0, 4, 3]), r"cu_seqlens\[2\]=3 is below cu_seqlens\[1\]=4"),
        (("zigzag", 0, 2, [0.0, 4.0]), r"cu_seqlens=\[0.0, 4.0\] is no sequence of integers in host memory"),
        (("zigzag", 0, 2, []), r"cu_seqlens=\[\] is no sequence"),
        (("zigzag", 0, 2, [[0, 4]]), r"cu_seqlens=\[\[0, 4\]\] is no sequence"),
        (("zigzag", 0, 2, [0, 2**31]), "has numbers beyond an int32"),
        (("zigzag", True, 2, [0, 4]), "rank=True is not an integer"),
    ],
)
def test_refusals(arguments, text):
    for function in (fad.segments, fad.indices, fad.positions, fad.local_cu_seqlens):
        with pytest.raises(fa.BadArgument, match=text):
            function(*arguments)


def test_refusals_of_shard_and_unshard():
    x = np.zeros((2, 9, 1, 4), np.float32)
    with pytest.raises(fa.BadArgument, match="layout='flat' with a dense batch of 2"):
        fad.shard(x, "flat", 0, 2)
    with pytest.raises(fa.BadArgument, match="x has 9 tokens, but cu_seqlens ends at 8"):
        fad.shard(x[0], "flat", 0, 2, [0, 8])
    with pytest.raises(fa.BadArgument, match="axis=4 is outside -4 .. 3"):
        fad.shard(x, "zigzag", 0, 2, axis=4)
    with pytest.raises(fa.BadArgument, match="has no axis 1 of tokens"):
        fad.shard(np.zeros(3), "zigzag", 0, 2)
    with pytest.raises(fa.BadArgument, match=r"parts\[0\] has shape \(2, 8, 1, 4\): rank 0 of 2 holds 9 of the 17"):
        fad.unshard([x[:, 1:], x], "zigzag")
    with pytest.raises(fa.BadArgument, match=r"parts=\[\]"):
        fad.unshard([], "zigzag")
