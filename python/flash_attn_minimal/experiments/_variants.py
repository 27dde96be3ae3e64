"""The library of variants: kernels of the library with other tiles, in another order, or at an earlier step of their
climb. Only a checkout builds it (CMake option FLASH_ATTN_EXPERIMENTS), so it may be missing; ladder/variants/ has its
sources and experiments.h, which this file mirrors."""

from __future__ import annotations

import ctypes as ct
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _library
from .._library import AttentionArgs, AttentionBackwardArgs, LibraryNotFound, declare, load, new
from .._options import Options, _output, _prepare
from .._pack import _put_tensor
from ..bench.machine import first_line
from ..bench.systems import Inputs, Refused, Shape, System
from ._measure import Candidate

DTYPE = "bfloat16"  # of every variant
LIBRARY_NAME = "libflash_attn_experiments.so"
INTEGERS = ("order", "backward", "tile_m", "tile_n", "stages", "threads")
RESOURCES = ("registers", "shared_bytes", "spill_bytes", "blocks_per_sm")  # 0 without a GPU
SERVES = ("headdim", "compute")  # 0: any


class _Variant(ct.Structure):
    """fa_variant."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        *((name, ct.c_char_p) for name in ("name", "experiment", "kernel", "about")),
        *((name, ct.c_int32) for name in INTEGERS + RESOURCES + SERVES),
    ]


@dataclass(frozen=True)
class Variant:
    name: str
    experiment: str
    kernel: str  # of the library, that it is a variant of
    about: str
    order: int
    backward: bool
    tile_m: int
    tile_n: int
    stages: int
    threads: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    blocks_per_sm: int
    headdim: int  # 0: whatever the kernel of the library serves
    compute: int  # 80: sm_80 or newer; 90: Hopper; 0: any

    def row(self) -> dict[str, Any]:
        """What a row of a result says of it."""
        names = ("kernel", "about", "order", "tile_m", "tile_n", "stages", "threads", *RESOURCES)
        return {"variant_of" if name == "kernel" else name: getattr(self, name) for name in names}


def places() -> list[Path]:
    """Where the library is looked for: $FLASH_ATTN_EXPERIMENTS, beside the library, build/ of the checkout."""
    if named := os.environ.get("FLASH_ATTN_EXPERIMENTS"):
        return [Path(named)]
    checkout = Path(__file__).resolve().parents[3]
    return [_library.path().with_name(LIBRARY_NAME), checkout / "build" / LIBRARY_NAME, Path("build") / LIBRARY_NAME]


class Variants:
    """The loaded library. LibraryNotFound says how to get it."""

    def __init__(self, device: str):
        load()  # the variants use functions of the library
        found = [place for place in places() if place.is_file()]
        if not found:
            raise LibraryNotFound(
                f"no {LIBRARY_NAME} ({', '.join(map(str, dict.fromkeys(places())))}): build the checkout with "
                "-DFLASH_ATTN_EXPERIMENTS=ON, or set FLASH_ATTN_EXPERIMENTS to its path"
            )
        try:
            self.lib = ct.CDLL(str(found[0]))
        except OSError as error:
            raise LibraryNotFound(f"{found[0]} does not load: {error}") from None
        self.file, self.device = found[0], 0 if device == "cuda" else -1
        declare(self.lib, "fa_variant_count", ct.c_int32)
        declare(self.lib, "fa_variant_get", ct.c_int, ct.c_int32, ct.c_int32, ct.POINTER(_Variant))
        for name, struct in (("forward", AttentionArgs), ("backward", AttentionBackwardArgs)):
            declare(self.lib, f"fa_variant_{name}", ct.c_int, ct.c_char_p, ct.POINTER(struct), ct.c_void_p)
        declare(self.lib, "fa_variant_last_error", ct.c_char_p)
        sizes = ct.POINTER(AttentionArgs), ct.POINTER(ct.c_size_t)
        declare(self.lib, "fa_variant_workspace", ct.c_int, ct.c_char_p, *sizes)

    @functools.cached_property
    def all(self) -> list[Variant]:
        found = []
        for index in range(self.lib.fa_variant_count()):
            raw = new(_Variant)
            status = self.lib.fa_variant_get(index, self.device, raw)
            if status and not raw.name:  # a kernel of another GPU has its name and no registers
                raise self._failure(status, f"variant {index}")
            texts = [getattr(raw, name).decode() for name in ("name", "experiment", "kernel", "about")]
            numbers = {name: int(getattr(raw, name)) for name in INTEGERS + RESOURCES + SERVES}
            numbers["backward"] = bool(numbers["backward"])
            found.append(Variant(*texts, **numbers))
        return found

    def of(self, experiment: str, headdim: int | None = None) -> list[Variant]:
        """Those of an experiment, in their order; with headdim those that serve it."""
        mine = [variant for variant in self.all if variant.experiment == experiment]
        mine = [variant for variant in mine if headdim is None or variant.headdim in (0, headdim)]
        return sorted(mine, key=lambda variant: (variant.backward, variant.order))

    def named(self, name: str) -> Variant | None:
        return next((variant for variant in self.all if variant.name == name), None)

    def candidate(self, variant: Variant) -> Candidate:
        return Candidate(variant.name, functools.partial(self.system, variant), variant.row())

    def system(self, variant: Variant, shape: Shape, inputs: Inputs) -> System:
        """Launches of a variant on the inputs of a shape, each with a struct of its own that is filled once."""
        made = [self._call(variant, shape, inputs, i) for i in range(len(inputs))]

        def launch(i):
            call, result = made[i % len(made)]
            call()
            return result

        return System("ours", variant.name, launch)

    def _call(self, variant: Variant, shape: Shape, inputs: Inputs, i: int) -> tuple[Callable[[], None], Any]:
        q, k, v, out = inputs[i]
        args, views = _prepare(q, k, v, None, Options(causal=shape.causal))
        qv = views[0]
        struct: Any = args
        result: Any = out
        if variant.backward:
            dout, lse, *gradients = inputs.gradients[i % len(inputs)]
            struct, result = new(AttentionBackwardArgs), tuple(gradients)
            for where, name, array in (
                (args, "out", out), (struct, "dout", dout),
                *zip([struct] * 3, ("dq", "dk", "dv"), gradients, strict=True),
            ):  # fmt: skip
                views.append(_view(name, array))
                _put_tensor(where, name, views[-1])
            views.append(_view("lse", lse))
            args.lse = views[-1].pointer
            struct.forward = ct.pointer(args)
        else:
            views.append(_output(args, views, out, tuple(q.shape), False))
        size, name = ct.c_size_t(0), variant.name.encode()
        asked = AttentionArgs.from_buffer_copy(args)
        asked.q_data = asked.k_data = asked.v_data = asked.out_data = None  # a query needs the sizes alone
        if status := self.lib.fa_variant_workspace(name, asked, size):
            raise Refused(first_line(self._failure(status, variant.name)))
        if size.value:
            scratch = qv.door.empty(qv, (size.value,), "uint8")
            views.append(scratch)
            args.workspace, args.workspace_bytes = scratch.pointer, size.value
        function = self.lib.fa_variant_backward if variant.backward else self.lib.fa_variant_forward
        door = qv.door

        def call() -> None:
            if status := function(name, struct, door.stream(views)):
                failure = self._failure(status, variant.name)
                raise Refused(first_line(failure)) if isinstance(failure, _library.Unsupported) else failure

        return call, result

    def _failure(self, status: int, what: str) -> Exception:
        """The exception of a status, with the text of the library that gave it."""
        kind = _library._ERRORS.get(status, _library.FlashAttnError)
        return kind(self.lib.fa_variant_last_error().decode(errors="replace") or f"{what}: status {status}")


def _view(name: str, array):
    from .. import _arrays

    return _arrays.view(array, name)


def on_gpu(run) -> Variants | None:
    """The variants of a run on a GPU; None, with the reason noted, where they cannot run."""
    if not run.gpu:
        run.leave_out("variants", "any shape", "they are kernels of a GPU")
        return None
    try:
        return Variants(run.machine.device)
    except LibraryNotFound as error:
        run.leave_out("variants", "any shape", first_line(error))
        return None
