"""The parts into which wgmma_sm90/walk_parts.h cuts walks are good ones among the times that its numbers come from."""

import json
import math

import numpy as np
import short_gradients

DATA = short_gradients.ROOT / "docs" / "benchmarks" / "h200" / "walk_parts.json"


def regrets(choose) -> list[float]:
    """The time of each call in the parts that `choose` takes over that in the best ones."""
    from flash_attn_lab.bench.calls.call import Call

    found = []
    for row in json.loads(DATA.read_text())["rows"]:
        call = Call.parse(row["call"])
        tile, wide = 128 if call.headdim <= 64 else 64, call.headdim > 128
        right = 0 if "causal" in call.options else -1
        walks = short_gradients.head_walk(call.seqlen_q, call.seqlen_k, -1, right, tile)
        blocks = math.ceil(call.seqlen_k / short_gradients.BLOCK_N) * call.batch * call.nheads_k
        group, sms = call.nheads // call.nheads_k, short_gradients.MULTIPROCESSORS
        heads, rows = choose(blocks, *walks, group, sms // 2 if wide else sms, sms, call.headdim)
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
