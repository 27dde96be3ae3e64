"""A worker of the sweep: reads a call a line from its input, checks and times it, writes the row to its output.

in   {"call": "bf16 fwd ...", "check": true, "peers": true}
out  {"ready": {machine}}, or {"refused": why}, once; then for each call {"row": {...}} or {"refused": why},
     {"wrong": row}, {"failed": why}

A worker whose device no longer works ends: after a row with "ends": true in its answer, else without an answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from flash_attn_minimal import backward_kernels, kernels

from .calls.call import Call
from .calls.judge import Judge
from .calls.make import USUAL, Arrays, Made, dtypes_of, ours, peer, prepared, rehearse
from .machine import BenchError, Meter, first_line, open_machine
from .suite import rounded
from .systems import PACKAGES, Refused, installed
from .timing import Protocol, Timing, interleave

PEER_FACTOR = 5  # a peer may round more than ours; beyond this factor its answer is wrong, and it is left out
HIDES_US = 1000  # a launch that takes longer hides the host's work for the next one
SLOW_S = {0.3: 3, 1.5: 1}  # of one launch of each system; the rounds of calls that take longer
ALIKE = 0.03  # ours and a peer: the root mean square of their difference over that of ours
ALIKE_FP8 = 0.2  # peers take the same call in bfloat16
COMPILES = {"fa4": 0.1}  # peers that compile for each kind of call, and the part of a worker's time that this may take


class Compiled:
    """The peers of the sweep. Remembers for which kinds of calls one has compiled a kernel, and how long that took."""

    suite, rehearses = "sweep", True

    def __init__(self):
        self.start = time.monotonic()
        self.known: set[tuple] = set()
        self.spent: dict[str, float] = {}

    def peer(self, name: str, arrays: Arrays) -> Made:
        if name not in COMPILES:
            return peer(name, arrays)
        call = arrays.call
        kind = (name, call.dtype, call.backward, call.headdim, call.headdim_v, call.group, call.options)
        kind += (call.packed is None, call.ways)
        before = time.monotonic()
        if kind not in self.known and self.spent.get(name, 0.0) > 20 + COMPILES[name] * (before - self.start):
            raise Refused(f"{name} has compiled enough for now")
        try:
            return peer(name, arrays)
        finally:
            if kind not in self.known:
                self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - before
                self.known.add(kind)


class ByName:
    """In the place of peers: the library's own kernels, each forced by its name. Those that take far longer than the
    library's choice are left out."""

    suite, rehearses = "dispatch", False
    FAR = 3

    def __init__(self, machine):
        self.machine = machine
        of_device = {way: table() for way, table in (("fwd", kernels), ("bwd", backward_kernels))}
        self.names = {
            way: [one["name"] for one in table if one["device"] == machine.device and "naive" not in one["name"]]
            for way, table in of_device.items()
        }
        self.chosen: tuple[Arrays, str | None, float] | None = None

    def peer(self, name: str, arrays: Arrays) -> Made:
        if self.chosen is None or self.chosen[0] is not arrays:
            mine = ours(arrays)
            self.chosen = arrays, mine.kernel, self._seconds(mine)
        _, kernel, seconds = self.chosen
        if name == kernel:
            raise Refused(f"{name} is the library's choice")
        made = replace(ours(arrays, name), name=name)
        if self._seconds(made) > self.FAR * seconds + 2e-5:
            raise Refused(f"{name} takes far longer than {kernel}")
        return made

    def _seconds(self, made: Made) -> float:
        """Times one launch, with the host's work: the least of a few."""
        found = []
        for i in range(4):
            self.machine.synchronize()
            before = time.perf_counter()
            made.launch(i)
            self.machine.synchronize()
            found.append(time.perf_counter() - before)
        return min(found[1:])


class Turn:
    """Held while the device works: workers that share a GPU take turns. What the host does alone needs no turn."""

    def __init__(self, path: str | None):
        self.file = open(path, "a") if path else None

    def __enter__(self) -> None:
        if self.file:
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *error) -> None:
        if self.file:
            fcntl.flock(self.file, fcntl.LOCK_UN)


