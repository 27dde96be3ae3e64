"""Attention on 8-bit floats (Shah et al. 2024, section 3.3), with the tensor cores' short sums.

Tensor cores multiply float8_e4m3 twice as fast as 16 bits. Its numbers have 4 significant bits, end at 448, and have
nothing below 2^-9. Four things keep attention accurate:

    scales for blocks   Each block of rows of q, k or v is divided by its own factor, so that one large row does not
                        push small values in other blocks below 2^-9. Factors are powers of two, so that the division
                        rounds nothing.
    rotation            q and k are multiplied by the same random orthogonal matrix. Scores stay what they are, but a
                        large entry is spread over all head dims (section 3.3, incoherent processing). It helps only
                        where few entries are large, and rounds q and k once more, so it is off by default.
    the range of P      P lies between 0 and 1, so it is multiplied by 2^8 before it is rounded.
    sums of two levels  Sums in the tensor cores have about 14 bits: each product is truncated at 2^-13 of the sum that
                        it joins. In a mean over thousands of keys nearly every product loses bits, always towards zero.
                        So the tensor cores sum one block of keys, and the blocks are added in float32.

A kernel does this work in the order of v3. This file shows only the arithmetic, one tile after another as in v2.
"""

from __future__ import annotations

import numpy as np

LARGEST = 448.0  # the largest e4m3 number
P_FACTOR = 256.0
BITS = 13  # a product that joins a sum is truncated at 2^-13 of the sum
INSTRUCTION = 32  # values of a row that one instruction multiplies and adds


def round_e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest e4m3 number, ties to even, stored as float32. Values beyond 448 become 448."""
    x = np.asarray(x, np.float32)
    exponent = np.maximum(np.frexp(x)[1], -5)  # x = m 2^exponent, m in [1/2, 1); below 2^-6 steps are equal
    step = np.ldexp(np.float32(1), exponent - 4)
    return np.clip(np.rint(x / step) * step, -LARGEST, LARGEST)


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """(values, factor) of a block: e4m3 values and a power of two, with x about values * factor."""
    largest = float(np.abs(x).max(initial=0))
    factor = np.float32(np.exp2(np.ceil(np.log2(largest / LARGEST)))) if largest else np.float32(1)
    return round_e4m3(x / factor), factor


def rotation(headdim: int, seed: int = 0) -> np.ndarray:
    """Random signs, then Hadamard's matrix: orthogonal, and every entry has the same size. headdim is a power of
    two."""
    if headdim & (headdim - 1):
        raise ValueError(f"headdim={headdim} is no power of two")
    matrix = np.ones((1, 1))
    while len(matrix) < headdim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.default_rng(seed).choice([-1, 1], headdim)
    return (signs[:, None] * matrix / np.sqrt(headdim)).astype(np.float32)


def add_products(acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """acc + a b as the tensor cores compute it. Each product is exact. Products and the sum so far are then truncated,
    towards zero, to multiples of 2^-13 of the largest among them."""
    for first in range(0, a.shape[1], INSTRUCTION):
        part = slice(first, first + INSTRUCTION)
        products = a[:, part, None] * b[None, part]
        largest = np.maximum(np.abs(acc), np.abs(products).max(axis=1))
        unit = np.ldexp(np.float32(1), np.frexp(largest)[1] - 1 - BITS)
        acc = (np.trunc(products / unit[:, None]).sum(axis=1) + np.trunc(acc / unit)) * unit
    return acc


def _one_head(q, k, v, last_key, block_q, block_k, two_levels):
    """Returns out and lse, float32."""
    scale = np.float32(q.shape[1] ** -0.5)
    out, lse = np.zeros((len(q), v.shape[1]), np.float32), np.full(len(q), -np.inf, np.float32)
    blocks = [slice(j, j + block_k) for j in range(0, len(k), block_k)]
    keys, values = [quantised(k[block]) for block in blocks], [quantised(v[block]) for block in blocks]
    for i in range(0, len(q), block_q):
        rows = slice(i, i + block_q)
        q8, q_factor = quantised(q[rows])
        last = last_key[rows]
        row_max, row_sum = np.full(len(q8), -np.inf, np.float32), np.zeros(len(q8), np.float32)
        acc, acc_factor = np.zeros((len(q8), v.shape[1]), np.float32), np.float32(1)  # out is about acc * acc_factor
        for block, (k8, k_factor), (v8, v_factor) in zip(blocks, keys, values, strict=True):
            if block.start > last.max():
                break
            s = add_products(np.zeros((len(q8), len(k8)), np.float32), q8, k8.T) * (q_factor * k_factor * scale)
            s = np.where(np.arange(block.start, block.start + len(k8)) <= last[:, None], s, -np.inf)
            new_max = np.maximum(row_max, s.max(axis=1))
            shift = np.where(np.isneginf(new_max), 0, new_max)
            p = np.exp(s - shift[:, None])
            correction = np.exp(row_max - shift)
            row_sum = correction * row_sum + p.sum(axis=1)
            row_max = new_max
            acc *= (correction * (acc_factor / v_factor))[:, None]
            acc_factor = v_factor
            p8 = round_e4m3(p * P_FACTOR)
            if two_levels:  # the short sum begins at zero, and acc + is an addition in float32
                acc += add_products(np.zeros_like(acc), p8, v8)
            else:
                acc = add_products(acc, p8, v8)
        seen = row_sum > 0
        row_sum = np.where(seen, row_sum, 1)
        out[rows] = acc / row_sum[:, None] * (acc_factor / P_FACTOR)
        lse[rows] = np.where(seen, row_max + np.log(row_sum), -np.inf)
    return out, lse


def flash_attention_fp8(
    q, k, v, *, causal=False, block_q=64, block_k=128, rotate=False, two_levels=True, one_block=False
):
    """Attention of q (batch, seqlen_q, nheads, headdim) over k and v (batch, seqlen_k, nheads_k, headdim). This
    function rounds them to 8 bits. Returns out and lse (batch, nheads, seqlen_q) in float32. With one_block a head has
    one factor for all its rows, instead of one for each block."""
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    batch, seqlen_q, nheads, headdim = q.shape
    seqlen_k, group = k.shape[1], nheads // k.shape[2]
    last_key = np.arange(seqlen_q) + seqlen_k - seqlen_q if causal else np.full(seqlen_q, seqlen_k - 1)
    out, lse = np.empty(q.shape, np.float32), np.empty((batch, nheads, seqlen_q), np.float32)
    for b, h in np.ndindex(batch, nheads):
        one_q, one_k, one_v = q[b, :, h], k[b, :, h // group], v[b, :, h // group]
        if rotate:
            one_q, one_k = (x @ rotation(headdim) for x in (one_q, one_k))
        if one_block:  # rounded with the factor of the whole head; the blocks' factors then round nothing
            one_q, one_k, one_v = (values * factor for values, factor in map(quantised, (one_q, one_k, one_v)))
        out[b, :, h], lse[b, h] = _one_head(one_q, one_k, one_v, last_key, block_q, block_k, two_levels)
    return out, lse
