"""Eight kernels with one mistake each, in NumPy. Each stands for a mistake that this repository had in CUDA, and that
tests with lengths of 128 and random numbers pass over. Exercise 21 asks for an input that shows each.

Some kernels take an `order`: which of several warps or roles makes its next step, until the list ends. Then the role
that comes last in the list of roles goes first, as long as it can. A step ends at a `yield`; a yielded condition must
be true before the role goes on."""

from __future__ import annotations

import math

import numpy as np
from simulator import Mbarrier


class Hang(Exception):
    """Nobody can go on."""


def interleave(roles: dict, order: list) -> None:
    waits = dict.fromkeys(roles)

    def ready(name) -> bool:
        return name in waits and (waits[name] is None or waits[name]())

    order = list(order)
    while waits:
        wanted = order.pop(0) if order else None
        if wanted is not None and not ready(wanted):
            continue  # it waits, or has ended
        name = wanted if wanted is not None else next(filter(ready, reversed(roles)), None)
        if name is None:
            raise Hang(f"{' and '.join(map(str, waits))} wait for ever")
        try:
            waits[name] = next(roles[name])
        except StopIteration:
            del waits[name]


def waiting(barrier: Mbarrier, parity: int):
    return lambda: barrier.done(parity)


def syncthreads(barrier: Mbarrier):
    """Arrives, and returns the condition that all have."""
    parity = barrier.phase
    barrier.arrive()
    return waiting(barrier, parity)


# ---- 1 ----


def row_maximum(scores, order):
    """The maximum of each row of scores (rows, 4 n), by 4 warps that have n scores of a row each and exchange their
    maxima through shared memory. Returns what each warp took for the maximum: (rows, 4). Roles: 0, 1, 2, 3."""
    scores = np.asarray(scores, float)
    parts = scores.reshape(len(scores), 4, -1)
    shared, found, barrier = [0.0] * 4, np.zeros((len(scores), 4)), Mbarrier("block", 4)

    def warp(w):
        for row in range(len(scores)):
            shared[w] = parts[row, w].max()
            yield syncthreads(barrier)
            found[row, w] = max(shared)
            yield

    interleave({w: warp(w) for w in range(4)}, order)
    return found


# ---- 2 ----


