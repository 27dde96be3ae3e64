"""The counts of the running maximum against a loop over rows, and against their probabilities."""

import numpy as np
import pytest

from flash_attn_lab.experiments import online_softmax as experiment
from flash_attn_lab.experiments.online_softmax import Heads, count, error, expected, random_heads


def by_hand(scores, tile, backwards, threshold):
    """(row tiles, moved, lazy) of one head, row by row, tile by tile."""
    tiles = moved = lazy = 0
    for row in scores:
        m = reference = -np.inf
        for keys in experiment.tile_order(len(row), tile, backwards):
            top = row[keys].max()
            if top == -np.inf:
                continue
            if m > -np.inf:
                tiles += 1
                moved += top > m
                lazy += top > reference + threshold
            if m == -np.inf or top > reference + threshold:
                reference = top
            m = max(m, top)
    return tiles, moved, lazy


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("tile", [5, 16, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_counts_equal_a_loop(tile, backwards, causal):
    heads = random_heads(3, 70, 2, 8, causal)
    heads.scores *= 6  # so that the lazy maximum moves, too
    found = count(heads, tile, backwards, threshold=4.0)
    hand = np.sum([by_hand(head, tile, backwards, 4.0) for head in heads.scores], axis=0)
    assert (found.row_tiles, found.moved, found.lazy) == tuple(hand)
    assert found.moved > 0 and (tile == 64 or found.lazy > 0)
    assert found.warp_moved <= found.warp_tiles <= found.row_tiles


def test_a_warp_acts_for_one_of_its_rows():
    scores = np.zeros((1, 33, 32))
    scores[0, 20, 16:] = 1
    scores[0, 32, 16:] = 9
    found = count(Heads("", scores, np.zeros((1, 32, 4))), 16, False)
    assert (found.moved, found.lazy) == (2, 1)
    assert (found.warp_tiles, found.warp_moved, found.warp_lazy) == (3, 2, 1)


def test_a_speculative_tile_is_done_again_near_overflow():
    scores = np.zeros((1, 16, 64))
    scores[0, 3, 16:32] = 14  # 16 of 2^14: 2^18, beyond what float16 may hold
    scores[0, 3, 32:48] = 14  # under the maximum that the tile before left: no second time
    for dtype, times in (("float16", 1), ("bfloat16", 0)):
        assert count(Heads("", scores, np.zeros((1, 64, 4))), 16, False, dtype=dtype).warp_again == times


def test_chance():
    """Independent rows of independent scores: every tile holds the largest so far with probability 1 / n."""
    scores = np.random.default_rng(0).standard_normal((1, 20000, 8 * 16))
    found = count(Heads("", scores, np.zeros((1, 128, 4))), 16, False)
    assert found.moved / 20000 == pytest.approx(experiment.records(8), rel=0.02)
    assert found.row_tiles == 20000 * 7
    assert expected(16, 16) == 0 and 0 < expected(256, 16) < 1


@pytest.mark.parametrize("threshold", [0.0, 8.0])
def test_any_maximum_gives_the_same_answer(threshold):
    heads = random_heads(1, 96, 2, 32, True)
    heads.scores *= 4
    assert error(heads, 16, True, threshold) < 2**-8


def test_the_model_s_scores_are_those_of_its_attention():
    layers = list(experiment.activations(0, 48))
    assert [layer for layer, *_ in layers] == [0, 1, 2]
    for _, q, k, v in layers:
        assert q.shape == (48, 4, 32) and k.shape == v.shape == (48, 2, 32)
        heads = experiment.heads_of("", q, k, v, True)
        assert np.isneginf(heads.scores[:, 0, 1:]).all()
        direct = q[7, 3] @ k[5, 1] / 32**0.5 / np.log(2)
        assert heads.scores[3, 7, 5] == pytest.approx(direct)
    assert not np.allclose(layers[0][1], layers[1][1])
