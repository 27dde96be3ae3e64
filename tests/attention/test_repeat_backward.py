"""`backward` called again on other arrays takes the shortcut of _core/repeats.py. Only its time may change."""

import numpy as np
import pytest
from conftest import torch
from test_repeats import every_kind, host, make, shortcuts  # noqa: F401

import flash_attn_minimal as fa
from flash_attn_minimal._core import recordings
from flash_attn_minimal.backward import _repeats as gradients

ROWS, KEYS, HEADS = (2, 5, 4, 8), (2, 7, 2, 8), 4
OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "scale": {"softmax_scale": 0.3},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 7},
    "softcap": {"softcap": 3.0, "num_threads": 1},
    "arrays": {"bias": (2, 4, 5, 7), "sinks": (HEADS,), "alibi_slopes": (HEADS,)},
}


@pytest.fixture(autouse=True)
def fresh():
    gradients.clear()


def inputs(kind, seed, options, packed=False):
    """dout, q, k, v, out, lse, and the options with arrays in the place of shapes."""
    rng = np.random.default_rng(seed)
    q, k, v, dout = (rng.standard_normal(shape, dtype=np.float32) for shape in (ROWS, KEYS, KEYS, ROWS))
    options = {
        name: rng.standard_normal(x, dtype=np.float32) if name in ("bias", "sinks", "alibi_slopes") else x
        for name, x in options.items()
    }
    if packed:
        q, k, v, dout = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, dout))
        ends = np.array([0, 4 + seed % 3, 10], np.int32), np.array([0, 6 - seed % 3, 14], np.int32)
        out, lse = fa.flash_attn_varlen_func(q, k, v, *ends, 10, 14, return_lse=True, **options)
        options |= {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "max_seqlen_q": 10, "max_seqlen_k": 14}
    else:
        out, lse = fa.flash_attn_func(q, k, v, return_lse=True, **options)
    options = {name: make(kind, x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return [make(kind, x) for x in (dout, q, k, v, out, lse)], options


@every_kind
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_same_bits(kind, name, packed, shortcuts):  # noqa: F811
    """New values give what the long way gives, in new arrays."""
    if packed and name == "arrays":
        pytest.skip("packed sequences take no bias")
    calls = [inputs(kind, seed, OPTIONS[name], packed) for seed in range(5)]
    shortcuts.clear()
    got = [fa.backward(*arrays, **options, deterministic=True) for arrays, options in calls]
    assert len(shortcuts) in (2, 3)  # the first call of a type loads its support
    for (arrays, options), results in zip(calls, got, strict=True):
        gradients.clear()
        np.testing.assert_equal(host(results), host(fa.backward(*arrays, **options, deterministic=True)))
    places = [id(x) for results in got for x in results]
    assert len(set(places)) == len(places)


@every_kind
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("missing", [(), ("dk",), ("dq", "dv")])
@pytest.mark.parametrize("accumulate", [False, True])
def test_given_gradients(kind, packed, missing, accumulate, shortcuts):  # noqa: F811
    """Other arrays for the results in each call, with a seed of its own: the same arrays come back, filled."""
    if accumulate and missing:
        pytest.skip("adds to arrays that are given")
    options = {"dropout_p": 0.25, "deterministic": True}
    calls = [inputs(kind, seed, options | {"dropout_seed": 5 + seed}, packed) for seed in range(5)]
    shapes = [array.shape for array in calls[0][0][1:4]]

    def places():
        start = np.nan if not accumulate else 0.5
        all_three = zip(("dq", "dk", "dv"), shapes, strict=True)
        return {name: make(kind, np.full(shape, start, np.float32)) for name, shape in all_three if name not in missing}

    found = []
    for arrays, named in calls:
        given = places()
        results = fa.backward(*arrays, **named, **given, accumulate=accumulate)
        for name, result in zip(("dq", "dk", "dv"), results, strict=True):
            assert name in missing or result is given[name]
        found.append(host(results))
    assert len(shortcuts) >= 2
    for (arrays, named), results in zip(calls, found, strict=True):
        gradients.clear()
        np.testing.assert_equal(results, host(fa.backward(*arrays, **named, **places(), accumulate=accumulate)))


@every_kind
def test_given_gradients_that_are_inputs_are_refused_in_every_call(kind):
    arrays, _ = inputs(kind, 0, {})
    given = [make(kind, np.zeros(shape, np.float32)) for shape in (ROWS, KEYS, KEYS)]
    for _ in range(4):
        fa.backward(*arrays, dq=given[0], dk=given[1], dv=given[2])
    dout, q, k, v, out, _ = arrays
    for dq, dk, dv, said in (
        (q, *given[1:], "dq starts at the same address as q"),
        (out, *given[1:], "dq starts at the same address as out"),
        (dout, *given[1:], "dq starts at the same address as dout"),
        (given[0], k, given[2], "dk starts at the same address as k"),
        (*given[:2], given[1], "dv starts at the same address as dk"),
        (given[0], v, given[2], "dk starts at the same address as v"),
    ):
        before = host(tuple(arrays))
        with pytest.raises(fa.BadArgument, match=said):
            fa.backward(*arrays, dq=dq, dk=dk, dv=dv)
        np.testing.assert_equal(host(tuple(arrays)), before)


@every_kind
def test_options_do_not_mix(kind):
    arrays, _ = inputs(kind, 0, {})
    wanted = {}
    for name in ("none", "causal", "window", "scale"):
        gradients.clear()
        wanted[name] = host(fa.backward(*arrays, **OPTIONS[name]))
    for _ in range(3):
        for name, results in wanted.items():
            for a, b in zip(host(fa.backward(*arrays, **OPTIONS[name])), results, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    dlse = make(kind, np.ones((2, HEADS, 5), np.float32))
    assert not np.allclose(host(fa.backward(*arrays, dlse=dlse))[0], wanted["none"][0])


@every_kind
def test_refusals_and_given_arrays_as_before(kind):
    arrays, _ = inputs(kind, 0, {})
    results = [host(fa.backward(*arrays)) for _ in range(4)][-1]
    dout, q, k, v, out, lse = arrays
    with pytest.raises(fa.BadArgument, match="dout has shape"):
        fa.backward(dout[:, :4], q, k, v, out, lse)
    with pytest.raises(fa.BadArgument, match="causal='yes'"):
        fa.backward(*arrays, causal="yes")
    with pytest.raises(fa.BadArgument, match="cu_seqlens_k"):
        fa.backward(*arrays, cu_seqlens_q=make(kind, np.array([0, 5], np.int32)))
    with pytest.raises(fa.BadArgument, match="bias is None"):
        fa.backward(*arrays, return_dbias=True)
    given = [make(kind, np.full(shape, np.nan, np.float32)) for shape in (ROWS, KEYS, KEYS)]
    for _ in range(3):
        for mine, returned in zip(given, fa.backward(*arrays, dq=given[0], dk=given[1], dv=given[2]), strict=True):
            assert mine is returned
        for mine, result in zip(given, results, strict=True):
            np.testing.assert_allclose(host(mine), result, rtol=1e-5, atol=1e-6)
    fa.backward(*arrays, dq=given[0], dk=given[1], dv=given[2], accumulate=True)
    np.testing.assert_allclose(host(given[2]), 2 * results[2], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_pytorch_settings_are_read_in_every_call():
    arrays, _ = inputs("torch", 0, {})
    for _ in range(3):
        fa.backward(*arrays)
    signatures = len(gradients.known)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            fa.backward(*arrays)
    finally:
        torch.use_deterministic_algorithms(before)
    assert len(gradients.known) == 2 * signatures
    arrays[1].requires_grad_()
    with pytest.raises(fa.Unsupported, match="q requires a gradient"):
        fa.backward(*arrays)
    with torch.no_grad():
        for _ in range(3):
            fa.backward(*arrays)
    with pytest.raises(fa.Unsupported, match="q requires a gradient"):
        fa.backward(*arrays)


def test_a_recording_sees_the_call():
    arrays, _ = inputs("numpy", 0, {})
    for _ in range(3):
        fa.backward(*arrays)
    with recordings.Recording() as recording:
        results = fa.backward(*arrays)
    expected = [x.copy() for x in results]
    for x in results:
        x[...] = np.nan
    recording()
    np.testing.assert_equal(results, expected)
