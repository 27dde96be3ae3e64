"""The library of variants: kernels of the library with other tiles, in another order, or at an earlier step of their
development. Only a checkout builds it (CMake option FLASH_ATTN_EXPERIMENTS), so it may be missing. Its sources are in
ladder/variants/; this file mirrors experiments.h there."""

from __future__ import annotations

import contextlib
import ctypes as ct
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_attn_minimal import errors
from flash_attn_minimal._core import library
from flash_attn_minimal._core.fields import _put_tensor
from flash_attn_minimal._core.library import declare, load
from flash_attn_minimal._core.options import Options, _output, _prepare
from flash_attn_minimal._core.structs import AttentionArgs, AttentionBackwardArgs, new
from flash_attn_minimal.errors import LibraryNotFound

from ..bench.machine import first_line
from ..bench.systems import Inputs, Refused, Shape, System
from ._measure import Candidate

DTYPE = "bfloat16"  # the dtype of every variant
LIBRARY_NAME = "libflash_attn_experiments.so"
INTEGERS = ("order", "backward", "tile_m", "tile_n", "stages", "threads")
RESOURCES = ("registers", "shared_bytes", "spill_bytes", "blocks_per_sm")  # 0 without a GPU
SERVES = ("headdim", "compute")  # 0: any


class VariantStruct(ct.Structure):
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
    kernel: str  # the library's kernel of which this is a variant
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
        """The fields of a result row that describe the variant."""
        names = ("kernel", "about", "order", "tile_m", "tile_n", "stages", "threads", *RESOURCES)
        return {"variant_of" if name == "kernel" else name: getattr(self, name) for name in names}


def places() -> list[Path]:
    """The files to try: $FLASH_ATTN_EXPERIMENTS alone if it is set; else beside the library, then in build/ of the
    checkout and of the current folder."""
    if named := os.environ.get("FLASH_ATTN_EXPERIMENTS"):
        return [Path(named)]
    checkout = Path(__file__).resolve().parents[3]
    return [library.path().with_name(LIBRARY_NAME), checkout / "build" / LIBRARY_NAME, Path("build") / LIBRARY_NAME]


def open_variants() -> tuple[Path, ct.CDLL]:
    """(the file, the loaded library), whose functions raise exceptions. LibraryNotFound says how to build it."""
    load()  # the variants use functions of the library
    found = [place for place in places() if place.is_file()]
    if not found:
        raise LibraryNotFound(
            f"no {LIBRARY_NAME} ({', '.join(map(str, dict.fromkeys(places())))}): build the checkout with "
            "-DFLASH_ATTN_EXPERIMENTS=ON, or set FLASH_ATTN_EXPERIMENTS to its path"
        )
    try:
        lib = ct.CDLL(str(found[0]))
    except OSError as error:
        raise LibraryNotFound(f"{found[0]} does not load: {error}") from None
    forward, backward = ct.POINTER(AttentionArgs), ct.POINTER(AttentionBackwardArgs)
    declare(lib, "fa_variant_count", ct.c_int32)
    declare(lib, "fa_variant_last_error", ct.c_char_p)
    for name, *arguments in (
        ("get", ct.c_int32, ct.c_int32, ct.POINTER(VariantStruct)),
        ("forward", ct.c_char_p, forward, ct.c_void_p),
        ("backward", ct.c_char_p, backward, ct.c_void_p),
        ("workspace", ct.c_char_p, forward, ct.POINTER(ct.c_size_t)),
    ):
        function = declare(lib, f"fa_variant_{name}", ct.c_int, *arguments)
        function.errcheck = functools.partial(_raise, lib)
    return found[0], lib


def _raise(lib: ct.CDLL, status: int, function, arguments) -> None:
    if status:
        kind = library._ERRORS.get(status, errors.FlashAttnError)
        raise kind(lib.fa_variant_last_error().decode(errors="replace") or f"status {status}")


def table(lib: ct.CDLL, device: int) -> list[Variant]:
    """Every variant; device=-1 gives the facts that are known without a GPU."""
    found = []
    for index in range(lib.fa_variant_count()):
        raw = new(VariantStruct)
        with contextlib.suppress(errors.Unsupported):  # a kernel for another GPU has a name, but no registers
            lib.fa_variant_get(index, device, raw)
        values = {name: getattr(raw, name) for name, _ in VariantStruct._fields_[1:]}
        texts = {name: value.decode() for name, value in values.items() if isinstance(value, bytes)}
        found.append(Variant(**{**values, **texts, "backward": bool(raw.backward)}))
    return found


class Variants:
    """The library of variants, as experiments use it."""

    def __init__(self, device: str):
        self.file, self.lib = open_variants()
        self.device = 0 if device == "cuda" else -1

    @functools.cached_property
    def all(self) -> list[Variant]:
        return table(self.lib, self.device)

    def of(self, experiment: str, headdim: int | None = None) -> list[Variant]:
        """The variants of an experiment, in their order. headdim: only the variants that serve it."""
        mine = [variant for variant in self.all if variant.experiment == experiment]
        mine = [variant for variant in mine if headdim is None or variant.headdim in (0, headdim)]
        return sorted(mine, key=lambda variant: (variant.backward, variant.order))

    def named(self, name: str) -> Variant | None:
        return next((variant for variant in self.all if variant.name == name), None)

    def candidate(self, variant: Variant) -> Candidate:
        return Candidate(variant.name, functools.partial(self.system, variant), variant.row())

    def system(self, variant: Variant, shape: Shape, inputs: Inputs) -> System:
        """A system that launches a variant on the inputs of a shape. Each input set has its struct, filled only
        once."""
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
        asked.q_data = asked.k_data = asked.v_data = asked.out_data = None  # a query needs only the sizes
        try:
            self.lib.fa_variant_workspace(name, asked, size)
        except errors.FlashAttnError as error:
            raise Refused(first_line(error)) from None
        if size.value:
            scratch = qv.door.empty(qv, (size.value,), "uint8")
            views.append(scratch)
            args.workspace, args.workspace_bytes = scratch.pointer, size.value
        function = self.lib.fa_variant_backward if variant.backward else self.lib.fa_variant_forward
        door = qv.door

        def call() -> None:
            try:
                function(name, struct, door.stream(views))
            except errors.Unsupported as error:
                raise Refused(first_line(error)) from None

        return call, result


def _view(name: str, array):
    from flash_attn_minimal import _arrays

    return _arrays.view(array, name)


def on_gpu(run) -> Variants | None:
    """The variants for a run on a GPU. If they cannot run: None, with the reason noted in the run."""
    if not run.gpu:
        run.leave_out("variants", "any shape", "they are kernels of a GPU")
        return None
    try:
        return Variants(run.machine.device)
    except LibraryNotFound as error:
        run.leave_out("variants", "any shape", first_line(error))
        return None