def measured(
    machine, call: Call, check: bool, protocol: Protocol, seed: int, peers: list[str],
    compiled: Compiled | ByName | None = None, turn: Turn | None = None,
) -> dict:  # fmt: skip
    """Makes, checks and times one call; returns its outcome."""
    turn = turn or Turn(None)
    with turn:
        arrays = Arrays.of(machine, call, seed)
        try:
            mine = ours(arrays)
        except Refused as refusal:
            return {"refused": str(refusal)}
        compiled = compiled or Compiled()
        rehearsed = [name for name in peers if turn.file and compiled.rehearses and prepared(name, arrays)]
        machine.synchronize()
    for name in rehearsed:
        rehearse(name, arrays)
    with turn:
        found = _measured(machine, arrays, mine, check, protocol, seed, peers, compiled)
        del arrays, mine
        machine.release()
    return found.outcome()


@dataclass
class Measured:
    """A call that has been timed, and what is still to be judged of its answers, on the host alone."""

    row: dict[str, Any]
    call: Call
    times: dict[str, Timing]  # of ours first
    unlike: list[str]  # peers that are not in the times
    judge: Judge | None
    seen: dict[str, list]  # of the answers of ours and of the peers in the times

    def outcome(self) -> dict:
        row, unlike = self.row, list(self.unlike)
        for name, seen in self.seen.items():
            error, budget = self.judge.judged(seen)
            if name == "ours":
                row["max_err"], row["err_budget"] = error, budget
                if not error <= budget:
                    return {"wrong": rounded(row | {"wrong": True})}
            elif not error <= PEER_FACTOR * budget and self.times.pop(name, None):
                unlike.append(name)
        return {"row": rounded(row | _timed(self.call, self.times, unlike))}


def _measured(
    machine, arrays: Arrays, mine: Made, check: bool, protocol: Protocol, seed: int, peers: list[str],
    compiled: Compiled | ByName,
) -> Measured:  # fmt: skip
    call, systems = arrays.call, [mine]
    for name in peers:
        try:
            systems.append(compiled.peer(name, arrays))
        except Refused:
            continue
    row: dict[str, Any] = {"suite": compiled.suite, "system": "ours", "kernel": mine.kernel, "call": str(call)}
    row |= {"pass": "bwd" if call.backward else "fwd", "dtype": call.dtype}  # the rest is in the line
    comparable = "dropout" not in call.options  # whose bits are each library's own
    before = time.perf_counter()
    answer = _answer(mine, machine)
    unlike = [one for one in systems[1:] if not _alike(machine, call, answer if comparable else (), one)]
    seconds = time.perf_counter() - before
    judge, seen = None, {}
    if (check or unlike) and Judge.affordable(call):
        judge = Judge(arrays, seed)
        seen["ours"] = judge.seen(answer)
        if comparable:
            for one in systems[1:]:
                with contextlib.suppress(Exception):  # as in _alike
                    seen[one.name] = judge.seen(_answer(one, machine))
            unlike = [one for one in systems[1:] if one.name not in seen]
    systems = [one for one in systems if one not in unlike]
    del answer
    graphs = True if machine.device == "cuda" else None  # the host's work is in no time, however long it takes a system
    if call.backward and "dropout" in call.options:
        graphs = False  # PyTorch's gradients alone in a graph read the seed at an address of the CPU
    for limit, rounds in SLOW_S.items():
        if seconds > limit:
            protocol = replace(protocol, rounds=min(protocol.rounds, rounds))
    try:
        found = interleave(machine, [one.launch for one in systems], protocol, None, seed, graphs)
    except Exception:  # a peer's doing, if ours can be timed alone
        if systems == [mine]:
            raise
        unlike += systems[1:]
        systems = [mine]
        found = []
    if not found:
        machine.release()
        found = interleave(machine, [mine.launch], protocol, None, seed, graphs)
    times = dict(zip([one.name for one in systems], found, strict=True))
    seen = {name: one for name, one in seen.items() if name in times}
    return Measured(row, call, times, [one.name for one in unlike], judge, seen)


