"""FlashAttention-3's order of work in NumPy (Shah et al. 2024, sections 3.1 and 3.2). The arithmetic is that of
flash_attention_v2 in reference.py. New is who does what, and when.

A block owns 2 x rows queries of one head and has three roles (block.py says what a role is):

    producer                     copies tiles of K and V into two rings of stages
    warpgroup 0, warpgroup 1     each has its own rows of Q, of out and of the softmax, and reads the same tiles

Tensor cores multiply, everything else does the softmax, and the two can work at the same time. On Hopper at headdim
64 a tile's exponentials take twice as long as one of its two products, so a warpgroup alone would leave the tensor
cores idle most of the time. Two techniques keep them busy:

    ping-pong   The warpgroups take turns. One multiplies while the other is in its softmax. Named barriers pass the
                turn from one to the other. Without them both multiply, then both are in the softmax.
    overlap     Within a warpgroup, S of tile j is begun together with O += P V of tile j - 1. The softmax of tile j
                needs only S, so it runs while O += P V is still under way.

The model differs from the CUDA kernels (roles_sm90.cuh, wgmma_sm90/kernel.cuh) in when a turn ends. A warpgroup of a
kernel gives the turn as soon as it has issued its products. The model's tensor cores would then alternate between the
warpgroups, so here a turn ends when its products are finished. In the model the first S and the last O of a block take
turns too. In wgmma_sm90/kernel.cuh they do not.

The model favours the softmax: two at a time do not slow each other down, while on the GPU they share the units that
compute exponentials.

`python -m ladder.numpy_.flash_attention_v3` prints the turns with and without each technique.
"""

from __future__ import annotations

import numpy as np

from .block import Barrier, Event, Product, Ring, Role, TensorCores, Work, run, timeline

PRODUCT_TURNS, SOFTMAX_TURNS = 2, 6  # for one tile of 64 rows at headdim 64: 2 n and 6 n cycles for n keys


def producer(tiles: int, keys: Ring, values: Ring) -> Role:
    for j in range(tiles):
        for ring in (keys, values):
            yield ring.free(j)  # both warpgroups have read what was in this stage
            yield Work(f"load {ring.name}", j)
            ring.fill(j)


class Warpgroup:
    """One consumer: its rows of Q, and the values it keeps in registers."""

    def __init__(self, number: int, q, last_key, keys: Ring, values: Ring, cores: TensorCores, turns: list[Barrier]):
        """last_key[i] is the last key that row i sees; it may be -1. turns is empty without ping-pong."""
        self.number, self.name = number, f"warpgroup {number}"
        self.q, self.last_key = q, last_key
        self.keys, self.values, self.cores, self.turns = keys, values, cores, turns
        self.row_max = np.full(len(q), -np.inf, q.dtype)
        self.row_sum = np.zeros(len(q), q.dtype)
        self.acc = np.zeros((len(q), values.source.shape[1]), q.dtype)
        self.s = self.p = self.correction = None
        self.had = 0  # turns at the tensor cores so far

    def role(self, tiles: int, overlap: bool) -> Role:
        # The first scores have nothing to overlap with.
        yield self.keys.there(0)
        yield from self.my_turn()
        scores = self.begin_scores(0, last=True)
        yield scores.done()
        self.keys.release(0)
        yield from self.softmax(0)

        for j in range(1, tiles):
            yield self.keys.there(j)
            yield self.values.there(j - 1)
            yield from self.my_turn()
            scores = self.begin_scores(j)
            output = self.begin_output(j - 1, last=True)
            yield scores.done()
            self.keys.release(j)
            if not overlap:
                yield output.done()
            # With overlap O(j - 1) may still be under way: it reads P(j - 1), while the softmax makes P(j). On the
            # GPU that is why S(j) and P(j - 1) both need registers.
            yield from self.softmax(j)
            yield output.done()
            self.values.release(j - 1)
            self.acc *= self.correction[:, None]  # acc held tiles up to j - 1, relative to the maximum before j

        yield self.values.there(tiles - 1)
        yield from self.my_turn()
        output = self.begin_output(tiles - 1, last=True)
        yield output.done()
        self.values.release(tiles - 1)

    # ---- the turn at the tensor cores ----

    def my_turn(self) -> Role:
        if self.turns:
            yield self.turns[self.number].phase(self.had)
            self.had += 1

    def give_turn(self) -> None:
        """Lets the other warpgroup begin, once the tensor cores have finished this warpgroup's products. No warp waits
        for that. The CUDA kernels give the turn earlier, right after they have issued the products."""
        if self.turns:
            self.turns[1 - self.number].arrive()

    def begin_scores(self, j: int, last: bool = False) -> Product:
        def compute():
            self.s = self.q @ self.keys[j].T
            if last:
                self.give_turn()

        return self.cores.begin(self.name, "S", j, compute)

    def begin_output(self, j: int, last: bool = False) -> Product:
        p = self.p

        def compute():
            self.acc += p @ self.values[j]
            if last:
                self.give_turn()

        return self.cores.begin(self.name, "O", j, compute)

    # ---- the softmax ----

    def softmax(self, j: int) -> Role:
        columns = j * self.keys.rows + np.arange(self.keys.rows)
        s = np.where(columns <= self.last_key[:, None], self.s, -np.inf)
        new_max = np.maximum(self.row_max, s.max(axis=1))
        shift = np.where(np.isneginf(new_max), 0, new_max)  # a row without a key yet: -inf - -inf would be NaN
        self.p = np.exp(s - shift[:, None])
        self.correction = np.exp(self.row_max - shift)
        self.row_sum = self.correction * self.row_sum + self.p.sum(axis=1)
        self.row_max = new_max
        for _ in range(SOFTMAX_TURNS):
            yield Work("softmax", j)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        seen = self.row_sum > 0
        row_sum = np.where(seen, self.row_sum, 1)
        return self.acc / row_sum[:, None], np.where(seen, self.row_max + np.log(row_sum), -np.inf)


