"""The orders of ladder/turns.py: each contains every key block once, and the library's order costs little."""

import pytest
from ladder import turns

SHAPE = turns.Shape(headdim=128, seqlen=1000, heads=20, heads_k=10, batch=2, causal=True)


@pytest.mark.parametrize("width", [1, 3, 8, 20])
@pytest.mark.parametrize("order", [turns.lowest_first, turns.highest_first])
def test_every_block_once(order, width):
    items = list(order(SHAPE, width))
    assert sorted(items) == [(h, n) for h in range(20) for n in range(SHAPE.blocks)]


@pytest.mark.parametrize("width", [1, 3, 8, 20])
def test_blocks_of_a_head_come_in_the_order_of_their_keys(width):
    """A block waits for the previous block of its head, which must already have been taken."""
    last = dict.fromkeys(range(20), -1)
    for head, n in turns.lowest_first(SHAPE, width):
        assert n == last[head] + 1
        last[head] = n


@pytest.mark.parametrize("walk", [turns.walk_up, turns.walk_down])
def test_walks_visit_what_they_see(walk):
    want = {head * SHAPE.tiles + m for head in range(2) for m in range(SHAPE.first_tile(3), SHAPE.tiles)}
    visits = walk(SHAPE, 3)
    assert len(visits) == len(want) and set(visits.tolist()) == want


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("headdim", "heads", "heads_k"), [(128, 16, 16), (128, 64, 8), (256, 32, 2)])
def test_the_order_of_the_library_costs_little(headdim, heads, heads_k, causal):
    got = turns.ratios(turns.Shape(headdim, 4096, heads, heads_k, 4, causal), lag=1.5)
    assert got[turns.LIBRARY] > (0.85 if causal else 0.95)
