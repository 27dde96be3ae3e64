"""An engine whose decode step can be timed: the same step at the same position, as often as one likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flash_attn_minimal.errors import BadArgument
from flash_attn_minimal.llama.engine import Engine
from flash_attn_minimal.llama.model import Array
from flash_attn_minimal.llama.sampling import GREEDY


class HeldEngine(Engine):
    """An Engine with `hold`."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self._held: np.ndarray | None = None  # the lengths on the device, if they are those of a held step

    def hold(self, batch: int, position: int) -> Callable[[], Array]:
        """Prepares, for timing, a decode step of `batch` sequences that stay at one position, over whatever the cache
        holds. Returns a function that runs the step and returns the logits (batch, vocab)."""
        if self.busy or not (1 <= batch <= self.max_batch and 0 <= position < self.context):
            where = f"max_batch={self.max_batch}, context={self.context}, busy={self.busy}"
            raise BadArgument(f"batch={batch}, position={position} cannot be held: {where}")
        lengths, kept = np.full(self.max_batch, -1, np.int32), []
        lengths[:batch] = position

        def place() -> None:
            self.device.upload(self.lengths, lengths)
            self.device.upload(self.active, np.zeros(self.max_batch, np.int32))
            if self.table is not None:
                last = self.cache.scratch_page - 1
                pages = np.minimum(np.arange(self._table.size, dtype=np.int32), last).reshape(self._table.shape)
                self.device.upload(self.table, pages)
            self._stale, self._held = True, lengths

        longest = self.device.longest_bucket(position + 1, self.context)

        def body() -> None:
            kept[:] = [self._body(batch, longest, (GREEDY,))]

        def run() -> Array:
            if self.busy:
                raise BadArgument(f"batch={batch}, position={position} cannot be held while sequences run")
            self._recount = True  # the step advances the device's count and not the host's
            with self.device.scope():
                if self._held is not lengths:  # sequences have run since then, or other steps were held
                    place()
                step()
            return kept[0]

        self._recount = True
        with self.device.scope():
            place()
            body()
        step = self.device.once(body)
        return run

    def _synchronise_state(self) -> None:
        if self._stale:
            self._held = None
        super()._synchronise_state()
