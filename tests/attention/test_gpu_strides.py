"""Strides that the copy engine cannot follow: kernels that use it refuse them, and another kernel serves the call. A
launch always does what the query says."""

import numpy as np
import pytest
from conftest import CUDA, NO_CUDA, torch

import flash_attn_minimal as fa
from flash_attn_lab import reference

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]
FORCED = [None, *(row["name"] for row in fa.kernels() if row["device"] == "cuda")]
BACKWARD = [None, *(row["name"] for row in fa.kernel_tables()["backward"] if row["device"] == "cuda")]


class Reversed:
    """A tensor with one axis in descending order, through __cuda_array_interface__. PyTorch has no such tensors."""

    def __init__(self, tensor, axis):
        strides = [x * tensor.element_size() for x in tensor.stride()]
        pointer = tensor.data_ptr() + (tensor.shape[axis] - 1) * strides[axis]
        strides[axis] = -strides[axis]
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "typestr": "<f2", "data": (pointer, False), "strides": tuple(strides),
            "version": 3, "stream": torch.cuda.current_stream().cuda_stream or 1,
        }  # fmt: skip


def plain(tensor):
    """An array of the same type with the tensor's order."""
    array = Reversed(tensor, 0)
    strides = tuple(x * tensor.element_size() for x in tensor.stride())
    array.__cuda_array_interface__ |= {"data": (tensor.data_ptr(), False), "strides": strides}
    return array


def half(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.half)


def skip_if_refused(plan, kernel):
    if plan.status == "FA_UNSUPPORTED" and kernel:
        pytest.skip(plan.error)
    assert plan.status == "FA_OK", plan.error


@pytest.mark.parametrize("kernel", FORCED)
@pytest.mark.parametrize("headdim", [64, 80, 128, 256, 320])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_descending_axis(kernel, headdim, name, axis):
    torch.manual_seed(axis)
    arrays = {"q": half(2, 33, 4, headdim), "k": half(2, 70, 2, headdim), "v": half(2, 70, 2, headdim)}
    out = torch.full((2, 33, 4, headdim), float("nan"), device="cuda", dtype=torch.half)
    given = {n: plain(x) for n, x in arrays.items()}
    result = plain(out)
    if name == "out":
        result = Reversed(out, axis)
    else:
        given[name] = Reversed(arrays[name], axis)
        arrays[name] = arrays[name].flip(axis)
    want = reference.standard_attention(*(x.float().cpu().numpy() for x in arrays.values()))[0]
    skip_if_refused(fa.query(*given.values(), kernel=kernel), kernel)
    try:
        fa.flash_attn_func(*given.values(), out=result, kernel=kernel)
    except fa.Unsupported as error:  # for out, which a query does not see; or arrays that cannot make a workspace
        assert (kernel and "out" in str(error)) or "workspace" in str(error), error
        pytest.skip(str(error))
    got = out.flip(axis) if name == "out" else out
    np.testing.assert_allclose(got.float().cpu().numpy(), want, atol=4e-3)


VIEWS = {
    "one head for all": lambda x: x[:, :, :1].expand_as(x),
    "one row for all": lambda x: x[:, :1].expand_as(x),
    "rows that overlap": lambda x: x.as_strided(x.shape, (x.stride(0), 16, x.shape[1] * 16 + x.shape[3], 1)),
    "heads 24 bytes off": lambda x: half(*x.shape[:3], x.shape[3] + 12)[..., : x.shape[3]].copy_(x),
}


@pytest.mark.parametrize("kernel", FORCED)
@pytest.mark.parametrize("headdim", [64, 80, 128, 256, 320])
@pytest.mark.parametrize("view", VIEWS)
def test_other_strides(kernel, headdim, view):
    torch.manual_seed(0)
    for which in range(3):
        arrays = [half(2, 33, 4, headdim), half(2, 70, 4, headdim), half(2, 70, 4, headdim)]
        arrays[which] = VIEWS[view](arrays[which])
        plan = fa.query(*arrays, kernel=kernel)
        if plan.status == "FA_UNSUPPORTED" and kernel:
            with pytest.raises(fa.Unsupported):
                fa.flash_attn_func(*arrays, kernel=kernel)
            continue
        assert plan.status == "FA_OK", plan.error
        got = fa.flash_attn_func(*arrays, kernel=kernel)
        want = fa.flash_attn_func(*(x.contiguous() for x in arrays), kernel=kernel)
        torch.testing.assert_close(got, want, atol=4e-3, rtol=0)


@pytest.mark.parametrize("kernel", FORCED)
@pytest.mark.parametrize("headdims", [(64, 64), (128, 128), (256, 256), (576, 512)])
@pytest.mark.parametrize("view", VIEWS)
def test_caches(kernel, headdims, view):
    torch.manual_seed(0)
    headdim, headdim_v = headdims
    q, k, v = half(2, 1, 8, headdim), half(5, 64, 2, headdim), half(5, 64, 2, headdim_v)
    tables = {
        "contiguous": {"cache_seqlens": torch.tensor([60, 7], dtype=torch.int32, device="cuda")},
        "pages": {
            "cache_seqlens": torch.tensor([100, 7], dtype=torch.int32, device="cuda"),
            "block_table": torch.tensor([[3, 1], [4, 0]], dtype=torch.int32, device="cuda"),
        },
    }
    for where in tables.values():
        for which in range(2):
            cache = [k, v]
            cache[which] = VIEWS[view](cache[which])
            plan = fa.kvcache_query(q, *cache, kernel=kernel, **where)
            if plan.status == "FA_UNSUPPORTED" and kernel:
                with pytest.raises(fa.Unsupported):
                    fa.flash_attn_with_kvcache(q, *cache, kernel=kernel, **where)
                continue
            assert plan.status == "FA_OK", plan.error
            got = fa.flash_attn_with_kvcache(q, *cache, kernel=kernel, **where)
            want = fa.flash_attn_with_kvcache(q, *(x.contiguous() for x in cache), kernel=kernel, **where)
            torch.testing.assert_close(got, want, atol=4e-3, rtol=0)


@pytest.mark.parametrize("kernel", BACKWARD)
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("view", VIEWS)
def test_gradients(kernel, headdim, view):
    torch.manual_seed(0)
    for which in range(4):
        q, k, v, dout = (
            half(2, 33, 4, headdim),
            half(2, 70, 4, headdim),
            half(2, 70, 4, headdim),
            half(2, 33, 4, headdim),
        )
        given = [dout, q, k, v]
        given[which] = VIEWS[view](given[which])
        same = [x.contiguous() for x in given]
        out, lse = fa.flash_attn_func(*same[1:], return_lse=True)
        try:
            got = fa.backward(*given, out, lse, kernel=kernel)
        except fa.Unsupported:
            assert kernel
            continue
        want = fa.backward(*same, out, lse, kernel=kernel)
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one, two, atol=2e-2, rtol=2e-2)
