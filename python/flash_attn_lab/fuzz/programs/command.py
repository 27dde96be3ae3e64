"""The campaign of programs: its command and its report."""

from __future__ import annotations

import json
import pprint
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flash_attn_minimal._commands.command import UsageError
from flash_attn_minimal._commands.report import cores, plural

from ... import PROGRAM
from ...progress import Progress
from ..campaign import Shrinker, check_names, gather, outcomes
from ..report import Report
from .shrink import shrink
from .steps import functions


class ProgramReport(Report):
    def __init__(self, about: dict[str, Any]):
        super().__init__(about)
        self.calls: Counter = Counter()  # the number of calls of each function

    def add(self, number, spec, message):
        self.calls.update(message.get("calls", {}))
        return super().add(number, spec, message)

    def distinct(self):
        """The first finding of each kind, kernel and message. Messages that differ only in numbers count as equal."""
        seen: dict[tuple, dict[str, Any]] = {}
        for finding in self.findings:
            text = re.sub(r"[\d.e+-]+", "#", finding["message"].split("\n", 1)[0])[:100]
            seen.setdefault((finding["kind"], finding["kernel"], text), finding)
        return list(seen.values())

    def speed(self) -> str:
        return super().speed().replace("cases/s", "programs/s")

    def call(self, finding) -> str:
        """A Python program that repeats the finding."""
        about = [repr(self.about["device"])] + [repr(self.about["framework"])] * bool(self.about.get("framework"))
        program = pprint.pformat(finding.get("shrunk") or finding["spec"], width=116, compact=True, sort_dicts=False)
        return (
            "from math import inf, nan\nfrom flash_attn_lab.fuzz.programs import reproduce\n\n"
            f"program = {program}\nprint(reproduce(program, {', '.join(about)}))\n"
        )

    def text(self) -> str:
        lines = []
        for finding in self.distinct():
            lines.append(f"\n{self.headline(finding)}")
            lines += [f"    {line}" for line in finding["message"].split("\n")[1:12]]
            if finding.get("alone") is False:
                lines.append("    (not when the program runs as the first of its process)")
            lines += [f"    {line}" for line in self.call(finding).split("\n")]
        table = [f"{name:<28} {count:>8}" for name, count in sorted(self.calls.items())]
        return "\n".join([*lines, "", f"{'function':<28} {'calls':>8}", *table, self.summary()])

    def ran(self) -> str:
        return f"{plural(self.cases, 'program')} of {plural(sum(self.calls.values()), 'call')}"

    def json(self) -> dict[str, Any]:
        found = super().json()
        return found | {"programs": found.pop("cases"), "calls": dict(sorted(self.calls.items()))}


class ProgramShrinker(Shrinker):
    def shrunk(self, finding, tries):
        program, kind, last = finding["spec"], finding["kind"], finding
        left = self.until

        def fails(smaller: dict[str, Any]) -> bool:
            nonlocal last
            if time.monotonic() > left:
                return False
            for _ in range(again):
                message = self.outcome(smaller)
                if message["kind"] == kind:
                    last = message
                    return True
            return False

        again = 3  # tries, because the timing of threads is random
        if not fails(program):
            return finding | {"alone": False}
        smaller = shrink(program, fails, tries)
        return finding | {"alone": True, "shrunk": smaller, "message": last["message"]}


def campaign(
    device: str = "cpu", seed: int = 0, programs: int = 200, first: int = 0, seconds: float = float("inf"),
    kernel: str | None = None, function: str | None = None, framework: str | None = None, workers: int = 1,
    program_seconds: float = 30.0, shrink_seconds: float = 120.0, shrink_tries: int = 200, ranks: bool = False,
    compares: bool = True, progress: Any = None, keep: Callable[[ProgramReport], None] | None = None, **more: Any,
) -> ProgramReport:  # fmt: skip
    """Runs programs first .. first + programs - 1 of a seed, and returns the report. `more` goes to the workers. `keep`
    gets the report before its findings are made smaller, which takes at most shrink_seconds."""
    about = {
        "device": device, "seed": seed, "kernel": kernel, "function": function, "framework": framework, "ranks": ranks,
        "program_seconds": program_seconds, "compares": compares, "worker": f"{__package__}.worker", **more,
    }  # fmt: skip
    result, until = ProgramReport(about), time.monotonic() + seconds
    limit = 60 + 3 * program_seconds  # the worker watches its children; this limit is for the worker
    if device == "cuda":
        limit = program_seconds + 30  # answers that differ take a new process
    found = outcomes(about, range(first, first + programs), workers, limit, until)
    if gather(result, found, progress) and shrink_seconds > 0 and result.findings:
        if keep:
            keep(result)
        shrinker = ProgramShrinker(about, limit, time.monotonic() + shrink_seconds)
        try:
            for finding in result.distinct()[:10]:
                try:
                    result.replace(finding, shrinker.shrunk(finding, shrink_tries))
                except Exception:  # a failure to shrink must not lose the findings
                    result.replace(finding, finding | {"shrinking": traceback.format_exc(limit=-4)})
        except KeyboardInterrupt:  # the findings are reported as they are
            result.interrupted = True
        finally:
            shrinker.close()
    return result


def run(options: Any, argv: list[str]) -> int:
    """Runs `fuzz --programs N`, with the options of `fuzz`. Returns the exit status."""
    check_names(options, functions())
    if options.ranks and options.kernel:
        raise UsageError(f"--kernel {options.kernel!r} with --ranks: the kernels of ranks are drawn")
    if options.framework == "cupy" and options.ranks:
        raise UsageError("--ranks with CuPy: the ranks' arrays are PyTorch's")
    command = " ".join([PROGRAM, "fuzz", *argv])

    def write(result: ProgramReport) -> None:
        result.command = command
        if options.json:
            Path(options.json).write_text(json.dumps(result.json(), indent=1) + "\n")

    one = options.case is not None
    programs = 1 if one else options.programs
    result = campaign(
        device=options.device, seed=options.seed, programs=programs, first=options.case if one else options.first,
        seconds=options.seconds, kernel=options.kernel, function=options.function, framework=options.framework,
        workers=1 if one else options.workers or cores(), program_seconds=options.case_seconds,
        shrink_seconds=options.shrink_seconds, shrink_tries=options.shrink_tries or 200, ranks=options.ranks,
        compares=not options.run_only, progress=Progress(programs, every=5), keep=write,
    )  # fmt: skip
    write(result)
    print(result.text())
    return result.status
