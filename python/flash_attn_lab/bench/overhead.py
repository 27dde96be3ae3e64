"""The suite `overhead`: the time that a call takes on the host."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import numpy as np

from flash_attn_minimal import flash_attn_func, query

from ..report import table as markdown_table
from .check import largest
from .figure import MINE, figure_of, set_title
from .machine import BenchError, load_average, open_machine
from .rows import label
from .suite import Outcome, Suite, measuring, register, rounded
from .timing import Protocol


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    """Host time of a call on one query and one key, for each installed framework. Calls do not wait for the GPU."""
    machines = []
    for device, framework in (("cpu", "numpy"), ("cpu", "torch"), ("cuda", "torch"), ("cuda", "cupy")):
        if options.device in (None, device) and options.framework in (None, framework):
            try:
                machines.append(open_machine(device, framework))
            except BenchError:
                continue
    if not machines:
        wanted = [
            f"--{name} {value}"
            for name, value in (("device", options.device), ("framework", options.framework))
            if value
        ]
        raise BenchError(f"{' '.join(wanted)}: no such arrays here")
    outcome = Outcome(load=load_average())
    with measuring(outcome, machines[-1], len(machines), "overhead") as (_, progress):
        for machine in machines:
            gpu = machine.device == "cuda"
            dtype = "float32" if not gpu else "float16" if machine.framework == "cupy" else "bfloat16"
            q, k, v, out = (machine.random((1, 1, 1, 64), dtype, i) for i in range(4))
            mask = machine.int32([[1]]) == 1
            calls: dict[tuple[str, str], Callable[[], Any]] = {
                ("ours", "new out"): lambda q=q, k=k, v=v: flash_attn_func(q, k, v),
                ("ours", "given out"): lambda q=q, k=k, v=v, out=out: flash_attn_func(q, k, v, out=out),
                ("ours", "mask"): lambda q=q, k=k, v=v, mask=mask: flash_attn_func(q, k, v, mask=mask),
            }
            if machine.framework == "torch":
                calls |= _torch_calls(machine.torch, q, k, v, mask)
            answers = [call() for (system, _), call in calls.items() if system == "ours"]
            err = largest(  # one key: the answer is its value, the gradient of the value that of the answer
                float(np.abs(machine.host(x[2] if isinstance(x, tuple) else x) - machine.host(v)).max())
                for x in answers
            )
            if not err <= 1e-6:
                outcome.wrong += 1
                outcome.rows.append(
                    {
                        "suite": "overhead",
                        "system": "ours",
                        "arrays": machine.framework,
                        "device": machine.device,
                        "wrong": True,
                    }
                )
                progress.step(f"{machine.framework} arrays on {machine.device}: WRONG, error {err:.3g}")
                continue
            times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
            order = random.Random(options.seed or 0)
            for call in calls.values():
                _host_us(machine, call)
            for _ in range(protocol.rounds):
                for name in order.sample(list(calls), len(calls)):
                    times[name].append(_host_us(machine, calls[name]))
            for (system, call), us in times.items():
                low, _, high = quantiles(us, n=4, method="inclusive") if len(us) > 1 else us * 3
                row = {
                    "suite": "overhead",
                    "system": system,
                    "arrays": machine.framework,
                    "device": machine.device,
                    "call": call,
                }
                if system == "ours":
                    row["kernel"] = query(q, k, v, mask=mask if call == "mask" else None).kernel
                row |= {
                    "pass": "bwd" if call == "and backward" else "fwd",
                    "dtype": dtype,
                    "headdim": 64,
                    "seqlen_q": 1,
                    "seqlen_k": 1,
                    "batch": 1,
                    "nheads": 1,
                    "nheads_k": 1,
                }
                outcome.rows.append(rounded(row | {"us": median(us), "us_min": min(us), "us_spread": high - low}))
                progress.say(f"  {system}, {call}: {median(us):.1f} us a call")
            progress.step(f"{machine.framework} arrays on {machine.device}")
    return machines[-1], outcome


def _torch_calls(torch, q, k, v, mask) -> dict[tuple[str, str], Callable[[], Any]]:
    """Calls with gradients, and calls of PyTorch's attention on (batch, heads, rows, headdim). dout is v."""

    def wanting(x):
        return x.detach().clone().requires_grad_()

    sdpa, grad = torch.nn.functional.scaled_dot_product_attention, torch.autograd.grad
    mine = [wanting(x) for x in (q, k, v)]
    views = [x.transpose(1, 2) for x in (q, k, v)]
    theirs = [wanting(x) for x in views]
    return {
        ("ours", "gradient wanted"): lambda: flash_attn_func(*mine),
        ("ours", "and backward"): lambda: grad(flash_attn_func(*mine), mine, v),
        ("torch", "new out"): lambda: sdpa(*views),
        ("torch", "mask"): lambda: sdpa(*views, attn_mask=mask),
        ("torch", "gradient wanted"): lambda: sdpa(*theirs),
        ("torch", "and backward"): lambda: grad(sdpa(*theirs), theirs, views[2]),
    }


def _host_us(machine, call, count: int = 200) -> float:
    machine.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - start
    machine.synchronize()
    return seconds / count * 1e6


# ---- the table and the picture ----


def table(data: dict, rows: list[dict]) -> list[str]:
    body = [
        [
            row["arrays"],
            row["device"],
            label(row["system"]),
            row["call"],
            f"{row['us']:.1f}",
            f"{row['us_min']:.1f}",
            f"{row['us_spread']:.1f}",
        ]
        for row in rows
    ]
    return [
        "## One query, one key, headdim 64",
        "",
        *markdown_table(["arrays", "device", "system", "call", "us", "least", "spread"], body),
    ]


def picture(data: dict, rows: list[dict]):
    """Microseconds of one small call."""
    figure, axes = figure_of(1, 1, 8.5, 1.4 + 0.4 * len(rows))
    axis = axes[0][0]
    texts = [f"{row['arrays']}, {row['device']}: {label(row['system'])}, {row['call']}" for row in rows]
    colours = [MINE[0] if row["system"] == "ours" else "#9A9A9A" for row in rows]
    drawn = axis.barh(range(len(rows)), [row["us"] for row in rows], color=colours, height=0.7)
    axis.bar_label(drawn, [f" {row['us']:.1f}" for row in rows])
    axis.set_yticks(range(len(rows)), texts)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("µs a call, least is best")
    axis.set_xlim(right=max(row["us"] for row in rows) * 1.12)
    set_title(figure, data, "The host's share of a call: one query, one key, headdim 64")
    return figure


register(
    Suite(
        name="overhead",
        about="host time of a small call, for NumPy, PyTorch and CuPy arrays",
        options=frozenset({"device", "framework", "rounds", "quick", "seed", "output"}),
        run=run,
        table=table,
        pictures={"": picture},
        titled=False,
        how="host time of one call, median of the bursts, systems in shuffled turns",
        device_time=False,
    )
)
