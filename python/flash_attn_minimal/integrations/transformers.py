"""Attention for Hugging Face transformers (4.57 and newer): `register()` gives it a name for attn_implementation.

    from flash_attn_minimal.integrations import transformers as adapter
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=adapter.register())

Two functions are registered. transformers calls `attention_mask` once in a forward pass, for the keys that each row
sees. Every layer calls `attention` for its result. Between the two goes a `Mask`, which holds edges and lengths, where
transformers' own masks are arrays of q_length x kv_length. Making it does not read the values of position_ids, and
reads those of attention_mask once.

A mask whose form is not known here (prefixes, images that see themselves) stays the array that transformers makes,
which the kernels read.

Models pass arbitrary arguments through to their attention. An argument that holds a tensor and is not known here is
refused, because it may decide which keys a row sees.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .._arrays import torch_modes
from ..errors import BadArgument, Unsupported
from ..kvcache import flash_attn_with_kvcache
from ..torch import flash_attn_with_kvcache as kvcache_operator
from ..torch._inputs import autocast, dense_rows
from ..torch._seeded import attend

torch_modes.active()  # loads PyTorch's functions now, because a trace could not
NAME = "attn_minimal"
_TAKEN = ("flash", "sdpa", "flex_attention")  # transformers looks for these words in a name
FEW_ROWS = 16  # calls with up to this many queries use the kernels for caches

# Arguments with tensors that models pass through to attention, and that do not affect its result.
_WITHOUT_EFFECT = frozenset(
    {
        # inputs of the rotation that q and k have had before
        *("position_ids", "cache_position", "position_embeddings", "decoder_position_ids"),
        # inputs from which q, k and v were computed
        *("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds", "encoder_outputs"),
        *("token_type_ids", "mm_token_type_ids", "special_tokens_mask", "pixel_values", "grid_thw"),
        # the loss
        *("labels", "num_items_in_batch"),
        # other layers: a decoder's mask passed through the encoder, documents of state space models (attention gets the
        # same documents as position_ids or cu_seq_lens_q)
        *("decoder_attention_mask", "seq_idx"),
    }
)
_INTERVALS = "startend_row_indices"
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Continuous batching: the rows of the cache that its update writes and reads, the longest of the sequences under the
# names of release 5.17, and what its step needs for drawing tokens afterwards.
_PAGED = frozenset(
    {
        *(*_PACKED, "read_index", "write_index", "max_seqlen_q", "max_seqlen_k"),
        *("logits_indices", "logits_processor_args"),
    }
)
# Layers of these models compute with their mask as numbers to add, as eager attention gets it: they append columns, or
# hide more keys. (Models with sparse attention among them are refused later, because of other arguments.)
_NUMBERS_FOR_MASKS = frozenset(
    {
        *("deepseek_v4", "doge", "bigbird_pegasus"),
        *("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "hy_v4_vl_text", "dots3_note_text", "mistral_large4_text"),
    }
)


def register(name: str = NAME) -> str:
    """Registers attention and its masks in this process, and returns the name for attn_implementation. A second call
    changes nothing.

    Raises:
        ValueError: a name that has a meaning to transformers: "flash" in a name means a kernel to download, "sdpa" and
            "flex_attention" request the inputs of those, and |, / and @ are syntax. Or the name of another
            implementation.
    """
    for word in (*_TAKEN, "|", "/", "@"):
        if word in name:
            raise ValueError(f"name={name!r}: transformers gives a name with {word!r} in it a meaning of its own")
    if not name or name == "eager":
        raise ValueError(f"name={name!r} is no name for an implementation")
    mine = {AttentionInterface: attention, AttentionMaskInterface: attention_mask}
    for interface, function in mine.items():
        if interface._global_mapping.get(name, function) is not function:
            raise ValueError(f"name={name!r} is the name of another implementation")
    for interface, function in mine.items():
        interface.register(name, function)
    AttentionInterface.register(f"paged|{name}", attention)  # up to 5.17 continuous batching puts this before a name
    return name


# ---- which keys a row sees ----


class Packing(NamedTuple):
    """The rows of a flattened batch that count, one sequence after the other."""

    rows: torch.Tensor  # (total,) row numbers in the flattened batch
    cu_seqlens: torch.Tensor  # (batch + 1,) int32
    longest: int


@dataclass(eq=False)
class Mask:
    """The keys that each row sees. Row i is aligned with key ends - q_length + i.

    It is passed where models expect a mask tensor of shape (batch, 1, q_length, kv_length), and has those attributes of
    a tensor that transformers uses on the way."""

    shape: tuple[int, int, int, int]
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    ends: int | torch.Tensor | None = None  # keys of a sequence; a (batch,) int32 tensor is not read on the host
    starts: torch.Tensor | None = None  # (batch,) int32: keys before it are padding
    valid: torch.Tensor | None = None  # (batch, kv_length) bool: keys where it is False are padding
    pack_rows: bool = False  # the rows are the keys: a row of padding does not count, and its result is 0
    documents: torch.Tensor | None = None  # (batch, q_length): rows and keys with the same number see each other
    ndim: int = field(default=4, init=False)

    def contiguous(self) -> Mask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Mask:
        """The mask on another device. A dtype, which tensors take here, is ignored."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, **moved) if moved and device is not None else self

    @property
    def positional(self) -> bool:
        """Whether a row's own position affects which keys it sees."""
        return self.causal or self.window != (-1, -1) or self.chunk != 0

    @property
    def full(self) -> bool:
        """Whether the keys end where the array ends."""
        return isinstance(self.ends, int) and self.ends == self.shape[-1]

    @functools.cached_property
    def packing(self) -> Packing:
        """The keys that are not padding."""
        lengths = self.valid.sum(-1, dtype=torch.int32)
        cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return Packing(self.valid.flatten().nonzero().flatten(), cu_seqlens, int(lengths.max()))

    @functools.cached_property
    def document_packing(self) -> Packing:
        """The documents: every run of one number in a row of the batch is a sequence."""
        new = torch.ones_like(self.documents, dtype=torch.bool)
        new[:, 1:] = self.documents.diff(dim=-1) != 0
        first = new.flatten().nonzero().flatten().int()
        cu_seqlens = F.pad(first, (0, 1), value=self.documents.numel())
        return Packing(first.new_empty(0), cu_seqlens, int(cu_seqlens.diff().max()))

    def array(self, device: torch.device) -> torch.Tensor:
        """The mask without its documents, as a bool array that broadcasts to `shape`."""
        batch, _, q_length, kv_length = self.shape
        key = torch.arange(kv_length, device=device)
        ends = torch.as_tensor(self.ends, device=device).reshape(-1, 1, 1)
        own = ends - q_length + torch.arange(q_length, device=device)[:, None]  # (batch or 1, q_length, 1)
        sees = key < ends
        if self.causal:
            sees = sees & (key <= own)
        left, right = self.window
        if left >= 0:
            sees = sees & (key >= own - left)
        if right >= 0:
            sees = sees & (key <= own + right)
        first = 0 if self.starts is None else self.starts.reshape(-1, 1, 1)
        if self.chunk:
            sees = sees & ((key - first) // self.chunk == (own - first) // self.chunk)
        if self.starts is not None:
            sees = sees & (key >= first)
        if self.valid is not None:
            sees = sees & self.valid[:, None]
        return sees[:, None]


class _Form(NamedTuple):
    """The meaning of a mask function of transformers, in terms of this library's options."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    documents: torch.Tensor | None = None

    def __and__(self, other: _Form) -> _Form:
        def edge(a: int, b: int) -> int:
            return max(a, b) if min(a, b) < 0 else min(a, b)

        left, right = map(edge, self.window, other.window)
        documents = self.documents if other.documents is None else other.documents
        return _Form(self.causal or other.causal, (left, right), self.chunk or other.chunk, documents)


def _form_of(function: Any) -> _Form | None:
    """The meaning of the function, or None if it is not known here. transformers builds these functions from a few
    parts. A part is recognised by the name of its maker, whose arguments are in the part's closure."""
    if function is masking_utils.causal_mask_function:
        return _Form(causal=True)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return _Form()
    if getattr(function, "__module__", None) != masking_utils.__name__ or not inspect.isfunction(function):
        return None
    maker = function.__qualname__.partition(".")[0]
    made_with = inspect.getclosurevars(function).nonlocals
    if maker == "and_masks":
        forms = [_form_of(part) for part in made_with["mask_functions"]]
        if None in forms:
            return None
        if sum(form.documents is not None for form in forms) > 1 or sum(form.chunk > 0 for form in forms) > 1:
            return None
        return functools.reduce(_Form.__and__, forms)
    if maker == "sliding_window_overlay":
        return _Form(window=(made_with["sliding_window"] - 1, -1))
    if maker == "sliding_window_bidirectional_overlay":
        return _Form(window=(made_with["sliding_window"],) * 2)
    if maker == "chunked_overlay":
        return _Form(chunk=made_with["chunk_size"])
    if maker == "packed_sequence_mask_function":
        return _Form(documents=made_with["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":  # positions count from the beginning of each document
        form = _form_of(made_with["mask_function"])
        return None if form is None or form.chunk else form
    return None


def attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | Mask | None = None,
    cache_position: torch.Tensor | None = None,
    **kwargs: Any,
) -> Mask | torch.Tensor:
    """The function that AttentionMaskInterface calls.

    Arguments:
        batch_size, q_length, kv_length: sizes of the mask. Row i is at position q_offset + i, key j at kv_offset + j.
        mask_function: tells whether a row sees a key.
        attention_mask: None, or (batch, kv_offset + kv_length or fewer) bool: the keys that are not padding, as far as
            there are tokens. Or a Mask that this function has made before.
        cache_position: (q_length,), the positions of the rows, which transformers 4 passes instead of q_length and
            q_offset.

    Returns a Mask. If the mask's form is not known, (batch, 1, q_length, kv_length) bool. For a model that computes
    with its mask, the mask of eager attention: an array of that shape with numbers to add.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    given = {"kv_length": kv_length, "kv_offset": kv_offset, "mask_function": mask_function} | kwargs
    given |= {"batch_size": batch_size, "attention_mask": attention_mask}
    if cache_position is None:
        given |= {"q_length": q_length, "q_offset": q_offset}
    else:
        given["cache_position"] = cache_position
        q_length = cache_position.shape[0]
        q_offset = 0 if q_length == kv_length + kv_offset else cache_position[0]
    skips = {name: False for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip")}
    if getattr(kwargs.get("config"), "model_type", None) in _NUMBERS_FOR_MASKS:
        return masking_utils.eager_mask(**given | skips)

    def array() -> torch.Tensor:
        return masking_utils.sdpa_mask(**given | skips)

    plain = mask_function is masking_utils.causal_mask_function  # a trace cannot look into any other function
    form = None if _is_traced() and not plain else _form_of(mask_function)
    if form is None or form.chunk and kv_offset:  # chunks count from the first key of a sequence
        return array()
    shape = (batch_size, 1, q_length, kv_length)
    mask = Mask(shape, form.causal, form.window, form.chunk, documents=form.documents)
    mask.ends = q_offset + q_length - kv_offset if mask.positional else kv_length
    if isinstance(mask.ends, torch.Tensor):
        mask.ends = mask.ends.reshape(-1).to(torch.int32).expand(batch_size).contiguous()
    if form.documents is not None:
        return mask if mask.full and q_length == kv_length else array()
    if attention_mask is None:
        return mask
    if _is_traced() or attention_mask.ndim != 2:  # its values cannot be read
        return array()
    return mask if _with_padding(mask, attention_mask, kv_offset) else array()


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _with_padding(mask: Mask, tokens: torch.Tensor, kv_offset: int) -> bool:
    """Adds the padding of the keys to the mask. False if that would need an array."""
    batch, _, q_length, kv_length = mask.shape
    if isinstance(mask.ends, int) and tokens.shape[-1] >= kv_offset + mask.ends and tokens[:, kv_offset:].all():
        return True
    valid = F.pad(tokens.bool(), (0, max(0, kv_offset + kv_length - tokens.shape[-1])))
    valid = valid[:, kv_offset : kv_offset + kv_length]
    key = torch.arange(kv_length, device=valid.device, dtype=torch.int32)
    ends = mask.ends if isinstance(mask.ends, int) else mask.ends[:, None]
    valid = valid & (key < ends)
    count = valid.sum(-1, dtype=torch.int32)
    first = torch.where(valid, key, kv_length).amin(-1)
    last = torch.where(valid, key + 1, 0).amax(-1)
    end = torch.as_tensor(mask.ends, device=valid.device)
    facts = [count == end, last - first == count, last == end, (end == q_length).expand(batch)]
    unpadded, in_one_piece, at_end, from_start = torch.stack([fact.all() for fact in facts]).tolist()
    if unpadded:
        return True
    if not mask.positional:
        mask.valid = valid
        if in_one_piece:
            mask.starts, mask.ends = first, last
        return True
    if from_start and (in_one_piece or mask.window == (-1, -1) and not mask.chunk):
        mask.valid, mask.pack_rows = valid, True
        mask.starts = first if in_one_piece else None
        return True
    if in_one_piece and at_end:
        mask.starts = first
        return True
    return False


# ---- attention ----


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cache: Any = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that AttentionInterface calls.

    Arguments:
        module: the layer; its `is_causal` is used if there is neither a mask nor the argument `is_causal`.
        query: (batch, nheads, q_length, headdim); key, value: (batch, nheads_k, kv_length, .).
        attention_mask: a Mask of q_length and kv_length; or bool (True: attend) or float (added to the scores)
            broadcasting to (batch, nheads, q_length, kv_length), which then decides alone; or None: is_causal and
            sliding_window decide, and the last row is aligned with the last key.
        dropout: its seed comes from PyTorch's generator.
        scaling: None means headdim ** -0.5.
        sliding_window: the number of keys that a row sees, its own included.
        s_aux: (nheads,), one more logit for each head (sinks), in any float dtype.
        position_bias: broadcasts to (batch, nheads, q_length, kv_length), added to the scores.
        cache: the cache of continuous batching. The tokens of all requests are then the rows of one batch entry.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: for sequences packed in one batch entry.
        startend_row_indices: a mask by intervals for all tokens of a call without a cache, as in flash_attn_func:
            model(tokens, position_ids=..., startend_row_indices=...). It decides alone, beside causal and the window of
            the layer: documents that transformers sees in the positions do not count.
        deterministic: gradients are the same in every run, as in flash_attn_func.
        kwargs: other arguments that a model passes. Under torch.autocast query, key and value are converted to its
            dtype.

    Returns out (batch, q_length, nheads, headdim_v), and None in place of the probabilities, which are not kept.

    Raises:
        Unsupported (a NotImplementedError): an argument that holds a tensor and is not known here. Sparse attention
            passes its choice of keys that way.
        BadArgument (a ValueError): a mask of integers, or for another number of keys.
    """
    _refuse_unknown(kwargs, (*_PACKED, _INTERVALS) if cache is None else _PAGED)
    options = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.float(),
        "deterministic": bool(deterministic),
    }
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    edge = -1 if sliding_window is None else sliding_window - 1
    window = (edge, -1 if is_causal else edge)
    if cache is not None:
        for name, x in (("attention_mask", attention_mask), ("position_bias", position_bias)):
            if isinstance(x, torch.Tensor):
                raise Unsupported(f"{name} is given with a cache of continuous batching: its lengths say what is seen")
        return _paged(module, query, key, value, cache, window, options, kwargs), None
    q, k, v = dense_rows(*autocast(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)))
    _check_mask("attention_mask", attention_mask, q, k)
    _check_mask("position_bias", position_bias, q, k)
    lengths = [kwargs.get(name) for name in _PACKED]
    if kwargs.get(_INTERVALS) is not None:
        beside = {"attention_mask": attention_mask, "position_bias": position_bias} | dict(
            zip(_PACKED, lengths, strict=True)
        )
        options |= {"causal": is_causal, "window_size": window, "dropout_p": dropout}
        return _by_intervals(q, k, v, kwargs[_INTERVALS], beside, options), None
    if any(x is not None for x in lengths) and not isinstance(attention_mask, torch.Tensor):
        if missing := [name for name, x in zip(_PACKED, lengths, strict=True) if x is None]:
            raise BadArgument(f"{missing[0]} is None: packed sequences need {', '.join(_PACKED[:3])} and {_PACKED[3]}")
        if position_bias is not None:
            raise Unsupported("position_bias is given with cu_seq_lens_q: packed sequences take no bias")
        options |= {"causal": is_causal, "window_size": window}
        if isinstance(attention_mask, Mask):
            mask = attention_mask
            if mask.valid is not None or mask.starts is not None:
                raise Unsupported(
                    "attention_mask hides padding, but cu_seq_lens_q is given: packed sequences have none"
                )
            options |= {"causal": mask.causal, "window_size": mask.window, "attention_chunk": mask.chunk}
        return _packed(q, k, v, lengths, options | {"dropout_p": dropout}), None
    if isinstance(attention_mask, torch.Tensor):
        bias = position_bias
        if attention_mask.dtype != torch.bool:
            bias = attention_mask if bias is None else bias + attention_mask
            attention_mask = None
        options |= {"bias": _aligned(bias, k), "mask": _aligned(attention_mask, k)}
        return attend(q, k, v, dropout_p=dropout, **options), None
    if attention_mask is None:
        shape = (q.shape[0], 1, q.shape[1], k.shape[1])
        attention_mask = Mask(shape, bool(is_causal), window, ends=k.shape[1])
    return _attend(q, k, v, attention_mask, position_bias, dropout, options), None


