"""The parts into which wgmma_sm90/walk_parts.h cuts walks are good ones among the times that its numbers come from."""

import json

import numpy as np
import short_gradients

DATA = short_gradients.ROOT / "docs" / "benchmarks" / "h200" / "walk_parts.json"


def regrets(choose) -> list[float]:
    """The time of each call in the parts that `choose` takes over that in the best ones."""
    from flash_attn_lab.bench.calls.call import Call

    found = []
    for row in json.loads(DATA.read_text())["rows"]:
        call = short_gradients.described(Call.parse(row["call"]))
        heads, rows = choose(*short_gradients.shape_of_walks(call))
        found.append(row["us"][f"{heads}x{rows}"] / min(row["us"].values()))
    return found


def test_parts_are_good():
    found = regrets(lambda *of_call: short_gradients.walk_parts(*of_call)[2])
    assert len(found) == 168 and np.exp(np.log(found).mean()) < 1.01 and max(found) < 1.25


def test_whole_walks_are_not():
    assert np.exp(np.log(regrets(lambda *_: (1, 1))).mean()) > 1.4


def test_walks():
    assert short_gradients.head_walk(3000, 128, -1, 0, 64) == (3, 3)  # the last 128 rows see keys
    assert short_gradients.head_walk(1024, 1024, -1, 0, 128) == (8, 4.5)
    assert short_gradients.head_walk(1024, 256, -1, 0, 128, top_left=True) == (8, 7.5)
    assert short_gradients.head_walk(500, 300, -1, -1, 64) == (8, 8)
