"""The Llama model: one forward pass over a KV cache, on the host or on a GPU (`device` is host.Host or cuda.Cuda).

    x = embedding[tokens]                                        (rows, dim), float32
    for every layer:
        q, k, v = wqkv rms(x)                                    k and v go to the cache; RoPE rotates q and k
        x += wo attention(q, cache)                              causal: a row sees the keys up to its own
        x += w2 (silu(w1 rms(x)) * w3 rms(x))
    logits = wcls rms(x)

A device's `linear` is a product together with the norm before it and the sum or the gate after it. `linears` computes
the products between two attentions. A decode step on a GPU therefore takes five kernels a layer, four products and the
attention; with 4-bit weights on Hopper it takes two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..transformer.quantized import PackedW4
from .cache import KVCache
from .checkpoint import Checkpoint
from .config import Config

Array = Any  # numpy.ndarray or cupy.ndarray
Matrix = Any  # Array or PackedW4


@dataclass(frozen=True)
class Layer:
    rms_att: Array  # (dim,)
    wqkv: Matrix  # ((nheads + 2 * nheads_k) * headdim, dim): wq, wk, wv stacked, so that one product gives all three
    bqkv: Array | None  # ((nheads + 2 * nheads_k) * headdim,)
    wo: Matrix  # (dim, nheads * headdim)
    rms_ffn: Array  # (dim,)
    w13: Matrix  # (2 * hidden, dim): gate, then up
    w2: Matrix  # (dim, hidden)


def load_layer(c: Checkpoint, i: int, device) -> Layer:
    matrix, vector = device.matrix, device.vector
    return Layer(
        rms_att=vector(c["rms_att"][i]),
        wqkv=matrix(*c.parts("wqkv", i)),
        bqkv=vector(c["bq"][i], c["bk"][i], c["bv"][i]) if "bq" in c else None,
        wo=matrix(*c.parts("wo", i)),
        rms_ffn=vector(c["rms_ffn"][i]),
        w13=matrix(*c.parts("w13", i), pair=True),
        w2=matrix(*c.parts("w2", i)),
    )


@dataclass(frozen=True)
class Rows:
    """The sequences of one forward pass, all arrays on the device: seqlen new tokens for each."""

    tokens: Array  # (batch, seqlen) int32
    lengths: Array  # (batch,) int32: how many positions of the cache are filled before these tokens
    table: Array | None  # (batch, max_pages) int32: the pages of each sequence; None = contiguous cache
    first: int = 0  # contiguous: sequence b is row first + b of the cache
    longest: int = 0  # an upper bound of lengths + seqlen, known to the host


class Llama:
    """A model ready to run: its matrices are on the device.

    Norms, the residual stream and the logits are float32. q, k, v and the cache have the device's `dtype`, matrices its
    `matrix_dtype`. On the host that is by default float32, the type in which BLAS is fast. There float32 tensors stay
    views of the mapped file, except wqkv and w13: stacking them copies them once.
    """

    def __init__(self, checkpoint: Checkpoint, device):
        self.config, self.device = checkpoint.config, device
        with device.scope():
            self._load(checkpoint)
        device.synchronize()

    def _load(self, c: Checkpoint) -> None:
        matrix, vector = self.device.matrix, self.device.vector
        self.layers = [load_layer(c, i, self.device) for i in range(self.config.n_layers)]
        self.embedding = matrix(c["token_embedding"])
        self.rms_final = vector(c["rms_final"])
        self.wcls = self.embedding if c.tied else matrix(c["wcls"])

    @property
    def weight_bytes(self) -> int:
        """The size of the model's arrays, including those in a mapped file."""
        return self.step_bytes + (0 if self.wcls is self.embedding else self.embedding.nbytes)

    @property
    def packed(self) -> list[PackedW4]:
        """The 4-bit matrices."""
        return [a for layer in self.layers for a in vars(layer).values() if isinstance(a, PackedW4)]

    @property
    def step_bytes(self) -> int:
        """The bytes that a decode step reads: all arrays except an embedding that is not also the classifier."""
        arrays = [a for layer in self.layers for a in vars(layer).values() if a is not None]
        arrays += [self.rms_final, self.wcls]
        return sum(array.bytes if isinstance(array, PackedW4) else array.nbytes for array in arrays)

    def forward(self, rows: Rows, cache: KVCache) -> Array:
        """Appends the tokens' keys and values to the cache; returns the logits after the last token, (batch, vocab)
        float32."""
        x = self.device.embed(self.embedding, rows.tokens)
        x = blocks(self.device, self.config, self.layers, x, rows, cache)
        last = x.reshape(*rows.tokens.shape, self.config.dim)[:, -1]
        return self.device.linear(last, self.wcls, norm=self.rms_final, eps=self.config.rms_eps)


def blocks(device, config: Config, layers: Sequence[Layer], x: Array, rows: Rows, cache: KVCache) -> Array:
    """Runs Transformer blocks; layer i uses entry i of the cache. x and the result are (batch * seqlen, dim) float32; x
    may be overwritten."""
    batch, seqlen = rows.tokens.shape
    nheads, nheads_k, headdim = config.n_heads, config.n_kv_heads, config.head_dim
    [qkv] = device.linears([_project(device, config, layers[0], x)], (layers[0].wo, layers[0].w13))
    for i, layer in enumerate(layers):
        after = layers[i + 1] if i + 1 < len(layers) else None
        heads = qkv.reshape(batch, seqlen, nheads + 2 * nheads_k, headdim)
        q, k, v = heads[:, :, :nheads], heads[:, :, nheads : nheads + nheads_k], heads[:, :, nheads + nheads_k :]
        attended = device.attend(q, k, v, cache.k[i], cache.v[i], rows, cache.rope, config)
        attended = attended.reshape(batch * seqlen, nheads * headdim)
        ffn = {"norm": layer.rms_ffn, "eps": config.rms_eps, "swiglu": True, "out_dtype": device.between}
        products = [  # an integer stands for the result of that product
            {"x": attended, "weight": layer.wo, "residual": x},
            {"x": 0, "weight": layer.w13, **ffn},
            {"x": 1, "weight": layer.w2, "residual": 0},
        ]
        if after:
            products.append(_project(device, config, after, 2))
        _, _, x, *rest = device.linears(products, (after.wo, after.w13) if after else ())
        qkv = rest[0] if rest else None
    return x


def _project(device, config: Config, layer: Layer, x: Array | int) -> dict[str, Any]:
    """The product that gives q, k and v, as an argument of device.linears."""
    norm = {"norm": layer.rms_att, "eps": config.rms_eps}
    return {"x": x, "weight": layer.wqkv, **norm, "bias": layer.bqkv, "out_dtype": device.dtype}