def _by_intervals(q, k, v, indices: torch.Tensor, beside: dict[str, Any], options: dict) -> torch.Tensor:
    """Attention under a mask by intervals. beside: other arguments that say what a row sees."""
    for name, x in beside.items():
        if isinstance(x, torch.Tensor) or isinstance(x, Mask) and (x.valid is not None or x.starts is not None):
            what = "hides padding" if isinstance(x, Mask) else "is a tensor"
            advice = ""
            if name == "attention_mask" and _is_traced():  # an array that transformers made
                advice = "; in a compiled model it always is: compile the layers (layer.compile()), not the model"
            raise Unsupported(
                f"{name} {what}, but {_INTERVALS} is given: it says alone which tokens a row sees{advice}"
            )
    if q.shape[1] != k.shape[1]:
        raise Unsupported(f"{_INTERVALS} is given for {q.shape[1]} rows and {k.shape[1]} keys: a cache takes none")
    mask = beside["attention_mask"]
    if mask is not None:
        options |= {"causal": mask.causal, "window_size": mask.window, "attention_chunk": mask.chunk}
    return attend(q, k, v, startend_row_indices=indices, **options)


def _refuse_unknown(kwargs: dict[str, Any], known: Iterable[str]) -> None:
    for name, x in kwargs.items():
        if name not in _WITHOUT_EFFECT and name not in known and (kind := _kind_of(x)) is not None:
            raise Unsupported(
                f"{name} is given, {kind}: this attention does not know it, and the result may depend on it; "
                "attn_implementation='eager' is the model's own"
            )


