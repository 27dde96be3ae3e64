"""A worker of the sweep: reads a call a line from its input, checks and times it, writes the row to its output.

in   {"call": "bf16 fwd ...", "check": true}
out  {"ready": {machine}} once, then for each call {"row": {...}} or {"refused": why}, {"wrong": row}, {"failed": why}
"""

from __future__ import annotations

import json
import os
import sys

from .calls import USUAL, Arrays, Call, Judge, Made, Refused, dtypes_of, ours, peer
from .machine import Meter, first_line, open_machine
from .suite import rounded
from .systems import PACKAGES, installed
from .timing import Protocol, interleave

PEER_FACTOR = 5  # a peer may round more than ours; beyond this factor its answer is wrong, and it is left out


def measured(machine, call: Call, check: bool, protocol: Protocol, seed: int, peers: list[str]) -> dict:
    """What came of one call."""
    arrays = Arrays.of(machine, call, seed)
    try:
        mine = ours(arrays)
    except Refused as refusal:
        return {"refused": str(refusal)}
    systems = [mine]
    for name in peers:
        try:
            systems.append(peer(name, arrays))
        except Refused:
            continue
    row = {"suite": "sweep", "system": "ours", "kernel": mine.kernel} | call.fields()
    if check and Judge.affordable(call):
        judge = Judge(arrays, seed)
        row["max_err"], row["err_budget"] = _verdict(judge, mine, machine)
        if not row["max_err"] <= row["err_budget"]:
            return {"wrong": rounded(row | {"max_err": min(row["max_err"], 1e30), "wrong": True})}
        if "dropout" not in call.options:  # whose bits are each library's own
            systems = [mine] + [one for one in systems[1:] if _right(judge, one, machine)]
    launches = [system.launch for system in systems]
    times = dict(zip((s.name for s in systems), interleave(machine, launches, protocol, None, seed), strict=True))
    row |= times.pop("ours").row(call.flops / 1e12)
    row["peers"] = {name: float(f"{timing.row(0.0)['us']:.5g}") for name, timing in times.items()}
    if row["peers"]:
        row["best"] = min(row["peers"], key=row["peers"].__getitem__)
        row["ratio"] = row["peers"][row["best"]] / row["us"]
    return {"row": rounded(row)}


def _verdict(judge: Judge, system: Made, machine) -> tuple[float, float]:
    answer = system.launch(0)
    machine.synchronize()
    return judge.verdict(answer, system.heads_second)


def _right(judge: Judge, system: Made, machine) -> bool:
    error, budget = _verdict(judge, system, machine)
    return error <= PEER_FACTOR * budget


def main() -> int:
    about = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints goes to standard error, not into the protocol
    machine = open_machine(about["device"], about["framework"])
    if machine.framework == "torch" and machine.device == "cpu" and about["threads"]:
        machine.torch.set_num_threads(about["threads"])
    peers = [name for name in USUAL[machine.device] if name not in PACKAGES or installed(PACKAGES[name])]
    if machine.framework != "torch":
        peers = []
    protocol = Protocol(rounds=about["rounds"], burst_s=about["burst_s"])
    described = machine.describe() | ({"driver": Meter(machine).driver} if machine.device == "cuda" else {})
    ready = {"device": machine.device, "framework": machine.framework, "dtypes": dtypes_of(machine), "peers": peers}
    print(json.dumps({"ready": ready | {"machine": described, "title": machine.title}}), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            found = measured(machine, Call.parse(order["call"]), order["check"], protocol, about["seed"], peers)
        except Exception as error:  # a call that breaks must not end the sweep: it is reported
            found = {"failed": f"{type(error).__name__}: {first_line(error)}"}
        print(json.dumps(found), file=out, flush=True)
        machine.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
