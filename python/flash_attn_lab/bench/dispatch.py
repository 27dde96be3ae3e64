"""The suite `dispatch`: the calls of the sweep, each beside every kernel of the library that takes it, forced by name.
Where one of those is faster, the rules by which the library chooses (cuda/api/attention) have a mistake.
"""

from __future__ import annotations

from statistics import geometric_mean as geometric

from ..report import table as markdown_table
from . import sweep
from .calls.call import Call
from .suite import SUITES, Suite, register

MISTAKE = 0.95  # the fastest kernel's time over that of the library's choice, below which the choice was a mistake
WORST = 200


def lost(row: dict) -> float:
    """How long the call takes by the fastest kernel, over the time of the library's choice; at most 1."""
    return min(1.0, row.get("ratio", 1.0))


def table(data: dict, rows: list[dict]) -> list[str]:
    if not rows:
        return ["No call was timed."]
    compared = [row for row in rows if row["peers"]]
    mistakes = [row for row in compared if lost(row) < MISTAKE]
    lines = [
        f"{len(rows)} calls, {len(compared)} of them with more than one kernel. The library chose a slower kernel in "
        f"{len(mistakes)} ({len(mistakes) / len(rows):.0%}; by more than {1 - MISTAKE:.0%} counts). With the fastest "
        f"kernel everywhere all calls would take {geometric([lost(row) for row in rows]):.3f} of their time in the "
        "geometric mean.",
    ]
    if not mistakes:
        return lines
    pairs: dict[tuple[str, str, str], list[dict]] = {}
    for row in mistakes:
        pairs.setdefault((row["pass"], row["kernel"], row["best"]), []).append(row)
    body = []
    for (way, kernel, best), mine in sorted(pairs.items(), key=lambda pair: -len(pair[1])):
        ratios = [lost(row) for row in mine]
        rows_q = sorted(Call.parse(row["call"]).seqlen_q for row in mine)
        body.append(
            [way, kernel, best, str(len(mine)), f"{geometric(ratios):.2f}", f"{min(ratios):.2f}",
             f"{rows_q[0]} .. {rows_q[-1]}"]
        )  # fmt: skip
    lines += ["", "## Mistakes, by kernel", "", "Ratios are the faster kernel's time over that of the choice.", ""]
    lines += markdown_table(["", "chosen", "faster", "calls", "mean", "least", "queries"], body)
    lines += ["", f"## The {min(WORST, len(mistakes))} worst", ""]
    for row in sorted(mistakes, key=lost)[:WORST]:
        others = ", ".join(f"{name} {us:g}" for name, us in sorted(row["peers"].items(), key=lambda pair: pair[1]))
        lines.append(f"* {lost(row):.2f} `{row['call']}` {row['kernel']}: {row['us']:g} us; {others}")
    return lines


def run(options, protocol):
    return sweep.run(options, protocol, by_name=True)


register(
    Suite(
        name="dispatch",
        about="the sweep's calls, each beside every kernel of the library that takes it: where its choice is slower",
        options=SUITES["sweep"].options,
        run=run,
        table=table,
        titled=False,
        checked=SUITES["sweep"].checked,
    )
)
