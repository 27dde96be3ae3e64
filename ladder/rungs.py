"""All rungs, in the order in which they are read."""

from __future__ import annotations

from . import c, library, numpy_, peers, triton_
from .rung import Rung

RUNGS: tuple[Rung, ...] = (*numpy_.RUNGS, *c.RUNGS, *library.RUNGS, *triton_.RUNGS, *peers.RUNGS)


def rung(name: str) -> Rung:
    return next(rung for rung in RUNGS if rung.name == name)
