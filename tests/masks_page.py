"""Draws the masks of docs/masks.md: which rows see which keys, and which tiles are visited.

python tests/masks_page.py     writes the drawings again"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from flash_attn_lab import reference
from flash_attn_minimal import masks

PAGE = Path(__file__).resolve().parent.parent / "docs/masks.md"
TILE = 4  # rows and keys of a tile of the drawings
DRAWN = {
    "documents": "masks.documents([6, 4, 6])",
    "documents, full": "masks.documents([6, 4, 6], causal=False)",
    "prefix_lm": "masks.prefix_lm([3, 4], [8, 8])",
    "shared_prompt": "masks.shared_prompt([6], [[4, 2, 4]])",
    "tree": "masks.tree([4, 3, 3, 2, 4], [-1, 0, 1, 1, 0])",
    "window": "masks.window(16, 4)",
    "global_and_window": "masks.global_and_window(16, 2, 3)",
    "global_and_window, full": "masks.global_and_window(16, 2, 3, right=3)",
    "block_causal": "masks.block_causal(16, 4)",
    "block_diffusion": "masks.block_diffusion(8, 4)",
}


def dense(mask: masks.RowMask) -> np.ndarray:
    indices = mask["startend_row_indices"][0, 0]
    seen = reference.dense_from_intervals(indices, len(indices), mask["causal"])
    return seen & np.tri(len(indices), dtype=bool) if mask["causal"] else seen


def drawing(code: str) -> str:
    """Rows from the top, keys from the left: o is a pair that counts. Beside it the tiles: # whole, + cut, . not."""
    seen = dense(eval(code, {"masks": masks}))  # noqa: S307  (a line of the table above)
    tiles = seen.reshape(len(seen) // TILE, TILE, -1, TILE).swapaxes(1, 2).mean((2, 3))
    lines = [f"{'keys':<{2 * len(seen) + 3}}tiles of {TILE} x {TILE}"]
    for i, row in enumerate(seen):
        line = " ".join("o" if x else "." for x in row)
        if i < len(tiles):
            line += "    " + " ".join("#" if x == 1 else "+" if x else "." for x in tiles[i])
        lines.append(line)
    return "\n".join(lines)


def drawings() -> dict[str, str]:
    return {name: f"```\n{code}\n\n{drawing(code)}\n```" for name, code in DRAWN.items()}


def page_with(pictures: dict[str, str]) -> str:
    """The text of the page with these drawings."""
    text = PAGE.read_text()
    for name, picture in pictures.items():
        between = rf"(<!-- tests/masks_page.py: {re.escape(name)} -->\n).*?(<!-- end -->)"
        text, count = re.subn(between, lambda m, new=picture: f"{m[1]}\n{new}\n\n{m[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE}: {count} places for {name} instead of one")
    return text


if __name__ == "__main__":
    PAGE.write_text(page_with(drawings()))
