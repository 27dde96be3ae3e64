"""The library's answers about itself: what a call would do, and which kernels there are."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .error_texts import explained
from .library import KERNEL_TABLES, last_error, load
from .structs import DEVICES, AttentionArgs, AttentionPlan, new


@dataclass(frozen=True)
class Plan:
    """The library's answer to a query: what a call would do."""

    status: str  # "FA_OK", or the name of the status that the call would raise
    error: str  # the text of that error, "" when there is none
    kernel: str  # the kernel that would run, "" when none would
    workspace_bytes: int  # scratch memory that the kernel takes, allocated by the call itself
    why_not: dict[str, str]  # for each kernel preferred to this one, the reason why it does not serve
    variant: str = ""  # which of the kernel's plans, of tiles and options, it follows; "" where it does not name them


def plan_of(args: AttentionArgs) -> Plan:
    """Queries the library about a filled struct, whose data pointers may be NULL."""
    return plan_from(lambda plan: load().fa_attention_query(args, plan), args)


def plan_from(ask: Callable[[AttentionPlan], int], struct: Any = None) -> Plan:
    """The Plan of one of the library's queries; ask(plan) calls it with this struct and returns its status."""
    lib, plan = load(), new(AttentionPlan)
    status = ask(plan)
    return Plan(
        status=lib.fa_status_name(status).decode(),
        error=last_error(struct) if status else "",
        kernel=plan.kernel.decode(),
        workspace_bytes=plan.workspace_bytes,
        why_not=reasons(plan.why_not),
        variant=plan.variant.decode(),
    )


def reasons(why_not: bytes) -> dict[str, str]:
    """The library's lines `kernel: reason`, in the words of Python's functions."""
    lines = (line.split(": ", 1) for line in why_not.decode(errors="replace").splitlines())
    return {kernel: explained(reason) for kernel, reason in lines}


def kernel_tables() -> dict[str, list[dict[str, str]]]:
    """Every kernel that can be forced by name, in lists like that of kernels(): "forward" (with caches), "backward",
    "linear", "w4_linear" and "w4_linear_chain"."""
    return {name: kernel_table(load(), prefix) for name, prefix in KERNEL_TABLES.items()}


def kernel_table(lib: ct.CDLL, prefix: str) -> list[dict[str, str]]:
    """The table of kernels whose C functions have this prefix, as [{"name", "device", "summary"}, ...]."""
    count, name, summary, device = (getattr(lib, f"{prefix}_{what}") for what in ("count", "name", "summary", "device"))
    return [
        {"name": name(i).decode(), "device": DEVICES[device(i)], "summary": summary(i).decode()} for i in range(count())
    ]
