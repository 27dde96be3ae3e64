"""Models with 4-bit weights, made from any checkpoint while it is loaded, and the file that holds one.

The four matrices of a layer (checkpoint.STACKED) become W4Weights. Those in `kept` stay 16 bits wide, and so do the
embedding and the classifier: an embedding is looked up, not multiplied, and every token's logit depends on the
classifier, which may be the embedding.

The file is a safetensors file with this package's names: layers.3.wqkv.codes, .scales and .tensor_scale, or
layers.3.wqkv if kept; layers.3.rms_att, layers.3.bq, ...; token_embedding, rms_final, wcls. Its metadata describe the
model and hold its tokenizer's path and the CRC-32 of every tensor. quantized.load_file can also read it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._arrays import to_numpy
from .._core.files import Fields, is_inside, parse_json, quoted, read_bytes
from ..errors import BadArgument
from ..transformer._safetensors import FLOATS, numpy_dtype, write_safetensors
from ..transformer.quantized import _KEY as FORMATS_KEY
from ..transformer.quantized import BLOCK, W4Weight, load_file, parts_of
from .checkpoint import STACKED, Checkpoint, bad_checkpoint, matrix_shapes
from .config import MAX_DIMENSION, Config, RopeScaling

FORMATS = tuple(BLOCK)
KEY, VERSION = "flash_attn_minimal.llama", 1
PLACE = r"[0-9]{1,9}\.\w{1,16}"  # layer.matrix

Place = tuple[int, str]  # layer, name: one matrix


@dataclasses.dataclass(frozen=True)
class W4Checkpoint(Checkpoint):
    """`tensors` has the names of STACKED in place of their parts; an entry is a W4Weight, or an array if it is kept.
    `dtype` is the 16-bit type of the other matrices."""

    weights: str  # one of FORMATS
    kept: frozenset[Place]
    tokenizer: dict[str, str] | None = None  # "file", a path relative to the checkpoint's folder, and "sha256"
    stops: frozenset[int] = frozenset()  # the ids that end a text, for a tokenizer.json

    def tokenizer_file(self) -> Path:
        folder, wanted = Path(self.path).parent, self.tokenizer
        if wanted is None:
            raise BadArgument(f"checkpoint {self.path!r} names no tokenizer; give its path with --tokenizer")
        name = wanted["file"]
        if not is_inside(folder, name):
            raise BadArgument(
                f"tokenizer {quoted(name)} of checkpoint {self.path!r} is not inside its folder; give the path of one "
                "that you trust with --tokenizer"
            )
        for file in (folder / name, folder / Path(name).name):
            if file.is_file():
                found = hashlib.sha256(read_bytes("tokenizer", file)).hexdigest()
                if found != wanted["sha256"]:
                    raise BadArgument(
                        f"tokenizer {str(file)!r} is not the one of checkpoint {self.path!r}: its sha256 is "
                        f"{found[:12]}..., not {wanted['sha256'][:12]}..."
                    )
                return file
        raise BadArgument(
            f"tokenizer {quoted(name)} of checkpoint {self.path!r} is not there; give its path with --tokenizer"
        )


# ---- quantising while loading ----


def quantize(checkpoint: Checkpoint, weights: str, kept: Iterable[Place] = (), device: Any = None) -> W4Checkpoint:
    """The same model with 4-bit weights. Each matrix is quantised when it is read, on `device` (host.Host,
    cuda.Cuda)."""
    if weights not in FORMATS:
        raise BadArgument(f"weights={weights!r} is none of {', '.join(FORMATS)}")
    if isinstance(checkpoint, W4Checkpoint):
        raise BadArgument(f"checkpoint {checkpoint.path!r} holds {checkpoint.weights} weights already")
    if device is None:
        from .host import Host

        device = Host()
    tensors = {name: checkpoint.tensors[name] for name in checkpoint.tensors if name not in sum(STACKED.values(), ())}
    kept = frozenset(kept)
    tensors |= {name: _Quantized(checkpoint, name, weights, kept, device) for name in STACKED}
    dtype = checkpoint.dtype if checkpoint.dtype in ("float16", "bfloat16") else "bfloat16"
    what = f"{checkpoint.format}, {'mixed ' * bool(kept)}{weights}"
    return W4Checkpoint(
        checkpoint.path, what, checkpoint.tied, checkpoint.config, dtype, tensors, weights=weights, kept=kept
    )


class _Quantized(Sequence):
    """One matrix of STACKED, for every layer."""

    def __init__(self, checkpoint: Checkpoint, name: str, weights: str, kept: frozenset[Place], device: Any):
        self.checkpoint, self.name, self.weights, self.kept, self.device = checkpoint, name, weights, kept, device

    def __len__(self) -> int:
        return self.checkpoint.config.n_layers

    def __getitem__(self, layer: int) -> Any:
        parts = self.checkpoint.parts(self.name, layer)
        whole = self.device.stack(parts, parts[0].dtype)
        if (layer, self.name) in self.kept:
            return whole
        return W4Weight.quantize(whole, self.weights)


# ---- the file ----


def stacked_shapes(config: Config) -> dict[str, tuple[int, int]]:
    shapes = matrix_shapes(config)
    return {name: (sum(shapes[part][0] for part in parts), shapes[parts[0]][1]) for name, parts in STACKED.items()}


def contents(
    config: Config, weights: str, kept: Iterable[Place], dtype: str, tied: bool, biases: bool
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The arrays in the file: name -> (dtype, shape). The dtype of a W4Weight is its format."""
    vocabulary = config.vocab_size, config.dim
    parts, shapes, kept = matrix_shapes(config), stacked_shapes(config), frozenset(kept)
    found: dict[str, tuple[str, tuple[int, ...]]] = {"token_embedding": (dtype, vocabulary)}
    for layer in range(config.n_layers):
        here: dict[str, tuple[str, tuple[int, ...]]] = {n: ("float32", (config.dim,)) for n in ("rms_att", "rms_ffn")}
        if biases:
            here |= {f"b{name}": ("float32", parts[f"w{name}"][:1]) for name in "qkv"}
        here |= {name: (dtype if (layer, name) in kept else weights, shape) for name, shape in shapes.items()}
        found |= {f"layers.{layer}.{name}": entry for name, entry in here.items()}
    found["rms_final"] = "float32", (config.dim,)
    if not tied:
        found["wcls"] = dtype, vocabulary
    return found