def attend_block(q, k, v, last_key, *, rows, block_k, stages, ping_pong, overlap):
    """Up to 2 x rows queries of one head, q already scaled. Returns out, lse and the log."""
    tiles = -(-(int(last_key.max()) + 1) // block_k)  # tiles that no row sees are not loaded
    keys, values = Ring("K", k, block_k, stages, readers=2), Ring("V", v, block_k, stages, readers=2)
    cores = TensorCores(PRODUCT_TURNS)
    turns = [Barrier(f"turn of warpgroup {w}") for w in range(2)] if ping_pong else []
    if turns:
        turns[0].arrive()  # somebody has to begin
    parts = slice(0, rows), slice(rows, None)
    groups = [Warpgroup(w, q[part], last_key[part], keys, values, cores, turns) for w, part in enumerate(parts)]
    log = []
    if tiles:
        roles = {"producer": producer(tiles, keys, values)} | {g.name: g.role(tiles, overlap) for g in groups}
        log = run(roles, cores)
    out, lse = (np.concatenate(pair) for pair in zip(*(group.result() for group in groups), strict=True))
    return out, lse, log


def flash_attention_v3(
    q, k, v, *, causal=False, rows=64, block_k=128, stages=2, ping_pong=True, overlap=True, logs=None
):
    """Attention of q (batch, seqlen_q, nheads, headdim) over k and v (batch, seqlen_k, nheads_k, headdim), computed in
    the inputs' own precision. Returns out and lse (batch, nheads, seqlen_q). A list given as `logs` gets the list of
    events of every block.

    >>> from flash_attn_lab.reference import standard_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 50, 2, 8))
    >>> out, lse = flash_attention_v3(q, k, v, rows=8, block_k=16)
    >>> bool(np.allclose(out, standard_attention(q, k, v)[0], atol=1e-12))
    True
    """
    batch, seqlen_q, nheads, headdim = q.shape
    seqlen_k, group = k.shape[1], nheads // k.shape[2]
    last_key = np.arange(seqlen_q) + seqlen_k - seqlen_q if causal else np.full(seqlen_q, seqlen_k - 1)
    last_key = np.maximum(last_key, -1)
    out, lse = np.empty_like(q), np.empty((batch, nheads, seqlen_q), q.dtype)
    for b, h, i in np.ndindex(batch, nheads, -(-seqlen_q // (2 * rows))):
        mine = slice(2 * rows * i, 2 * rows * (i + 1))
        one_q = q[b, mine, h] * q.dtype.type(headdim**-0.5)
        one_k, one_v = (x[b, :, h // group] for x in (k, v))
        out[b, mine, h], lse[b, h, mine], log = attend_block(
            one_q, one_k, one_v, last_key[mine],
            rows=rows, block_k=block_k, stages=stages, ping_pong=ping_pong, overlap=overlap,
        )  # fmt: skip
        if logs is not None:
            logs.append(log)
    return out, lse


def main() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 128, 1, 64))
    for ping_pong in (False, True):
        for overlap in (False, True):
            logs: list[list[Event]] = []
            flash_attention_v3(q, k, v, rows=64, block_k=16, ping_pong=ping_pong, overlap=overlap, logs=logs)
            print(f"\nping-pong {'on' if ping_pong else 'off'}, overlap {'on' if overlap else 'off'}")
            print(timeline(logs[0]))


if __name__ == "__main__":
    main()
