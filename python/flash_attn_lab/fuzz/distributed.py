"""Draws, makes and judges calls across ranks: forward and backward of flash_attn_minimal.distributed.

A case is one of packed sequences (attention.py, backward.py). Its rows are distributed over 2 .. 8 ranks, which are
threads of this process. The arena has the arrays of each rank, by name and rank: q0, q1, ... The results are put
together again and judged like those of one device. The mode takes the place of the kernel: gather or ulysses.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import numpy as np

from flash_attn_minimal import distributed
from flash_attn_minimal._core.queries import Plan
from flash_attn_minimal.errors import FlashAttnError, RankLost

from .arrays import Array
from .attention import E4M3, VARLEN, Forward
from .backward import Backward
from .judge import Wrong

MODES = ("gather", "ulysses")
# The arrays that are cut, by the axis of their rows.
CUT = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), 0) | {"lse": 1, "dlse": 1}
KEYS = ("k", "v", "dk", "dv")
TIMEOUT = 20.0  # seconds; shorter than the campaign's limit, which ends the process


@functools.cache
def groups_of(devices: tuple) -> list[distributed.Group]:
    """The groups of ranks on these devices, kept from case to case, as a program keeps them."""
    return distributed.thread_groups(devices=devices, timeout=TIMEOUT)


os.register_at_fork(after_in_child=groups_of.cache_clear)  # a group belongs to the process that made it

# Options that calls over ranks do not have.
UNSERVED = ("kernel", "return_max_score", "return_key_sums")


class AcrossRanks:
    """The shared part of the two functions. As a base class it comes before Forward or Backward."""

    DEFAULTS: dict[str, Any] = {"ranks": 2, "cut": "zigzag", "pieces": 0, "spread": False}
    LEAST = Forward.LEAST | {"ranks": 2}
    FREE: dict[str, tuple[int, ...]] = {}
    LOOSE: dict[str, tuple[int, ...]] = {}
    any_rank, queried, capturable = False, False, False
    MORE_BAD_OPTIONS = {
        "layout": ("spiral", 3, None), "mode": ("star", 1, None), "groups": (1.5, "x", -1, 17),
        "seqlen_q": (4, "x"), "q_descale": (1.0,), "out_dtype": ("float16",),
    }  # fmt: skip

    def __init__(self):
        super().__init__(self.name, self.varlen, self.weight)

    def kernels(self, backend):
        return list(MODES)

    # ---- drawing ----

    def draw(self, draw, backend):
        spec = super().draw(draw, backend) | {"max_score": False, "key_sums": False, "attention_chunk": 0}
        spec["intervals"] = spec["blocks"] = None
        spec |= {"extra": [0, 0], "longer": [0, 0], "ranks": draw.pick((2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8))}
        spec["cut"] = draw.pick(("zigzag", "zigzag", "contiguous", "flat"))
        spec["pieces"] = draw.pick((0, 0, 0, 0, 1, 2, 3, 16))
        spec["spread"] = draw.chance(0.7)
        spec["num_threads"] = draw.pick((1, 1, 1, 2)) if backend.device == "cpu" else 0
        whole = [name for name in super().arrays(spec) if name in CUT]
        spec["layouts"] = {}
        for name in (f"{name}{r}" for name in whole for r in range(spec["ranks"])):
            if draw.option(0.1) and not name.startswith(("lse", "dlse")):  # a gap after each row
                step = draw.pick((1, 8)) * (1 + draw.below(3))
                spec["layouts"][name] = {"pad": [0, step * spec["headdim"], 0]}
            if draw.option(0.05):
                spec["layouts"].setdefault(name, {})["offset"] = draw.pick((1, 2, 8))
        return spec

    def draw_shape(self, draw, backend):
        """Packed sequences; the last one may be long, so that ranks share it."""
        spec = VARLEN.draw_shape(draw, backend)
        if spec["dtype"] == E4M3:
            spec["dtype"] = "float16"
        return spec

    # ---- the rows of the ranks ----

    def places(self, spec, keys: bool) -> list[np.ndarray]:
        """For each rank, the indices of its rows of q (or of k and v) in the whole arrays."""
        size, cu = self.get(spec, "ranks"), self._cu(spec)[keys]
        return [distributed.indices(self.get(spec, "cut"), rank, size, cu) for rank in range(size)]

    def _score_places(self, spec) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each rank: where each sequence begins among the rank's rows, and the positions of the rank's rows."""
        how, size, cu = self.get(spec, "cut"), self.get(spec, "ranks"), self._cu(spec)[0]
        return [
            (distributed.local_cu_seqlens(how, r, size, cu), distributed.positions(how, r, size, cu))
            for r in range(size)
        ]

    def _has_rows(self, spec, name: str) -> bool:
        """Whether a bias or mask has an axis of rows."""
        return bool(self.get(spec, name)) and bool(self.get(spec, name)[-1])

    def arrays(self, spec):
        layouts, found = self.get(spec, "layouts"), {}
        for name, array in super().arrays(spec).items():
            if name in CUT:
                for rank, rows in enumerate(self.places(spec, name in KEYS)):
                    shape = list(array.shape)
                    shape[CUT[name]] = len(rows)
                    layout = layouts.get(f"{name}{rank}", {})
                    found[f"{name}{rank}"] = dataclasses.replace(array, shape=tuple(shape), layout=layout)
            elif name in ("bias", "mask") and self._has_rows(spec, name):
                for rank, (starts, _) in enumerate(self._score_places(spec)):
                    shape = self._cut_scores_shape(spec, array, starts)
                    found[f"{name}{rank}"] = Array(shape, array.dtype)
            elif not name.startswith("cu_seqlens"):
                found[name] = array
        return found

    def _cut_scores_shape(self, spec, array: Array, starts: np.ndarray) -> tuple[int, ...]:
        """(batch, heads or 1, the most rows of a sequence, keys). The same row stands for a different position in each
        sequence."""
        heads = array.shape[-3] if len(array.shape) > 2 else 1
        return len(spec["lens"]), heads, int(np.diff(starts).max(initial=0)), array.shape[-1]

    def values(self, spec):
        """The values of the whole arrays, for the judge, and of the arrays of each rank."""
        values = super().values(spec)
        whole = super().arrays(spec)
        for name in CUT:
            if name in values:
                for rank, rows in enumerate(self.places(spec, name in KEYS)):
                    values[f"{name}{rank}"] = values[name].take(rows, CUT[name])
        for name in ("bias", "mask"):
            if name in values and self._has_rows(spec, name):
                for rank, (starts, positions) in enumerate(self._score_places(spec)):
                    shape = self._cut_scores_shape(spec, whole[name], starts)
                    x = values[name]
                    x = np.broadcast_to(x, (shape[0], *((1,) * (4 - x.ndim) + x.shape)[1:]))
                    cut = np.full(shape, True if name == "mask" else np.nan, x.dtype)
                    for b in range(shape[0]):
                        mine = positions[starts[b] : starts[b + 1]]
                        cut[b, :, : len(mine)] = x[b][:, mine]
                    values[f"{name}{rank}"] = cut
        return values

    def written(self, spec, values):
        return {name: ... for name, array in self.arrays(spec).items() if array.output}

    def bad_contents(self, spec, values, draw):
        return None  # lengths are in host memory, so they are options

    # ---- the call ----

    def options(self, spec):
        options = super().options(spec)
        for name in ("max_seqlen_q", "max_seqlen_k"):
            del options[name]
        cu_q, cu_k = self._cu(spec)
        options |= {"cu_seqlens_q": cu_q, "layout": self.get(spec, "cut"), "groups": self.get(spec, "pieces")}
        return options | ({} if np.array_equal(cu_q, cu_k) else {"cu_seqlens_k": cu_k})

    def _devices(self, spec, views) -> tuple:
        """The device of each rank. With `spread`, ranks are on all GPUs in turn; otherwise all share the arena's
        GPU."""
        size, gpus = self.get(spec, "ranks"), 1
        on_gpu = [x for x in views.values() if str(getattr(x, "device", "cpu")) != "cpu"]
        if not on_gpu:
            return ("cpu",) * size
        if self.get(spec, "spread") and "mutation" not in spec and type(on_gpu[0]).__module__.startswith("torch"):
            import torch

            gpus = torch.cuda.device_count()
        return tuple(rank % gpus for rank in range(size))

    def rank_views(self, spec, views, rank: int) -> dict[str, Any]:
        """The arrays of a rank by the names of the arguments."""
        found = {}
        for name, view in views.items():
            base = name.rstrip("0123456789")
            if name == base:
                found[name] = view
            elif name == f"{base}{rank}":
                found[base] = view
        return found

    def query(self, spec, views, options):
        options, size = dict(options), self.get(spec, "ranks")
        mode = options.pop("kernel", None) or "auto"
        for rank in range(size):
            mine = self.rank_views(spec, views, rank)
            given = {n: mine[n] for n in ("q", "k", "v", "bias", "mask", "alibi_slopes", "sinks") if n in mine}
            more = {n: x for n, x in options.items() if not n.startswith("return_")}
            plan = distributed.plan((rank, size), **given, mode=mode, backward=self.backward, **more)
            if plan.status != "FA_OK":
                break
        return Plan(plan.status, plan.error, plan.mode, plan.workspace_bytes, plan.why_not)

    def exact_query(self, spec):
        outputs = any(name.startswith(("out", "d")) for name in self.get(spec, "layouts"))
        return not outputs and not spec.get("return_dbias")

    def call(self, spec, views, options):
        options = dict(options)
        options["mode"] = options.get("mode", options.pop("kernel", None) or "auto")
        devices, odd = self._devices(spec, views), self._odd_rank(spec)
        errors: dict[int, BaseException] = {}

        def rank(group: distributed.Group):
            try:
                mine = options if odd is None or group.rank == odd else self._without_mutation(spec, options)
                with _on(devices[group.rank], self.rank_views(spec, views, group.rank)) as arrays:
                    return self.call_rank(spec, group, arrays, mine)
            except BaseException as error:
                errors[group.rank] = error
                raise

        try:
            parts = distributed.run(groups_of(devices), rank)
        except Exception as error:
            if any(isinstance(e, RankLost) or not isinstance(e, FlashAttnError) for e in (error, *errors.values())):
                groups_of.cache_clear()  # the groups may have ended
            elif len(errors) != len(devices):
                raise Wrong(f"ranks {sorted(errors)} of {len(devices)} raised, the others did not: {errors}") from None
            raise
        return {f"{name}{rank}": array for rank, part in enumerate(parts) for name, array in part.items()}

    def _odd_rank(self, spec) -> int | None:
        """The only rank that gets a mutated option, or None if all ranks get it."""
        if spec.get("mutation", [""])[0] != "option" or spec.get("seed", 0) % 2:
            return None
        return spec.get("seed", 0) // 2 % self.get(spec, "ranks")

    def _without_mutation(self, spec, options):
        name, right = spec["mutation"][1], self.options(spec)
        return {n: x for n, x in options.items() if n != name} | ({name: right[name]} if name in right else {})

    def together(self, spec, found, names) -> dict[str, np.ndarray]:
        """Whole arrays from those of the ranks."""
        whole, size = {}, self.get(spec, "ranks")
        for name in names:
            if f"{name}0" in found:
                parts = [found[f"{name}{rank}"] for rank in range(size)]
                order = np.argsort(np.concatenate(self.places(spec, name in KEYS)))
                whole[name] = np.concatenate(parts, CUT[name]).take(order, CUT[name])
        return whole


