"""All rungs, in the order in which they are read."""

from __future__ import annotations

from . import library, peers
from .rung import Rung
from .triton_ import RUNGS as TRITON

RUNGS: tuple[Rung, ...] = (
    *library.RUNGS,
    *TRITON,
    *peers.RUNGS,
)


def rung(name: str) -> Rung:
    return next(rung for rung in RUNGS if rung.name == name)
