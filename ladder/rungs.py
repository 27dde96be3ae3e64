"""All rungs, in the order in which they are read."""

from __future__ import annotations

from . import c, library, numpy_
from .rung import Rung

RUNGS: tuple[Rung, ...] = (*numpy_.RUNGS, *c.RUNGS, *library.RUNGS)


def rung(name: str) -> Rung:
    return next(rung for rung in RUNGS if rung.name == name)
