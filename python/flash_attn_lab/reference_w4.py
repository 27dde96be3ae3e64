"""4-bit weights in NumPy, written to be read: the formats of cuda/transformer/w4/common/w4.h, and the same bits as the
library.

    weight[n, k] = code[n, k] * scale[n, k // block] * tensor_scale

    format  code                      block  scale                    tensor_scale
    nvfp4   E2M1                      16     float8_e4m3, positive    float32
    mxfp4   E2M1                      32     E8M0: 2^(byte - 127)     1
    int4    two's complement, -8..7   128    float16, positive        1

All arithmetic is float32 with every step rounded once, so that C and CUDA can compute the same bits.
"""

from __future__ import annotations

import numpy as np

BLOCK = {"nvfp4": 16, "mxfp4": 32, "int4": 128}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

# What `search` tries besides the scale that maps a block's largest number to the largest code:
# nvfp4: steps of the scale's byte, up to the scale that maps it to 4 instead of 6. mxfp4: steps of the exponent.
# int4: the code that the largest number is mapped to.
STEPS = {"nvfp4": range(-2, 7), "mxfp4": (0, 1), "int4": np.arange(7, 11.5, 0.5, dtype=np.float32)}


# ---- numbers and bytes ----


def encode_e2m1(x):
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; ties to the even code; beyond 6: 6; NaN: -0."""
    x = np.asarray(x, np.float32)
    a = np.abs(x)
    below, at = (0.25, 1.25, 2.5, 5), (0.75, 1.75, 3.5)  # midpoints after an even code, and after an odd one
    code = sum((a > b).astype(np.uint8) for b in below) + sum((a >= b).astype(np.uint8) for b in at)
    return code | np.where(np.signbit(x) | np.isnan(x), 8, 0).astype(np.uint8)


def encode_e4m3(x):
    """Encodes numbers >= 0, saturating at 448: 4 exponent bits with bias 7, 3 mantissa bits, no infinity; NaN is
    0x7F."""
    x = np.minimum(np.asarray(x, np.float32), np.float32(448))
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.int64)
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) - 0x3C000000) >> 20
    subnormal = np.rint(np.where(x < 2.0**-6, x, 0) * np.float32(512)).astype(np.int64)
    return np.where(np.isnan(x), 0x7F, np.where(x < 2.0**-6, subnormal, normal)).astype(np.uint8)


def decode_e4m3(byte):
    byte = np.asarray(byte, np.int32)
    exponent, mantissa = byte >> 3 & 15, (byte & 7).astype(np.float32)
    value = np.where(exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9)).astype(np.float32)
    value = np.where(byte & 127 == 127, np.float32(np.nan), value)
    return np.where(byte & 128, -value, value)


def decode_e8m0(byte):
    byte = np.asarray(byte, np.int32)
    return np.where(byte == 255, np.float32(np.nan), np.ldexp(np.float32(1), np.minimum(byte, 254) - 127))


def decode_scales(scales, format):
    """The scales in float32, without the tensor_scale."""
    if format == "int4":
        return np.asarray(scales, np.float16).astype(np.float32)
    return (decode_e4m3 if format == "nvfp4" else decode_e8m0)(np.asarray(scales).view(np.uint8))


def pack_nibbles(codes):
    """(rows, columns) codes as (rows, ceil(columns / 2)) bytes, the even column in the low nibble."""
    codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack_nibbles(packed, columns):
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)[:, :columns]


def decode_codes(codes, format):
    if format == "int4":
        return ((codes ^ 8).astype(np.int8) - np.int8(8)).astype(np.float32)
    return E2M1[codes]


# ---- matrices ----


def dequantize(codes, scales, tensor_scale, format, in_features):
    """float32 (out_features, in_features): code * scale is exact; the product with tensor_scale is rounded once."""
    values = decode_codes(unpack_nibbles(np.asarray(codes), in_features), format)
    scales = np.repeat(decode_scales(scales, format), BLOCK[format], 1)[:, :in_features]
    with np.errstate(over="ignore"):
        return values * scales * np.float32(tensor_scale)


def quantize(w, format="nvfp4", search=True):
    """(codes, scales, tensor_scale) of a matrix: codes uint8 (out_features, ceil(in_features / 2)); scales
    (out_features, ceil(in_features / block)), uint8, or float16 for int4; tensor_scale a float32 number.

    A block with a NaN or an infinity gets the scale NaN."""
    w = np.asarray(w).astype(np.float32)
    rows, columns = w.shape
    block = BLOCK[format]
    blocks = np.pad(w, ((0, 0), (0, -columns % block))).reshape(rows, -1, block)
    finite = np.isfinite(blocks)
    magnitude = np.where(finite, np.abs(blocks), 0)
    largest = magnitude.max(-1, initial=0)  # the largest number of each block
    tensor_scale = _tensor_scale(largest.max(initial=0)) if format == "nvfp4" else np.float32(1)

    # Errors are compared after multiplication by a power of two that brings the block near 1, so squares cannot
    # overflow.
    exponent = np.ascontiguousarray(largest).view(np.uint32).astype(np.int64) >> 23
    power = np.ascontiguousarray(np.maximum(254 - exponent, 1).astype(np.uint32) << 23).view(np.float32)
    best = None
    for scale in _scales(largest, tensor_scale, format, search):
        factor = decode_scales(scale, format) * tensor_scale
        code = _codes(blocks, factor, format)
        with np.errstate(over="ignore"):  # with a scale far too large the error is NaN, which never wins
            value, unit = decode_codes(code, format), factor * power
        sums = np.zeros((*largest.shape, 8), np.float32)  # added up in the library's order
        for i in range(0, block if search else 0, 8):
            with np.errstate(invalid="ignore", over="ignore"):
                distance = blocks[..., i : i + 8] * power[..., None] - value[..., i : i + 8] * unit[..., None]
                sums = sums + distance * distance
        for width in (4, 2, 1):
            sums = sums[..., :width] + sums[..., width:]
        error = sums[..., 0]
        if best is None:
            best = error, scale, code
        else:
            better = error < best[0]
            best = (
                np.where(better, error, best[0]),
                np.where(better, scale, best[1]),
                np.where(better[..., None], code, best[2]),
            )
    _, scales, codes = best
    lost = ~finite.all(-1)
    scales = np.where(
        lost, {"nvfp4": np.uint8(127), "mxfp4": np.uint8(255), "int4": np.float16(np.nan)}[format], scales
    )
    codes = np.where(lost[..., None], np.uint8(0), codes).reshape(rows, -1)[:, :columns]
    return pack_nibbles(codes), scales, tensor_scale


def _tensor_scale(largest):
    """The scale that maps the matrix's largest number to 6 (the largest code) * 448 (the largest scale). It is a normal
    number, and 1 for a matrix of zeros."""
    if largest == 0:
        return np.float32(1)
    return max(np.float32(largest) / np.float32(6 * 448), np.finfo(np.float32).tiny)


def _scales(largest, tensor_scale, format, search):
    """The scales to try, a list of arrays of the shape of `largest`."""
    if format == "nvfp4":
        first = encode_e4m3(largest / (np.float32(6) * tensor_scale)).astype(np.int32)
        return [np.clip(first + d, 0, 126).astype(np.uint8) for d in (STEPS[format] if search else (0,))]
    if format == "mxfp4":  # the largest power of two in the block is mapped to 4, the largest power of two in a code
        first = np.maximum((np.ascontiguousarray(largest).view(np.uint32) >> 23).astype(np.int32) - 2, 0)
        return [(first + d).astype(np.uint8) for d in (STEPS[format] if search else (0,))]
    with np.errstate(over="ignore"):
        tries = [(largest / d).astype(np.float16) for d in (STEPS[format] if search else STEPS[format][:1])]
    return [np.minimum(scale, np.float16(65504)) for scale in tries]


def _codes(blocks, factor, format):
    """The codes of the blocks' numbers divided by the factor; 0 where the factor is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        x = np.where(factor[..., None] > 0, blocks / factor[..., None], np.float32(0))
    if format == "int4":
        return np.clip(np.rint(np.nan_to_num(x, nan=0.0)), -8, 7).astype(np.int8).view(np.uint8) & 15
    return encode_e2m1(x)
