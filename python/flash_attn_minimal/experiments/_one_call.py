"""The process that ncu watches: `python -m flash_attn_minimal.experiments._one_call '{"name": ..., shape}'` makes the
inputs, launches twice to warm up, and once between the profiler's marks."""

from __future__ import annotations

import json
import sys

from ..bench.machine import open_machine
from ..bench.systems import Inputs, Shape, ours
from ._variants import Variants


def call_of(name: str, shape: Shape, framework: str, variant: bool) -> dict:
    """The argument of this module."""
    fields = ("batch", "seqlen", "nheads", "nheads_k", "headdim", "causal", "dtype", "backward", "allow_tf32")
    return {"name": name, "framework": framework, "variant": variant} | {x: getattr(shape, x) for x in fields}


def main(text: str) -> int:
    call = json.loads(text)
    name, framework, variant = call.pop("name"), call.pop("framework"), call.pop("variant")
    machine, shape = open_machine("cuda", framework), Shape(**call)
    inputs = Inputs(machine, shape.given, 0)
    if shape.given != shape:
        inputs, _ = inputs.quantised(machine, shape)
    if variant:
        variants = Variants("cuda")
        found = variants.named(name)
        if found is None:
            raise SystemExit(f"{variants.file} has no variant {name}")
        system = variants.system(found, shape, inputs)
    else:
        system = ours(shape, inputs, name, 0)
    for i in range(2):
        system.launch(i)
    machine.synchronize()
    profiler = machine.torch.cuda.profiler if machine.framework == "torch" else machine.cupy.cuda.profiler
    profiler.start()
    system.launch(0)
    machine.synchronize()
    profiler.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
