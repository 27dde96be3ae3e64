"""From logits to the next token: greedy, temperature, top-p (nucleus)."""

from __future__ import annotations

import math
import random

import numpy as np

from .._library import BadArgument, FlashAttnError


class Sampler:
    """Draws tokens from softmax(logits / temperature), cut to the fewest likeliest tokens that hold probability top_p.

    temperature 0 is greedy: the largest logit, the lowest id on a tie, whatever the rest says. The same seed draws the
    same tokens: the random numbers come from random.Random(seed).random(), the one sequence that Python promises to
    keep from release to release.
    """

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0):
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise BadArgument(f"temperature={temperature} is not a finite number >= 0")
        if not 0 < top_p <= 1:
            raise BadArgument(f"top_p={top_p} is outside 0 < top_p <= 1")
        if seed < 0:
            raise BadArgument(f"seed={seed} is negative")
        self.temperature, self.top_p = temperature, top_p
        self._random = random.Random(seed)

    def __call__(self, logits) -> int:
        """logits (vocab,), NumPy or CuPy. Waits for the device; the draw itself is on the host."""
        if self.temperature == 0:
            token = int(logits.argmax())
            self._check(float(logits[token]))  # a NaN wins every argmax
            return token
        logits = logits.get() if hasattr(logits, "get") else logits  # CuPy's copy to the host
        logits = logits.astype(np.float64)
        self._check(logits.max())
        p = np.exp((logits - logits.max()) / self.temperature)
        p /= p.sum()
        tokens = self._nucleus(p)
        cumulative = p[tokens].cumsum()
        drawn = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return int(tokens[min(drawn, len(tokens) - 1)])

    @staticmethod
    def _check(largest: float) -> None:
        if not math.isfinite(largest):
            raise FlashAttnError(f"the model's largest logit is {largest}: damaged weights, or an overflow in 16 bits")

    def _nucleus(self, p: np.ndarray) -> np.ndarray:
        """Ids of the likeliest tokens, likeliest first, until their probabilities reach top_p."""
        if self.top_p == 1:
            return np.arange(len(p))
        # Tokens below this cutoff hold less than 1 - top_p together: none is in the set, and few are left to sort.
        ids = np.flatnonzero(p >= (1 - self.top_p) / len(p))
        ids = ids[np.argsort(-p[ids], kind="stable")]
        return ids[: int(np.searchsorted(p[ids].cumsum(), self.top_p)) + 1]
