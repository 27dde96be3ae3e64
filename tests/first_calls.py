"""Makes every sample call as the first call of a process: in its main thread, in a new thread, in PyTorch's backward
thread, on a second stream, and captured in a graph.

    python tests/first_calls.py [--device cuda|cpu] [--scenario NAME] [--name NAME] [--jobs N] [--json FILE]
    python tests/first_calls.py --repeat 1000 [--load] [--items]

Each call has its own process, forked before anything has touched the GPU and killed after a time limit. A call that
hangs or ends the process is a finding, as is a wrong result. --repeat N instead makes every call N times in one
process, and compares the bits if the contract promises equal bits; with --load, while copies and products on a second
stream compete for memory, cache and multiprocessors; with --items, calls of the kernels whose blocks take one piece of
work after another, with at least three pieces for each block. --in-process makes all calls in this process, one after
another, for a memory checker."""

from __future__ import annotations

import argparse
import json
import os
import reprlib
import signal
import sys
import threading
import time
import traceback
from functools import partial

import numpy as np

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
import sample_calls  # noqa: E402

SCENARIOS = {"cpu": ["main", "thread"], "cuda": ["main", "thread", "backward", "stream", "graph"]}
TIME_LIMIT = 120.0


class NumpySide:
    def put(self, x: np.ndarray, dtype: str):
        import ml_dtypes

        return x.astype(getattr(ml_dtypes, dtype) if dtype in ("bfloat16", "float8_e4m3fn") else dtype)

    def get(self, x) -> np.ndarray:
        return np.asarray(x)

    def same(self, x, y) -> bool:
        """Whether two arrays have the same bits."""
        return np.asarray(x).tobytes() == np.asarray(y).tobytes()

    def wait(self) -> None:
        pass


class TorchSide:
    def __init__(self):
        import torch

        self.torch = torch
        torch.use_deterministic_algorithms(True, warn_only=True)  # new memory, workspaces too, is NaN or all ones

    def put(self, x: np.ndarray, dtype: str):
        return self.torch.tensor(x, device="cuda").to(getattr(self.torch, dtype))

    def get(self, x) -> np.ndarray:
        return (x.float() if x.is_floating_point() else x).cpu().numpy()

    def same(self, x, y) -> bool:
        return self.torch.equal(*(a.contiguous().view(self.torch.uint8) for a in (x, y)))

    def wait(self) -> None:
        self.torch.cuda.synchronize()

    def load(self) -> None:
        """Queues half a millisecond of copies and products on a separate stream."""
        torch = self.torch
        if not hasattr(self, "busy"):
            self.busy, self.copied = torch.cuda.Stream(), torch.ones(1 << 26, device="cuda")
            self.factor = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
            self.product = torch.empty_like(self.factor)
            self.wait()
        with torch.cuda.stream(self.busy):
            for _ in range(2):
                self.copied.mul_(1.0)
                torch.mm(self.factor, self.factor, out=self.product)


