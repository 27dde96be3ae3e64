"""A Hugging Face model's folder: config.json, *.safetensors (with an index when there are several), tokenizer.json.

Reads LlamaForCausalLM, MistralForCausalLM and Qwen2ForCausalLM, which are one architecture: Mistral's has a sliding
window, Qwen2's has biases on q, k and v. Fields of config.json that change the arithmetic are interpreted or refused;
other fields (dropout for training, names, versions) are not read.

tokenizer.json is read by the tokenizers package.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._core.files import Fields, is_inside, is_int, json_of, quoted, read_bytes
from ..errors import BadArgument
from ..transformer._safetensors import read_safetensors
from .checkpoint import Checkpoint, bad_checkpoint, matrix_shapes
from .config import MAX_DIMENSION, Config, RopeScaling

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
NAMES = {  # this package's name -> Hugging Face's; {} is the layer
    "token_embedding": "model.embed_tokens.weight",
    "rms_att": "model.layers.{}.input_layernorm.weight",
    "wq": "model.layers.{}.self_attn.q_proj.weight",
    "wk": "model.layers.{}.self_attn.k_proj.weight",
    "wv": "model.layers.{}.self_attn.v_proj.weight",
    "wo": "model.layers.{}.self_attn.o_proj.weight",
    "bq": "model.layers.{}.self_attn.q_proj.bias",
    "bk": "model.layers.{}.self_attn.k_proj.bias",
    "bv": "model.layers.{}.self_attn.v_proj.bias",
    "rms_ffn": "model.layers.{}.post_attention_layernorm.weight",
    "w1": "model.layers.{}.mlp.gate_proj.weight",
    "w2": "model.layers.{}.mlp.down_proj.weight",
    "w3": "model.layers.{}.mlp.up_proj.weight",
    "rms_final": "model.norm.weight",
    "wcls": "lm_head.weight",
}
CONTEXT = 16  # the number of tokens before a token that its text may depend on; every tokenizer needs fewer
SHORT = 1 << 12  # characters of a text that is encoded within a few milliseconds
UNREAD = (".rotary_emb.inv_freq",)  # endings of tensors in older files that follow from config.json


def _read_json(path: Path) -> dict[str, Any]:
    found = json_of(f"{str(path)!r} is not JSON", read_bytes("file", path))
    if not isinstance(found, dict):
        raise BadArgument(f"{str(path)!r} holds a JSON {type(found).__name__}: expected an object")
    return found


# ---- config.json ----


class _Rope(NamedTuple):
    """The statements of one object of config.json about RoPE; None for what it does not state."""

    theta: float | None
    kind: str | None  # "default": without scaling
    scaling: RopeScaling | None


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """rope_theta and rope_scaling, or the one field rope_parameters that newer files have instead. A file may have all
    three: rope_parameters may state only rope_theta, and fields that state the same thing must agree. rope_theta inside
    an object takes precedence over that of the file, as in transformers."""
    names = [name for name in ("rope_parameters", "rope_scaling") if fields.fields.get(name) not in (None, {})]
    stated = [_rope_of(fields, name) for name in names]
    thetas = {x.theta for x in stated if x.theta is not None}
    scalings = {x.scaling for x in stated if x.kind is not None}
    if len(thetas) > 1 or len(scalings) > 1:
        other = quoted(fields.fields["rope_parameters"])
        raise fields.refuse("rope_scaling", f"contradicts rope_parameters={other}: they must agree")
    theta = thetas.pop() if thetas else fields.number("rope_theta", 10000.0)
    return theta, scalings.pop() if scalings else None


def _rope_of(fields: Fields, name: str) -> _Rope:
    """Reads the object `name`. It may hold one object for each type of layer; these must then agree."""
    found = Fields(fields.where, fields.fields[name], f"{name}.")
    kinds = {kind: x for kind, x in found.fields.items() if isinstance(x, dict)}
    if not kinds:
        return _one_rope(fields, found)
    if others := [key for key, x in found.fields.items() if key not in kinds and x is not None]:
        raise fields.refuse(name, f"has {quoted(others[0])} beside objects for types of layers")
    ropes = [_one_rope(fields, Fields(fields.where, x, f"{name}.{kind}.")) for kind, x in kinds.items()]
    if any(rope != ropes[0] for rope in ropes):
        raise fields.refuse(name, "differs between types of layers, which all turn alike here")
    return ropes[0]


def _one_rope(fields: Fields, scaling: Fields) -> _Rope:
    found = scaling.fields
    theta = None if found.get("rope_theta") is None else scaling.number("rope_theta")
    key = "type" if "rope_type" not in found and "type" in found else "rope_type"
    kind = found.get(key)
    if found.get("type", kind) != kind:
        raise scaling.refuse("type", f"contradicts rope_type={quoted(kind)}")
    scaling.must_be("partial_rotary_factor", 1.0, 1, None)
    if key not in found and "factor" in found:
        raise scaling.refuse(key, f"says no kind of scaling, but factor={quoted(found['factor'])}")
    if key not in found or kind == "default":
        return _Rope(theta, kind, None)
    if kind == "linear":
        return _Rope(theta, kind, RopeScaling(kind, scaling.number("factor")))
    if kind != "llama3":
        raise scaling.refuse(key, "is not understood (only 'default', 'linear', 'llama3')")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.refuse("low_freq_factor", f"is not below high_freq_factor={high}")
    name = "original_max_position_embeddings"
    given = [x for x in (scaling, fields) if x.fields.get(name) is not None]  # transformers takes the file's
    contexts = [x.get(name, int) for x in given or [scaling]]
    if len(set(contexts)) > 1:
        raise fields.refuse(name, f"contradicts {scaling.prefix}{name}={contexts[0]}")
    return _Rope(theta, kind, RopeScaling(kind, scaling.number("factor"), low, high, contexts[0]))


def _read_config(path: Path) -> tuple[Config, str, bool, bool]:
    """(config, architecture, tied, biases on q, k and v)"""
    fields = Fields(repr(str(path)), _read_json(path))
    architectures = fields.fields.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures
    if name not in ARCHITECTURES:
        raise BadArgument(f"{str(path)!r}: architectures={quoted(architectures)} is none of {', '.join(ARCHITECTURES)}")
    fields.must_be("hidden_act", "silu")
    fields.must_be("attention_bias", False, None)
    fields.must_be("mlp_bias", False, None)
    fields.must_be("use_sliding_window", False, None)
    fields.must_be("partial_rotary_factor", 1.0, 1, None)
    fields.must_be("quantization_config", None)
    theta, scaling = _rope(fields)
    heads = fields.get("num_attention_heads", int)
    window = fields.get("sliding_window", int, 0) if name == "MistralForCausalLM" else 0
    if window < 0:
        raise fields.refuse("sliding_window", "is negative")
    config = Config(
        dim=fields.get("hidden_size", int),
        hidden_dim=fields.get("intermediate_size", int),
        n_layers=fields.get("num_hidden_layers", int),
        n_heads=heads,
        n_kv_heads=fields.get("num_key_value_heads", int, heads),
        vocab_size=fields.get("vocab_size", int),
        seq_len=fields.get("max_position_embeddings", int, 2048),
        head_size=fields.get("head_dim", int, 0),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_interleaved=False,
        window=window,
    )
    if problem := config.problem():
        raise BadArgument(f"{str(path)!r}: {problem}")
    return config, name, fields.get("tie_word_embeddings", bool, False), name == "Qwen2ForCausalLM"


def stop_ids(folder: str | os.PathLike[str]) -> frozenset[int]:
    """The ids that end a text: eos_token_id of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        found = _read_json(path).get("eos_token_id") if path.is_file() else None
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(is_int(i, -MAX_DIMENSION, MAX_DIMENSION) for i in ids):
                raise BadArgument(f"{str(path)!r}: eos_token_id={quoted(found)} is neither an int nor a list of them")
            return frozenset(ids)
    return frozenset()