def _kind_of(x: Any) -> str | None:
    """A description of an argument, or None if there is no tensor in it."""
    if isinstance(x, torch.Tensor):
        return f"{x.dtype} of shape {tuple(x.shape)}"
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else ()
    return f"a {type(x).__name__} of tensors" if any(_kind_of(part) for part in parts) else None


def _check_mask(name: str, x: Mask | torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> None:
    """Refuses a mask or bias that does not fit these rows and keys. q, k: (batch, seqlen, nheads, .)."""
    if x is None:
        return
    sizes = q.shape[1], k.shape[1]
    if isinstance(x, torch.Tensor):
        if x.dtype != torch.bool and not x.is_floating_point():
            raise BadArgument(
                f"{name} is {x.dtype}: expected bool or floating point; {name}.bool() attends to the ones"
            )
        fits = x.ndim > 0 and all(n in (1, m) for n, m in zip(x.shape[-2:], sizes[-x.ndim :], strict=True))
    elif not isinstance(x, Mask):
        raise BadArgument(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
    else:
        fits = tuple(x.shape[2:]) == sizes
    if not fits:
        raise BadArgument(
            f"{name} has shape {tuple(x.shape)}: its last axes are for other rows or keys than the {sizes[0]} rows of "
            f"query and {sizes[1]} of key"
        )


def _aligned(x: torch.Tensor | None, k: torch.Tensor) -> torch.Tensor | None:
    """A bias or mask with as many columns as k, which may be only the first of the keys that it was made for."""
    if x is None:
        return None
    x = x[..., : k.shape[1]].to(k.device)
    if x.is_floating_point() and x.dtype not in (k.dtype, torch.float32):  # a model in another dtype than autocast's
        x = x.float()
    return x.expand(*x.shape[:-1], k.shape[1]).contiguous() if x.shape[-1] == 1 else dense_rows(x)[0]


def _attend(q, k, v, mask: Mask, bias, dropout: float, options: dict) -> torch.Tensor:
    """Attention by the kind of call that suits the mask. q, k, v: (batch, seqlen, nheads, .)."""
    if isinstance(mask.ends, int) and mask.ends < k.shape[1] and mask.valid is None:  # a static cache that is not full
        k, v = k[:, : mask.ends], v[:, : mask.ends]
        mask = replace(mask, shape=(*mask.shape[:3], mask.ends))
    graded = torch_modes.records() and any(x is not None and x.requires_grad for x in (q, k, v, options["sinks"]))
    if bias is None and not dropout and not graded and mask.documents is None and not mask.pack_rows:
        if not mask.full or mask.starts is not None or q.shape[1] <= FEW_ROWS:
            if mask.valid is None or mask.starts is not None:
                call = kvcache_operator if torch.compiler.is_compiling() else flash_attn_with_kvcache
                return call(  # where the keys lie in the cache: nothing is copied
                    q, k, v, cache_seqlens=mask.ends, cache_leftpad=mask.starts, sinks=options["sinks"],
                    softmax_scale=options["softmax_scale"], softcap=options["softcap"], causal=mask.causal,
                    window_size=mask.window, attention_chunk=mask.chunk,
                )  # fmt: skip
    options = options | {"causal": mask.causal, "window_size": mask.window, "attention_chunk": mask.chunk}
    options["dropout_p"] = dropout
    if mask.documents is not None and bias is None:
        _, cu_seqlens, longest = mask.document_packing
        return _packed(q, k, v, (cu_seqlens, cu_seqlens, longest, longest), options)
    if mask.pack_rows and bias is None:
        rows, cu_seqlens, longest = mask.packing
        if k.shape[1] != q.shape[1]:  # q is the start of a cache: from numbers in the flattened cache to those in q
            rows = rows // k.shape[1] * q.shape[1] + rows % k.shape[1]
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
        return _packed(q, k, v, (cu_seqlens, cu_seqlens, longest, longest), options, rows, rows)
    if mask.valid is not None and bias is None and not mask.positional:
        keys, cu_seqlens, longest = mask.packing
        batch, seqlen = q.shape[:2]
        cu_q = torch.arange(0, (batch + 1) * seqlen, seqlen, device=q.device, dtype=torch.int32)
        return _packed(q, k, v, (cu_q, cu_seqlens, seqlen, longest), options, keys=keys)
    if not mask.full or mask.starts is not None or mask.documents is not None:
        sees = mask.array(q.device)
        if mask.documents is not None:
            sees = sees & (mask.documents[:, None, :, None] == mask.documents[:, None, None])
        options |= {"causal": False, "window_size": (-1, -1), "attention_chunk": 0, "mask": sees}
    elif mask.valid is not None:
        options["mask"] = mask.valid[:, None, None]
    return attend(q, k, v, bias=_aligned(bias, k), **options)


def _packed(q, k, v, lengths, options: dict, rows=None, keys=None) -> torch.Tensor:
    """Attention of sequences that follow each other in the flattened batch. lengths: cu_seqlens_q, cu_seqlens_k and the
    longest of each. rows, keys: the numbers of those that count, None: all of them. The result of other rows is 0."""
    cu_q, cu_k, longest_q, longest_k = lengths
    flat = zip((q, k, v), (rows, keys, keys), strict=True)
    q_, k_, v_ = (x.flatten(0, 1) if at is None else x.flatten(0, 1).index_select(0, at) for x, at in flat)
    out = attend(q_, k_, v_, (cu_q.int(), cu_k.int(), int(longest_q), int(longest_k)), **options)
    if rows is not None:
        out = out.new_zeros(q.shape[0] * q.shape[1], *out.shape[1:]).index_copy(0, rows, out)
    return out.unflatten(0, q.shape[:2])


def _paged(module, query, key, value, cache, window: tuple[int, int], options: dict, kwargs: dict) -> torch.Tensor:
    """A step of continuous batching: the cache takes the new keys and gives the keys of all requests, packed."""
    if "max_length_q" in kwargs:
        k, v = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        k, v = k[0].transpose(0, 1), v[0].transpose(0, 1)
        longest_q, longest_k = kwargs["max_length_q"], kwargs["max_length_k"]
    else:
        indices = {name: kwargs[name] for name in ("read_index", "write_index")}
        k, v = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **indices)
        longest_q, longest_k = kwargs["max_seqlen_q"], kwargs["max_seqlen_k"]
    cu_k = kwargs["cu_seq_lens_k"]
    if isinstance(cu_k, dict):
        kind = "full_attention" if window[0] < 0 else "sliding_attention"
        cu_k, longest_k = cu_k[kind], longest_k[kind]
    q, k, v = dense_rows(*autocast(query[0].transpose(0, 1), k, v))
    lengths = kwargs["cu_seq_lens_q"].int(), cu_k.int(), int(longest_q), int(longest_k)
    return attend(q, k, v, lengths, causal=True, window_size=window, **options)[None]
