"""Forward and backward passes of several ranks: against float64, and against one call over all tokens."""

import numpy as np
import pytest
from accuracy import Case
from ranks import LAYOUTS, MODES, Split, check_case, compute, devices, one_call, small

import flash_attn_minimal as fa

LONGER_K = {"cu_seqlens_q": (0, 5, 21, 60), "cu_seqlens_k": (0, 41, 57, 130)}
LONGER_Q = {"cu_seqlens_q": (0, 41, 57, 130), "cu_seqlens_k": (0, 5, 21, 60)}
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "causal_longer_k": {"causal": True, **LONGER_K},
    "causal_longer_q": {"causal": True, **LONGER_Q},
    "top_left_longer_k": {"causal": True, "top_left": True, **LONGER_K},
    "top_left_longer_q": {"causal": True, "top_left": True, **LONGER_Q},
    "window": {"window_size": (9, 4)},
    "left": {"window_size": (12, -1), **LONGER_K},
    "right": {"window_size": (-1, 7), **LONGER_Q},
    "causal_window": {"window_size": (8, 0), "causal": True},
    "softcap_scale": {"softcap": 2.5, "softmax_scale": 0.4, "causal": True},
    "alibi": {"alibi": 1, "causal": True},
    "alibi_batch": {"alibi": 2, **LONGER_K},
    "sinks": {"sinks": True, "causal": True, **LONGER_Q},
    "headdim_v": {"headdim": 24, "headdim_v": 40, "causal": True},
    "dlse": {"dlse": True, "causal": True, **LONGER_Q},
    "one_key_head": {"nheads": 6, "nheads_k": 1, "causal": True},
    "odd_heads": {"nheads": 6, "nheads_k": 3, "causal": True},
}


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options, mode, device):
    size = 2 + list(OPTIONS).index(options) % 2
    layout = LAYOUTS[(list(OPTIONS).index(options) + MODES.index(mode)) % 3]
    check_case(small(**OPTIONS[options]), Split(size, layout, mode), device)
