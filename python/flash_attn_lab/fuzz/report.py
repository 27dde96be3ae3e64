"""The results of a campaign: counts and findings."""

from __future__ import annotations

import datetime
import platform
import re
import time
from collections import Counter
from typing import Any

from flash_attn_minimal import __version__
from flash_attn_minimal._commands.info import gpus
from flash_attn_minimal._commands.report import cores, cpu_model, plural
from flash_attn_minimal._core.library import load

from ..report import commit
from .case import functions
from .function import FINE, PASSED, REFUSED, REJECTED


class Report:
    def __init__(self, about: dict[str, Any]):
        self.about, self.command = about, ""
        self.counts: Counter = Counter()  # (function, kernel, dtype, outcome)
        self.findings: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}  # additional sections
        self.cases, self.started = 0, time.monotonic()
        self.date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.seconds = 0.0
        self.interrupted = False

    @property
    def status(self) -> int:
        """The exit status of the command."""
        return 130 if self.interrupted else 1 if self.findings else 0

    def add(self, number: int, spec: dict[str, Any] | None, message: dict[str, Any]) -> dict[str, Any] | None:
        """Counts one case. Returns its finding, or None if the outcome is fine."""
        self.cases += 1
        self.counts[message["function"], message["kernel"], message["dtype"], message["kind"]] += 1
        if message["kind"] in FINE:
            return None
        finding = {"number": number, "spec": spec or {}, **{k: message[k] for k in ("kind", "kernel", "message")}}
        self.findings.append(finding)
        return finding

    def add_readers(self, found: dict[str, Any]) -> None:
        """Adds the result of readers.run as a section, and its failures to the findings."""
        self.more["readers"] = found
        for failure in found["failures"]:
            spec = {"function": f"reader {failure['reader']}", "number": failure["case"], "input": failure["input"]}
            about = {"kind": failure["outcome"], "kernel": "", "message": failure["error"]}
            self.findings.append({"number": None, "spec": spec, **about})

    def replace(self, finding, other) -> None:
        self.findings[next(i for i, f in enumerate(self.findings) if f is finding)] = other

    def finish(self) -> None:
        self.seconds = time.monotonic() - self.started

    def distinct(self) -> list[dict[str, Any]]:
        """The first finding of each function, kernel, kind and mutation."""
        seen = {}
        for finding in self.findings:
            mutation = finding["spec"].get("mutation", [""])[:2]
            key = (finding["spec"].get("function"), finding["kernel"], finding["kind"], str(mutation))
            seen.setdefault(key, finding)
        return list(seen.values())

    def speed(self) -> str:
        seconds = time.monotonic() - self.started
        rate = self.cases / max(seconds, 1e-9)
        return f"{seconds:.0f} s, {rate:.1f} cases/s, {plural(len(self.findings), 'finding')}"

    def headline(self, finding) -> str:
        first = finding["message"].split("\n", 1)[0]
        kernel = f" {finding['kernel']}" if finding["kernel"] else ""
        where = f"case {finding['number']}, " if finding["number"] is not None else ""
        return f"{where}{finding['spec'].get('function', '')}{kernel}: {finding['kind']}: {first[:300]}"

    def call(self, finding) -> str:
        """Python code that repeats the finding."""
        device = f", {self.about['device']!r}"
        if self.about.get("framework"):
            device += f", {self.about['framework']!r}"
        spec = finding.get("shrunk") or finding["spec"]
        numbers = "from math import inf, nan; " if re.search(r"\b(inf|nan)\b", repr(spec)) else ""
        return f"{numbers}from flash_attn_lab.fuzz import reproduce; print(reproduce({spec!r}{device}))"

    def text(self) -> str:
        lines = []
        for finding in self.findings:
            lines.append(f"\n{self.headline(finding)}")
            lines += [f"    {line}" for line in finding["message"].split("\n")[1:12]]
            if finding.get("alone") is False:
                lines.append("    (not when it runs alone)")
            for name, what in describe(finding.get("shrunk") or finding["spec"]):
                lines.append(f"    {name:<16} {what}")
            lines.append(f"    {self.call(finding)}")
        return "\n".join([*lines, "", *self.table(), self.summary()])

    def table(self) -> list[str]:
        """The numbers of cases and of their outcomes, for every function and kernel."""
        rows: dict[tuple[str, str], Counter] = {}
        for (function, kernel, _, kind), count in self.counts.items():
            rows.setdefault((function, kernel), Counter())[kind] += count
        heads = ("cases", "passed", "refused", "rejected", "findings")
        lines = [f"{'function':<26} {'kernel':<20} " + " ".join(f"{head:>8}" for head in heads)]
        for (function, kernel), kinds in sorted(rows.items()):
            bad = sum(n for kind, n in kinds.items() if kind not in FINE)
            lines.append(
                f"{function:<26} {kernel or '-':<20} "
                + " ".join(
                    f"{n:>8}" for n in (sum(kinds.values()), kinds[PASSED], kinds[REFUSED], kinds[REJECTED], bad)
                )
            )
        return lines

    def summary(self) -> str:
        rate = self.cases / self.seconds if self.seconds else 0.0
        about = self.about
        kinds = f", {plural(len(self.distinct()), 'kind')} of them" if self.findings else ""
        return (
            f"{about['device']}, seed {about['seed']}: {self.ran()} in {self.seconds:.0f} s ({rate:.1f}/s), "
            f"{plural(len(self.findings), 'finding')}{kinds}{' (interrupted)' * self.interrupted}"
        )

    def ran(self) -> str:
        return plural(self.cases, "case")

    def json(self) -> dict[str, Any]:
        keys = ("function", "kernel", "dtype", "outcome")
        return {
            "machine": machine(self.about["device"]),
            "library": load().fa_build_info().decode(),
            "version": __version__,
            "commit": commit(),
            "date": self.date,
            "command": self.command,
            "about": self.about,
            "seconds": round(self.seconds, 1),
            "cases": self.cases,
            "counts": [dict(zip((*keys, "cases"), (*key, n), strict=True)) for key, n in sorted(self.counts.items())],
            "findings": [finding | {"call": self.call(finding)} for finding in self.findings],
            **self.more,
        }


def describe(spec: dict[str, Any]):
    """Yields (name, description) of the arrays of a case."""
    try:
        for name, array in functions()[spec["function"]].arrays(spec).items():
            strides, _, _ = array.strides()
            how = "" if not array.layout else f" strides {strides}"
            offset = f", {array.layout['offset']} elements off" if array.layout.get("offset") else ""
            yield name, f"{array.dtype} {tuple(array.shape)}{how}{offset}"
    except (KeyError, ValueError, TypeError, IndexError):
        return


def machine(device: str) -> str:
    names = gpus() if device == "cuda" else []
    return ", ".join([*names, cpu_model(), plural(cores(), "core"), f"Python {platform.python_version()}"])