class _on:
    """The arrays of a rank on its device: the arena's, or copies of them; outputs are then copied back."""

    OUTPUTS = ("out", "dq", "dk", "dv")

    def __init__(self, device: Any, arrays: dict[str, Any]):
        self.device, self.given, self.arrays = device, arrays, arrays

    def __enter__(self):
        if isinstance(self.device, int) and type(self.given.get("k")).__module__.startswith("torch"):
            import torch

            torch.cuda.set_device(self.device)
            if self.device:
                place = f"cuda:{self.device}"
                self.arrays = {n: x.to(place) if getattr(x, "is_cuda", False) else x for n, x in self.given.items()}
        return self.arrays

    def __exit__(self, kind, *_):
        if self.arrays is not self.given and kind is None:
            for name in self.OUTPUTS:
                if name in self.given:
                    self.given[name].copy_(self.arrays[name])


class DistributedForward(AcrossRanks, Forward):
    """distributed.forward."""

    name, varlen, weight, backward = "distributed_forward", True, 2, False
    DEFAULTS = Forward.DEFAULTS | AcrossRanks.DEFAULTS
    REQUIRED = ("q0", "k0", "v0", "q1", "k1", "v1")
    BAD_OPTIONS = {k: v for k, v in Forward.BAD_OPTIONS.items() if k not in UNSERVED} | AcrossRanks.MORE_BAD_OPTIONS
    ALIASES = tuple((f"out{rank}", f"{name}{rank}") for rank in range(8) for name in "qkv")

    def call_rank(self, spec, group, arrays, options):
        wanted = {"return_lse": True} if self.get(spec, "return_lse") else {}
        got = distributed.forward(group, **arrays, **(wanted | options))
        out, lse = got if (wanted | options).get("return_lse") else (got, None)
        if "out" in arrays and out is not arrays["out"]:
            raise Wrong("the call returned another array than the given out")
        return ({} if "out" in arrays else {"out": out}) | ({} if lse is None else {"lse": lse})

    def judge(self, spec, values, after, results):
        super().judge(spec, values, {}, self.together(spec, {**after, **results}, ("out", "lse")))


