"""A worker of the campaign: reads one case a line from its input, and writes the outcome to its output.

    in   {"number": 17} or {"spec": {...}}
    out  {"ready": ...} once, then for each case {"spec": {...}} before it runs and {"kind": ..., ...} after it

A sticky CUDA error ends the process, after it is reported.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def opened() -> tuple[dict[str, Any], Callable[..., None]]:
    """Returns what the worker is told at its start, and a function that writes a message of the protocol. From here on,
    anything else that the process prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    return json.loads(sys.argv[1]), say


def main() -> int:
    about, say = opened()

    from .arrays import backend_for
    from .case import generate, run
    from .function import BROKEN, STICKY, Outcome, World, told

    world = World(backend_for(about["device"], about.get("framework")), about.get("kernel"), about.get("function"))
    if not world.backend.alive():  # creates the context
        sys.exit("the device takes no work")
    say(ready=world.backend.framework)
    for line in sys.stdin:
        order = json.loads(line)
        started, spec = time.perf_counter(), order.get("spec")
        try:
            spec = spec or generate(about["seed"], order["number"], world)
            say(spec=spec)
            outcome = run(spec, world.backend)
        except Exception as error:
            outcome = Outcome(BROKEN, "", told(error))
            if not world.backend.alive():
                outcome.kind = STICKY
        dtype = (spec or {}).get("dtype", "float32")
        say(
            kind=outcome.kind, kernel=outcome.kernel, message=outcome.message, dtype=dtype,
            function=(spec or {}).get("function", ""), seconds=round(time.perf_counter() - started, 4),
        )  # fmt: skip
        if outcome.kind == STICKY:
            os._exit(0)  # memory of a lost context cannot be freed
    return 0


if __name__ == "__main__":
    sys.exit(main())
