"""The examples that the page ships: inputs, and the results of the float64 reference.

python ladder/page/examples.py          writes examples.json; needs flash_attn_minimal on the path
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from flash_attn_lab import reference

FILE = Path(__file__).resolve().with_name("examples.json")

# name -> seqlen_q, seqlen_k, headdim, tile rows, tile keys, causal; the page starts with these tiles
EXAMPLES = {
    "First steps": (8, 8, 4, 4, 4, False),
    "Causal": (16, 16, 8, 4, 4, True),
    "A longer past: more keys than rows": (6, 24, 8, 2, 6, True),
    "Rows that see nothing: more rows than keys": (16, 10, 8, 4, 4, True),
    "The maximum keeps rising": (8, 24, 8, 4, 4, False),
    "Lengths that no tile divides": (29, 31, 13, 8, 12, True),
}


def inputs(name: str, seqlen_q: int, seqlen_k: int, headdim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v (seqlen, headdim), normal, rounded to 1 / 64: the numbers a reader sees are exactly those multiplied."""
    rng = np.random.default_rng(list(EXAMPLES).index(name))
    q, k, v = (rng.standard_normal((rows, headdim)) for rows in (seqlen_q, seqlen_k, seqlen_k))
    q *= 1.5
    if name == "The maximum keeps rising":  # later keys score higher with every row
        q += 1.5
        k = 0.4 * k + np.linspace(-1, 1.5, seqlen_k)[:, None]
    return tuple(np.round(64 * x) / 64 for x in (q, k, v))


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """out (seqlen_q, headdim) and lse (seqlen_q,) of one head."""
    out, lse = reference.standard_attention(*(x[None, :, None] for x in (q, k, v)), causal=causal)
    return out[0, :, 0], lse[0, 0]


def example(name: str) -> dict:
    seqlen_q, seqlen_k, headdim, tile_m, tile_n, causal = EXAMPLES[name]
    q, k, v = inputs(name, seqlen_q, seqlen_k, headdim)
    out, lse = exact(q, k, v, causal)
    arrays = {"q": q, "k": k, "v": v, "out": out}
    return {
        "name": name,
        "settings": {"seqlenQ": seqlen_q, "seqlenK": seqlen_k, "headdim": headdim, "tileM": tile_m, "tileN": tile_n}
        | {"causal": causal},
        **{name: array.tolist() for name, array in arrays.items()},
        "lse": [x if np.isfinite(x) else None for x in lse.tolist()],  # null: minus infinity, a row that sees nothing
    }


def main() -> None:
    FILE.write_text("[\n" + ",\n".join(json.dumps(example(name)) for name in EXAMPLES) + "\n]\n")


if __name__ == "__main__":
    main()
