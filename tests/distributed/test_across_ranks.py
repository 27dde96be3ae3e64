"""Forward and backward passes of several ranks: against float64, and against one call over all tokens."""

import numpy as np
import pytest
import ranks
from accuracy import Case
from ranks import LAYOUTS, MODES, Split, check_case, compute, devices, one_call, small

from flash_attn_minimal import distributed as fad

LONGER_K = {"cu_seqlens_q": (0, 5, 21, 60), "cu_seqlens_k": (0, 41, 57, 130)}
LONGER_Q = {"cu_seqlens_q": (0, 41, 57, 130), "cu_seqlens_k": (0, 5, 21, 60)}
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "causal_longer_k": {"causal": True, **LONGER_K},
    "causal_longer_q": {"causal": True, **LONGER_Q},
    "top_left_longer_k": {"causal": True, "top_left": True, **LONGER_K},
    "top_left_longer_q": {"causal": True, "top_left": True, **LONGER_Q},
    "window": {"window_size": (9, 4)},
    "left": {"window_size": (12, -1), **LONGER_K},
    "right": {"window_size": (-1, 7), **LONGER_Q},
    "causal_window": {"window_size": (8, 0), "causal": True},
    "softcap_scale": {"softcap": 2.5, "softmax_scale": 0.4, "causal": True},
    "alibi": {"alibi": 1, "causal": True},
    "alibi_batch": {"alibi": 2, **LONGER_K},
    "sinks": {"sinks": True, "causal": True, **LONGER_Q},
    "headdim_v": {"headdim": 24, "headdim_v": 40, "causal": True},
    "dlse": {"dlse": True, "causal": True, **LONGER_Q},
    "one_key_head": {"nheads": 6, "nheads_k": 1, "causal": True},
    "odd_heads": {"nheads": 6, "nheads_k": 3, "causal": True},
}


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options, mode, device):
    size = 2 + list(OPTIONS).index(options) % 2
    layout = LAYOUTS[(list(OPTIONS).index(options) + MODES.index(mode)) % 3]
    check_case(small(**OPTIONS[options]), Split(size, layout, mode), device)


ROWS = {"bias": (True, True, True)}
GATHERED = {
    "bias_rows": ROWS,
    "bias_of_heads": {"bias": (True, False, True), "causal": True, **LONGER_K},
    "bias_float32": {"bias": (True, True), "bias_float32": True, "dtype": "float16", **LONGER_Q},
    "bias_columns": {"bias": (True, True, False)},
    "bias_of_rank_1": {"bias": (), "causal": True},
    "mask_rows": {"mask": (True, False, True), **LONGER_K},
    "mask_columns": {"mask": (False, True, False), "causal": True},
    "all": {**ROWS, "mask": (False, False, True), "alibi": 2, "sinks": True, "dropout_p": 0.2, "window_size": (20, 9)},
}


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", GATHERED)
def test_bias_and_mask(options, layout, device):
    """A rank has its own rows of bias, mask and dbias."""
    check_case(small(**GATHERED[options]), Split(3, layout, "auto"), device)


INTERVALS = {
    "causal1": {"causal": True, "intervals": (1, 1)},
    "causal2": {"causal": True, "intervals": (2, 2), **LONGER_K},
    "full2": {"intervals": (4, 2), **LONGER_Q},
    "full4": {"intervals": (2, 4), "dtype": "float16", "headdim_v": 24},
    "top_left": {"causal": True, "top_left": True, "intervals": (4, 1), **LONGER_K},
    "all": {**ROWS, "mask": (False, False, True), "alibi": 2, "sinks": True, "dropout_p": 0.2, "window_size": (20, 9),
            "intervals": (1, 4), "dlse": True},
}  # fmt: skip


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", INTERVALS)
def test_masks_by_intervals(options, layout, device):
    """Each rank has the numbers of all keys; their rows count from the start of whole sequences."""
    for size, groups in ((2, 0), (3, 2), (4, 1)):
        check_case(small(**INTERVALS[options]), Split(size, layout, "auto", groups), device)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_masks_by_intervals_of_a_dense_batch(layout):
    for form in ({"causal": True, "intervals": (2, 1)}, {"intervals": (1, 4)}):
        case = Case(48, 48, 16, batch=3, nheads=4, nheads_k=2, **form)
        check_case(case, Split(3, layout, "gather", dense=True))


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bias_of_ranks_with_a_row_or_none(layout, device):
    """A rank with one row of a bias cannot tell that others have more."""
    case = small(cu_seqlens_q=(0, 5, 5, 8), cu_seqlens_k=(0, 5, 9, 20), bias=(True, True, True), dtype="float16")
    for size in (4, 8):
        check_case(case, Split(size, layout, "auto"), device)


@pytest.mark.parametrize("score", ["bias", "mask"])
def test_an_array_without_rows_is_an_array(score):
    """PyTorch may give an array without elements neither an address nor strides. The rank still chooses the same mode
    as the other ranks."""
    torch = pytest.importorskip("torch")
    q, k = torch.zeros(0, 8, 16), torch.zeros(1, 4, 16)
    rows = torch.tensor(np.zeros((1, 1, 0, 9), bool if score == "mask" else np.float32))
    assert not rows.data_ptr() and not any(rows.stride())
    plan = fad.plan((0, 8), q, k, k, cu_seqlens_q=[0, 5], cu_seqlens_k=[0, 9], layout="contiguous", **{score: rows})
    assert (plan.mode, plan.error) == ("gather", "")


