"""The NumPy rungs: the order of v3's work, read from its log, and the error of 8 bits."""

import doctest
import sys

import accuracy
import numpy as np
import pytest
from conftest import ROOT, ml_dtypes

from flash_attn_lab.bench import check
from flash_attn_lab.reference import standard_attention

if not (ROOT / "ladder").is_dir():
    pytest.skip("the ladder is not beside the tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from ladder.numpy_ import block, flash_attention_fp8, flash_attention_v3  # noqa: E402
from ladder.numpy_.flash_attention_fp8 import round_e4m3  # noqa: E402

fp8, v3 = flash_attention_fp8.flash_attention_fp8, flash_attention_v3.flash_attention_v3


def arrays(seqlen_q, seqlen_k, nheads=1, nheads_k=1, headdim=16, seed=0):
    draw = np.random.default_rng(seed)
    sizes = ((1, seqlen_q, nheads, headdim), (1, seqlen_k, nheads_k, headdim), (1, seqlen_k, nheads_k, headdim))
    return [draw.standard_normal(size) for size in sizes]


# ---- v3 ----


@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (50, 77), (64, 16), (33, 130)])
def test_v3_is_exact(sizes, causal, overlap, ping_pong):
    q, k, v = arrays(*sizes, nheads=4, nheads_k=2)
    for stages in (1, 2, 3):
        options = {"rows": 8, "block_k": 16, "stages": stages, "ping_pong": ping_pong, "overlap": overlap}
        found = v3(q, k, v, causal=causal, **options)
        for got, want in zip(found, standard_attention(q, k, v, causal=causal), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def log_of(tiles=8, **options):
    logs = []
    v3(*arrays(32, 16 * tiles), rows=16, block_k=16, logs=logs, **options)
    [log] = logs
    return log


def turns(log, who, what, tile=None):
    return [e.turn for e in log if e.who == who and e.what == what and tile in (None, e.tile)]


GROUPS = "warpgroup 0", "warpgroup 1"
PRODUCTS = ("S", "O")


@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_product_once_and_never_two_at_a_time(overlap, ping_pong):
    log = log_of(ping_pong=ping_pong, overlap=overlap)
    products = [event.turn for event in log if event.what in PRODUCTS]
    assert len(set(products)) == len(products)
    for who in GROUPS:
        for what in PRODUCTS:
            for tile in range(8):
                assert len(turns(log, who, what, tile)) == flash_attention_v3.PRODUCT_TURNS
        for tile in range(8):  # S, then its softmax, then O
            s, softmax, o = (turns(log, who, what, tile) for what in ("S", "softmax", "O"))
            assert max(s) < min(softmax) and max(softmax) < min(o)


def test_ping_pong_gives_the_turn_to_the_other():
    """The tensor cores serve one warpgroup, then the other. While one is served, the other is in its softmax."""
    log = log_of()
    served = [event.who for event in log if event.what in PRODUCTS]
    visits = [who for i, who in enumerate(served) if i == 0 or served[i - 1] != who]
    assert visits == [*GROUPS] * 9  # the first S, 7 times S and O, the last O
    for mine, other in (GROUPS, GROUPS[::-1]):
        softmax = set(turns(log, other, "softmax"))
        steady = [turn for j in range(2, 7) for turn in (*turns(log, mine, "S", j), *turns(log, mine, "O", j - 1))]
        assert set(steady) <= softmax
    without = log_of(ping_pong=False)
    served = [event.who for event in without if event.what in PRODUCTS]
    assert sum(a != b for a, b in zip(served, served[1:], strict=False)) > 2 * len(visits)


@pytest.mark.parametrize("ping_pong", [False, True])
def test_overlap_within_a_warpgroup(ping_pong):
    """S of tile j is multiplied before O of tile j - 1. The product for O runs during the softmax of tile j."""
    for overlap in (False, True):
        log = log_of(ping_pong=ping_pong, overlap=overlap)
        for who in GROUPS:
            for j in range(1, 8):
                output, softmax = turns(log, who, "O", j - 1), turns(log, who, "softmax", j)
                assert max(turns(log, who, "S", j)) < min(output)
                if overlap:
                    assert set(output) & set(softmax)
                else:
                    assert max(output) < min(softmax)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_ring_never_overwrites_an_unread_stage(stages):
    log = log_of(stages=stages)
    for name, product in (("load K", "S"), ("load V", "O")):
        for tile in range(8):
            [load] = turns(log, "producer", name, tile)
            for who in GROUPS:
                assert load < min(turns(log, who, product, tile))
                if tile >= stages:
                    assert load > max(turns(log, who, product, tile - stages))


def test_each_measure_shortens_the_block():
    length = {(a, b): max(e.turn for e in log_of(ping_pong=a, overlap=b)) for a in (0, 1) for b in (0, 1)}
    assert length[1, 1] < length[1, 0] < length[0, 0] and length[1, 1] < length[0, 1] < length[0, 0]
    log = log_of(tiles=40)
    busy = sum(event.what in PRODUCTS for event in log)
    assert busy > 0.95 * max(event.turn for event in log)  # of the peak


def test_a_release_too_early_gives_a_wrong_answer_and_a_missing_one_a_deadlock(monkeypatch):
    """The simulation notices the faults that its barriers prevent."""
    q, k, v = arrays(32, 128)
    exact = standard_attention(q, k, v)[0]
    release = block.Ring.release
    there = block.Ring.there

    def early(ring, tile):  # as soon as the tile is there, before the product has read it
        release(ring, tile)
        return there(ring, tile)

    with monkeypatch.context() as patch:
        patch.setattr(block.Ring, "there", early)
        patch.setattr(block.Ring, "release", lambda ring, tile: None)
        assert np.abs(v3(q, k, v, rows=16, block_k=16, stages=1)[0] - exact).max() > 1e-3
    monkeypatch.setattr(block.Ring, "release", lambda ring, tile: None)
    with pytest.raises(RuntimeError, match="deadlock.*warpgroup 0 for K full.*producer|deadlock.*producer for K empty"):
        v3(q, k, v, rows=16, block_k=16)


def test_timeline(capsys):
    text = block.timeline(log_of(tiles=2))
    lines = dict(line.split("  ", 1) for line in text.splitlines()[:-1])
    assert lines["producer, K"].strip().startswith("0.1")
    assert lines["warpgroup 0, products"].strip(" .").replace(".", "") == "SSSSOOOO"
    assert lines["warpgroup 1, softmax"].strip(" .").replace(".", "") == "000000111111"
    assert text.endswith("the tensor cores worked in 16 of them")
    flash_attention_v3.main()
    assert capsys.readouterr().out.count("turns; the tensor cores") == 4
    assert doctest.testmod(flash_attention_v3) == (0, 4)


# ---- 8 bits ----


def test_round_e4m3():
    if ml_dtypes is None:
        pytest.skip("ml_dtypes is not installed")
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    between = np.concatenate([every, (every[1:] + every[:-1]) / 2, np.linspace(-448, 448, 9999, dtype=np.float32)])
    assert np.array_equal(round_e4m3(between), between.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert list(round_e4m3(np.float32([1000, -1e9]))) == [448, -448]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (77, 203), (130, 35), (300, 300)])
