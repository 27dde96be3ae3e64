"""Runs the sample calls of every kernel and operation under compute-sanitizer.

    python tests/sanitize.py [--tool memcheck ...] [--race-library FILE] [--json FILE]

memcheck finds accesses outside of allocations and failed calls, initcheck reads of memory that was never written,
synccheck barriers that some threads do not reach, racecheck accesses to shared memory that no barrier separates.

racecheck does not know that one lane's arrival at a barrier counts for its whole warp. Build its library with
-DFLASH_ATTN_RACECHECK=ON, with which every lane arrives. initcheck does not see the writes of the copy engine, so
kernels that read sums of dq, which the copy engine adds up, are left out; first_calls.py starts every workspace as NaN
instead. Every tensor has a separate allocation."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import sample_calls

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")


def sanitize(tool: str, name: str, race_library: str | None) -> dict:
    """The sample calls of one name under one tool."""
    place = Path(f"/tmp/sanitize.{os.getpid()}.{tool}.{name}")
    place.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if tool == "racecheck" and race_library:
        environment["FLASH_ATTN_LIBRARY"] = race_library
    calls = [sys.executable, str(Path(__file__).with_name("first_calls.py")), "--in-process", "--name", name]
    left_out = ["--kernel-name-exclude", "kernel_substring=after_kernel"] if tool == "initcheck" else []
    command = ["compute-sanitizer", "--tool", tool, *left_out, "--log-file", str(place / "log"), *calls]
    began = time.monotonic()
    done = subprocess.run([*command, "--json", str(place / "rows")], env=environment, capture_output=True, text=True)
    log = (place / "log").read_text() if (place / "log").exists() else ""
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", log)
    rows = json.loads((place / "rows").read_text())["rows"] if (place / "rows").exists() else []
    row = {"call": name, "tool": tool, "errors": int(found[-1]) if found else None}
    row |= {"outcomes": [one["outcome"].splitlines()[0] for one in rows], "seconds": round(time.monotonic() - began, 1)}
    if row["errors"] != 0:
        lines = [line.strip("= ") for line in log.splitlines() if "Host Frame" not in line]
        row["reports"] = [line for line in lines if line][:12] or (done.stdout + done.stderr).splitlines()[-5:]
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--name", action="append", help="samples of this name")
    parser.add_argument("--race-library")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    names = options.name or sample_calls.names("cuda")
    work = [(tool, name) for name in names for tool in options.tool or TOOLS]
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda one: sanitize(*one, options.race_library), work):
            rows.append(row)
            if row["errors"] != 0 or not set(row["outcomes"]) <= {"ok", "refused"}:
                print(json.dumps(row), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": rows}, file, indent=1)
    clean = sum(row["errors"] == 0 for row in rows)
    print(f"{len(rows)} runs, {clean} clean")
    return clean < len(rows)


if __name__ == "__main__":
    sys.exit(main())
