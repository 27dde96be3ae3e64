"""The suite `masks`: masks by intervals (docs/masks.md), forward and backward. A call under a mask should take as long
as the call without one, times the share of the tiles that the mask leaves: the rows have the ratio to that.

Ours, the dense causal call, the same mask said in another way where there is one, and every peer take shuffled turns.
What a peer makes of a mask before its call, such as a BlockMask or a plan, is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from flash_attn_minimal import masks as makers

from ..report import commit
from ..report import table as markdown_table
from .attention import PEER_FACTOR
from .figure import LINES, figure_of, legend, plain_log, set_title
from .machine import SHORT, BenchError, load_average, open_machine
from .masked import PEERS, USUAL, Case, Mask, MaskedExact, ours, peer, reason_of, whole, works
from .report import read
from .rows import label
from .suite import Outcome, Suite, measuring, register, rounded
from .systems import Refused, Shape, peers_of
from .timing import Protocol, interleave

SLOW_S, SLOW_ROUNDS = 1.0, 3
HIDES_US = 1000  # a launch that takes longer hides the host's work for the next one


def equal(total: int, count: int) -> list[int]:
    """`count` lengths, as equal as can be, that make up the total."""
    return [total * (i + 1) // count - total * i // count for i in range(count)]


def width(n: int) -> int:
    """Tokens of a window: 4096, an eighth of the sequence where that is less."""
    return max(1, min(4096, n // 8))


def _tree(n: int) -> makers.RowMask:
    root, *turns = n - 6 * (n // 8), *[n // 8] * 6
    return makers.tree([root, *turns], [-1, 0, 1, 1, 0, 4, 4])


def _prefix_lm(n: int) -> makers.RowMask:
    lengths = equal(n, 8)
    return makers.prefix_lm([length // 2 for length in lengths], lengths)


MASKS: dict[str, Callable[[int], makers.RowMask]] = {
    "shared_prompt": lambda n: makers.shared_prompt([n // 4], [equal(n - n // 4, 24)]),
    "documents": lambda n: makers.documents(equal(n, 8)),
    "window": lambda n: makers.window(n, width(n) - 1),
    "all_seen": lambda n: makers.documents([n]),
    "prefix_lm": _prefix_lm,
    "tree": _tree,
    "global_and_window": lambda n: makers.global_and_window(n, max(1, n // 64), width(n) - 1),
    "block_causal": lambda n: makers.block_causal(n, max(1, n // 64)),
    "block_diffusion": lambda n: makers.block_diffusion(n // 2, 32),
}
USUALLY = ("shared_prompt", "documents", "window", "all_seen")
INTERVALS = "intervals"
OTHERWISE: dict[str, tuple[str, Callable[[int], tuple[dict[str, Any], int]]]] = {
    # The same mask without intervals: its name, and by n our options and the number of equal parts of the sequence.
    "documents": ("a batch", lambda n: ({"causal": True}, 8)),
    "window": ("window_size", lambda n: ({"causal": True, "window_size": (width(n) - 1, 0)}, 1)),
}
# Head dims and lengths.
SHAPES = {"cuda": ((64, 128, 256), (8192, 32768, 65536, 131072)), "cpu": ((64, 128), (1024, 4096))}
QUICK = {"cuda": ((128,), (8192,)), "cpu": ((64,), (512,))}
GROUPED = {"cuda": (8192, 128, 64, 8), "cpu": None}  # tokens, head dim, heads, key heads of one more shape


def heads_of(device: str, seqlen: int, headdim: int, quick: bool) -> int:
    """Fewer where the sequence is long, so that a call takes at most about a tenth of a second."""
    if device == "cpu":
        return 2 if quick else 8
    return 16 if seqlen <= 32768 else 4 if headdim <= 128 else 2


def shapes(options, device: str, dtype: str) -> list[Shape]:
    headdims, seqlens = (QUICK if options.quick else SHAPES)[device]
    found = []
    for seqlen in options.seqlen or seqlens:
        for headdim in options.headdim or headdims:
            nheads = options.heads or heads_of(device, seqlen, headdim, bool(options.quick))
            pairs = [(nheads, options.heads_k or nheads)]
            grouped = GROUPED[device]
            if grouped and grouped[:2] == (seqlen, headdim) and not (options.heads or options.quick):
                pairs.append(grouped[2:])
            for h, h_k in pairs:
                found += [Shape(1, seqlen, h, h_k, headdim, True, dtype, backward=way) for way in (False, True)]
    return found


def chosen(options, all_shapes: list[Shape]) -> list[tuple[Shape, list[str]]]:
    """The masks of each shape. --row asks for those with one of the texts in `mask pass`; a text that names the pass
    alone means the usual masks."""
    found = []
    for shape in all_shapes:
        way = "bwd" if shape.backward else "fwd"
        asked = options.row or [way]
        names = [
            name for name in MASKS
            if any(text in f"{name} {way}" and (name in USUALLY or text != way) for text in asked)
        ]  # fmt: skip
        found.append((shape, names))
    if not any(names for _, names in found):
        raise BenchError(
            f"--row {','.join(options.row)}: no row has this in its name; a name is a pass, fwd or bwd, after one of "
            f"{', '.join(MASKS)}"
        )
    return [pair for pair in found if pair[1]]


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    machine = open_machine(options.device, options.framework, "masks")
    dtype = options.dtype or ("bfloat16" if machine.device == "cuda" else "float32")
    if dtype == "float8_e4m3fn":
        raise BenchError("--dtype fp8: suite masks has a backward pass, which fp8 has not")
    work = chosen(options, shapes(options, machine.device, dtype))
    earlier = earlier_parts(options.before, machine) if options.before else None
    asked = options.peers or (USUAL[machine.device] if machine.framework == "torch" else "none")
    peers = peers_of(machine, asked, known=list(PEERS[machine.device]))
    if machine.framework == "torch" and machine.device == "cpu" and options.threads:
        machine.torch.set_num_threads(options.threads)
    machine.use_one_stream()
    outcome = Outcome(load=load_average())
    print(f"{machine.title}, {SHORT[dtype]}, {machine.framework} arrays", flush=True)
    with measuring(outcome, machine, sum(len(names) for _, names in work), "masks") as (meter, progress):
        made: dict[str, Mask] = {}  # of one length, for all its shapes
        for shape, names in work:
            if any(mask.n != shape.seqlen for mask in made.values()):
                made = {}
            one = _Shape(machine, shape, options, protocol, meter, outcome, made)
            for name in names:
                progress.step(one.measured(name, peers))
            del one
            machine.release()
    if earlier:
        new = {identity(row) for row in outcome.rows}
        outcome.rows[:0] = [row for row in earlier["rows"] if identity(row) not in new]
        outcome.left_out[:0] = [item for item in earlier.get("left_out", []) if item not in outcome.left_out]
    return machine, outcome


def identity(row: dict) -> tuple:
    fields = ("mask", "form", "pass", "dtype", "seqlen_q", "nheads", "nheads_k", "headdim")
    return tuple(row[name] for name in fields)


def earlier_parts(file: Path, machine) -> dict:
    """An earlier result of the suite, to which this run adds. It is of this commit and of a device of this name."""
    data = read(file)
    if data["suite"] != "masks":
        raise BenchError(f"--before {file}: a result of suite {data['suite']}, not of masks")
    now = machine.describe()
    for name, before, here in (
        ("commit", data.get("commit"), commit()),
        ("device", *(about.get("gpu") or about.get("cpu") for about in (data["machine"], now))),
    ):
        if before != here:
            raise BenchError(f"--before {file}: its rows are of {name} {before}, this run is of {here}")
    return data


class _Shape:
    """One shape and pass: its inputs, and the dense causal call that every mask is compared with."""

    def __init__(self, machine, shape: Shape, options, protocol: Protocol, meter, outcome: Outcome, made: dict):
        self.machine, self.shape, self.protocol, self.meter, self.outcome = machine, shape, protocol, meter, outcome
        self.made = made
        self.seed, self.threads = options.seed or 0, options.threads or 0
        *sizes, out_size = shape.sizes
        self.inputs = [machine.random(x, shape.dtype, self.seed + i) for i, x in enumerate([*sizes, out_size])]
        dense = self.case("dense", makers.documents([shape.seqlen]))
        self.dense = self.ours(dense, MaskedExact(dense, self.seed), {"causal": True}, {"mask": "", "form": "dense"})

    def case(self, name: str, numbers: makers.RowMask) -> Case:
        if name not in self.made:
            self.made[name] = Mask.of(self.machine, name, numbers)
        return Case(self.machine, self.shape, self.made[name], *self.inputs)

    def ours(self, case: Case, exact: MaskedExact, call: dict, fields: dict, parts: int = 1) -> tuple | None:
        """(launch, row) of a call of ours that is right; a wrong one is recorded, and not timed."""
        try:
            system = ours(case, call, self.threads, parts)
        except Refused as refusal:
            named = f"ours, {fields['form']}" if fields["form"] != INTERVALS else "ours"
            self.leave_out(named, case, str(refusal))
            return None
        shape = self.shape
        row: dict[str, Any] = {"suite": "masks", "system": "ours", "kernel": system.kernel} | fields
        row |= {"pass": "bwd" if shape.backward else "fwd"} | shape.keys() | {"causal": case.mask.causal}
        row["share"] = case.mask.share
        answer = system.launch(0)
        self.machine.synchronize()
        row["max_err"], row["err_budget"] = exact.judge(whole(case, answer), shape.dtype)
        if not row["max_err"] <= row["err_budget"]:
            self.outcome.wrong += 1
            self.outcome.rows.append(rounded(row | {"wrong": True}))
            return None
        return system.launch, row

    def leave_out(self, system: str, case: Case, reason: str) -> None:
        self.outcome.left_out.append({"system": system, "shape": str(case), "reason": reason})

    def peer(self, name: str, case: Case, exact: MaskedExact) -> Callable | None:
        """The launch of a peer whose answer is right."""
        try:
            launch = peer(name, case).launch
            try:
                error, budget = exact.judge(launch(0), self.shape.dtype)
            except Exception as failure:  # such as no memory to look at the answer
                works(self.machine, name, reason_of(failure))
                raise Refused(reason_of(failure)) from None
            if not error <= PEER_FACTOR * budget:
                raise Refused(
                    f"its answer is off by {error:.3g}, more than {PEER_FACTOR} times the budget of {budget:.3g}"
                )
        except Refused as refusal:
            self.leave_out(name, case, str(refusal))
            return None
        return launch

    def _protocol(self, launches: list[Callable]) -> Protocol:
        """Fewer rounds where a turn of all launches takes long, as on a CPU."""
        start = time.perf_counter()
        for launch in launches:
            launch(0)
        self.machine.synchronize()
        if time.perf_counter() - start < SLOW_S:
            return self.protocol
        return replace(self.protocol, rounds=min(self.protocol.rounds, SLOW_ROUNDS))

    def measured(self, name: str, peers: list[str]) -> str:
        """Checks and times everything under one mask; returns the line about it."""
        n = self.shape.seqlen
        numbers = MASKS[name](n)
        if numbers["startend_row_indices"].shape[2] != n:
            self.outcome.left_out.append({"system": "ours", "shape": f"{name} n{n}", "reason": f"not for {n} tokens"})
            return f"{name}: not for {n} tokens"
        case = self.case(name, numbers)
        exact = MaskedExact(case, self.seed)
        mine = self.ours(case, exact, case.mask.options, {"mask": name, "form": INTERVALS})
        if mine is None:
            return f"{case}: ours is wrong or refuses"
        if self.dense is None:
            self.leave_out("ours", case, "the dense causal call, with which it is compared, is wrong or refused")
            return f"{case}: no dense call"
        rows = [mine[1]]
        launches = [self.dense[0], mine[0]]
        if name in OTHERWISE:
            form, of = OTHERWISE[name]
            call, parts = of(n)
            if n % parts:
                self.leave_out(f"ours, {form}", case, f"{n} tokens are not {parts} equal parts")
            elif other := self.ours(case, exact, call, {"mask": name, "form": form}, parts):
                launches.append(other[0])
                rows.append(other[1])
        found = {name: launch for name in peers if (launch := self.peer(name, case, exact))}
        launches += found.values()
        timings = interleave(self.machine, launches, self._protocol(launches), self.meter, self.seed)
        case.mask.cache.pop("dense", None)  # the largest array of all
        hosts = [t.capture_failed and median(t.bursts) < HIDES_US for t in timings]
        dense, *times = (timing.row(0.0) for timing in timings)
        flop = self.shape.flops / (n * n / 2) * case.mask.pairs
        for row, timing in zip(rows, timings[1:], strict=False):
            row |= timing.row(flop / 1e12)
            row["dense_us"] = dense["us"]
            row["over_share"] = row["us"] / (row["share"] * dense["us"])
        first = rows[0]
        first["peers"] = {p: float(f"{t['us']:.5g}") for p, t in zip(found, times[len(rows) :], strict=True)}
        if first["peers"]:
            first["best"] = min(first["peers"], key=first["peers"].__getitem__)
            first["ratio"] = first["peers"][first["best"]] / first["us"]
        with_host = [
            name for name, host in zip(["ours", *found], [hosts[1], *hosts[1 + len(rows) :]], strict=True) if host
        ]
        if with_host:
            first["not_captured"] = with_host
        self.outcome.rows += map(rounded, rows)
        peers_text = ", ".join(f"{p} {us:g}" for p, us in first["peers"].items())
        return f"{case}: {first['us']:.1f} us, over share x dense {first['over_share']:.3f}; {peers_text or 'no peer'}"


# ---- the table and the picture ----


def _heads(row: dict) -> str:
    return str(row["nheads"]) if row["nheads"] == row["nheads_k"] else f"{row['nheads']}/{row['nheads_k']}"


def table(data: dict, rows: list[dict]) -> list[str]:
    by_form = {(row["form"], *identity(row)[:1], *identity(row)[2:]): row for row in rows}
    mine = [row for row in rows if row["form"] == INTERVALS]
    peers = list(dict.fromkeys(name for row in mine for name in row["peers"]))
    body = []
    for row in sorted(mine, key=lambda r: (r["seqlen_q"], r["headdim"], r["nheads"], r["pass"] == "bwd")):
        form = OTHERWISE.get(row["mask"], ("",))[0]
        other = by_form.get((form, *identity(row)[:1], *identity(row)[2:]))
        body.append([
            row["mask"].replace("_", " "), str(row["seqlen_q"]), _heads(row), str(row["headdim"]), row["pass"],
            f"{row['share']:.3f}", f"{row['us']:.1f}", f"{row['over_share']:.2f}",
            f"{row['us'] / other['us']:.2f}, {form}" if other else "",
            label(row["best"]) if "best" in row else "", f"**{row['ratio']:.2f}**" if "ratio" in row else "",
            *(f"{row['peers'][name] / row['us']:.2f}" if name in row["peers"] else "" for name in peers),
        ])  # fmt: skip
    head = [
        "mask",
        "tokens",
        "heads",
        "D",
        "pass",
        "share",
        "us",
        "over share x dense",
        "over the same without intervals",
    ]
    head += ["best peer", "its time over ours", *(f"{label(name)}, over ours" for name in peers)]
    lines = [
        "share: the tiles of 128 x 128 that some row sees, over those of the causal call without a mask (dense). Over",
        "share x dense: our time over that of the dense call times the share; 1 is a mask that costs nothing. Over the",
        "same without intervals: eight documents as a batch of causal calls, the window as `window_size`. What a peer",
        "makes of the mask before its call is not timed, and its gradients without its forward pass, as ours are.",
        "PyTorch's scaled_dot_product_attention gets a dense mask, of -inf and 0, up to 32768 tokens.",
        "",
        *markdown_table(head, body),
    ]
    hosts = sorted({name for row in mine for name in row.get("not_captured", [])})
    if hosts:
        lines += ["", f"Some short times have the host's work in them, without a CUDA graph: {', '.join(hosts)}."]
    return lines


def picture(data: dict, rows: list[dict]):
    """Over the number of tokens: our time over share x dense, and the best peer's time over ours."""
    mine = [row for row in rows if row["form"] == INTERVALS]
    figure, axes = figure_of(2, 2, 10, 7)
    names = [name for name in MASKS if any(row["mask"] == name for row in mine)]
    dims = sorted({row["headdim"] for row in mine})
    styles = ("-", "--", ":", "-.")
    for column, (way, title) in enumerate((("fwd", "forward"), ("bwd", "backward"))):
        for line, field in enumerate(("over_share", "ratio")):
            axis = axes[line][column]
            for name in names:
                for dim in dims:
                    points = sorted(
                        (row["seqlen_q"], row[field])
                        for row in mine
                        if (row["mask"], row["headdim"], row["pass"]) == (name, dim, way)
                        and row["nheads"] == row["nheads_k"] and field in row
                    )  # fmt: skip
                    if points:
                        look = {"color": LINES[names.index(name) % len(LINES)], "marker": "."}
                        look |= {"linestyle": styles[dims.index(dim) % len(styles)]}
                        axis.plot(*zip(*points, strict=True), **look, label=f"{name.replace('_', ' ')}, D{dim}")
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
            axis.set_title(title)
            if line:
                axis.set_yscale("log")
                plain_log(axis.yaxis)
                axis.set_xlabel("tokens")
        axes[0][column].set_ylim(bottom=0)
    axes[0][0].set_ylabel("our time over share x dense\n(less is better)")
    axes[1][0].set_ylabel("best peer's time over ours\n(more is better)")
    legend(figure, axes)
    set_title(figure, data, "Masks by intervals")
    return figure


register(
    Suite(
        name="masks",
        about="masks by intervals: documents, a shared prompt, windows; our time over that of the call without a mask\n"
        "times the share of its tiles; beside FlexAttention, FlashAttention-4, cuDNN and dense masks",
        options=frozenset(
            {
                "device",
                "framework",
                "dtype",
                "headdim",
                "seqlen",
                "heads",
                "heads_k",
                "peers",
                "row",
                "before",
                "threads",
                "rounds",
                "quick",
                "seed",
                "output",
            }
        ),  # fmt: skip
        run=run,
        table=table,
        pictures={"": picture},
    )
)