def in_thread(work) -> None:
    failures = []

    def run():
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def run(sample: sample_calls.Sample, scenario: str, side) -> None:
    on = {name: side.put(*about) for name, about in sample.arrays.items()}
    results: list = []

    def call():
        results.append(sample.call(**on))

    if scenario == "main":
        call()
    elif scenario == "thread":
        in_thread(call)
    elif scenario == "backward":

        class Caller(side.torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                call()
                return gradient

        Caller.apply(side.torch.ones(1, device="cuda", requires_grad=True)).backward()
    elif scenario == "stream":
        side.wait()
        with side.torch.cuda.stream(side.torch.cuda.Stream()):
            call()
    elif scenario == "graph":
        side.wait()
        graph = side.torch.cuda.CUDAGraph()
        with side.torch.cuda.graph(graph):
            call()
        for _ in range(2):
            graph.replay()
    side.wait()
    sample.check([side.get(x) for x in results[0]])


def refused(error: Exception) -> bool:
    """Whether this GPU lacks what the sample's kernel needs."""
    return type(error).__name__ == "Unsupported" and "needs sm_" in str(error)


def forked(work, log: str) -> str:
    """Runs `work` in a forked child. Returns "" if it ends well, else a text about what happened."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            work()
            code = 0
        except BaseException as error:
            if isinstance(error, Exception) and refused(error):
                code = 77
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + TIME_LIMIT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if os.WIFSIGNALED(status):
                return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
            code = os.WEXITSTATUS(status)
            return "" if code == 0 else "refused" if code == 77 else open(log).read().strip().splitlines()[-1]
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"no end after {TIME_LIMIT:.0f} s"


AT_ONCE = 8  # calls that nothing waits for


def repeat(sample, times: int, load: bool, side) -> None:
    """Makes a call many times. sample: a Sample, or a function that makes one. A result without a promise of equal bits
    is checked once in AT_ONCE calls."""
    sample = sample if isinstance(sample, sample_calls.Sample) else sample()
    on = {name: side.put(*about) for name, about in sample.arrays.items()}
    first: list = []

    def call():
        fresh = dict(on)
        for name in ("k_cache", "v_cache"):  # appending changes them
            if name in on:
                fresh[name] = on[name].clone() if hasattr(on[name], "clone") else on[name].copy()
        return sample.call(**fresh)

    for turn in range(0, times, AT_ONCE):
        if load:
            side.load()
        for i, results in enumerate([call() for _ in range(min(AT_ONCE, times - turn))]):
            if first and sample.repeatable:
                same = all(side.same(x, y) for x, y in zip(first, results, strict=True))
                assert same, f"{sample.name}: a repetition after {turn} has other bits"
            elif not i or len(results) != len(first):
                sample.check([side.get(x) for x in results])
                first = first or list(results)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SCENARIOS), default="cuda")
    parser.add_argument("--scenario", action="append")
    parser.add_argument("--name", action="append", help="samples of this name")
    parser.add_argument("--repeat", type=int, default=0)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--items", action="store_true", help="at least three pieces of work for each block")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    if options.load and (options.device != "cuda" or not options.repeat):
        parser.error("--load: with --repeat on a GPU")
    if options.items and (options.device != "cuda" or not options.repeat):
        parser.error("--items: with --repeat on a GPU")
    side = TorchSide() if options.device == "cuda" else NumpySide()
    of_device = sample_calls.cuda_samples if options.device == "cuda" else sample_calls.cpu_samples
    samples = (sample_calls.cuda_items if options.items else of_device)(options.name)
    scenarios = options.scenario or SCENARIOS[options.device]
    if options.in_process or options.repeat:
        scenarios = [("load" if options.load else "repeat") if options.repeat else "main"]
    if options.items:
        scenarios = [f"items, {scenarios[0]}"]
    work = [(sample, scenario) for scenario in scenarios for sample in samples]
    rows: list[dict] = []

    def finish(sample, scenario, found):
        name = sample.args[0] if isinstance(sample, partial) else sample.name
        about = {"arguments": reprlib.repr(sample.args[1:])} if isinstance(sample, partial) else {}
        rows.append({"call": name, "scenario": scenario, "outcome": found or "ok", **about})
        if found:
            print(f"{name:<28} {scenario:<9} {found}", flush=True)

    if options.in_process:
        for sample, scenario in work:
            found = ""
            try:
                run(sample, scenario, side)
            except Exception as error:
                found = "refused" if refused(error) else f"{type(error).__name__}: {error}"
            finish(sample, scenario, found)
    else:
        lock, left = threading.Lock(), iter(work)

        def worker(number: int) -> None:
            while True:
                with lock:
                    item = next(left, None)
                if item is None:
                    return
                sample, scenario = item
                one = (
                    partial(repeat, sample, options.repeat, options.load)
                    if options.repeat
                    else partial(run, sample, scenario)
                )
                found = forked(lambda one=one: one(side), f"/tmp/first_calls.{os.getpid()}.{number}")
                with lock:
                    finish(sample, scenario, found)

        threads = [threading.Thread(target=worker, args=(i,)) for i in range(options.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    bad = [row for row in rows if row["outcome"] not in ("ok", "refused")]
    if options.json:
        with open(options.json, "w") as file:
            about = {"device": options.device, "repeat": options.repeat, "load": options.load}
            json.dump({**about, "items": options.items, "rows": rows}, file, indent=1)
    print(f"{len(rows)} calls, {sum(row['outcome'] == 'ok' for row in rows)} right, {len(bad)} findings")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
