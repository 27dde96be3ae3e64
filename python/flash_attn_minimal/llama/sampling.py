"""From logits to the next token: greedy, temperature, top-k, top-p, with different settings for each slot of a
batch."""

from __future__ import annotations

import ctypes as ct
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._core.checks import integer, number
from ..errors import BadArgument

Rule = tuple[float, int, float]  # temperature, top_k, top_p
GREEDY: Rule = (0.0, 0, 1.0)
MOST_TOP_K = (1 << 31) - 1


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: from softmax(logits / temperature), cut to the top_k most likely tokens (0 = all),
    then to the fewest of the most likely tokens that hold the share top_p of their probability. temperature=0 is
    greedy, whatever the other fields are: the largest logit, on a tie the lowest id. The same seed draws the same
    tokens on every device and in any batch.

    temperature and top_p are rounded to float32 and checked here, because a step draws for all sequences in one call,
    which must have nothing to refuse.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        temperature, top_p = number("temperature", self.temperature), number("top_p", self.top_p)
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise BadArgument(f"temperature={self.temperature} is not a finite number >= 0")
        if not 0 < top_p <= 1:
            raise BadArgument(f"top_p={self.top_p} is outside 0 < top_p <= 1")
        if not _float32(top_p):
            raise BadArgument(f"top_p={self.top_p} is 0 as a float32")
        top_k, seed = (integer(name, getattr(self, name), -math.inf, math.inf) for name in ("top_k", "seed"))
        if not 0 <= top_k <= MOST_TOP_K:
            raise BadArgument(f"top_k={top_k} is {'negative' if top_k < 0 else 'not below 2^31'}")
        if not 0 <= seed < 1 << 63:
            raise BadArgument(f"seed={seed} is {'negative' if seed < 0 else 'not below 2^63'}")

    @property
    def rule(self) -> Rule:
        temperature = _float32(self.temperature)
        return (temperature, int(self.top_k), _float32(self.top_p)) if temperature else GREEDY


def _float32(value: Any) -> float:
    return ct.c_float(float(value)).value


class Sampler:
    """The sampling of every slot. The seeds are arrays on the device. The rules are part of a step: it draws once with
    each rule in use, and each slot keeps the draw made with its own rule."""

    def __init__(self, device: Any, slots: int):
        self.device = device
        self._rules: list[Rule] = [GREEDY] * slots
        self._seeds = np.zeros(slots, np.int64)
        self.seeds, self.rule = device.xp.zeros(slots, np.int64), device.xp.zeros(slots, np.int32)

    def set(self, slot: int, sampling: Sampling) -> None:
        self._rules[slot], self._seeds[slot] = sampling.rule, sampling.seed

    def synchronise(self, used: list[int]) -> tuple[Rule, ...]:
        """Brings the device's copies up to date; returns the rules of the slots in use."""
        rules = sorted({self._rules[slot] for slot in used})
        index = [rules.index(rule) if rule in rules else 0 for rule in self._rules]
        self.device.upload(self.seeds, self._seeds)
        self.device.upload(self.rule, np.array(index, np.int32))
        return tuple(rules)

    def draw(self, logits: Any, tokens: Any, steps: Any, rules: tuple[Rule, ...], first: int = 0) -> None:
        """Draws the next tokens, (batch, 1) int32, of the slots from `first` on, from logits (batch, vocab); -1 where a
        row holds a NaN or nothing above -inf. steps (batch,): a number that differs between the draws of a sequence."""
        device, here = self.device, slice(first, first + len(logits))
        seeds = self.seeds[here]
        if len(rules) == 1:
            device.sample(logits, tokens, rules[0], seeds, steps)
            return
        for i, rule in enumerate(rules):
            drawn = device.xp.empty(tokens.shape, np.int32)
            device.sample(logits, drawn, rule, seeds, steps)
            device.select(tokens, drawn, lambda i=i: (self.rule[here] == i)[:, None])
