"""The float64 reference itself: three loop orders agree with each other on every option, and with answers known by
hand."""

import numpy as np
import pytest
from accuracy import Case, inputs, round_to

from flash_attn_lab import reference

OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "top_left": True},
    {"window_size": (7, 3)},
    {"softcap": 1.5},
    {"alibi": 2},
    {"bias": (True, False, True)},
    {"mask": (True,), "mask_rate": 0.05},
    {"sinks": True},
    {"dropout_p": 0.4},
    {"causal": True, "softcap": 2.0, "alibi": 1, "bias": (), "mask": (True, True), "sinks": True, "dropout_p": 0.2},
]


@pytest.mark.parametrize("blocks", [(4, 5), (16, 7), (33, 64), (1000, 1000)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_blocked_equals_standard(options, blocks):
    q, k, v, options = inputs(Case(33, 50, 8, 5, batch=2, nheads=4, nheads_k=2, **options))
    out, lse = reference.standard_attention(q, k, v, **options)
    for blocked in (reference.flash_attention_v1, reference.flash_attention_v2):
        blocked_out, blocked_lse = blocked(q, k, v, block_q=blocks[0], block_k=blocks[1], **options)
        np.testing.assert_allclose(blocked_out, out, atol=1e-12)
        np.testing.assert_allclose(blocked_lse, lse, atol=1e-12)


def test_against_the_formula():
    """The reference equals the formula, written out here without shared code."""
    q, k, v, _ = inputs(Case(5, 7, 4))
    s = q[0, :, 1].astype(float) @ k[0, :, 0].astype(float).T / 2
    p = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
    out, lse = reference.standard_attention(q, k, v)
    np.testing.assert_allclose(out[0, :, 1], p @ v[0, :, 0], atol=1e-14)
    np.testing.assert_allclose(lse[0, 1], np.log(np.exp(s).sum(axis=1)), atol=1e-14)


@pytest.mark.parametrize("seqlen_q,seqlen_k,top_left,want", [
    (2, 5, False, "11110 11111"), (2, 5, True, "10000 11000"),
    (5, 2, False, "00 00 00 10 11"), (5, 2, True, "10 11 11 11 11"),
])  # fmt: skip
def test_masks_drawn_in_the_docstring(seqlen_q, seqlen_k, top_left, want):
    head = reference.Head(
        np.zeros((seqlen_q, 1)), np.zeros((seqlen_k, 1)), np.zeros((seqlen_k, 1)), 1.0, causal=True, top_left=top_left
    )
    seen = head.visible(slice(None), slice(None))
    assert " ".join("".join(str(int(x)) for x in row) for row in seen) == want


def test_nan_in_a_masked_value_stays_there():
    q, k, v, _ = inputs(Case(6, 6, 4))
    v[0, 4] = np.nan
    for attention in (reference.standard_attention, reference.flash_attention_v1, reference.flash_attention_v2):
        out, lse = attention(q, k, v, causal=True)
        assert np.isnan(out[0, 4:]).all() and np.isfinite(out[0, :4]).all() and np.isfinite(lse).all()


def test_dropout_rate_and_scale():
    """The dropped share is p, the mean is kept, and seed, offset, batch, head, row and column all change the
    pattern."""
    row, column = np.arange(200)[:, None], np.arange(300)[None]
    base = reference.dropout_bits(1, 0, 0, 0, row, column)
    assert abs((base < reference.dropout_threshold(0.25)).mean() - 0.25) < 0.01
    assert base.min() == 0 and base.max() == 255
    for other in [(2, 0, 0, 0), (1 << 32 | 1, 0, 0, 0), (1, 1, 0, 0), (1, 1 << 32, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1)]:
        assert (reference.dropout_bits(*other, row, column) == base).mean() < 0.01
    np.testing.assert_array_equal(reference.dropout_bits(1, 0, 0, 0, row[7:9], column[:, 13:40]), base[7:9, 13:40])
    assert (
        reference.dropout_threshold(0.0) == 0
        and reference.dropout_threshold(1e-9) == 1
        and reference.dropout_threshold(0.5) == 128
    )


def test_philox_known_answers():
    """From the test vectors published with Random123."""
    zeros = reference.philox((0,) * 4, (0,) * 2, rounds=7)
    assert [int(w) for w in zeros] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert [int(w) for w in reference.philox((ones,) * 4, (ones,) * 2)] == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]
    assert [int(w) for w in reference.philox(pi, (0xA4093822, 0x299F31D0))] == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


def test_rounding_to_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).integers(0, 2**32, 100000, np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    np.testing.assert_array_equal(round_to(x, "bfloat16"), x.astype(ml_dtypes.bfloat16).astype(np.float32))