def _timed(call: Call, times: dict[str, Timing], unlike: list[str]) -> dict[str, Any]:
    """The times of a row. Those with the host's work in them compare with their like alone."""
    hosts = [name for name, t in times.items() if t.capture_failed and median(t.bursts) < HIDES_US]
    row: dict[str, Any] = times["ours"].row(call.flops / 1e12)
    others = {name: timing for name, timing in times.items() if name != "ours"}
    row["peers"] = {name: float(f"{timing.row(0.0)['us']:.5g}") for name, timing in others.items()}
    like = [name for name in others if (name in hosts) == ("ours" in hosts)]
    if like:
        row["best"] = min(like, key=row["peers"].__getitem__)
        row["ratio"] = row["peers"][row["best"]] / row["us"]
    if hosts:
        row["not_captured"] = hosts
    if unlike:
        row["peers_wrong"] = unlike
    return row


def _answer(system: Made, machine) -> tuple:
    """The arrays that a system computes, each (batch, seqlen, heads, headdim)."""
    answer = system.launch(0)
    machine.synchronize()
    arrays = answer if isinstance(answer, tuple) else (answer,)
    return tuple(x.transpose(1, 2) for x in arrays) if system.heads_second else arrays


def _alike(machine, call: Call, mine: tuple, peer: Made) -> bool:
    """Whether a peer's answer equals ours except for rounding. Every call is compared in this way, some also with
    float64. False where the peer has no answer. Where ours is missing (dropout), any answer will do."""
    bound = ALIKE_FP8 if call.dtype == "float8_e4m3fn" else ALIKE
    try:
        other = _answer(peer, machine)
        for a, b in zip(mine, other, strict=bool(mine)):
            difference, size = (machine.cast(x, "float32").square().mean() for x in (a.sub(b), a))
            if not bool(difference <= bound**2 * size + 1e-12):
                return False
    except Exception:  # such as no memory for a second answer
        return False
    return True


def answers(machine) -> bool:
    """Whether the device still works: after an error in a kernel it refuses everything."""
    try:
        machine.random((4,), "float32", 0)
        if machine.framework == "torch":
            machine.torch.nn.functional.dropout(machine.torch.ones(4, device=machine.device))
        machine.synchronize()
        return True
    except Exception:  # whatever it is
        return False


def main() -> int:
    about = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints goes to standard error, not into the protocol
    try:
        machine = open_machine(about["device"], about["framework"])
    except BenchError as error:
        print(json.dumps({"refused": str(error)}), file=out, flush=True)
        return 2
    machine.use_one_stream()
    if machine.framework == "torch" and machine.device == "cpu" and about["threads"]:
        machine.torch.set_num_threads(about["threads"])
    peers = [name for name in USUAL[machine.device] if name not in PACKAGES or installed(PACKAGES[name])]
    if machine.framework != "torch":
        peers = []
    protocol = Protocol(rounds=about["rounds"], burst_s=about["burst_s"], max_launches=200)
    compiled: Compiled | ByName = ByName(machine) if about.get("by_name") else Compiled()
    turn = Turn(about.get("turn"))
    described = machine.describe() | ({"driver": Meter(machine).driver} if machine.device == "cuda" else {})
    ready = {"device": machine.device, "framework": machine.framework, "dtypes": dtypes_of(machine), "peers": peers}
    print(json.dumps({"ready": ready | {"machine": described, "title": machine.title}}), file=out, flush=True)
    for number, line in enumerate(sys.stdin):
        order = json.loads(line)
        if number % 16 == 0:
            gc.collect()  # what a peer holds in a circle is memory of the device
        asked = peers if order.get("peers", True) else []
        broken = True
        try:
            call = Call.parse(order["call"])
            if isinstance(compiled, ByName) and order.get("peers", True):
                asked = compiled.names["bwd" if call.backward else "fwd"]
            found = measured(machine, call, order["check"], protocol, about["seed"], asked, compiled, turn)
            broken = "not_captured" in found.get("row", {})
        except Exception as error:  # a call that breaks must not end the sweep: it is reported
            found = {"failed": f"{type(error).__name__}: {first_line(error)}"}
        works = not broken or answers(machine)
        if not works and "row" not in found:  # perhaps a peer's doing: the call is asked for again, without peers
            print(found.get("failed"), file=sys.stderr)
            return 1
        print(json.dumps(found | ({} if works else {"ends": True})), file=out, flush=True)
        if not works:
            return 0
        machine.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
