"""The calls of the committed sweeps in the kernels that the library chooses now, beside the peers' times of then.

    python tests/sweeps_again.py OUT.json [--seconds 200]     on a GPU, with PyTorch

A sweep with its peers takes ten minutes for 4000 calls; this takes two for those of three sweeps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import few_queries

SWEEPS = ("sweep", "sweep_seed41", "sweep_seed43")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    given = parser.parse_args()
    from flash_attn_lab.bench.calls.call import Call
    from flash_attn_lab.bench.calls.make import Arrays, ours
    from flash_attn_lab.bench.machine import open_machine

    machine, rows, end = open_machine("cuda", "torch"), [], time.monotonic() + given.seconds
    folder = few_queries.DATA.parent
    todo = [(name, row) for name in SWEEPS for row in json.loads((folder / f"{name}.json").read_text())["rows"]]
    todo = [(name, row) for name, row in todo if row["peers"]]
    for name, row in todo:
        if time.monotonic() > end:
            break
        system = ours(Arrays.of(machine, Call.parse(row["call"])))
        then = {"peer": min(row["peers"].values()), "was": row["us"]}
        now = few_queries.microseconds(system.launch, 1 if row["us"] > 1000 else 0)
        rows.append({"sweep": name, "call": row["call"]} | then | {"us": now, "kernel": system.kernel})
        if len(rows) % 100 == 0:
            print(f"[{len(rows)}/{len(todo)}] {row['call']}", file=sys.stderr)
    few_queries.write(given.path, machine, "python tests/sweeps_again.py", "sweeps_again", rows)


if __name__ == "__main__":
    main()