# ---- tensors ----


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if not (folder / "model.safetensors").is_file():
            raise bad_checkpoint(folder, f" has neither model.safetensors nor {index.name}")
        return read_safetensors(folder / "model.safetensors")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise BadArgument(f"{str(index)!r} has no weight_map from tensors to files")
    for name, file in weight_map.items():
        if not is_inside(folder, file):
            raise BadArgument(
                f"{str(index)!r}: weight_map {quoted(name)}={quoted(file)} is no file inside the model's folder"
            )
    files = {name: read_safetensors(folder / name) for name in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in files[file]:
            raise BadArgument(f"{str(index)!r} says that {quoted(name)} is in {file!r}, where it is not")
    return {name: files[file][name] for name, file in weight_map.items()}


# ---- the folder ----


def tensor_names(config: Config, tied: bool, biases: bool) -> dict[str, tuple[str, int | None, tuple[int, ...]]]:
    """Hugging Face's name -> (this package's name, layer, shape), in the order in which they are written."""
    matrices = matrix_shapes(config)
    layered: dict[str, tuple[int, ...]] = {"rms_att": (config.dim,), "rms_ffn": (config.dim,), **matrices}
    if biases:
        layered |= {f"b{name}": matrices[f"w{name}"][:1] for name in "qkv"}
    names = {NAMES["token_embedding"]: ("token_embedding", None, (config.vocab_size, config.dim))}
    for layer in range(config.n_layers):
        names |= {NAMES[name].format(layer): (name, layer, shape) for name, shape in layered.items()}
    names[NAMES["rms_final"]] = ("rms_final", None, (config.dim,))
    if not tied:
        names[NAMES["wcls"]] = ("wcls", None, (config.vocab_size, config.dim))
    return names


def load_folder(path: str | os.PathLike[str]) -> Checkpoint:
    """Maps the model in a folder; no tensor is read yet."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise bad_checkpoint(path, " is a folder without config.json: not a Hugging Face model")
    config, architecture, tied, biases = _read_config(folder / "config.json")
    found = _read_tensors(folder)
    if config.n_layers > len(found):  # checked before a name is made for each layer's tensors
        raise bad_checkpoint(path, f": num_hidden_layers={config.n_layers}, but its files hold {len(found)} tensors")
    wanted = tensor_names(config, tied, biases)
    if tied:  # some files hold the classifier anyway
        found.pop(NAMES["wcls"], None)
    tensors: dict[str, Any] = {}
    for name, (ours, layer, shape) in wanted.items():
        if name not in found:
            raise bad_checkpoint(path, f" lacks the tensor {name!r}, {shape}")
        array = found.pop(name)
        if array.shape != shape:
            raise bad_checkpoint(path, f": {name!r} has shape {array.shape}, expected {shape}")
        if layer is None:
            tensors[ours] = array
        else:
            tensors.setdefault(ours, []).append(array)
    if left := sorted(name for name in found if not name.endswith(UNREAD)):
        raise bad_checkpoint(path, f": {quoted(left[0])} is no tensor of this {architecture} ({len(left)} such)")
    dtype = str(tensors["wq"][0].dtype.name)
    return Checkpoint(os.fspath(path), f"Hugging Face {architecture}", tied, config, dtype, tensors)


def _check_tables(path: str | os.PathLike[str], data: bytes) -> None:
    """Raises for a precompiled_charsmap that is too short. It begins with four bytes that give the size of a table in
    it. The package trusts them, and aborts the process if it cannot allocate that much."""
    if not re.search(rb"precompiled_charsmap|\\u00[4-7]", data):  # its letters may be escaped, as in \u0063
        return
    todo = [json_of(f"tokenizer {str(path)!r} is not JSON", data)]
    while todo:
        node = todo.pop()
        if isinstance(node, (dict, list)):
            todo += node.values() if isinstance(node, dict) else node
        if not isinstance(node, dict) or not isinstance(text := node.get("precompiled_charsmap"), str):
            continue
        try:
            table = base64.b64decode(text, validate=True)
        except ValueError as error:
            raise BadArgument(f"tokenizer {str(path)!r}: precompiled_charsmap={quoted(text)}: {error}") from None
        if int.from_bytes(table[:4], "little") > len(table) - 4:
            raise BadArgument(
                f"tokenizer {str(path)!r}: precompiled_charsmap={quoted(text)} has {len(table)} bytes, fewer than the "
                f"table of {int.from_bytes(table[:4], 'little')} that it begins with"
            )


class JsonTokenizer:
    """A tokenizer.json, run by the tokenizers package. It has the interface of tokenizer.Tokenizer."""

    def __init__(self, path: str | os.PathLike[str], stops: frozenset[int] = frozenset()):
        try:
            import tokenizers
        except ImportError as error:
            raise BadArgument(
                f"tokenizer {str(path)!r} needs the tokenizers package (pip install tokenizers): {error}"
            ) from None
        data = read_bytes("tokenizer", path)
        _check_tables(path, data)
        self.path, self.stops = str(path), stops
        with self._refusing("the file"):
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
            self._tokenizer.no_padding()  # a text must be neither padded nor cut
            self._tokenizer.no_truncation()
            added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, piece in added.items() if piece.special)

    @contextlib.contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Turns errors of the package into BadArgument. It raises a bare Exception for whatever it cannot read. Where
        its Rust code panics it raises a PanicException, a BaseException whose class cannot be imported."""
        try:
            yield
        except MemoryError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise  # an interrupt, or the end of the process
            raise BadArgument(f"tokenizer {self.path!r}: {what}: {str(error) or type(error).__name__}") from None

    @property
    def vocab_size(self) -> int:
        with self._refusing("its vocabulary"):
            return self._tokenizer.get_vocab_size()

    @functools.cached_property
    def longest(self) -> int:
        """The number of characters of the longest token."""
        with self._refusing("its vocabulary"):
            return max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str) -> list[int]:
        with self._refusing(f"text {quoted(text)}"):
            if len(text) <= SHORT:
                return self._tokenizer.encode(text).ids
            return self._tokenizer.encode_batch([text])[0].ids  # unlike encode, it releases the GIL

    def decode(self, tokens: Iterable[int]) -> str:
        with self._refusing("decoding"):
            return self._tokenizer.decode(list(tokens))

    def stream(self, tokens: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """The text of the tokens as they come: one string for each token and one more at the end. A token's text can
        depend on the tokens before it, so each string is what decoding one token more has added. An unfinished
        character waits for its last token. after: the tokens before these, whose text is not returned."""
        kept = self._ending([token for token in after if token not in self._special])
        text = self.decode(kept)
        shown = len(text)
        for token in tokens:
            if token in self._special:  # it has no text, and decoding drops it first of all
                yield ""
                continue
            kept.append(token)
            text = self.decode(kept)
            if text.endswith("\ufffd") and len(kept) < 4 * CONTEXT:
                yield ""
                continue
            yield text[shown:]
            if len(kept) >= 2 * CONTEXT:
                kept = self._ending(kept)
                text = self.decode(kept)
            shown = len(text)
        yield text[shown:]

    def _ending(self, tokens: list[int]) -> list[int]:
        """The last tokens of a text, on which alone the text of the next token depends. They begin with a whole
        character: if a run of bytes begins with a part of one, decoding may take the whole run for damaged."""
        for count in range(CONTEXT, CONTEXT + 4):  # a character has at most 4 bytes
            ending = self.decode(tokens[-count:])
            if ending and not ending.startswith("\ufffd"):
                return tokens[-count:]
        return tokens[-CONTEXT:]
