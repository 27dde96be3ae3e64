"""A base for the doors of arrays whose framework has no door of its own."""

from __future__ import annotations

from ..errors import Unsupported
from .door import Door


class ForeignDoor(Door):
    """Arrays of a type without a door of its own. Outputs come from the type's array-API namespace if it has one."""

    def __init__(self, kind: type):
        self.name = f"{kind.__module__}.{kind.__qualname__}"

    def empty(self, like, shape, dtype):
        namespace = getattr(like.owner, "__array_namespace__", None)
        if namespace is None:
            raise Unsupported(
                f"{self.name} arrays on {like.place} do not say how to make another (no __array_namespace__): "
                "pass out=, without return_lse and with a kernel that needs no workspace"
            )
        xp = namespace()
        native = like.owner.dtype if dtype == like.dtype else getattr(xp, dtype)
        return self.view(xp.empty(shape, dtype=native, device=like.owner.device), "out")
