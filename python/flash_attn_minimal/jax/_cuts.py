"""The axes of a function's arrays that may be cut when the arrays are spread over devices, named as in
_partition.Rule."""

from __future__ import annotations

from typing import Any

from .._core.options import OPTION_ARRAYS


def head_axes(nheads: int, nheads_k: int) -> tuple[Any, Any]:
    """The names of the heads' axes of q and of k: each device gets the key heads that its heads of q read."""
    if nheads_k == 1:
        return "heads", None
    return ("heads" if nheads == nheads_k else ("heads", "group")), "heads"


def own_axes(names: tuple, shape: tuple[int, ...]) -> tuple:
    """The names of the axes of an array that broadcasts to axes with these names."""
    names = names[len(names) - len(shape) :]
    return tuple(name if size != 1 else None for name, size in zip(names, shape, strict=True))


def option_axes(arrays: dict, batch: Any, heads: Any, heads_k: Any) -> dict[str, tuple]:
    """The names of the axes of the options among a call's arrays. batch, heads, heads_k: how those of q and k are
    named."""
    found = {}
    for name in (name for name in OPTION_ARRAYS if name in arrays):
        x, axes = arrays[name], OPTION_ARRAYS[name][0].split(", ")
        own = heads if x.ndim > 2 and x.shape[-3] == arrays["q"].shape[-2] else heads_k
        cut = {"batch": batch, "heads": heads, "own heads": own}
        found[name] = own_axes(tuple(cut.get(axis) for axis in axes), x.shape)
    return found


def of_function(title: str, arrays: dict, plain: dict, results: list) -> tuple[dict[str, tuple], list[tuple]]:
    """The names of the axes of each array and of each result. results: the shapes of the results."""
    names, out = _NAMES[title](arrays, plain) if title in _NAMES else ({}, [])
    named = {name: names.get(name, (None,) * x.ndim) for name, x in arrays.items()}
    return named, out or [(None,) * len(shape) for shape in results]


def _leading(array) -> tuple:
    return tuple(f"axis{i}" for i in range(array.ndim - 1))


def _merge(arrays, plain):
    rows = ("batch", "rows", "heads", None)[4 - arrays["out_a"].ndim :]
    lse = ("batch", "heads", "rows")[3 - arrays["lse_a"].ndim :]
    return {"out_a": rows, "out_b": rows, "lse_a": lse, "lse_b": lse}, [rows, lse]


def _row_by_row(name):
    def names(arrays, plain):
        axes = (*_leading(arrays[name]), None)
        return {name: axes}, [axes]

    return names


def _rope(arrays, plain):
    by_token = "positions" in arrays and arrays["positions"].ndim == 2
    axes = ("batch", "rows" if by_token else None, "heads", None)
    return {"x": axes, "positions": ("batch", "rows")[: 1 + by_token]}, [axes]


def _linear(arrays, plain):
    rows, columns = _leading(arrays["x"]), None if plain.get("swiglu") else "columns"
    out = (*rows, columns)
    return {"x": (*rows, None), "weight": (columns, None), "bias": (columns,), "residual": out}, [out]


def _sample(arrays, plain):
    """Rows can be cut if each has a seed: their draws do not depend on their number."""
    if "seeds" not in arrays or arrays["logits"].ndim != 2:
        return {}, []
    names = {"logits": ("rows", None), "seeds": ("rows",)}
    if "step" in arrays:
        names["step"] = own_axes(("rows",), arrays["step"].shape)
    return names, [("rows",)]


def _cache(arrays, plain):
    """Heads can be cut, and sequences if each has its own cache entry."""
    heads, heads_k = head_axes(arrays["q"].shape[2], arrays["k_cache"].shape[2])
    batch = "batch" if arrays.keys().isdisjoint(("block_table", "cache_batch_idx")) else None
    if arrays["k_cache"].shape[0] != arrays["q"].shape[0]:
        batch = None
    q, k = (batch, None, heads, None), (batch, None, heads_k, None)
    names = {"q": q, "k_cache": k, "v_cache": k, "k": k, "v": k, **option_axes(arrays, batch, heads, heads_k)}
    names |= dict.fromkeys(("cache_seqlens", "cache_leftpad", "cache_batch_idx"), (batch,))
    names |= {"k_scale": (batch, None, heads_k), "v_scale": (batch, None, heads_k), "tree_mask": (batch, None)}
    names = {name: own_axes(axes, arrays[name].shape) for name, axes in names.items() if name in arrays}
    lse = [(batch, heads, None)] if plain.get("return_softmax_lse") or plain.get("return_lse") else []
    return names, [q, *lse]


_NAMES = {
    "merge": _merge,
    "rms_norm": _row_by_row("x"),
    "swiglu": _row_by_row("gate_up"),
    "rope": _rope,
    "linear": _linear,
    "sample": _sample,
    "flash_attn_with_kvcache": _cache,
}
