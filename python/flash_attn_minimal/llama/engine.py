"""The engine: a batch of sequences that join and leave while others run (continuous batching), over a paged or a
contiguous cache.

A slot is one row of the batch. The state of all slots (next token, filled positions, pages, sampling) is on the device
and is advanced there, so a decode step is a function without arguments. On a GPU it is a CUDA graph, one for each batch
size, length bucket and set of sampling rules, which is replayed. The host queues up to `ahead` steps before it reads
the tokens of the first. It knows all lengths without reading them. It learns late that a token has ended a text; tokens
drawn after that one are dropped.

A sequence joins when a slot is free, and also the pages for its prompt and all its new tokens. So a full cache never
stops a running sequence.

A failure ends only one sequence if it can be traced to it: an exception in the pass over its prompt, or a NaN in its
logits. That sequence ends with `finished == "error"`, and the other sequences get the tokens that they would get alone.
A step that fails as a whole ends all running sequences. `step` raises neither; `run` raises the first error at its end.
"""

from __future__ import annotations

import itertools
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .._core.checks import integer
from ..errors import BadArgument, FlashAttnError
from .cache import KVCache, pages_of
from .model import Array, Llama, Rows
from .sampling import Rule, Sampler, Sampling

# The number of recorded steps that are kept, those used last. There is one for each batch size, length bucket and set
# of sampling rules. Clients choose the rules, so the number of sets is unlimited. A dropped step is recorded anew.
KEPT_STEPS = 32


@dataclass(eq=False)
class Request:
    """One sequence, from `add` to its last token."""

    id: int
    prompt: list[int]
    max_new: int
    sampling: Sampling
    stops: frozenset[int]
    cut_by_context: bool  # the context has no room for all the wanted new tokens
    tokens: list[int] = field(default_factory=list)  # the new tokens that the host has read
    queued: int = 0  # the number of new tokens that are computed or queued
    finished: str = ""  # "stop", "length", "context", "cancelled", "error"
    error: BaseException | None = None  # the reason of "error"; tokens are those drawn before it
    slot: int | None = None
    pages: list[int] = field(default_factory=list)

    @property
    def positions(self) -> int:
        """The positions of the cache that are filled at its end: the last new token does not go through the model."""
        return max(len(self.prompt) + self.max_new - 1, len(self.prompt))


@dataclass
class _InFlight:
    """Tokens that the host has not read yet: those of one decode step, or the first token of one sequence."""

    wait: Callable[[], None]
    row: int  # its row of the ring
    lanes: list[tuple[int, Request]]  # (slot, the request that gets its token)
    is_decode: bool
    started: float