def two_stages(scores, values, order):
    """softmax(scores) @ values of one query; scores and values are (tiles, n). A producer copies a tile of both into
    one of two stages, a consumer reads it. Roles: "producer", "consumer"."""
    scores, values = np.asarray(scores, float), np.asarray(values, float)
    stages = [{}, {}]
    full, empty = ([Mbarrier(f"{kind}[{stage}]", 1) for stage in (0, 1)] for kind in ("full", "empty"))
    sums = np.zeros(2)

    def producer():
        for tile in range(len(scores)):
            stage = tile % 2
            yield waiting(empty[stage], 1 - tile // 2 % 2)
            stages[stage] = {"scores": scores[tile], "values": values[tile]}
            full[stage].arrive()

    def consumer():
        for tile in range(len(scores)):
            stage = tile % 2
            yield waiting(full[stage], tile // 2 % 2)
            p = np.exp(stages[stage]["scores"] - scores.max())
            empty[stage].arrive()
            yield
            sums[:] += p.sum(), p @ stages[stage]["values"]

    interleave({"producer": producer(), "consumer": consumer()}, order)
    return sums[1] / sums[0]


# ---- 3 ----


def visible_pairs(seqlen_q, seqlen_k):
    """The pairs that a causal mask leaves, (seqlen_q, seqlen_k) of bool, in tiles of 16 rows and 16 keys: tiles that
    every row sees as a whole are not compared, tiles that no row sees are skipped. The last query sees the last key."""
    seen, offset = np.zeros((seqlen_q, seqlen_k), bool), seqlen_k - seqlen_q
    for i0 in range(0, seqlen_q, 16):
        i = np.arange(i0, min(i0 + 16, seqlen_q))[:, None]
        for j0 in range(0, min(seqlen_k, max(0, i0 + 16 + offset)), 16):
            j = np.arange(j0, min(j0 + 16, seqlen_k))[None]
            cut = j0 + 16 > i0 + offset + 2
            seen[i, j] = j <= i + offset if cut else True
    return seen


# ---- 4 ----


def fp8_sum(p, v):
    """p @ v of up to 16384 numbers, as the tensor cores sum 8-bit numbers: each product is cut off at 2^-13 of the
    larger of itself and the sum that it joins. The result may be off by 1 % of the sum of |p v|."""
    total, sum_of_block = 0.0, 0.0
    for n, product in enumerate((np.asarray(p, float) * np.asarray(v, float)).tolist(), 1):
        unit = 2.0 ** (math.frexp(max(abs(product), abs(sum_of_block), 1e-30))[1] - 14)
        sum_of_block += product - math.fmod(sum_of_block, unit) - math.fmod(product, unit)
        if n % 16384 == 0:
            total, sum_of_block = total + sum_of_block, 0.0
    return total + sum_of_block


# ---- 5 ----


def persistent_block(items):
    """A block that stays on the SM and works on one item after another; item n has items[n] tiles. A producer fills a
    ring of two slots, a consumer empties it. Returns the tiles in the order in which they were read: (item, tile)."""
    slots, read = [None, None], []
    full, empty = ([Mbarrier(f"{kind}[{slot}]", 1) for slot in (0, 1)] for kind in ("full", "empty"))

    def producer():
        slot = phase = 0
        for item, tiles in enumerate(items):
            for tile in range(tiles):
                yield waiting(empty[slot], phase ^ 1)
                slots[slot] = item, tile
                full[slot].arrive()
                slot, phase = (slot + 1, phase) if slot == 0 else (0, phase ^ 1)

    def consumer():
        slot = phase = 0
        for tiles in items:
            phase = 0
            for _ in range(tiles):
                yield waiting(full[slot], phase)
                read.append(slots[slot])
                empty[slot].arrive()
                slot, phase = (slot + 1, phase) if slot == 0 else (0, phase ^ 1)

    interleave({"producer": producer(), "consumer": consumer()}, [])
    return read


# ---- 6 ----


def element(shape, index):
    """The offset at which an element of an array (batch, seqlen, heads, headdim) lies. The array may have up to 64 GiB
    in bf16; nothing is allocated."""
    _, seqlen, heads, headdim = shape
    batch, row, head, d = index
    row_stride = np.int32(heads * headdim)
    with np.errstate(over="ignore"):
        in_sequence = np.array([row], np.int32) * row_stride
    return batch * seqlen * heads * headdim + int(in_sequence[0]) + head * headdim + d


# ---- 7 ----


def decode_steps(lengths):
    """A decode kernel, called once for each length. It cuts `length` keys into 4 pieces of a multiple of 64 keys, each
    piece leaves its lse in a workspace that is kept from call to call, and a second kernel merges the pieces. All
    scores are 0, so lse is log(length). Returns lse of each call."""
    workspace = np.full(4, -np.inf)
    found = []
    for length in lengths:
        size = -(-length // 256) * 64
        for piece in range(4):
            begin, end = piece * size, min(length, (piece + 1) * size)
            if begin >= end:
                continue
            workspace[piece] = np.log(end - begin)
        found.append(np.logaddexp.reduce(workspace))
    return np.array(found)


# ---- 8 ----


def two_halves(seqlen_q, seqlen_k, cut, causal):
    """lse of rows of scores 0 over keys 0 .. cut - 1 and over the rest, merged. Row i sees seqlen_k keys, or under a
    causal mask i + 1 + seqlen_k - seqlen_q; a row without keys has lse = -inf."""
    i = np.arange(seqlen_q)
    seen = np.clip(i + 1 + seqlen_k - seqlen_q, 0, None) if causal else np.full(seqlen_q, seqlen_k)
    with np.errstate(divide="ignore", invalid="ignore"):
        a, b = np.log(np.minimum(seen, cut)), np.log(np.clip(seen - cut, 0, None))
        top = np.maximum(a, b)
        return top + np.log(np.exp(a - top) + np.exp(b - top))