def test_fp8_on_numbers_that_8_bits_have(sizes, causal):
    """The remaining error is the rounding of P (steps of 2^-4 of each, so half of that either way) and the truncation
    of the sums."""
    q, k, v = map(round_e4m3, arrays(*sizes, nheads=2, headdim=64))
    out, lse = fp8(q, k, v, causal=causal)
    exact, exact_lse = standard_attention(q, k, v, causal=causal)
    seen = np.isfinite(exact_lse)
    assert np.array_equal(seen, np.isfinite(lse))
    assert np.abs(np.where(seen, lse, 0) - np.where(seen, exact_lse, 0)).max() < 2e-3
    weight = standard_attention(q, k, np.abs(v), causal=causal)[0]  # sum of P |v|
    assert (np.abs(out - exact) <= (2**-4 + 2**-6) * weight + 1e-6).all()
    same = check.attend(q[0, :, 0], k[0, :, 0], v[0, :, 0], np.arange(sizes[0]), False, "float8_e4m3fn")
    if not causal:  # as good as rounding P alone
        assert np.abs(out - exact).max() <= 2 * np.abs(same - exact[0, :, 0]).max() + 2**-5 * np.abs(v).max()


def test_two_level_sums_keep_the_mean_of_v():
    """Over 4096 keys the short sums lose 5 % of a mean of V; sums of 128 keys, added in float32, lose 0.2 %."""
    q, k, v = arrays(64, 4096, headdim=64)
    v = v + 1
    exact = standard_attention(q, k, v)[0]
    one, two = (fp8(q, k, v, two_levels=levels)[0] - exact for levels in (False, True))
    assert -0.10 < one.mean() < -0.03 and -0.004 < two.mean() < 0
    assert np.abs(two).max() < 0.25 * np.abs(one).max()


def test_a_rotation_helps_against_rare_large_entries():
    """The distribution of the paper's section 4.3: normal, and one entry in a thousand ten times as wide."""
    draw = np.random.default_rng(3)
    q, k, v = (
        x + 10 * draw.standard_normal(x.shape) * (draw.random(x.shape) < 1e-3) for x in arrays(512, 512, headdim=64)
    )
    exact = standard_attention(q, k, v)[0]
    plain, rotated = (np.sqrt(np.mean((fp8(q, k, v, rotate=rotate)[0] - exact) ** 2)) for rotate in (False, True))
    assert rotated < 0.85 * plain
    turn = flash_attention_fp8.rotation(64)
    np.testing.assert_allclose(turn @ turn.T, np.eye(64), atol=1e-6)
    with pytest.raises(ValueError, match="headdim=40 is no power of two"):
        flash_attention_fp8.rotation(40)


def test_scales_for_blocks_keep_small_rows_beside_large_ones():
    q, k, v = arrays(64, 512, headdim=64)
    v[:, :128, :, :32] *= 1e6  # one block has large numbers in half of the head dims
    exact = standard_attention(q, k, v)[0]
    blocks, head = (np.sqrt(np.mean((fp8(q, k, v, one_block=one)[0] - exact)[..., 32:] ** 2)) for one in (False, True))
    assert blocks < 0.5 * head


def test_budgets_of_the_suites_know_the_rounding():
    """bench's check and this rung round to the same values."""
    x = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    assert np.array_equal(check.round_to(x, "float8_e4m3fn"), round_e4m3(x))
    assert "float8_e4m3fn" not in accuracy.EPSILON  # test_rungs leaves these dtypes to this file
