"""torch.nn.attention.flex_attention, for functions that the kernels support.

The kernels cannot run the caller's code. A score_mod or mask_mod is read as an expression (_terms.py) and recognised by
its algebra (_masks.py, _scores.py): bounds on kv_idx - q_idx are windows, equal documents are packed sequences, a slope
times a distance is ALiBi, c * tanh(score / c) is a softcap, and so on. Other masks are recognised by their values
(_measured.py). An expression that is not certainly one of these is refused, and the error quotes the part that was not
recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from ...errors import BadArgument, Unsupported
from ._form import Form, form_of
from ._found import ARGUMENTS, Call, Found
from ._masks import read_mask
from ._scores import read_score
from ._terms import Term, evaluate, reads, trace

__all__ = ["Form", "flex_attention", "mods", "recognise"]


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention: its arguments, layout, meaning and gradients.

    Arguments:
        query: (batch, heads, seqlen_q, headdim); key, value: (batch, heads_k, seqlen_k, .); headdims up to 512. Under
            torch.autocast they are converted to its dtype; captured tensors are not.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score. See recognise.
        block_mask: a mask_mod(b, h, q_idx, kv_idx) -> bool; or a BlockMask, whose mask_mod is used and compared with
            its blocks, which evaluates it at as many places as making the BlockMask did; or the result of recognise for
            both functions, which costs nothing. Compiled code takes only the last.
        scale: None means headdim ** -0.5.
        enable_gqa: heads may be a multiple of heads_k.
        return_lse, return_aux: as in PyTorch; of AuxRequest only lse.
        kernel_options: accepted and ignored.

    Gradients: for query, key and value, and for a captured tensor that is added to the scores without change.

    Raises: Unsupported (a NotImplementedError), which quotes the part of a function that was not recognised;
        BadArgument.
    """
    if getattr(return_aux, "max_scores", False):
        raise Unsupported("return_aux.max_scores: the greatest score of each row is not among the results here")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4 or x.is_nested:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) and not x.is_nested else type(x).__name__
            raise BadArgument(f"{name} is {shape}: expected (batch, heads, seqlen, headdim)")
    if isinstance(block_mask, Form):
        if score_mod is not None:
            raise BadArgument("score_mod is given beside a Form: recognise(score_mod, mask_mod, ...) takes both")
        form = block_mask
    else:
        plain = score_mod is None and block_mask is None
        if torch.compiler.is_compiling() and not plain:
            raise Unsupported(
                "a score_mod or block_mask in compiled code: call recognise(score_mod, mask_mod, ...) before, "
                "and pass the Form that it returns as block_mask"
            )
        sizes = *query.shape[:3], key.shape[2]
        form = Form(*sizes) if plain else recognise(score_mod, block_mask, *sizes, query.device)
    found = form(query, key, value, scale, enable_gqa, bool(return_lse) or return_aux is not None)
    if return_aux is None:
        return found
    from torch.nn.attention.flex_attention import AuxOutput

    return found[0], AuxOutput(lse=found[1] if return_aux.lse else None, max_scores=None)


def recognise(
    score_mod: Callable | None,
    mask_mod: Any,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: Any = "cpu",
) -> Form:
    """The Form of attention with these functions: pass it to flex_attention as block_mask, or call it. Like
    create_block_mask, it is meant for many calls. It reads captured tensors, which on a GPU waits; calls read them
    again, see Form.

    Recognised in mask_mod, and as torch.where(..., score, -inf) in score_mod, joined by &:

        kv_idx <= q_idx, q_idx - kv_idx <= n, (q_idx - kv_idx).abs() <= n, ...   causal, windows (seqlen_q and seqlen_k
                                                                                 may be captured, for bottom-right)
        ids[q_idx] == ids[kv_idx], ids[b, q_idx] == ..., q_idx // n == kv_idx // n     documents, each in one piece
        (kv_idx <= q_idx) | (kv_idx < n), | (kv_idx < lengths[b])                prefix-LM
        any expression of b, h and kv_idx, such as kv_idx < lengths[b]           padding
        mask[b, h, q_idx, kv_idx], with any of these indices                     a mask in memory
        any other expression, evaluated at every place: what it hides from a key is at most two intervals of rows
            (one beside causal), or whole blocks of 64                           masks by intervals, by blocks

    and in score_mod, where softcap comes first:

        score * c, c * tanh(score / c)                                           scale, softcap
        score + slopes[h] * (kv_idx - q_idx), with causal, or -(...).abs()       ALiBi; slopes: any expression of b, h
        score + bias[b, h, q_idx, kv_idx], with any of these indices             bias; or any expression of b, h, kv_idx

    Documents that are not each in one piece, or beside padding, a mask or a bias, and a prefix beside another condition
    are masks by intervals, too.

    Arguments:
        score_mod, mask_mod: functions as flex_attention takes them, or None; mask_mod may be a BlockMask.
        batch, heads, seqlen_q, seqlen_k: sizes of the calls; heads are those of query.
        device: the device of the calls' tensors; "cuda" means the current one.
    """
    if torch.is_inference_mode_enabled():  # tensors made in it could not be used where gradients are recorded
        with torch.inference_mode(False), torch.no_grad():
            return recognise(score_mod, mask_mod, batch, heads, seqlen_q, seqlen_k, device)
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:  # with an index, as tensors' devices have one
        device = torch.device("cuda", torch.cuda.current_device())
    call = Call(batch, heads, seqlen_q, seqlen_k, device)
    found = Found()
    if score_mod is not None:
        with _named("score_mod"):
            read_score(_traced(score_mod, ("score", *ARGUMENTS), device, found), found, call)
    if mask_mod is not None:
        blocks = mask_mod if hasattr(mask_mod, "mask_mod") else None
        with _named("mask_mod"):
            mask = _traced(mask_mod if blocks is None else blocks.mask_mod, ARGUMENTS, device, found)
            if blocks is not None:
                found.blocks = _check_blocks(blocks, mask, call)
                found.fix(mask)  # the blocks were made from these values
            read_mask(mask, found, call)
    return form_of(found, call)