class DistributedBackward(AcrossRanks, Backward):
    """distributed.backward."""

    name, varlen, weight, backward = "distributed_backward", True, 1.5, True
    DEFAULTS = Backward.DEFAULTS | AcrossRanks.DEFAULTS
    REQUIRED = tuple(f"{name}{rank}" for rank in (0, 1) for name in ("q", "k", "v", "dout", "out", "lse"))
    BAD_OPTIONS = {
        k: v for k, v in Backward.BAD_OPTIONS.items() if k not in ("accumulate", "kernel")
    } | AcrossRanks.MORE_BAD_OPTIONS  # fmt: skip
    ALIASES = tuple((f"{a}{rank}", f"{b}{rank}") for rank in range(8) for a, b in Backward.ALIASES)

    def draw(self, draw, backend):
        spec = super().draw(draw, backend)
        spec["accumulate"] = False
        return spec

    def call_rank(self, spec, group, arrays, options):
        return self.named(distributed.backward(group, **arrays, **options), arrays, options)

    def judge(self, spec, values, after, results):
        found = {**after, **results}
        whole = self.together(spec, found, ("dq", "dk", "dv"))
        size = self.get(spec, "ranks")
        if "dbias0" in results:
            whole["dbias"] = self._dbias(spec, values, [results[f"dbias{rank}"] for rank in range(size)])
        if "dsinks0" in results:
            for rank in range(1, size):
                if not np.array_equal(results["dsinks0"], results[f"dsinks{rank}"], equal_nan=True):
                    raise Wrong(f"dsinks of rank {rank} is not that of rank 0")
            whole["dsinks"] = results["dsinks0"]
        super().judge(spec, values, {}, whole)

    def _dbias(self, spec, values, parts: list[np.ndarray]) -> np.ndarray:
        shape = values["bias"].shape
        if not self._has_rows(spec, "bias"):
            return np.sum(parts, axis=0, dtype=np.float64)
        full = (1,) * (4 - len(shape)) + shape
        whole = np.zeros((len(spec["lens"]), *full[1:]))
        for (starts, positions), part in zip(self._score_places(spec), parts, strict=True):
            for b in range(len(whole)):
                mine = positions[starts[b] : starts[b + 1]]
                whole[b][:, mine] = part[b, :, : len(mine)]
        return (whole.sum(0, keepdims=True) if full[0] == 1 else whole).reshape(shape)


FUNCTIONS = (DistributedForward(), DistributedBackward())
