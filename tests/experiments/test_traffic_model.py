"""The formulas of bytes against implementations that count them, and against the papers' orders of growth."""

import numpy as np
import pytest

from flash_attn_lab.bench.check import attend
from flash_attn_lab.experiments import _counted, _traffic
from flash_attn_lab.experiments._traffic import Problem, Tile

SHAPES = [(64, Tile(16, 16)), (100, Tile(32, 16)), (77, Tile(16, 48)), (33, Tile(64, 64)), (1, Tile(16, 16))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen, tile", SHAPES)
@pytest.mark.parametrize("order", ["standard", "v1", "v2"])
def test_formulas_equal_what_is_counted(order, seqlen, tile, causal):
    q, k, v = np.random.default_rng(seqlen).standard_normal((3, seqlen, 24), dtype=np.float32)
    memory, out, lse = _counted.Memory(), np.full_like(q, np.nan), np.full(seqlen, np.nan, np.float32)
    more = () if order == "standard" else (tile,)
    getattr(_counted, order)(memory, q, k, v, out, lse, *more, causal=causal)
    p = Problem(seqlen, 24, causal=causal, itemsize=4)
    assert memory.moved == getattr(_traffic, order)(p, *more)

    rows = np.arange(seqlen)
    np.testing.assert_allclose(out, attend(q, k, v, rows, causal), atol=2e-6)
    s = q.astype(np.float64) @ k.T.astype(np.float64) / 24**0.5
    s[(np.arange(seqlen) > rows[:, None]) & causal] = -np.inf
    np.testing.assert_allclose(lse, np.log(np.exp(s).sum(1)), atol=2e-6)


@pytest.mark.parametrize("tile", [Tile(16, 16), Tile(64, 32), Tile(256, 256)])
def test_the_timed_order_of_v2_is_attention(tile):
    q, k, v = np.random.default_rng(0).standard_normal((3, 130, 32), dtype=np.float32)
    np.testing.assert_allclose(_counted.plain_v2(q, k, v, tile), attend(q, k, v, np.arange(130), False), atol=2e-6)


def test_growth():
    def ratio(bytes_of, **change):
        base = {"seqlen": 1 << 14, "headdim": 64}
        return bytes_of(Problem(**(base | change))) / bytes_of(Problem(**base))

    def v1(p, small=1 << 15):
        return _traffic.v1(p, _traffic.tile_of(small, p.headdim))

    assert ratio(_traffic.standard, seqlen=1 << 15) == pytest.approx(4, rel=0.01)
    assert ratio(v1, seqlen=1 << 15) == pytest.approx(4, rel=0.01)
    assert ratio(v1, headdim=128) == pytest.approx(4, rel=0.05)  # S^2 d^2 / M
    assert v1(Problem(1 << 14, 64)) / v1(Problem(1 << 14, 64), 1 << 16) == pytest.approx(2, rel=0.02)
    assert ratio(_traffic.once, seqlen=1 << 15) == 2
    assert ratio(lambda p: _traffic.v2(p, Tile(128, 128)), headdim=128) == pytest.approx(2, rel=0.01)


def test_limits():
    p, tile = Problem(8192, 128, heads=4), Tile(128, 128)
    assert _traffic.standard(p) / _traffic.v2(p, tile) == pytest.approx(_traffic.ratio_at_length(p, tile), rel=0.02)
    causal = Problem(8192, 128, causal=True, heads=4)
    assert 0.5 < _traffic.v2(causal, tile) / _traffic.v2(p, tile) < 0.53
    assert causal.flops == p.flops / 2


def test_a_cache_between_once_and_v2():
    p, tile = Problem(8192, 128, heads=8), Tile(128, 128)
    whole = 8 * 2 * p.operand
    assert _traffic.v2_cached(p, tile, whole, 132) == _traffic.once(p)
    assert _traffic.v2_cached(p, tile, 1000, 132) == _traffic.v2(p, tile)
    between = [_traffic.v2_cached(p, tile, whole - 1, blocks) for blocks in (1, 16, 64, 512)]
    assert between[0] == _traffic.v2(p, tile) and between[-1] == between[-2] == _traffic.once(p)
    assert between == sorted(between, reverse=True)
    # 64 tiles of rows a head, and 64 blocks at once: every wave is one head.
    assert between[2] - 8 * (2 * p.operand + 4 * p.seqlen) == 8 * 2 * p.operand


def test_the_tile_of_algorithm_1():
    assert _traffic.tile_of(64 * 1024, 64) == Tile(64, 256)
    assert _traffic.tile_of(1, 64) == Tile(1, 1)
