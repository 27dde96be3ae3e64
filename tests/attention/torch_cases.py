"""Inputs and options of the tests of PyTorch's traces, transforms and modes; attention in PyTorch's own operations."""

import math

import pytest
from conftest import CUDA_DEVICES

torch = pytest.importorskip("torch")

import flash_attn_minimal as fa  # noqa: E402

HAS_CUDA = CUDA_DEVICES and torch.cuda.is_available()
NO_CUDA = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device for the library and PyTorch")
BATCH, ROWS, COLUMNS, HEADS, HEADS_K, DIM = 2, 9, 11, 4, 2, 8
DEVICES = ["cpu", pytest.param("cuda", marks=NO_CUDA)]
QUIET = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


def normal(device, *shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device)


def qkv(device, *mapped):
    return (
        normal(device, *mapped, BATCH, ROWS, HEADS, DIM),
        normal(device, *mapped, BATCH, COLUMNS, HEADS_K, DIM),
        normal(device, *mapped, BATCH, COLUMNS, HEADS_K, DIM) * 0.7,
    )


def standard(q, k, v, bias=None, mask=None, alibi_slopes=None, sinks=None, causal=False, startend_row_indices=None):
    """(out, lse) in PyTorch's own operations, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    rows = torch.arange(s.shape[2], device=q.device)[:, None] + s.shape[3] - s.shape[2]
    columns = torch.arange(s.shape[3], device=q.device)
    if alibi_slopes is not None:
        s = s - alibi_slopes.double()[..., None, None] * (rows - columns).abs()
    if bias is not None:
        s = s + bias.double()
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    if startend_row_indices is not None:  # not causal, 2 numbers for each key
        start, end = startend_row_indices.repeat_interleave(q.shape[2] // startend_row_indices.shape[1], 1).unbind(-1)
        i = torch.arange(s.shape[2], device=q.device)[:, None]
        s = s.masked_fill((i >= start[..., None, :]) | (i < end[..., None, :]), -torch.inf)
    if causal:
        s = s.masked_fill(columns > rows, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(*s.shape[:3], 1)], -1)
    out = torch.einsum("bhij,bjhd->bihd", s.softmax(-1)[..., : k.shape[1]], v)
    return out, s.logsumexp(-1)


def close(got, want, tolerance=1e-4):
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


def options_of(device):
    """Every option that is a tensor: alone, and together with options that are numbers."""
    bias, sinks = normal(device, 1, HEADS, ROWS, COLUMNS), normal(device, HEADS)
    mask = (normal(device, BATCH, 1, ROWS, COLUMNS) > -0.5).logical_or(torch.eye(ROWS, COLUMNS, device=device) > 0)
    slopes = torch.linspace(0.1, 0.5, HEADS, device=device)
    keys = torch.arange(COLUMNS, dtype=torch.int32, device=device)
    intervals = torch.stack([torch.stack([keys + 2 + head, keys - 3], -1) for head in range(HEADS_K)])[None]
    return {
        "plain": {},
        "causal": {"causal": True},
        "bias": {"bias": bias},
        "row_bias": {"bias": bias[0, 0, 0]},
        "mask": {"mask": mask},
        "alibi": {"alibi_slopes": slopes},
        "alibi2": {"alibi_slopes": slopes.expand(BATCH, HEADS).contiguous()},
        "sinks": {"sinks": sinks},
        "intervals": {"startend_row_indices": intervals},
        "all": {"bias": bias, "mask": mask, "alibi_slopes": slopes, "sinks": sinks},
    }


OPTIONS = ["plain", "causal", "bias", "row_bias", "mask", "alibi", "alibi2", "sinks", "intervals", "all"]
LENGTHS = ([0, 4, 9], [0, 6, 11])


def varlen(q, k, v, **options):
    """A varlen call on the rows of the first batch entry, as two sequences."""
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=q.device) for cu in LENGTHS)
    return fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, **options)


def varlen_standard(q, k, v):
    (a, b), (c, d) = LENGTHS[0][1:], LENGTHS[1][1:]
    parts = (slice(0, a), slice(0, c)), (slice(a, b), slice(c, d))
    return torch.cat([standard(q[None, i], k[None, j], v[None, j])[0][0] for i, j in parts])


def compiled(function, inputs):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")
