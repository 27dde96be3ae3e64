"""The kernels and copies on rank 0's GPU during one call across ranks, as PyTorch's profiler records them.

record()   records on rank 0 a call of all ranks
summary()  how long attention, copies and the host took
picture()  draws a line for each stream
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from ..bench import figure
from ..report import STYLE

CALLS = 3  # recorded calls; only the last one counts, because the profiler starts its work in the first
# of cuda/distributed/rows.cu
BETWEEN = (
    "copies_kernel",
    "store_kernel",
    "negative_delta_kernel",
    "sum_kernel",
    "merge_parts_kernel",
    "subtract_kernel",
)
KINDS = {"attention": "#D55E00", "copy engine": "#0072B2", "copy kernel": "#56B4E9", "other kernel": "#7F7F7F"}


class Here(Protocol):
    """A rank, and its connection to the other ranks: rank.Here."""

    rank: int
    machine: Any

    def gather(self, value: Any) -> list[Any]: ...

    def together(self) -> float: ...


def record(here: Here, launch: Callable[[], Any], index: int) -> dict[str, Any] | None:
    """Records one call of all ranks from idle devices. Collective. Returns on rank 0 the timeline of its GPU, `index`:

        call_us   from the start of the call on the host to the end of the last kernel or copy
        host_us   how long the call kept the host
        rows      in the order of their starts: {"kind": one of KINDS, "name", "stream", "start_us", "us", "bytes"}

    and None on other ranks."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    profiler = None if here.rank else torch.profiler.profile(activities=activities, acc_events=True)
    with profiler or contextlib.nullcontext():
        for _ in range(CALLS):
            here.together()
            start = time.time_ns()
            launch()
            host_us = (time.time_ns() - start) / 1e3
            here.machine.synchronize()
    here.gather(None)
    if profiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
    began = start / 1e3 - trace.get("baseTimeNanoseconds", 0) / 1e3
    return {"host_us": host_us, **_timeline(trace["traceEvents"], began, index)}


def _timeline(events: Iterable[dict], began: float, index: int) -> dict[str, Any]:
    """The kernels and copies in a trace of Chrome's format that the GPU `index` began after `began` (microseconds)."""
    found = []
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        about = event["args"]
        device = about.get("device", about.get("inDevice"))  # a copy between GPUs names the GPU that makes it
        if event["ts"] < began or device != index:
            continue
        name = _short(event["name"])
        if event["cat"] == "gpu_memcpy":
            kind = "copy engine"
        elif event["cat"] == "kernel" and name not in BETWEEN:
            kind = "attention"
        else:
            kind = "copy kernel" if name == "copies_kernel" else "other kernel"
        found.append(
            {"kind": kind, "name": name, "stream": about.get("stream", 0), "start_us": round(event["ts"] - began, 2),
             "us": round(event["dur"], 2), "bytes": int(about.get("bytes", 0))}
        )  # fmt: skip
    found.sort(key=lambda event: event["start_us"])
    end = max((event["start_us"] + event["us"] for event in found), default=0.0)
    return {"call_us": end, "rows": found}


def _short(name: str) -> str:
    """A kernel's name without its namespaces, template arguments and parameters."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return name.partition("<")[0].partition("(")[0].rpartition("::")[2].strip() or name


def summary(timeline: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of the call, of the host in it, before the first kernel of attention (before_us), with at least one
    kernel of attention running (attention_us), with a copy engine at work (copy_us), and after the last kernel of
    attention (behind_us)."""
    spans = {
        kind: [(e["start_us"], e["start_us"] + e["us"]) for e in timeline["rows"] if e["kind"] == kind]
        for kind in ("attention", "copy engine")
    }
    attention = spans["attention"] or [(timeline["call_us"],) * 2]
    return {
        "call_us": timeline["call_us"],
        "host_us": round(timeline["host_us"], 1),
        "before_us": min(start for start, _ in attention),
        "attention_us": round(_covered(attention), 2),
        "copy_us": round(_covered(spans["copy engine"]), 2),
        "behind_us": round(timeline["call_us"] - max(end for _, end in attention), 2),
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def picture(timeline: dict[str, Any], title: str, file: Path) -> None:
    """Draws a bar for each kernel and copy, a line for each stream."""
    import matplotlib
    from matplotlib.patches import Patch

    events = timeline["rows"]
    streams = list(dict.fromkeys(event["stream"] for event in events))
    with matplotlib.rc_context(STYLE):
        drawn, axes = figure.figure_of(1, 1, 9.0, 1.5 + 0.42 * len(streams))
        axis = axes.flat[0]
        for event in events:
            axis.broken_barh(
                [(event["start_us"] / 1e3, max(event["us"], timeline["call_us"] / 2000) / 1e3)],
                (len(streams) - streams.index(event["stream"]) - 0.9, 0.8), facecolors=KINDS[event["kind"]],
            )  # fmt: skip
        axis.set_yticks([len(streams) - i - 0.5 for i in range(len(streams))])
        axis.set_yticklabels([f"stream {stream}" for stream in streams])
        axis.set_ylim(0, len(streams))
        axis.set_xlim(0, timeline["call_us"] / 1e3)
        axis.set_xlabel("ms since the call")
        shown = [kind for kind in KINDS if any(event["kind"] == kind for event in events)]
        drawn.legend([Patch(color=KINDS[kind]) for kind in shown], shown, loc="outside lower center", ncols=4)
        drawn.suptitle(title, fontsize=10)
        drawn.savefig(file, metadata={"Software": None})
