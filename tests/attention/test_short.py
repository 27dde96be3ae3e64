"""Short sequences: small tiles of mma_sm80, and the choice between it and wgmma_sm90."""

import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA

import flash_attn_minimal as fa

HEADDIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
LENGTHS = [(1, 1), (17, 31), (32, 32), (64, 5), (65, 32), (33, 33), (64, 64), (130, 200)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("headdim, headdim_v", HEADDIMS)
def test_answers(kernel, headdim, headdim_v, dtype):
    for i, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        kernel.check(Case(seqlen_q, seqlen_k, headdim, headdim_v, nheads=4, nheads_k=2, causal=i % 2 == 0, dtype=dtype))


def plan(shape_q, shape_k, **options):
    q, k = (CUDA.array(np.zeros(shape, np.float32), "float16") for shape in (shape_q, shape_k))
    found = fa.query(q, k, k, **options)
    if "needs sm_90" in found.why_not.get("wgmma_sm90", "needs sm_90" if found.kernel != "wgmma_sm90" else ""):
        pytest.skip("needs a Hopper GPU and a build with wgmma_sm90")
    return found, (q, k, k)


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
def test_the_faster_kernel_is_chosen():
    """The library chooses mma_sm80 over wgmma_sm90 where it was measured to be faster, and says so. wgmma_sm90 can
    still be forced."""
    short, arrays = plan((1, 48, 4, 64), (1, 40, 4, 64))
    assert short.kernel == "mma_sm80"
    expected = "seqlen_q=48, seqlen_k=40: mma_sm80 is faster for short sequences"
    assert short.why_not["wgmma_sm90"] == expected
    assert fa.query(*arrays, kernel="wgmma_sm90").kernel == "wgmma_sm90"
    assert np.isfinite(CUDA.numpy(fa.flash_attn_func(*arrays, kernel="wgmma_sm90"))).all()
    for shape_q, shape_k, kernel in [
        ((1, 256, 4, 128), (1, 256, 4, 128), "mma_sm80"),
        ((1, 4096, 4, 64), (1, 4096, 4, 64), "wgmma_sm90"),
        ((32, 256, 16, 64), (32, 256, 16, 64), "wgmma_sm90"),  # short, but more than small blocks can do at once
        ((1, 64, 4, 256), (1, 64, 4, 256), "mma_sm80"),
    ]:
        assert plan(shape_q, shape_k)[0].kernel == kernel, (shape_q, shape_k)
