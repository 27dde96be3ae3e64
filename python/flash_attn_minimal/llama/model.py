"""The Llama model: one forward pass with a KV cache, on NumPy or CuPy arrays alike (`xp` is the one or the other).

    x = embedding[tokens]                                  (batch, seqlen, dim), float32
    for every layer:
        q, k, v = rope(wqkv rms(x))                        k and v go to the cache rows start .. start + seqlen
        x += wo attention(q, cache k, cache v)             causal, hung from the bottom-right corner
        x += w2 (silu(w1 rms(x)) * w3 rms(x))
    logits = wcls rms(x)

The matrix products belong to NumPy's BLAS or CuPy's cuBLAS. Attention is `flash` (this library's kernels) or `standard`
(softmax of the whole score matrix in plain array operations, which runs without the library and shows what flash
attention replaces).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._library import BadArgument
from .weights import Checkpoint

Array = Any  # numpy.ndarray or cupy.ndarray
RMS_EPS = 1e-5
ROPE_THETA = 10000.0


def standard_attention(xp, q: Array, k: Array, v: Array) -> Array:
    """Causal attention, hung from the bottom-right corner, with the whole score matrix of every head in memory.

    q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim) -> the shape of q.
    16-bit inputs are widened to float32 first.
    """
    batch, seqlen_q, nheads, headdim = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    group = nheads // nheads_k  # the query heads of one key head stand side by side, so they become rows of one product
    rows = (
        q.reshape(batch, seqlen_q, nheads_k, group, headdim)
        .transpose(0, 2, 3, 1, 4)
        .reshape(batch, nheads_k, group * seqlen_q, headdim)
    )
    keys = k.transpose(0, 2, 3, 1).astype(xp.float32, copy=False)
    values = v.transpose(0, 2, 1, 3).astype(xp.float32, copy=False)
    s = (rows.astype(xp.float32, copy=False) * headdim**-0.5) @ keys  # (batch, nheads_k, group * seqlen_q, seqlen_k)
    if seqlen_q > 1:  # a single row sees every key
        visible = xp.arange(seqlen_k) <= xp.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
        s = s.reshape(batch, nheads_k, group, seqlen_q, seqlen_k)
        s = xp.where(visible, s, xp.float32(-np.inf)).reshape(batch, nheads_k, group * seqlen_q, seqlen_k)
    p = xp.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = (p @ values).reshape(batch, nheads_k, group, seqlen_q, headdim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, seqlen_q, nheads, headdim).astype(q.dtype, copy=False)


def flash_attention(xp, q: Array, k: Array, v: Array) -> Array:
    """The same through this library; k and v are read where they lie, by their strides."""
    from ..attention import flash_attn_func

    return flash_attn_func(q, k, v, causal=True)


ATTENTIONS: dict[str, Callable[[Any, Array, Array, Array], Array]] = {
    "standard": standard_attention,
    "flash": flash_attention,
}


class KVCache:
    """Keys (already rotated) and values of every position so far, in one allocation made at the start.

    k[layer], v[layer] are (batch, seqlen, nheads_k, headdim), of which rows 0 .. length - 1 are filled. Attention reads
    the view [:, :n]: a strided array, not a copy.
    """

    def __init__(self, xp, layers: int, batch: int, seqlen: int, nheads_k: int, headdim: int, dtype):
        storage = xp.empty((layers, 2, batch, seqlen, nheads_k, headdim), dtype)
        self.k = [storage[layer, 0] for layer in range(layers)]
        self.v = [storage[layer, 1] for layer in range(layers)]
        self.seqlen, self.nbytes = seqlen, storage.nbytes
        self.length = 0


@dataclass(frozen=True)
class Layer:
    rms_att: Array  # (dim,)
    wqkv: Array  # ((nheads + 2 * nheads_k) * headdim, dim): wq, wk, wv stacked, so that one product gives all three
    wo: Array  # (dim, nheads * headdim)
    rms_ffn: Array  # (dim,)
    w13: Array  # (2 * hidden, dim): gate, then up
    w2: Array  # (dim, hidden)


class Llama:
    """A model ready to run.

    dtype is that of q, k, v and the KV cache. On the CPU the weights and their products stay float32, the one type BLAS
    is fast in; with CuPy and float16 the matrices are float16 too (cuBLAS sums in float32). Norms, RoPE, the residual
    stream and the logits are float32.

    On the CPU the tensors stay views of the mapped file, except wqkv and w13: fusing them copies them once at load.
    """

    def __init__(self, checkpoint: Checkpoint, xp=np, attention: str = "flash", dtype="float32"):
        if attention not in ATTENTIONS:
            raise BadArgument(f"attention={attention!r} is none of {', '.join(sorted(ATTENTIONS))}")
        config = checkpoint.config
        self.config, self.xp, self.dtype = config, xp, np.dtype(dtype)
        self._attend = ATTENTIONS[attention]
        matrix_dtype = np.float16 if xp is not np and self.dtype == np.float16 else np.float32

        def matrix(*parts: np.ndarray) -> Array:
            host = parts[0] if len(parts) == 1 else np.concatenate(parts)
            return xp.asarray(host.astype(matrix_dtype, copy=False))

        c = checkpoint
        self.layers = [
            Layer(
                rms_att=xp.asarray(c["rms_att"][i]),
                wqkv=matrix(c["wq"][i], c["wk"][i], c["wv"][i]),
                wo=matrix(c["wo"][i]),
                rms_ffn=xp.asarray(c["rms_ffn"][i]),
                w13=matrix(c["w1"][i], c["w3"][i]),
                w2=matrix(c["w2"][i]),
            )
            for i in range(config.n_layers)
        ]
        self.embedding = matrix(c["token_embedding"])
        self.rms_final = xp.asarray(c["rms_final"])
        self.wcls = self.embedding if c.tied else matrix(c["wcls"])

        # RoPE turns pair (2i, 2i + 1) of a head at position t by the angle t * theta^(-2i / headdim): as complex
        # numbers, one product.
        frequencies = ROPE_THETA ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        angles = np.outer(np.arange(config.seq_len), frequencies)
        self.rope = xp.asarray(np.exp(1j * angles).astype(np.complex64)[:, None])  # (seq_len, 1, headdim / 2)

    @property
    def weight_bytes(self) -> int:
        """What the model's arrays hold, mapped or not."""
        arrays = [array for layer in self.layers for array in vars(layer).values()]
        arrays += [self.embedding, self.rms_final, self.rope]
        arrays += [] if self.wcls is self.embedding else [self.wcls]
        return sum(array.nbytes for array in arrays)

    def new_cache(self, batch: int = 1, seqlen: int | None = None) -> KVCache:
        """An empty cache for `seqlen` positions (the model's context when None)."""
        config = self.config
        seqlen = config.seq_len if seqlen is None else seqlen
        if not 1 <= seqlen <= config.seq_len:
            raise BadArgument(f"seqlen={seqlen} is outside 1 .. {config.seq_len}, the model's context")
        return KVCache(self.xp, config.n_layers, batch, seqlen, config.n_kv_heads, config.head_dim, self.dtype)

    def forward(self, tokens, cache: KVCache) -> Array:
        """tokens (batch, seqlen), the next ones of each sequence -> logits (batch, vocab) behind the last of them.

        A whole prompt in one call is the prefill; one token per call is a decode step. The cache grows by seqlen.
        """
        xp, config = self.xp, self.config
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or tokens.size == 0:
            raise BadArgument(f"tokens has shape {tokens.shape}, not (batch, seqlen)")
        if tokens.min() < 0 or tokens.max() >= config.vocab_size:
            raise BadArgument(
                f"tokens reach from {tokens.min()} to {tokens.max()}, "
                f"outside the vocabulary 0 .. {config.vocab_size - 1}"
            )
        batch, seqlen = tokens.shape
        start, end = cache.length, cache.length + seqlen
        if end > cache.seqlen:
            raise BadArgument(
                f"seqlen={seqlen} tokens at position {start} go beyond the {cache.seqlen} positions of the cache"
            )
        nheads, nheads_k, headdim = config.n_heads, config.n_kv_heads, config.head_dim
        rope = self.rope[start:end]

        x = self.embedding[xp.asarray(tokens.ravel())].astype(xp.float32, copy=False)  # (batch * seqlen, dim)
        for layer, cache_k, cache_v in zip(self.layers, cache.k, cache.v, strict=True):
            qkv = self._linear(self._rms_norm(x, layer.rms_att), layer.wqkv)
            pairs = qkv.view(xp.complex64).reshape(batch, seqlen, nheads + 2 * nheads_k, headdim // 2)
            q_and_k = pairs[:, :, : nheads + nheads_k]
            q_and_k *= rope  # in place, so `heads` sees the rotated ones
            heads = qkv.reshape(batch, seqlen, nheads + 2 * nheads_k, headdim)
            cache_k[:, start:end] = heads[:, :, nheads : nheads + nheads_k]
            cache_v[:, start:end] = heads[:, :, nheads + nheads_k :]
            q = heads[:, :, :nheads].astype(self.dtype, copy=False)
            attended = self._attend(xp, q, cache_k[:, :end], cache_v[:, :end])
            x += self._linear(attended.reshape(batch * seqlen, nheads * headdim), layer.wo)

            gate_up = self._linear(self._rms_norm(x, layer.rms_ffn), layer.w13)
            gate, up = gate_up[:, : config.hidden_dim], gate_up[:, config.hidden_dim :]
            x += self._linear(self._silu(gate) * up, layer.w2)
        cache.length = end
        last = x.reshape(batch, seqlen, config.dim)[:, -1]
        return self._linear(self._rms_norm(last, self.rms_final), self.wcls)

    def _linear(self, x: Array, weight: Array) -> Array:
        """x (rows, in) times weight (out, in) transposed, float32."""
        return (x.astype(weight.dtype, copy=False) @ weight.T).astype(self.xp.float32, copy=False)

    def _rms_norm(self, x: Array, weight: Array) -> Array:
        mean_square = (x * x).sum(-1, keepdims=True) * (1 / self.config.dim)
        return x * weight / self.xp.sqrt(mean_square + RMS_EPS)

    def _silu(self, x: Array) -> Array:
        """x / (1 + exp(-x)), by way of tanh, which cannot overflow."""
        half = x * 0.5
        return half + half * self.xp.tanh(half)
