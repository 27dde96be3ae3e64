"""The sample call of every kernel and operation under compute-sanitizer.

    python tests/sanitize.py [--tool memcheck ...] [--race-library FILE] [--json FILE]

memcheck: accesses outside of what was allocated, and failed calls; initcheck: reads of what nobody wrote; synccheck:
barriers that not all reach; racecheck: shared memory written and read with nothing between. racecheck does not see that
one lane's arrival at a barrier speaks for its warp: its library is one built with -DFLASH_ATTN_RACECHECK=ON, in which
every lane arrives. initcheck does not see what the copy engine writes: the kernels that read the sums of dq it has made
are left out, and first_calls.py has every workspace begin as NaN instead. Every tensor has an allocation of its own."""

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

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")


def sanitize(tool: str, names: list[str], race_library: str | None) -> dict:
    """{"errors", "seconds", "calls": [name, outcome], "reports": the first of them}."""
    place = Path(f"/tmp/sanitize.{os.getpid()}.{tool}.{names[0] if names else 'all'}")
    place.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if tool == "racecheck" and race_library:
        environment["FLASH_ATTN_LIBRARY"] = race_library
    calls = [
        sys.executable,
        str(Path(__file__).with_name("first_calls.py")),
        "--in-process",
        "--json",
        str(place / "rows"),
    ]
    calls += [word for name in names for word in ("--name", name)]
    left_out = ["--kernel-name-exclude", "kernel_substring=after_kernel"] if tool == "initcheck" else []
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        *left_out,
        "--log-file",
        str(place / "log"),
        "--print-limit",
        "20",
        *calls,
    ]
    began = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    log = (place / "log").read_text() if (place / "log").exists() else ""
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", log)
    rows = json.loads((place / "rows").read_text())["rows"] if (place / "rows").exists() else []
    return {
        "errors": int(found[-1]) if found else None,
        "seconds": round(time.monotonic() - began, 1),
        "calls": [[row["call"], row["outcome"]] for row in rows],
        "reports": log.splitlines()[:60] if not found or int(found[-1]) else [],
        "said": [] if found and rows else (done.stdout + done.stderr).splitlines()[-10:],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--name", action="append", default=[], help="samples whose name begins so")
    parser.add_argument("--race-library")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    tools = options.tool or TOOLS
    with ThreadPoolExecutor(len(tools)) as pool:
        results = dict(
            zip(tools, pool.map(lambda tool: sanitize(tool, options.name, options.race_library), tools), strict=True)
        )
    bad = 0
    for tool, result in results.items():
        wrong = {name: outcome for name, outcome in result["calls"] if outcome not in ("ok", "refused")}
        bad += bool(result["errors"] is None or result["errors"] or wrong)
        print(
            f"{tool:<10} {len(result['calls'])} calls, {result['errors']} errors, {result['seconds']} s {wrong or ''}"
        )
        print("\n".join(result["reports"] + result["said"]))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