@pytest.mark.parametrize("options", ["bias_columns", "bias_of_rank_1", "mask_columns"])
def test_bias_and_mask_without_rows(options):
    case = small(**GATHERED[options])
    check_case(case, Split(2, "zigzag", "ulysses"), backward="bias" not in options)


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (30, 0)}, {"alibi": 2}])
@pytest.mark.parametrize("mode", MODES)
def test_dropout_drops_what_one_device_drops(mode, options, device):
    case = small(dropout_p=0.3, **LONGER_K, **options)
    got = check_case(case, Split(2, "zigzag", mode), device)
    out, _ = one_call(case, device)
    np.testing.assert_allclose(got["out"], out, atol=2e-6)


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("options", ["full", "causal_longer_k", "alibi_batch", "one_key_head", "odd_heads", "sinks"])
@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_ulysses_gives_the_bits_of_one_call(options, pieces, device):
    case = small(**OPTIONS[options])
    got = compute(case, Split(3, "zigzag", "ulysses", pieces), device, backward=False)
    out, lse = one_call(case, device)
    if device is ranks.CPU:  # its kernels cut their work by the number of heads, which may change the order of a sum
        np.testing.assert_allclose(got["out"], out, atol=1e-6)
        np.testing.assert_allclose(got["lse"], lse, atol=1e-5)
    else:
        assert np.array_equal(got["out"], out) and np.array_equal(got["lse"], lse)


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_call_gives_the_same_bits(mode, device):
    case = small(causal=True, sinks=True, dlse=True, dtype="float16", nheads=4, nheads_k=1)
    runs = [compute(case, Split(3, "zigzag", mode), device, deterministic=True) for _ in range(2)]
    assert runs[0].keys() == {"out", "lse", "dq", "dk", "dv", "dsinks"}
    for name, x in runs[0].items():
        assert np.array_equal(x, runs[1][name]), name


SHAPES = {
    "one_token": {"cu_seqlens_q": (0, 1), "cu_seqlens_k": (0, 1)},
    "fewer_tokens_than_ranks": {"cu_seqlens_q": (0, 3, 5, 6), "cu_seqlens_k": (0, 2, 9, 10)},
    "empty_sequences": {"cu_seqlens_q": (0, 0, 30, 30, 47), "cu_seqlens_k": (0, 9, 9, 9, 30)},
    "no_queries": {"cu_seqlens_q": (0, 0, 0), "cu_seqlens_k": (0, 9, 30)},
    "no_keys": {"cu_seqlens_q": (0, 9, 30), "cu_seqlens_k": (0, 0, 0)},
    "nothing": {"cu_seqlens_q": (0, 0), "cu_seqlens_k": (0, 0)},
}


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_few_tokens(shape, mode, device):
    for layout in LAYOUTS:
        for causal in (False, True):
            check_case(small(causal=causal, sinks=causal, **SHAPES[shape]), Split(4, layout, mode), device)


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_dense_batches(layout, mode, device):
    case = small(batch=3, seqlen_q=37, seqlen_k=53, cu_seqlens_q=None, cu_seqlens_k=None, causal=True, alibi=2)
    check_case(case, Split(3, layout, mode, dense=True), device)


def sampled(rng: np.random.Generator) -> tuple[Case, Split]:
    """A random call that all three modes serve."""

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    mode = str(rng.choice(MODES))
    size = int(rng.choice([1, 2, 3, 4, 8]))
    group, nheads_k = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 4]))
    if mode == "ulysses" and group * nheads_k < size:
        group = -(-size // nheads_k)
    sequences, own_k = int(rng.integers(1, 5)), chance(0.5)
    lengths = [rng.integers(0, 60, sequences) * rng.integers(0, 2, sequences, endpoint=True) for _ in "qk"]
    cu = [tuple(np.cumsum([0, *x]).tolist()) for x in lengths]
    fields = {
        "cu_seqlens_q": cu[0],
        "cu_seqlens_k": cu[own_k],
        "nheads": group * nheads_k,
        "nheads_k": nheads_k,
        "headdim": int(rng.choice([8, 16, 24])),
        "headdim_v": int(rng.choice([8, 16, 20])),
        "dtype": str(rng.choice(["float32", "float32", "float16", "bfloat16"])),
        "causal": chance(0.5),
        "top_left": chance(0.3),
        "window_size": tuple(int(x) if chance(0.4) else -1 for x in rng.integers(0, 40, 2)),
        "softcap": 3.0 if chance(0.2) else 0.0,
        "softmax_scale": 0.3 if chance(0.2) else None,
        "alibi": int(rng.choice([0, 0, 1, 2])),
        "sinks": chance(0.3),
        "dlse": chance(0.3),
        "seed": int(rng.integers(2**31)),
    }
    if mode == "gather":
        rows = chance(0.5)
        fields["bias"] = (chance(0.5) or rows, chance(0.5), rows) if chance(0.3) else None
        fields["mask"] = (chance(0.5), chance(0.5), chance(0.5)) if chance(0.2) else None
        fields["bias_float32"] = chance(0.5)
    fields["dropout_p"] = 0.25 if chance(0.2) else 0.0
    return small(**fields), Split(size, str(rng.choice(LAYOUTS)), mode, int(rng.choice([0, 0, 1, 2, 5])))


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("seed", range(48))
def test_sampled_calls(seed, device):
    case, split = sampled(np.random.default_rng(seed))
    check_case(case, split, device)
