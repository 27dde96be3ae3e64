import numpy as np

# kernel: what stands in broken.py, and what belongs there
REPAIRS = {
    "row_maximum": (
        "found[row, w] = max(shared)\n            yield\n",
        "found[row, w] = max(shared)\n            yield syncthreads(barrier)\n",  # all have read before anybody writes
    ),
    "two_stages": (
        'empty[stage].arrive()\n            yield\n            sums[:] += p.sum(), p @ stages[stage]["values"]\n',
        'yield\n            sums[:] += p.sum(), p @ stages[stage]["values"]\n            empty[stage].arrive()\n',
    ),
    "visible_pairs": ("i0 + offset + 2", "i0 + offset + 1"),
    "fp8_sum": ("n % 16384 == 0", "n % 64 == 0"),  # promoted to a longer sum
    "persistent_block": ("for tiles in items:\n            phase = 0\n", "for tiles in items:\n"),
    "element": ("np.array([row], np.int32) * row_stride", "np.array([row], np.int64) * row_stride"),
    "decode_steps": (
        "if begin >= end:\n                continue\n            workspace[piece] = np.log(end - begin)",
        "workspace[piece] = np.log(end - begin) if begin < end else -np.inf",
    ),
    "two_halves": ("top = np.maximum(a, b)", "top = np.maximum(np.maximum(a, b), -1e30)"),
}


def row_maximum():
    scores = np.zeros((2, 4))
    scores[1, 0] = 1  # warp 0 of the second row
    return scores, [0, 1, 2, 3, 0, 0, 1]  # warp 0 reads, goes on and writes; only then warp 1 reads


def two_stages():
    scores, values = np.zeros((3, 1)), np.array([[1.0], [2.0], [4.0]])
    order = ["producer"] * 3 + ["consumer"] * 2 + ["producer"]
    return scores, values, order  # the third tile takes stage 0 between the product with K and that with V


def visible_pairs():
    return 16, 30  # keys 0 to 15 of tile 0, and row 0 sees 0 to 14


def fp8_sum():
    return np.ones(4096), np.full(4096, 1.3)  # a mean: every loss has the same sign


def persistent_block():
    return ([3, 3],)  # the ring stands in the middle of a lap when the second item begins


def element():
    return (1, 1 << 20, 32, 128), (0, 600_000, 0, 0)


def decode_steps():
    return ([1000, 64],)  # fewer pieces than before


def two_halves():
    return 3, 1, 0, True  # rows 0 and 1 see no key