@contextmanager
def _named(function: str) -> Iterator[None]:
    try:
        yield
    except Unsupported as error:
        raise Unsupported(f"{function}: {error}") from None


def _traced(function: Any, names: tuple[str, ...], device: torch.device, said: Found) -> Any:
    if not callable(function):
        raise BadArgument(f"a {type(function).__name__} is given as score_mod or mask_mod: expected a function")
    found, derived = trace(function, names, device)
    said.derived += derived
    if not isinstance(found, (Term, torch.Tensor, bool, int, float)):
        raise BadArgument(f"{function} returned a {type(found).__name__}: expected a score, or a bool")
    return found


def _check_blocks(blocks: Any, mask: Any, call: Call) -> torch.Tensor | None:
    """Raises unless a BlockMask's blocks agree with its mask_mod. Blocks that are left out count as hidden, and full
    blocks as visible, whatever mask_mod says. Where blocks of 64 or 128 are left out that mask_mod shows, the result is
    the block_mask that hides them."""
    if tuple(blocks.seq_lengths) != (call.rows, call.keys):
        raise BadArgument(
            f"block_mask is of {tuple(blocks.seq_lengths)}, but the call of {(call.rows, call.keys)} places"
        )
    of = tuple(blocks.kv_num_blocks.shape[:2])
    if of[0] not in (1, call.batch) or of[1] not in (1, call.heads):
        raise BadArgument(f"block_mask is of (batch, heads) = {of}, but the call of {(call.batch, call.heads)}")
    size_q, size_k = blocks.BLOCK_SIZE
    columns = -(-call.keys // size_k)
    listed = []
    for numbers, places in (
        (blocks.kv_num_blocks, blocks.kv_indices),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices),
    ):
        if numbers is None:
            listed.append(torch.zeros_like(listed[0]))
            continue
        counted = torch.arange(places.shape[-1], device=places.device) < numbers[..., None]
        spots = torch.where(counted, places, columns).long()
        dense = torch.zeros(*places.shape[:-1], columns + 1, dtype=torch.int32, device=places.device)
        listed.append(dense.scatter_add_(-1, spots, torch.ones_like(spots, dtype=torch.int32))[..., :columns])
    partial, full = listed
    wrong, more = (partial + full > 1).any(), torch.tensor(False, device=call.device)
    places = call.places(reads(mask))
    for block in range(-(-call.rows // size_q)):
        row = slice(block * size_q, min((block + 1) * size_q, call.rows))
        some = places | ({"q_idx": places["q_idx"][:, :, row]} if "q_idx" in places else {})
        seen = torch.as_tensor(evaluate(mask, some), device=call.device)
        seen = seen.view(1, 1, 1, 1) if seen.dim() == 0 else seen
        seen = seen.bool().expand(-1, -1, -1, call.keys)
        rest = columns * size_k - call.keys
        some_seen = F.pad(seen.any(2), (0, rest), value=False).unflatten(-1, (columns, size_k)).any(-1)
        all_seen = F.pad(seen.all(2), (0, rest), value=True).unflatten(-1, (columns, size_k)).all(-1)
        more = more | (some_seen & (partial[:, :, block] + full[:, :, block] == 0)).any()
        wrong = wrong | (~all_seen & (full[:, :, block] > 0)).any()
    of_size = {size_q, size_k} <= {64, 128}
    if wrong or (more and not of_size):
        raise Unsupported("the blocks of block_mask are not those of this function: make it with create_block_mask")
    return partial + full > 0 if more else None
