"""The process that ncu watches. It launches each call of a list twice to warm up, and once between the profiler's
marks. A kernel that fills an array comes before that launch, so that ncu's list of kernels can be divided into
calls."""

from __future__ import annotations

import json
import sys
from typing import Any

from flash_attn_minimal.errors import FlashAttnError

from ..bench.machine import first_line, open_machine
from ..bench.systems import Inputs, Refused, Shape, System, ours
from ._variants import Variants

FIELDS = ("batch", "seqlen", "nheads", "nheads_k", "headdim", "causal", "dtype", "backward", "allow_tf32")


def call_of(name: str, shape: Shape, variant: bool) -> dict[str, Any]:
    """An entry of the list: a kernel of the library, or a variant, on a shape."""
    return {"name": name, "variant": variant} | {field: getattr(shape, field) for field in FIELDS}


def main(text: str) -> None:
    asked = json.loads(text)
    machine = open_machine("cuda", asked["framework"])
    profiler = machine.torch.cuda.profiler if machine.framework == "torch" else machine.cupy.cuda.profiler
    for call in asked["calls"]:
        system = None
        try:
            system = _system(machine, call)
            for i in range(2):
                system.launch(i)
            machine.synchronize()
        except (FlashAttnError, Refused, MemoryError) as error:
            print(f"{call['name']}, seqlen {call['seqlen']}: {first_line(error)}", file=sys.stderr)
            system = None
        profiler.start()
        machine.nans((1,), "float32")  # the kernel that fills an array
        if system:
            system.launch(0)
        machine.synchronize()
        profiler.stop()
        del system
        machine.release()


def _system(machine, call: dict[str, Any]) -> System:
    shape = Shape(**{field: call[field] for field in FIELDS})
    inputs = Inputs(machine, shape.given, 0)
    if shape.given != shape:
        inputs, _ = inputs.quantised(machine, shape)
    if not call["variant"]:
        return ours(shape, inputs, call["name"], 0)
    variants = Variants("cuda")
    found = variants.named(call["name"])
    if found is None:
        raise Refused(f"{variants.file} has no variant {call['name']}")
    return variants.system(found, shape, inputs)
