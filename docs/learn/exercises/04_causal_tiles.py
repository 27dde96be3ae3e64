"""Exercise 4. Which tiles of scores a causal mask hides, which it cuts, and which it leaves alone.

Row i sees key j if j <= i + seqlen_k - seqlen_q: the last query sees the last key (bottom-right alignment). A kernel
skips a tile that no row sees, masks one that some pairs of it hide, and does no comparison in all others.

    python docs/learn/exercises/04_causal_tiles.py
"""

import numpy as np
from judging import main, require

TO_WRITE = ("key_tiles",)


def key_tiles(row0, rows, seqlen_q, seqlen_k, block_k):
    """Rows row0 .. row0 + rows - 1 of seqlen_q -> (whole, end): the key tiles 0 .. whole - 1 are seen by every row as a
    whole, whole .. end - 1 need a mask, and later ones are skipped. A tile that reaches past seqlen_k needs a mask."""
    raise NotImplementedError("key_tiles(row0, rows, seqlen_q, seqlen_k, block_k) -> whole, end")


# ---- the judge ----


def judge(key_tiles):
    work = {}
    for seqlen_q, seqlen_k in ((256, 256), (100, 300), (300, 100), (64, 65), (1, 1000), (4096, 4096)):
        for block_q, block_k in ((64, 64), (128, 64), (64, 128)):
            work = {"whole": 0, "masked": 0, "all": 0}
            for row0 in range(0, seqlen_q, block_q):
                rows = min(block_q, seqlen_q - row0)
                i, keys = row0 + np.arange(rows)[:, None], -(-seqlen_k // block_k)
                j = np.arange(keys * block_k)[None]
                seen = ((j <= i + seqlen_k - seqlen_q) & (j < seqlen_k)).reshape(rows, keys, block_k)
                kinds = np.where(seen.all((0, 2)), 2, np.where(seen.any((0, 2)), 1, 0)).tolist()
                whole, end = key_tiles(row0, rows, seqlen_q, seqlen_k, block_k)
                got = [2 if n < whole else 1 if n < end else 0 for n in range(keys)]
                require(
                    0 <= whole <= end <= keys,
                    f"row0={row0} of {seqlen_q} x {seqlen_k}: got {whole}, {end} of {keys} tiles",
                )
                call = f"row0={row0}, rows={rows} of {seqlen_q} x {seqlen_k}, block_k={block_k}"
                wanted = kinds.count(2), len(kinds) - kinds.count(0)
                require(got == kinds, f"{call}: got whole, end = {whole}, {end}; expected {wanted[0]}, {wanted[1]}")
                work["whole"] += whole
                work["masked"] += end - whole
                work["all"] += keys
    share = (work["whole"] + work["masked"]) / work["all"]
    require(share < 0.53, f"{share:.2f} of the tiles of 4096 x 4096 are computed; a little over one half is enough")


if __name__ == "__main__":
    main(globals())