@dataclass
class Timing:
    """Sums over the steps whose tokens were collected. Steps overlap: the time of a step begins when it was queued, or
    when the step before it arrived if that was later."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0  # several per step when several sequences run
    positions_read: int = 0  # positions of the cache that the decode steps have read


class Engine:
    """Runs sequences in a batch. One thread at a time may use it.

    max_batch: the number of sequences that run at once. page_size: None for a contiguous cache. num_pages: by default
    enough for max_batch full contexts. ahead: by default the number that suits the device."""

    def __init__(
        self,
        model: Llama,
        max_batch: int = 1,
        context: int | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
        ahead: int | None = None,
    ):
        limit = model.config.seq_len
        context = limit if context is None else context
        if not 1 <= context <= limit:
            raise BadArgument(f"context={context} is outside 1 .. {limit}, the model's context")
        for name, value in (("max_batch", max_batch), ("page_size", page_size), ("num_pages", num_pages)):
            if value is not None and value < 1:
                raise BadArgument(f"{name}={value} is not positive")
        if page_size is None and num_pages is not None:
            raise BadArgument(f"num_pages={num_pages} needs a page_size")
        self.model, self.device, self.max_batch, self.context = model, model.device, max_batch, context
        self.ahead = self.device.ahead if ahead is None else ahead
        max_pages = 1 if page_size is None else pages_of(context, page_size)
        num_pages = max_batch * max_pages if num_pages is None else num_pages
        with self.device.scope():
            self._allocate(max_pages, num_pages, page_size)
        self.device.synchronize()

        self._ids = itertools.count()
        self._waiting: deque[Request] = deque()
        self._flight: deque[_InFlight] = deque()
        self._steps: dict[tuple, Callable[[], None]] = {}
        self.timing, self._collected = Timing(), 0.0

    def _allocate(self, max_pages: int, num_pages: int, page_size: int | None) -> None:
        xp, device, max_batch = self.device.xp, self.device, self.max_batch
        self.cache = KVCache(device, self.model.config, max_batch, self.context, page_size, num_pages)

        self._slots: list[Request | None] = [None] * max_batch
        # The host's copies of the state that the device advances: the values after all work queued so far.
        self._lengths = np.full(max_batch, -1, np.int32)  # -1: an idle slot
        self._active = np.zeros(max_batch, np.int32)
        self._table = np.full((max_batch, max_pages), self.cache.scratch_page, np.int32)
        self._stale = True  # the device's copies may differ
        self._recount = False  # the device's count may differ too
        self.tokens = xp.zeros((max_batch, 1), np.int32)
        self.lengths, self.active, self.idle, self.zero = (xp.zeros(max_batch, np.int32) for _ in range(4))
        self.table = None if page_size is None else xp.zeros((max_batch, max_pages), np.int32)
        self.sampler = Sampler(device, max_batch)
        self._rules: tuple[Rule, ...] = ()
        self._ring_rows = self.ahead + max_batch + 2
        self.ring, self._ring = device.shared((self._ring_rows, max_batch))  # each row: one entry of _flight
        self.count = xp.zeros(max_batch, np.int32)  # the ring's next row, the same number in all entries
        self._entries = 0  # the host's copy of count

    # ---- requests ----

    def add(
        self, prompt: Sequence[int], max_new: int, sampling: Sampling | None = None, stops: Iterable[int] = ()
    ) -> Request:
        """Queues a sequence of up to max_new tokens after the prompt. A token of `stops` ends it early and is not part
        of the text. A model of context n runs n tokens, so a prompt of p tokens is followed by at most n - p + 1."""
        prompt = [int(token) for token in prompt]
        if not prompt:
            raise BadArgument("prompt has no tokens")
        if len(prompt) > self.context:
            raise BadArgument(f"prompt has {len(prompt)} tokens, more than the context of {self.context}")
        vocab = self.model.config.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocab:
            raise BadArgument(
                f"prompt reaches from token {min(prompt)} to {max(prompt)}, outside the vocabulary 0 .. {vocab - 1}"
            )
        max_new = integer("max_new", max_new, -math.inf, math.inf)
        if max_new < 0:
            raise BadArgument(f"max_new={max_new} is negative")
        room = self.context - len(prompt) + 1
        request = Request(
            next(self._ids), prompt, min(max_new, room), sampling or Sampling(), frozenset(stops), max_new > room
        )
        if self.cache.page_size is not None:
            wanted, there = pages_of(request.positions, self.cache.page_size), self.cache.scratch_page
            if wanted > there:
                raise BadArgument(
                    f"a prompt of {len(prompt)} tokens and {request.max_new} new ones need {wanted} pages of "
                    f"{self.cache.page_size} positions, more than num_pages={there}"
                )
        if request.max_new == 0:
            request.finished = "length"
        else:
            self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a sequence whose result is no longer wanted: it gives back its slot and pages, or its place in the
        queue. It keeps the tokens that it has. A sequence that has ended does not change."""
        if request.finished:
            return
        request.finished = "cancelled"
        if request in self._waiting:
            self._waiting.remove(request)
        self._leave(request)

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or running, or has tokens on their way."""
        return bool(self._waiting or self._flight or any(self._slots))

    def step(self) -> list[tuple[Request, int]]:
        """Lets sequences join, queues work, and returns the tokens of the oldest queued step: (sequence, token) for
        each sequence that got one. The list may be empty; more tokens come as long as the engine is `busy`.

        A sequence that fails gets no token and is `finished` with "error". An interrupt ends all running sequences and
        is raised."""
        try:
            with self.device.scope():
                self._admit()
                while any(self._slots) and len(self._flight) <= self.ahead:
                    self._decode()
            return self._collect() if self._flight else []
        except BaseException as error:
            self._fail_step(error)
            if not isinstance(error, Exception):
                raise
            return []

    def run(self) -> None:
        """Runs until every sequence has ended. Then raises the error of the first that failed, if any."""
        requests = sorted({*self._waiting, *self._running()}, key=lambda request: request.id)
        while self.busy:
            self.step()
        for request in requests:
            if request.error is not None:
                raise request.error

    # ---- joining and leaving ----

    def _admit(self) -> None:
        while self._waiting and None in self._slots and len(self._flight) < self._ring_rows - self.ahead - 1:
            request, slot = self._waiting[0], self._slots.index(None)
            wanted = 0
            if self.cache.page_size is not None:
                wanted = pages_of(request.positions, self.cache.page_size)
                if wanted > len(self.cache.pool):
                    return  # first come, first served: smaller requests after this one wait too
            self._slots[slot], request.slot = request, slot
            self._waiting.popleft()
            try:
                if wanted:
                    request.pages = self.cache.pool.take(wanted)
                    self._table[slot, :wanted] = request.pages
                self._lengths[slot], self._active[slot], self._stale = len(request.prompt), 1, True
                self.sampler.set(slot, request.sampling)
                self._prefill(request, slot)
            except Exception as error:  # none of its work is in a queue that others read: only this sequence ends
                self._recount = True
                self._fail(request, error)

    def _leave(self, request: Request) -> None:
        """Frees the slot. Queued steps may still write to its pages, but the work of the pages' next owner is queued
        after them."""
        slot = request.slot
        if slot is None:
            return
        self._slots[slot], request.slot = None, None
        self._lengths[slot], self._active[slot], self._stale = -1, 0, True
        self._table[slot] = self.cache.scratch_page
        if request.pages:
            pages, request.pages = request.pages, []
            self.cache.pool.give_back(pages)

    def _running(self) -> list[Request]:
        """The sequences in slots, and those that have left their slot but whose last tokens are on their way."""
        underway = (request for entry in self._flight for _, request in entry.lanes)
        return [request for request in (*self._slots, *underway) if request and not request.finished]

    def _fail(self, request: Request, error: BaseException) -> None:
        """Ends one sequence with an error."""
        if isinstance(error, MemoryError):
            traceback.clear_frames(error.__traceback__)  # its frames hold the arrays of the pass that ran out of memory
        if not request.finished:
            request.error, request.finished = error, "error"  # in this order: another thread may read them
            if request in self._waiting:
                self._waiting.remove(request)
        self._leave(request)

    def _fail_step(self, error: BaseException) -> None:
        """Ends the running sequences, whose tokens are lost with the step. If none runs, it ends the waiting ones,
        because the failure then belongs to no single sequence. Drops the recorded steps: one of them, or a lack of
        memory, may have been the cause."""
        for request in self._running() or list(self._waiting):
            self._fail(request, error)
        self._flight.clear()
        self._steps.clear()
        self._stale = self._recount = True

    # ---- work on the device ----

    def _synchronise_state(self) -> None:
        if self._recount:
            self.device.upload(self.count, np.full(self.max_batch, self._entries, np.int32))
            self._recount = False
        if self._stale:
            self.device.upload(self.lengths, self._lengths)
            self.device.upload(self.active, self._active)
            if self.table is not None:
                self.device.upload(self.table, self._table)
            self._rules = self.sampler.synchronise([slot for slot, request in enumerate(self._slots) if request])
            self._stale = False

    def _prefill(self, request: Request, slot: int) -> None:
        started = time.perf_counter()
        self._synchronise_state()
        if self.table is None and self.device.reads_unfilled:
            self.cache.clear(slot)  # the slot's last sequence may have left a NaN, and 0 * NaN is NaN
        here = slice(slot, slot + 1)
        rows = Rows(
            tokens=self.device.vector_int32([request.prompt]),
            lengths=self.zero[:1],
            table=None if self.table is None else self.table[here],
            first=slot,
            longest=len(request.prompt),
        )
        logits = self.model.forward(rows, self.cache)
        self.sampler.draw(logits, self.tokens[here], self.zero[:1], (request.sampling.rule,), slot)
        self.device.advance(self.tokens, self.ring, self.count, self.lengths, self.idle)
        self._sent([(slot, request)], False, started)

    def _decode(self) -> None:
        """Queues one token for every sequence in a slot."""
        started = time.perf_counter()
        lanes = [(slot, request) for slot, request in enumerate(self._slots) if request]
        self._synchronise_state()
        batch = min(1 << lanes[-1][0].bit_length(), self.max_batch)
        longest = int(self._lengths.max()) + 1
        key = (batch, self.device.longest_bucket(longest, self.context), self._rules)
        body = self._steps.pop(key, None)
        if body is None:  # the first step of a kind runs without capture, which compiles what is compiled on first use
            body = lambda: self._body(*key)  # noqa: E731
            body()
            body = self.device.once(body)
        else:
            body()
        self._steps[key] = body  # moves it to the end: the first entry is the one unused for longest
        if len(self._steps) > KEPT_STEPS:
            del self._steps[next(iter(self._steps))]
        self._lengths += self._active
        self.timing.positions_read += int(self._lengths @ self._active)
        self._sent(lanes, True, started)

    def _body(self, batch: int, longest: int, rules: tuple[Rule, ...]) -> Array:
        """One decode step of slots 0 .. batch - 1. It only reads and advances the state."""
        table = None if self.table is None else self.table[:batch]
        rows = Rows(self.tokens[:batch], self.lengths[:batch], table, 0, longest)
        logits = self.model.forward(rows, self.cache)
        self.sampler.draw(logits, self.tokens[:batch], self.lengths[:batch], rules)
        self.device.advance(self.tokens, self.ring, self.count, self.lengths, self.active)
        return logits

    def _sent(self, lanes: list[tuple[int, Request]], is_decode: bool, started: float) -> None:
        self._flight.append(_InFlight(self.device.event(), self._entries, lanes, is_decode, started))
        self._entries = (self._entries + 1) % self._ring_rows
        for _, request in lanes:
            request.queued += 1
            if request.queued == request.max_new:
                self._leave(request)

    def _collect(self) -> list[tuple[Request, int]]:
        entry = self._flight[0]
        entry.wait()
        self._flight.popleft()
        now, arrived, timing = time.perf_counter(), [], self.timing
        elapsed, self._collected = now - max(entry.started, self._collected), now
        if entry.is_decode:
            timing.decode_steps += 1
            timing.decode_seconds += elapsed
        else:
            timing.prompt_tokens += len(entry.lanes[0][1].prompt)
            timing.prefill_seconds += elapsed
        for slot, request in entry.lanes:
            if request.finished:
                continue
            token = int(self._ring[entry.row, slot])
            if token < 0:
                text = "the model's logits hold a NaN: damaged weights, or an overflow in 16 bits"
                self._fail(request, FlashAttnError(text))
                continue
            if token in request.stops:
                request.finished = "stop"
                self._leave(request)
                continue
            timing.decode_tokens += entry.is_decode
            request.tokens.append(token)
            arrived.append((request, token))
            if len(request.tokens) == request.max_new:
                request.finished = "context" if request.cut_by_context else "length"
        return arrived
