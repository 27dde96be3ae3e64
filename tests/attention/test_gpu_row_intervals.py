"""Masks by intervals in Hopper's kernels: which calls they take, and that these calls are right where tiles are hidden,
whole or cut, where walks have gaps, and where keys that nobody sees hold NaN. Needs a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA, BackwardKernel, Kernel, torch

import flash_attn_minimal as fa
from flash_attn_lab import reference
from flash_attn_minimal import masks

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]

NAME = "wgmma_sm90"
FORWARD = Kernel(CUDA, NAME)
FORMS = {"causal1": (True, 1), "causal2": (True, 2), "full2": (False, 2), "full4": (False, 4)}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
SHAPES = [(700, 900, 1), (900, 700, 2), (333, 333, 6), (1, 500, 1), (450, 64, 6), (1300, 1300, 1)]
PLANS = [  # headdim, keys
    (64, 2048, "d64_short_intervals"),
    (64, 16384, "d64_short_intervals"),
    (64, 16385, "d64_intervals"),
    (72, 2048, "d128_middle_intervals"),
    (128, 65536, "d128_middle_intervals"),
    (128, 65537, "d128_intervals"),
    (192, 2048, "d256_intervals"),
    (256, 2048, "d256_intervals"),
]
MAKERS = {
    "documents": lambda: masks.documents([1, 300, 700, 64, 128, 307]),
    "documents, full": lambda: masks.documents([500, 192, 640, 168], causal=False),
    "one document, full": lambda: masks.documents([1500], causal=False),
    "prefix_lm": lambda: masks.prefix_lm([300, 10], [800, 700]),
    "shared_prompt": lambda: masks.shared_prompt([400, 100], [[100, 300], [200, 200, 200]]),
    "tree": lambda: masks.tree([300, 200, 250, 350, 400], [-1, 0, 1, 0, 3]),
    "window": lambda: masks.window(1500, 300),
    "global_and_window": lambda: masks.global_and_window(1500, 130, 250, 100),
    "block_diffusion": lambda: masks.block_diffusion(768, 96),
}


def kernel_of_backward(headdim):
    return NAME if headdim <= 128 else "wgmma_pair_sm90"


def backward_of(headdim):
    return BackwardKernel(CUDA, kernel_of_backward(headdim))


def case_of(shape, form, headdim, dtype="bfloat16", **more):
    rows, keys, heads = shape
    return Case(
        rows,
        keys,
        headdim,
        batch=2,
        nheads=6,
        nheads_k=2,
        causal=form[0],
        intervals=(heads, form[1]),
        dtype=dtype,
        **more,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@forms
@pytest.mark.parametrize("headdim", [40, 64, 96, 128, 256])
def test_forward(headdim, form, shape, dtype):
    for seed in range(3):
        FORWARD.check(case_of(shape, form, headdim, dtype, seed=seed))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "in order"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@forms
@pytest.mark.parametrize("headdim", [40, 64, 96, 128, 160, 192, 256])
def test_backward(headdim, form, shape, deterministic, dtype):
    for seed in range(3):
        case = case_of(shape, form, headdim, dtype, seed=seed, dlse=seed == 1)
        backward_of(headdim).check(case, deterministic=deterministic)


@pytest.mark.parametrize(("headdim", "headdim_v"), [(192, 128), (136, 64), (64, 192), (256, 8)])
@forms
def test_backward_with_values_of_their_own_head_dim(form, headdim, headdim_v):
    backward_of(256).check(case_of((700, 900, 2), form, headdim, headdim_v=headdim_v))


OPTIONS = {
    "top_left": {"top_left": True},
    "window": {"window_size": (160, 90)},
    "left edge": {"window_size": (70, -1)},
    "sinks": {"sinks": True},
    "large scores": {"spread": 3e3},
    "overflow": {"spread": 30.0},
}


@pytest.mark.parametrize("option", OPTIONS)
@forms
@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
def test_beside_options(headdim, form, option):
    for shape in SHAPES[:3]:
        FORWARD.check(case_of(shape, form, headdim, "float16", **OPTIONS[option]))
        backward_of(headdim).check(case_of(shape, form, headdim, "float16", **OPTIONS[option]))


@pytest.mark.parametrize("heads", [1, 2, 6])
@forms
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_packed_sequences(headdim, form, heads):
    cu_q, cu_k = (0, 1, 200, 200, 537, 900), (0, 130, 130, 330, 790, 1153)  # the second has no keys, the third no rows
    case = case_of((363, 460, heads), form, headdim, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    FORWARD.check(case)
    backward_of(headdim).check(case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_makers(headdim, maker, dtype):
    """More items than multiprocessors, so that a block takes several. All keys of the last batch entry are hidden by
    numbers of their own from row 900 on in the second half; they hold NaN where no row sees them."""
    mask = MAKERS[maker]()
    numbers = np.repeat(mask["startend_row_indices"], 4, axis=0)
    seqlen = numbers.shape[2]
    numbers[3, :, seqlen // 2 : seqlen // 2 + 300] = {
        (True, 1): [0], (True, 2): [0, seqlen], (False, 2): [0, 0], (False, 4): [0, 9, 9, seqlen],
    }[mask["causal"], numbers.shape[3]]  # fmt: skip
    options = {"startend_row_indices": numbers, "causal": mask["causal"]}
    round_to = getattr(torch, dtype)
    q, dout = (
        torch.randn(4, seqlen, 12, headdim, generator=torch.Generator().manual_seed(i)).to(round_to).float().numpy()
        for i in (0, 1)
    )
    k, v = (
        torch.randn(4, seqlen, 4, headdim, generator=torch.Generator().manual_seed(i)).to(round_to).float().numpy()
        for i in (2, 3)
    )
    out, lse = reference.standard_attention(q, k, v, **options)
    exact = reference.standard_attention_backward(dout, q, k, v, **options)
    k, v = k.copy(), v.copy()
    k[3, seqlen // 2 : seqlen // 2 + 300], v[3, seqlen // 2 : seqlen // 2 + 300] = np.nan, np.nan
    tolerance = 4e-3 if dtype == "float16" else 3e-2
    got = FORWARD(q, k, v, dtype, **options)
    np.testing.assert_allclose(got[0], out, atol=tolerance)
    np.testing.assert_allclose(got[1], lse, atol=5e-5)
    for deterministic in (False, True):
        gradients = backward_of(headdim)(
            dout, q, k, v, out.astype(np.float32), lse.astype(np.float32), dtype, deterministic=deterministic, **options
        )
        for x, want in zip(gradients, exact[:3], strict=True):
            np.testing.assert_allclose(x, want, atol=tolerance * max(1.0, np.abs(want).max()))
        for x in gradients[1:]:
            assert not x[3, seqlen // 2 : seqlen // 2 + 300].any()


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_everything_hidden(headdim):
    x = np.random.default_rng(0).standard_normal((2, 400, 2, headdim), np.float32)
    nan = np.full_like(x, np.nan)
    numbers = np.zeros((2, 1, 400, 1), np.int32)
    out, lse = FORWARD(x, nan, nan, "float16", startend_row_indices=numbers, causal=True)
    assert (out == 0).all() and (lse == -np.inf).all()
    for grad in backward_of(headdim)(x, x, nan, nan, out, lse, "float16", startend_row_indices=numbers, causal=True):
        assert (grad == 0).all()


@pytest.mark.parametrize("heads", [1, 8, 32])
@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
def test_same_as_the_general_kernel(headdim, heads):
    """At a size where every block takes many items: 8192 keys, 32 heads."""
    torch.manual_seed(0)
    q = torch.randn(1, 8192, 32, headdim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 8192, 8, headdim, device="cuda", dtype=torch.bfloat16)
    mask = masks.shared_prompt([2048], [[700, 68, 1024, 1000, 1, 1300, 1000, 1051]], like=q)
    numbers = mask["startend_row_indices"].expand(1, heads, 8192, 1).contiguous()
    numbers[:, :, 5000:5100] = 5200
    results = []
    for kernel in (NAME, "mma_sm80"):
        options = {"startend_row_indices": numbers, "causal": True}
        out, lse = fa.flash_attn_func(q, k, v, return_lse=True, kernel=kernel, **options)
        kernel = kernel_of_backward(headdim) if kernel == NAME else kernel
        results.append([out, lse, *fa.backward(out, q, k, v, out, lse, kernel=kernel, **options)[:3]])
    for got, want in zip(*results, strict=True):
        scale = want.float().abs().max()
        assert ((got.float() - want.float()).abs().max() / scale).item() < 1.5e-2


def long_mask(form, seqlen, rng):
    """Runs of keys of 1 to 9000 keys that share intervals, most of which hide all but a few thousand rows."""
    causal, count = form
    numbers = np.empty((2, seqlen, count), np.int32)
    for of_head in numbers:
        first = 0
        while first < seqlen:
            end = min(seqlen, first + int(rng.choice([1, 30, 700, 5000, 9000])))
            low, high = np.sort(rng.integers(0, seqlen + 1, 2))
            if rng.random() < 0.7:  # a document
                low, high = first, end
            of_head[first:end] = {
                (True, 1): [high], (True, 2): [high, seqlen],
                (False, 2): [high, low], (False, 4): [high, seqlen, 0, low],
            }[form]  # fmt: skip
            first = end
    return numbers[None]


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@forms
def test_groups_of_tiles(headdim, form, packed):
    """Sequences long enough that a warp passes over groups of tiles, and tiles whose keys have equal intervals."""
    lengths = [300, 21000, 9001, 8192] if packed else [33001]
    rng = np.random.default_rng(headdim)
    torch.manual_seed(0)
    total, heads = sum(lengths), 4
    q = torch.randn(total, heads, headdim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, total, 2, headdim, device="cuda", dtype=torch.bfloat16)
    numbers = np.concatenate([long_mask(form, n, rng) for n in lengths], axis=2)
    options = {"startend_row_indices": torch.from_numpy(numbers).cuda(), "causal": form[0], "return_lse": True}
    results = []
    for kernel in (NAME, "mma_sm80"):
        if packed:
            cu = torch.tensor(np.cumsum([0, *lengths]), device="cuda", dtype=torch.int32)
            options["startend_row_indices"] = torch.from_numpy(numbers[0]).cuda()
            results.append(fa.flash_attn_varlen_func(q, k, v, cu, cu, *[max(lengths)] * 2, kernel=kernel, **options))
        else:
            results.append(fa.flash_attn_func(q[None], k[None], v[None], kernel=kernel, **options))
    (out, lse), (want, want_lse) = results
    assert torch.equal(lse == -np.inf, want_lse == -np.inf)
    assert (out.float() - want.float()).abs().max().item() < 2e-2 * want.float().abs().max().item()
    seen = want_lse != -np.inf
    assert (lse[seen] - want_lse[seen]).abs().max().item() < 1e-3


def documents_of(length, seqlen):
    return masks.documents([length] * (seqlen // length) + [seqlen % length] * (seqlen % length > 0))


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("per_head", [False, True], ids=["one mask", "a mask for each key head"])
@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_of_blocks_in_order_of_their_length(headdim, per_head, batch):
    """Documents of two lengths: the gradients of the same call in the order of the keys."""
    seqlen, heads, heads_k = 3000, 16, 8
    torch.manual_seed(0)
    q, dout = torch.randn(2, batch, seqlen, heads, headdim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, seqlen, heads_k, headdim, device="cuda", dtype=torch.bfloat16)
    of_head = [documents_of(length, seqlen)["startend_row_indices"] for length in range(200, 1800, 200)]
    indices = np.concatenate(of_head if per_head else of_head[4:5], axis=1)
    indices = np.concatenate([indices, indices[:, ::-1]][:batch], axis=0)
    options = {"startend_row_indices": torch.from_numpy(np.ascontiguousarray(indices)).cuda(), "causal": True}
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, **options)
    free = fa.backward(dout, q, k, v, out, lse, **options)
    ordered = fa.backward(dout, q, k, v, out, lse, deterministic=True, **options)
    for name, got, want in zip("qkv", free, ordered, strict=True):
        scale = want.float().abs().max()
        assert ((got.float() - want.float()).abs().max() / scale).item() < 1e-2, f"d{name}"
    reference = fa.backward(dout, q, k, v, out, lse, kernel="simple", **options)
    for name, got, want in zip("qkv", free, reference, strict=True):
        assert ((got.float() - want.float()).abs().max() / want.float().abs().max()).item() < 1.5e-2, f"d{name}"


@pytest.mark.parametrize("option", [None, *OPTIONS])
@forms
@pytest.mark.parametrize(("headdim", "keys"), [(64, 9000), (64, 16500), (128, 9000), (128, 32800), (128, 65600)])
def test_few_rows_over_many_keys(headdim, keys, form, option):
    """Beyond 16384 and 65536 keys other plans serve the call; beyond 8192 they have bounds of groups."""
    for dtype in ("float16", "bfloat16") if option is None else ("float16",):
        FORWARD.check(case_of((130, keys, 2), form, headdim, dtype, **OPTIONS.get(option, {})))


@forms
@pytest.mark.parametrize(("headdim", "keys"), [(64, 17000), (128, 33000), (128, 65700)])
def test_packed_sequences_with_many_keys(headdim, keys, form):
    cu_q, cu_k = (0, 70, 70, 200, 263), (0, keys, keys + 1, keys + 300, keys + 1200)
    FORWARD.check(case_of((263, keys + 1200, 2), form, headdim, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k))


@pytest.mark.parametrize(("headdim", "keys", "plan"), PLANS)
def test_which_plan(headdim, keys, plan):
    x = torch.zeros(1, keys, 2, headdim, device="cuda", dtype=torch.bfloat16)
    numbers = torch.full((1, 1, keys, 1), keys, device="cuda", dtype=torch.int32)
    options = {"startend_row_indices": numbers, "causal": True}
    found = fa.query(x, x, x, **options)
    if torch.cuda.get_device_capability()[0] != 9:
        assert found.kernel == "mma_sm80"
        return
    assert (found.kernel, found.variant) == (NAME, plan)
    assert fa.backward_query(x, x, x, **options).kernel == kernel_of_backward(headdim)
    others = {"softcap": 9.0}, {"alibi_slopes": torch.ones(2, device="cuda")}, {"dropout_p": 0.1, "dropout_seed": 1}
    for more in others:
        assert fa.query(x, x, x, **options, **more).kernel == "mma_sm80"
        assert fa.backward_query(x, x, x, **options, **more).kernel == "mma_sm80"
    assert fa.query(x, x, x, **options, return_max_score=True).kernel == "mma_sm80"