def contents_of(c: W4Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    return contents(c.config, c.weights, c.kept, c.dtype, c.tied, "bq" in c.tensors)


def tensor_shapes(c: W4Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    """`contents_of` in safetensors' terms: a W4Weight is three tensors."""
    codes = {native: code for code, native in FLOATS.items()}
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in contents_of(c).items():
        if dtype in codes:
            found[name] = codes[dtype], shape
            continue
        found |= {f"{name}.{part}": (code, size) for part, (_, code, size) in parts_of(dtype, *shape).items()}
    return found


def _arrays(c: W4Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors in the order of tensor_shapes. Each matrix is read only once, because reading quantises it."""
    for name, (dtype, _) in contents_of(c).items():
        _, layer, matrix = name.split(".") if "." in name else ("", "", name)
        whole = c[matrix][int(layer)] if layer else c[name]
        if dtype in FORMATS:
            for part in ("codes", "scales", "tensor_scale"):
                yield f"{name}.{part}", to_numpy(getattr(whole, part))
        else:
            yield name, to_numpy(whole).astype(numpy_dtype(dtype), copy=False)


def save(
    path: str | os.PathLike[str],
    checkpoint: W4Checkpoint,
    tokenizer: str | os.PathLike[str] | None = None,
    stops: Iterable[int] = (),
) -> Path | None:
    """Writes the file. It refers to `tokenizer`, the path of the model's tokenizer. A tokenizer that lies elsewhere is
    copied beside the file, because a checkpoint may only refer to files inside its folder. Returns the path of the
    copy, or None."""
    about: dict[str, Any] = {
        "version": VERSION,
        "source": checkpoint.format,
        "weights": checkpoint.weights,
        "kept": [f"{layer}.{name}" for layer, name in sorted(checkpoint.kept)],
        "dtype": checkpoint.dtype,
        "tied": checkpoint.tied,
        "biases": "bq" in checkpoint.tensors,
        "config": dataclasses.asdict(checkpoint.config),
        "tokenizer": None,
        "stops": sorted(stops),
    }
    if tokenizer is not None:
        folder = Path(path).parent
        file = Path(os.path.relpath(tokenizer, folder)).as_posix()
        if not is_inside(folder, file):
            file = f"{Path(path).stem}.{Path(tokenizer).name}"  # such as model.tokenizer.bin
        sha256 = hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()
        about["tokenizer"] = {"file": file, "sha256": sha256}
    formats = {
        name: {"format": dtype, "in_features": shape[1]}
        for name, (dtype, shape) in contents_of(checkpoint).items()
        if dtype in FORMATS
    }
    metadata = {KEY: json.dumps(about), FORMATS_KEY: json.dumps(formats)}
    write_safetensors(path, _arrays(checkpoint), tensor_shapes(checkpoint), metadata)
    if tokenizer is not None:
        place = folder / file
        if not (place.exists() and place.samefile(tokenizer)):
            shutil.copyfile(tokenizer, place)
            return place
    return None


def load(path: str | os.PathLike[str]) -> W4Checkpoint:
    """Maps a file that `save` wrote. Raises BadArgument for any other or damaged file, with the name of the tensor."""

    def bad(why: str) -> BadArgument:
        return bad_checkpoint(path, f": {why}")

    found, metadata = load_file(path)
    if KEY not in metadata:
        raise bad("not written by `python -m flash_attn_minimal quantize`: its metadata do not say what the model is")
    try:
        fields = Fields(f"checkpoint {str(path)!r}: its metadata are damaged", parse_json(metadata[KEY]), f"{KEY}.")
        shape = dict(fields.get("config", dict))
        if isinstance(shape.get("rope_scaling"), dict):
            shape["rope_scaling"] = RopeScaling(**shape["rope_scaling"])
        config = Config(**shape)
    except BadArgument:
        raise
    except (ValueError, TypeError) as error:  # from the two classes: an unknown or a missing field
        raise bad(f"its metadata are damaged: config: {error}") from None
    version, weights, dtype = fields.get("version", int), fields.get("weights", str), fields.get("dtype", str)
    tied, biases, source = fields.get("tied", bool), fields.get("biases", bool), fields.get("source", str)
    stops, tokenizer = frozenset(fields.ints("stops", -MAX_DIMENSION, MAX_DIMENSION)), None
    if fields.fields.get("tokenizer") is not None:
        about = Fields(fields.where, fields.get("tokenizer", dict), f"{fields.prefix}tokenizer.")
        tokenizer = {name: about.get(name, str) for name in ("file", "sha256")}
    places = fields.get("kept", list)
    if not all(isinstance(place, str) and re.fullmatch(PLACE, place) for place in places):
        raise fields.refuse("kept", "is not a list of matrices, such as '3.wqkv'")
    kept = frozenset((int(layer), name) for layer, _, name in (place.partition(".") for place in places))
    problem = config.problem()
    if version != VERSION:
        raise bad(f"version={version!r} is not {VERSION}, which is read")
    if weights not in FORMATS or dtype not in ("float16", "bfloat16"):
        raise bad(f"weights={quoted(weights)} in dtype={quoted(dtype)} are not understood")
    if not problem and config.n_layers > len(found):  # checked before a name is made for each layer's tensors
        problem = f"n_layers={config.n_layers}, but it holds {len(found)} tensors"
    if problem:
        raise bad(problem)
    if strange := [place for place in sorted(kept) if place[1] not in STACKED or place[0] >= config.n_layers]:
        raise bad(f"kept={quoted(strange[0])} is no matrix of the model")

    tensors: dict[str, Any] = {}
    for name, wanted in contents(config, weights, kept, dtype, tied, biases).items():
        if name not in found:
            raise bad(f"lacks the tensor {name!r}, {wanted[0]} {wanted[1]}")
        array = found.pop(name)
        got = array.format if isinstance(array, W4Weight) else array.dtype.name, array.shape
        if got != wanted:
            raise bad(f"tensor {name!r} is {got[0]} {got[1]}: expected {wanted[0]} {wanted[1]}")
        if "." in name:  # the layers come in order
            tensors.setdefault(name.split(".")[2], []).append(array)
        else:
            tensors[name] = array
    if found:
        raise bad(f"{quoted(min(found))} is no tensor of this model ({len(found)} such)")
    return W4Checkpoint(
        os.fspath(path), source, tied, config, dtype, tensors,
        weights=weights, kept=kept, tokenizer=tokenizer, stops=stops,
    )  # fmt: skip
