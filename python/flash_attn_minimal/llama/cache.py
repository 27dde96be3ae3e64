"""The KV cache: keys (already rotated) and values of every layer, in one allocation made at the start.

Paged: k[layer], v[layer] are (num_pages + 1, page_size, nheads_k, headdim). A sequence's row of the block table lists
the pages that it owns, in order. The last page belongs to no sequence; idle slots write there.
Contiguous: (slots, context, nheads_k, headdim). Sequence i is in slot i; there is no table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._commands.report import plural
from ..errors import BadArgument
from .config import Config


def pages_of(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


class PagePool:
    """The free pages. The page given back last is given out first."""

    def __init__(self, num_pages: int):
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = [True] * num_pages

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise BadArgument(f"{count} pages are wanted, but {len(self._free)} of {len(self._is_free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            if not 0 <= page < len(self._is_free) or self._is_free[page]:
                raise BadArgument(f"page {page} is given back, but of {len(self._is_free)} pages it is not one in use")
            self._is_free[page] = True
            self._free.append(page)


class KVCache:
    """The cache of all layers. With page_size=None it is contiguous: `slots` sequences of `context` positions each.
    `rope` holds the cosines and sines of all positions."""

    def __init__(
        self, device: Any, config: Config, slots: int, context: int, page_size: int | None = None, num_pages: int = 0
    ):
        if page_size is None:
            rows = (slots, context)
        else:
            rows = (num_pages + 1, page_size)
            self.pool = PagePool(num_pages)
        self.page_size, self.context = page_size, context
        self.scratch_page = num_pages
        storage = device.xp.zeros((config.n_layers, 2, *rows, config.n_kv_heads, config.head_dim), device.dtype)
        self.k: list[Any] = [storage[layer, 0] for layer in range(config.n_layers)]
        self.v: list[Any] = [storage[layer, 1] for layer in range(config.n_layers)]
        self.rope = tuple(device.vector(table) for table in config.rope_tables(context))
        self.nbytes = storage.nbytes
        self._bits = storage.view(np.dtype(f"u{storage.dtype.itemsize}"))  # as integers: CuPy cannot fill bfloat16
        self.position_bytes = self.nbytes // (rows[0] * rows[1])

    def clear(self, slot: int) -> None:
        """Fills a slot of a contiguous cache with zeros."""
        self._bits[:, :, slot] = 0

    def describe(self) -> str:
        if self.page_size is None:
            return plural(self.context, "position") + (f" x {len(self.k[0])}" if len(self.k[0]) > 1 else "")
        return f"{plural(self.scratch_page, 'page')} of {plural(self.page_size, 'position')}"
