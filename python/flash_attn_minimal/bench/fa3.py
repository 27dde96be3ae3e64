"""FlashAttention-3 where its package is not installed: its speed over cuDNN's, measured once with both in one process.

FlashAttention-3's main of August 2026, compiled with CUDA 13.0 for sm_90a, PyTorch 2.11 with cuDNN 9, one H200,
2026-11-20: 16384 tokens, heads x headdim = 2048, random normal inputs. Forward and backward are bfloat16 on both sides;
"fp8" is FlashAttention-3's e4m3 forward over cuDNN's bfloat16 forward. The ratios move by several per cent with the
card's power state. Tables and pictures place FlashAttention-3 at cuDNN's time in their own run over these.
"""

from __future__ import annotations

from typing import Any

NOTE = (
    "its times are cuDNN's of this run over the ratio of the two measured in one process on the same GPU model "
    "(FlashAttention-3's main of August 2026, CUDA 13.0)"
)
DEVICE, TOKENS, HIDDEN = "H200", 16384, 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
# fmt: off
RATIOS = {  # by (headdim, causal)
    "fwd": {
        (64, False): (0.846, 0.964, 1.040, 1.087, 1.183, 1.226),
        (64, True): (0.822, 0.862, 1.063, 1.095, 1.165, 1.221),
        (128, False): (0.978, 1.049, 1.065, 1.071, 1.078, 1.071),
        (128, True): (0.986, 1.109, 1.214, 1.113, 1.113, 1.221),
        (256, False): (0.999, 0.990, 1.072, 1.093, 1.030, 1.016),
        (256, True): (0.928, 0.998, 1.152, 1.101, 1.291, 1.220),
    },
    "fp8": {
        (64, False): (0.850, 1.073, 1.167, 1.194, 1.281, 1.331),
        (64, True): (0.775, 0.912, 1.094, 1.146, 1.259, 1.244),
        (128, False): (1.016, 1.100, 1.279, 1.269, 1.270, 1.300),
        (128, True): (0.973, 1.097, 1.210, 1.270, 1.411, 1.464),
        (256, False): (1.444, 1.407, 1.541, 1.589, 1.548, 1.535),
        (256, True): (1.208, 1.358, 1.653, 1.615, 1.659, 1.590),
    },
    "bwd": {
        (64, False): (1.305, 1.275, 1.301, 1.215, 1.185, 1.191),
        (64, True): (1.320, 1.405, 1.361, 1.340, 1.276, 1.252),
        (128, False): (1.340, 1.207, 1.148, 1.075, 1.063, 1.108),
        (128, True): (1.258, 1.314, 1.275, 1.150, 1.156, 1.109),
        (256, False): (1.349, 1.445, 1.292, 1.167, 1.271, 1.286),
        (256, True): (1.253, 1.290, 1.323, 1.261, 1.146, 1.235),
    },
}
# fmt: on


def rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for FlashAttention-3 beside each row of cuDNN that has the shape of a ratio, on the same device."""
    if DEVICE not in data["machine"].get("gpu", "") or any(row["system"] == "fa3" for row in data["rows"]):
        return []
    fp8 = any(row.get("dtype") == "float8_e4m3fn" for row in data["rows"])
    placed = []
    for row in data["rows"]:
        if (
            row["pass"] not in RATIOS
            or row["system"] != "cudnn"
            or row.get("dtype") != "bfloat16"
            or "us" not in row
            or "mix" in row
        ):
            continue
        ratios = RATIOS["fp8" if fp8 else row["pass"]].get((row["headdim"], row["causal"]))
        protocol = row["batch"] * row["seqlen_q"] == TOKENS and row["nheads_k"] * row["headdim"] == HIDDEN
        if ratios and protocol and row["nheads"] == row["nheads_k"] and row["seqlen_q"] in SEQLENS:
            ratio = ratios[SEQLENS.index(row["seqlen_q"])]
            same = {key: value for key, value in row.items() if not key.startswith("sustained")}
            same["dtype"] = "float8_e4m3fn" if fp8 else row["dtype"]
            placed.append(same | {"system": "fa3_ratio", "us": row["us"] / ratio, "tflops": row["tflops"] * ratio})
    return placed
