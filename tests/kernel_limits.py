"""Makes the tables of docs/contract.md that say what each kernel of attention takes, from the rows by which the library
chooses a kernel for a call (fa_kernel_limits). Any build knows the rows of all kernels.

python tests/kernel_limits.py     writes the tables again"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs/contract.md"
TABLES = {"forward": "Forward kernel", "backward": "Backward kernel"}
ROWS = {"": "any", "rows": "whole 16 bytes", "TMA": "whole 16 bytes, strides of TMA"}
NEEDS = {"tf32": "calls without allow_tf32", "cache": "calls without a cache", "fast_accum": "calls without fast_accum"}
NEEDS["shared_prefix"] = "calls without shared_prefix"


def lines(library: ctypes.CDLL) -> list[list[str]]:
    """The fields of every kernel: table, name, built, device, and those of kernels of attention."""
    library.fa_kernel_limits.restype = ctypes.c_size_t
    library.fa_kernel_limits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    size = library.fa_kernel_limits(None, 0) + 1
    text = ctypes.create_string_buffer(size)
    library.fa_kernel_limits(text, size)
    return [line.split("\t") for line in text.value.decode().splitlines()]


def tables(library: ctypes.CDLL) -> str:
    pieces = []
    for table, title in TABLES.items():
        names: dict[tuple[str, ...], list[str]] = {}  # kernels with equal limits share a line
        for its_table, name, _, *limits in lines(library):
            if its_table == table:
                names.setdefault(tuple(limits), []).append(name)
        pieces.append(f"| {title} | device | dtypes | head dims | rows in memory | refuses |")
        pieces.append("|---|---|---|---|---|---|")
        for (device, dtypes, dims, refused, needs, page_step, memory), kernels in names.items():
            every = [NEEDS[needs]] if needs else []
            every += refused.split(", ") if refused else []
            every += [f"pages of other than multiples of {page_step} keys"] if page_step != "1" else []
            shown = ", ".join(f"`{name}`" for name in kernels)
            cells = (shown, device, dtypes, dims, ROWS[memory], ", ".join(every) or "nothing")
            pieces.append("| " + " | ".join(cells) + " |")
        pieces.append("")
    return "\n".join(pieces)


def page_with(new: str) -> str:
    """The text of the page with these tables."""
    between = r"(<!-- tests/kernel_limits.py -->\n).*?(<!-- end -->)"
    text, count = re.subn(between, lambda m: m[1] + "\n" + new + "\n" + m[2], PAGE.read_text(), flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{PAGE}: {count} places for the tables instead of one")
    return text


if __name__ == "__main__":
    from flash_attn_minimal._core import library

    PAGE.write_text(page_with(tables(library.load())))
