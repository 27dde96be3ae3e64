"""Measures what 4-bit weights cost a model (errors of matrices and blocks, perplexity), and chooses which matrices stay
wider.

Everything is compared with the same model with 16-bit matrices. Products are computed in float32 on the host, with the
weights decoded as the kernels decode them, so that only the weights differ. One layer at a time is in memory, for all
of the text.

    error        of a matrix: |q - w| / |w|, Frobenius norms
    block error  |y' - y| / |y - x|: x goes into a block, y comes out, y' with 4-bit weights; relative to what the block
                 adds to x
    rise         of the perplexity, in percent
    divergence   mean of KL(p | p') over the tokens, in nats: p from the 16-bit model, p' from the 4-bit one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flash_attn_minimal.errors import BadArgument
from flash_attn_minimal.llama.cache import KVCache
from flash_attn_minimal.llama.checkpoint import STACKED, Checkpoint
from flash_attn_minimal.llama.engine import Engine
from flash_attn_minimal.llama.host import Host
from flash_attn_minimal.llama.model import Layer, Llama, Rows, blocks, load_layer
from flash_attn_minimal.llama.sampling import Sampling
from flash_attn_minimal.llama.w4 import Place
from flash_attn_minimal.transformer._safetensors import numpy_dtype
from flash_attn_minimal.transformer.quantized import W4Weight

CHUNK = 1 << 26  # float32 numbers in the largest array
WINDOW = 512  # the most tokens in one window
WRITERS = 16  # sequences that a model writes at once when it writes its own text
BUDGET = 1.0  # percent by which the perplexity may rise
HELD_OUT = "held_out.txt"  # a file beside a checkpoint: text that the model was not trained on
CURVE = 6  # points that are measured before the search, between all matrices in 4 bits and none


# ---- text ----


def read_windows(text: str, tokenizer: Any, context: int, tokens: int) -> np.ndarray:
    """(n, seqlen + 1) tokens, where each row overlaps the next by one. Paragraphs (separated by empty lines) are
    encoded one by one, as texts of their own, and joined."""
    ids: list[int] = []
    for paragraph in text.split("\n\n"):
        if paragraph.strip():
            ids += tokenizer.encode(paragraph.strip())
        if len(ids) > tokens:
            break
    seqlen = min(context, WINDOW, (len(ids) - 1) // 2)
    if seqlen < 8:
        raise BadArgument(f"the text has {len(ids)} tokens: at least 17 are needed")
    count = min(max(2, tokens // seqlen), (len(ids) - 1) // seqlen)
    return np.stack([np.array(ids[i * seqlen : (i + 1) * seqlen + 1], np.int32) for i in range(count)])


def write_windows(checkpoint: Checkpoint, tokenizer: Any, tokens: int, seed: int) -> np.ndarray:
    """As read_windows, but each row is a text that the model writes at temperature 1. On such text the rise of the loss
    estimates the divergence."""
    start = tokenizer.encode("")
    if not start:
        raise BadArgument("this model's tokenizer puts no token in front of a text to begin one with; give a text")
    seqlen = min(checkpoint.config.seq_len, WINDOW)
    count = max(2, tokens // seqlen)
    engine = Engine(Llama(checkpoint, Host()), min(count, WRITERS), seqlen)
    requests = [engine.add(start, seqlen + 1 - len(start), Sampling(1.0, 0, 1.0, seed + i)) for i in range(count)]
    engine.run()
    return np.array([request.prompt + request.tokens for request in requests], np.int32)


def find_text(
    checkpoint: Checkpoint, tokenizer: Any, tokens: int, seed: int = 0, path: str | None = None
) -> tuple[np.ndarray, str]:
    """Windows of tokens and their source: the file `path`, HELD_OUT beside the checkpoint, or the model itself."""
    beside = Path(checkpoint.path).with_name(HELD_OUT)
    file = Path(path) if path else beside if beside.is_file() else None
    if file is None:
        windows = write_windows(checkpoint, tokenizer, tokens, seed)
        return windows, f"written by the model itself at temperature 1, seed {seed}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # unreadable, not UTF-8, or an impossible file name
        raise BadArgument(f"text {str(file)!r}: {error}") from None
    return read_windows(text, tokenizer, checkpoint.config.seq_len, tokens), file.name


# ---- the blocks over the text ----


@dataclass(frozen=True)
class Loss:
    """The loss of one variant over all tokens of a text, compared with 16 bit."""

    nats: float  # the mean loss
    rise: float  # of the perplexity, in percent
    rise_error: float  # the standard error of `rise`
    divergence: float

    def row(self) -> dict[str, float]:
        return {"perplexity": _grow(math.exp, self.nats), "loss": self.nats} | {
            name: getattr(self, name) for name in ("rise", "rise_error", "divergence")
        }


Change = Callable[[int, Layer], Layer]  # layer number, its 16-bit matrices -> the variant's matrices


class Text:
    """Runs a model's blocks over windows of text."""

    def __init__(self, checkpoint: Checkpoint, windows: np.ndarray):
        self.checkpoint, self.windows, self.host = checkpoint, windows, Host()
        self.narrow = numpy_dtype(checkpoint.dtype if checkpoint.dtype in ("float16", "bfloat16") else "bfloat16")
        config = checkpoint.config
        self.batch = max(1, CHUNK // (max(2 * config.hidden_dim, config.vocab_size) * (windows.shape[1] - 1)))
        one = replace(config, n_layers=1)
        self.cache = KVCache(self.host, one, min(self.batch, len(windows)), windows.shape[1] - 1)

    def rounded(self, matrix: np.ndarray) -> np.ndarray:
        return matrix.astype(self.narrow).astype(np.float32)

    def stored(self, layer: int) -> Layer:
        return load_layer(self.checkpoint, layer, self.host)

    def sixteen(self, stored: Layer) -> Layer:
        return replace(stored, **{name: self.rounded(getattr(stored, name)) for name in STACKED})

    def embed(self, round_to_16: bool = True) -> np.ndarray:
        x = self.host.embed(np.asarray(self.checkpoint["token_embedding"]), self.windows[:, :-1])
        return self.rounded(x) if round_to_16 else x

    def block(self, layer: Layer, x: np.ndarray) -> np.ndarray:
        """Runs one block on all windows. x and the result are (n * seqlen, dim)."""
        config, cache, parts = self.checkpoint.config, self.cache, []
        seqlen = self.windows.shape[1] - 1
        for start in range(0, len(self.windows), self.batch):
            tokens = self.windows[start : start + self.batch, :-1]
            rows = Rows(tokens, np.zeros(len(tokens), np.int32), None, 0, seqlen)
            part = x[start * seqlen : (start + len(tokens)) * seqlen]
            parts.append(blocks(self.host, config, [layer], part, rows, cache))
        return np.concatenate(parts)

    def losses(self, sixteen: np.ndarray, variants: dict[str, np.ndarray], wide: str = "") -> dict[str, Loss]:
        """The losses of the variants, from the outputs of their last blocks; the name "" is for 16 bit. The variant
        `wide` has the classifier as stored."""
        c, host = self.checkpoint, self.host
        norm, eps = host.vector(c["rms_final"]), c.config.rms_eps
        stored = host.matrix(c["wcls"])
        narrow = self.rounded(stored)
        targets = self.windows[:, 1:].reshape(-1)
        nats = {name: np.empty(len(targets)) for name in ("", *variants)}
        divergence = dict.fromkeys(nats, 0.0)
        step = max(1, CHUNK // c.config.vocab_size)
        for start in range(0, len(targets), step):
            here = slice(start, start + step)
            logs = _log_softmax(host.linear(sixteen[here], narrow, norm=norm, eps=eps))
            p = np.exp(logs)
            for name in nats:
                found = logs
                if name:
                    found = _log_softmax(
                        host.linear(variants[name][here], stored if name == wide else narrow, norm=norm, eps=eps)
                    )
                    divergence[name] += float((p * (logs - found)).sum(dtype=np.float64))
                nats[name][here] = -np.take_along_axis(found, targets[here, None], 1)[:, 0]
        out = {}
        for name, mine in nats.items():
            apart = mine - nats[""]
            rise = 100 * _grow(math.expm1, float(apart.mean()))
            error = 100 * float(apart.std()) / math.sqrt(len(apart))
            out[name] = Loss(float(mine.mean()), rise, error, divergence[name] / len(apart))
        return out

    def run(self, variants: dict[str, Change], wide: str = "") -> dict[str, Loss]:
        """The loss of each variant of the matrices, and under the name "" that of 16 bit. `wide`, if given, names one
        more variant: everything as stored."""
        base = self.embed()
        xs = dict.fromkeys(variants, base)
        if wide:
            xs[wide] = self.embed(False)
        for i in range(self.checkpoint.config.n_layers):
            stored = self.stored(i)
            layer = self.sixteen(stored)
            base = self.block(layer, base)
            for name in xs:
                xs[name] = self.block(stored if name == wide else variants[name](i, layer), xs[name])
        return self.losses(base, xs, wide)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


# ---- the errors of one format ----


@dataclass(frozen=True)
class MatrixError:
    layer: int
    matrix: str
    weights: int
    error: float
    block_error: float  # of its block, if only this matrix is in 4 bits

    @property
    def place(self) -> Place:
        return self.layer, self.matrix

    @property
    def harm(self) -> float:
        """The squared block error divided by the number of weights that 16 bits would widen."""
        return self.block_error**2 / self.weights


@dataclass(frozen=True)
class Errors:
    matrices: list[MatrixError]
    blocks: list[float]  # the block error with all four matrices in 4 bits, for each layer
    quantized: dict[Place, Any]  # W4Weight

    def change(self, kept: Iterable[Place] = ()) -> Change:
        kept = frozenset(kept)

        def variant(i: int, layer: Layer) -> Layer:
            return replace(layer, **{n: self.decoded(i, n) for n in STACKED if (i, n) not in kept})

        return variant

    def decoded(self, layer: int, name: str) -> np.ndarray:
        return np.asarray(self.quantized[layer, name].dequantize("float32"))


def measure(text: Text, weights: str) -> Errors:
    """The errors of every matrix and block. Each block gets the input that it gets in the 16-bit model."""
    errors = Errors([], [], {})
    x = text.embed()
    for i in range(text.checkpoint.config.n_layers):
        stored = text.stored(i)
        layer = text.sixteen(stored)
        y = text.block(layer, x)
        added = _norm(y - x)
        decoded = {}
        for name in STACKED:
            w = getattr(stored, name)
            errors.quantized[i, name] = W4Weight.quantize(w, weights)
            decoded[name] = errors.decoded(i, name)
            alone = _share(_norm(text.block(replace(layer, **{name: decoded[name]}), x) - y), added)
            error = _share(_norm(decoded[name] - w), _norm(w))
            errors.matrices.append(MatrixError(i, name, w.size, error, alone))
        errors.blocks.append(_share(_norm(text.block(replace(layer, **decoded), x) - y), added))
        x = y
    return errors


def _share(error: float, whole: float) -> float:
    """error / whole. If whole is 0, as for a matrix of zeros: 0 without an error, else infinity."""
    return error / whole if whole else math.inf if error else 0.0


def _grow(exp: Callable[[float], float], x: float) -> float:
    """exp(x), or infinity if it overflows: the loss of a damaged model has no bound."""
    try:
        return exp(x)
    except OverflowError:
        return math.inf


def _norm(x: np.ndarray) -> float:
    return math.sqrt(float(np.einsum("ij,ij->", x, x, dtype=np.float64)))


# ---- mixed ----


@dataclass(frozen=True)
class Choice:
    kept: frozenset[Place]
    curve: list[dict[str, float]]  # on the text of the choice: kept matrices, their share of the weights, loss


def choose(text: Text, errors: Errors, budget: float, curve: bool = False) -> Choice:
    """Chooses the matrices that stay 16 bits wide: the most harmful ones, as few as keep the rise of the perplexity
    within `budget` percent. The rise is assumed to fall with their number, so a binary search finds it."""
    order = sorted(errors.matrices, key=lambda m: (-m.harm, m.place))
    total = sum(m.weights for m in order)
    found: dict[int, Loss] = {}

    def look(counts: Iterable[int]) -> None:
        new = {str(n): errors.change(m.place for m in order[:n]) for n in counts if n not in found}
        losses = text.run(new) if new else {}
        found.update({int(name): losses[name] for name in new})

    look(round(i * len(order) / CURVE) for i in range(CURVE)) if curve else look([0])
    within = min((n for n in found if found[n].rise <= budget), default=len(order))  # with all wide there is no rise
    below = max((n for n in found if n < within), default=-1)
    while within - below > 1:
        look([middle := (below + within) // 2])
        below, within = (below, middle) if found[middle].rise <= budget else (middle, within)
    points = []
    for n in sorted(found):
        share = sum(m.weights for m in order[:n]) / total
        points.append({"kept": n, "share": share, "rise": found[n].rise, "divergence": found[n].divergence})
    kept = frozenset(m.place for m in order[:within])
    return Choice(kept, points)
