"""The campaign: worker processes that run one case at a time under a watchdog.

A worker that takes too long for a case is killed. A worker that dies, by a signal or a sticky CUDA error, is replaced.
Both are findings about the case that the worker ran, and the campaign goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flash_attn_minimal._commands.command import (
    Parser,
    UsageError,
    any_seed,
    check_file,
    did_you_mean,
    integer,
    one_of,
    real,
)
from flash_attn_minimal._commands.report import cores
from flash_attn_minimal._core.library import load
from flash_attn_minimal.attention import query
from flash_attn_minimal.errors import FlashAttnError

from .. import PROGRAM
from ..children import python_path
from ..progress import Progress, Silent
from . import readers, report
from .arrays import without_ml_dtypes
from .case import functions
from .function import CRASH, HANG, STICKY
from .shrink import shrink

FIRST_SECONDS = 120  # limit for a worker's start: imports, a CUDA context, the first launch


class Worker:
    """One process. `order` gives it a case, `poll` returns the outcome once there is one."""

    def __init__(self, about: dict[str, Any], seconds: float):
        self.about, self.seconds = about, seconds
        self.errors = tempfile.TemporaryFile()
        env = {"FLASH_ATTN_NUM_THREADS": "2"} | os.environ | {"PYTHONPATH": python_path()}
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            env.setdefault(name, "1")
        env = {k: v for k, v in env.items() if not (k.startswith("FLASH_ATTN_") and k.endswith("KERNEL"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", about.get("worker", f"{__package__}.worker"), json.dumps(about)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=env, start_new_session=True,
        )  # fmt: skip
        os.set_blocking(self.process.stdout.fileno(), False)
        self.ready, self.number, self.spec, self._text = False, None, None, b""
        self.since = time.monotonic()
        self.deadline = self.since + FIRST_SECONDS

    def order(self, number: int | None, spec: dict[str, Any] | None = None) -> None:
        self.number, self.spec = number, spec
        self.since = time.monotonic()
        self.deadline = self.since + (self.seconds if self.ready else FIRST_SECONDS)
        line = {"number": number} if spec is None else {"spec": spec}
        try:
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # poll() finds that the process has ended

    def poll(self) -> dict[str, Any] | None:
        """The outcome of the case, or None while it runs."""
        ended = False
        try:
            while True:
                part = self.process.stdout.read(1 << 16)
                if part is None:
                    break
                if not part:
                    ended = True
                    break
                self._text += part
        except BlockingIOError:
            pass
        found = None
        while b"\n" in self._text:
            line, self._text = self._text.split(b"\n", 1)
            message = json.loads(line)
            if "ready" in message:
                self.ready = True
                self.deadline = time.monotonic() + 2 * self.seconds  # the first launch loads the kernels
            elif "spec" in message:
                self.spec = message["spec"]
            else:
                found = message
        if found:
            return found
        if ended:
            return self._died()
        if time.monotonic() > self.deadline:
            self.kill()
            return self._lost(HANG, f"took more than {time.monotonic() - self.since:.1f} s\n{self._said()}")
        return None

    def _died(self) -> dict[str, Any]:
        code = self.process.wait()
        how = f"exit status {code}"
        if code < 0:
            how = f"signal {signal.Signals(-code).name}"
        return self._lost(CRASH, f"the process ended: {how}\n{self._said()}")

    def _said(self) -> str:
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(size - 1500, 0))
        return self.errors.read().decode(errors="replace").strip()

    def _lost(self, kind: str, message: str) -> dict[str, Any]:
        spec = self.spec or {}
        about = {"function": spec.get("function", ""), "kernel": spec.get("kernel") or "", "lost": True}
        return {"kind": kind, "message": message, "dtype": spec.get("dtype", "float32"), "seconds": 0.0, **about}

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        if self.alive:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                pass  # the driver still waits for a kernel of that process; nothing can be done about it here

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            try:
                stream.close()
            except OSError:
                pass


def outcomes(about: dict[str, Any], numbers, workers: int, seconds: float, until: float) -> Iterator[tuple]:
    """Yields (number, spec, message) of every case, in the order in which cases end."""
    left = deque(numbers)
    selector = selectors.DefaultSelector()
    pool: list[Worker] = []

    def start():
        worker = Worker(about, seconds)
        selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        pool.append(worker)
        worker.order(left.popleft())

    def stop(worker):
        selector.unregister(worker.process.stdout)
        pool.remove(worker)
        worker.close()

    broken_starts = 0
    try:
        for _ in range(min(workers, len(left))):
            start()
        while pool:
            selector.select(timeout=0.2)
            for worker in list(pool):
                message = worker.poll()
                if message is None:
                    continue
                if not worker.ready and message.get("lost"):  # it died before its first case
                    broken_starts += 1
                    if broken_starts > 2 + workers:
                        raise FlashAttnError(f"workers do not start: {message['message']}")
                yield worker.number, worker.spec, message
                again = left and time.monotonic() < until
                if message.get("lost") or message["kind"] == STICKY or not worker.alive:
                    stop(worker)
                    if again:
                        start()
                elif again:
                    worker.order(left.popleft())
                else:
                    stop(worker)
    finally:
        for worker in list(pool):
            stop(worker)
        selector.close()


def gather(result: report.Report, found: Iterator[tuple], progress: Any = None) -> bool:
    """Adds the outcomes to a report, and shows them. False if the user interrupts: then the report has those so far."""
    try:
        with progress or Silent() as bar:
            for number, spec, message in found:
                finding = result.add(number, spec, message)
                if finding:
                    bar.say(result.headline(finding))
                bar.step(result.speed())
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        result.finish()
    return not result.interrupted


class Shrinker:
    """Makes findings smaller. It runs specs in its own watched process, and sees whether they fail in the same way."""

    def __init__(self, about: dict[str, Any], seconds: float, until: float):
        self.about, self.seconds, self.until, self.worker = about, seconds, until, None

    def outcome(self, spec: dict[str, Any]) -> dict[str, Any]:
        if self.worker is None or not self.worker.alive:
            self.close()
            self.worker = Worker(self.about, self.seconds)
        self.worker.order(None, spec)
        while True:
            message = self.worker.poll()
            if message is not None:
                if message.get("lost") or message["kind"] == STICKY:
                    self.close()
                return message
            time.sleep(0.002)

    def shrunk(self, finding: dict[str, Any], tries: int) -> dict[str, Any]:
        """The finding with a smaller spec. Its field `alone` tells whether the case fails when it runs by itself."""
        spec, kind = finding["spec"], finding["kind"]
        if time.monotonic() > self.until:
            return finding
        again = self.outcome(spec)
        if again["kind"] != kind:
            return finding | {"alone": False}
        last = again

        def fails(smaller):
            nonlocal last
            if time.monotonic() > self.until:
                return False
            message = self.outcome(smaller)
            if message["kind"] != kind:
                return False
            last = message
            return True

        smaller = shrink(spec, fails, tries)
        return finding | {"alone": True, "shrunk": smaller, "message": last["message"]}

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def campaign(
    device: str = "cpu", seed: int = 0, cases: int = 2000, first: int = 0, seconds: float = float("inf"),
    kernel: str | None = None, function: str | None = None, framework: str | None = None, workers: int | None = None,
    case_seconds: float = 30.0, shrink_seconds: float = 120.0, shrink_tries: int = 40, progress=None, **more,
) -> report.Report:  # fmt: skip
    """Runs cases first .. first + cases - 1 of a seed, and returns the report. `more` goes to the workers."""
    about = {"device": device, "seed": seed, "kernel": kernel, "function": function, "framework": framework, **more}
    workers = workers or cores()
    result = report.Report(about)
    until = time.monotonic() + seconds
    found = outcomes(about, range(first, first + cases), workers, case_seconds, until)
    if gather(result, found, progress) and shrink_seconds > 0 and result.findings:
        shrinker = Shrinker(about, case_seconds, time.monotonic() + shrink_seconds)
        try:
            for i, finding in enumerate(result.distinct()):
                result.replace(finding, shrinker.shrunk(finding, shrink_tries if i < 20 else 0))
        except KeyboardInterrupt:  # the findings are reported as they are
            result.interrupted = True
        finally:
            shrinker.close()
    return result


def check_names(options, known: dict[str, Any]) -> None:
    """Refuses names for which no case could be drawn, before any process starts. known: the functions by name."""
    if options.device == "cuda" and not load().fa_cuda_device_count():
        raise UsageError(f"--device cuda: this library sees no CUDA device ({load().fa_build_info().decode()})")
    if options.device == "cpu":  # or every call of the workers would be a finding
        x = np.zeros((1, 1, 1, 1), np.float32)
        if (error := query(x, x, x).error).startswith("FLASH_ATTN_NUM_THREADS="):
            raise UsageError(error)
    if options.function and options.function not in known:
        hint = did_you_mean(options.function, known)
        raise UsageError(f"--function {options.function!r} is not one of {', '.join(map(repr, known))}{hint}")
    missing = without_ml_dtypes(options.device, options.framework)
    needed = missing.intersection(known[options.function].NEEDS) if options.function else ()
    if needed:
        raise UsageError(f"--function {options.function} needs arrays of {', '.join(needed)}: pip install ml_dtypes")
    if options.kernel:
        wanted = [known[options.function]] if options.function else known.values()
        kernels = dict.fromkeys(name for function in wanted for name in function.kernels(options))
        if options.kernel not in kernels:
            if not kernels:
                raise UsageError(f"--kernel {options.kernel!r}: {options.function} has no kernels to choose from")
            hint = did_you_mean(options.kernel, kernels)
            raise UsageError(f"--kernel {options.kernel!r} is not one of {', '.join(kernels)}{hint}")
    if missing:
        names = " and ".join(sorted(missing))
        print(f"no calls with {names}, which NumPy has with ml_dtypes (pip install ml_dtypes)", flush=True)


def parsed(argv: list[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = Parser(
        "fuzz", PROGRAM, description="Random calls of every function, right and wrong ones, against float64."
    )
    add = parser.add_argument
    add("--device", **one_of(("cpu", "cuda")), help="default: cuda where there is one, else cpu")
    add(
        "--framework",
        **one_of(("torch", "cupy", "numpy")),
        help="whose arrays (default: PyTorch's or CuPy's on cuda, NumPy's)",
    )
    add("--cases", metavar="N", type=integer(0), default=2000, help="how many (default 2000)")
    add("--first", metavar="N", type=integer(0), default=0, help="the number of the first one")
    add("--case", metavar="N", type=integer(0), help="only this one")
    add("--seconds", metavar="S", type=real(), default=float("inf"), help="stop after so many")
    add("--seed", metavar="N", type=any_seed, default=0)
    add("--kernel", metavar="NAME", help="only this one, of the functions that have it")
    add("--function", metavar="NAME", help="only this one: " + ", ".join(functions()))
    add("--workers", metavar="N", type=integer(), help="processes (default: one per core)")
    add(
        "--case-seconds",
        metavar="S",
        type=real(above=True),
        default=30.0,
        help="when a case, or a program, counts as hanging",
    )
    add(
        "--shrink-seconds",
        metavar="S",
        type=real(),
        default=120.0,
        help="for making findings smaller; 0: leave them",
    )
    add(
        "--shrink-tries",
        metavar="N",
        type=integer(),
        help="smaller cases to try for a finding (default 40; programs 200)",
    )
    add("--readers", action="store_true", help="also damaged files, for the readers of files")
    add("--programs", metavar="N", type=integer(0), help="so many programs of 5 to 50 calls in place of single calls")
    add("--ranks", action="store_true", help="with --programs: calls over ranks")
    add("--run-only", action="store_true", help="with --programs: answers are not compared, for sanitizers")
    add("--devices", metavar="N,...", help="with --device cuda: the GPUs to use, such as 0,1 (default: all)")
    add("--json", metavar="FILE", type=Path, help="write a report there")
    options = parser.parse_args(argv)
    if options.devices:  # set before the driver is first used
        os.environ["CUDA_VISIBLE_DEVICES"] = options.devices
    options.device = options.device or ("cuda" if load().fa_cuda_device_count() else "cpu")
    for name in ("ranks", "run_only"):
        if getattr(options, name) and options.programs is None:
            parser.error(f"--{name.replace('_', '-')} is for --programs, which is not given")
    check_file("--json", options.json)
    return options


def run(options: argparse.Namespace, argv: list[str]) -> int:
    """Runs the campaign of single calls and prints its report. Returns the exit status."""
    check_names(options, functions())
    one = options.case is not None
    cases, first = (1, options.case) if one else (options.cases, options.first)
    result = campaign(
        device=options.device, seed=options.seed, cases=cases, first=first, seconds=options.seconds,
        kernel=options.kernel, function=options.function, framework=options.framework,
        workers=1 if one else options.workers, case_seconds=options.case_seconds,
        shrink_seconds=options.shrink_seconds, shrink_tries=options.shrink_tries or 40,
        progress=Progress(cases, every=5),
    )  # fmt: skip
    result.command = " ".join([PROGRAM, "fuzz", *argv])
    if options.readers and not result.interrupted:
        try:
            result.add_readers(readers.run(options.cases, options.seed))
        except KeyboardInterrupt:
            result.interrupted = True
    print(result.text())
    if options.json:
        options.json.write_text(json.dumps(result.json(), indent=1) + "\n")
    return result.status
