"""Runs what a changed GPU kernel must pass (CONTRIBUTING.md), on all GPUs of this machine and within a time limit.

    python tests/on_gpus.py [--seconds N] [--output DIR] [--kernel NAME ...] STEP ...

Steps, in the order in which they are named, each with all GPUs:

    native       build/test_flash_attn, a process for each kernel, and the other native tests
    tests        pytest in shards; a shard whose GPU has failed goes on with its next test in a new process
    first        tests/first_calls.py of every sample call
    memcheck     tests/sanitize.py with memcheck
    fuzz         random calls of each --kernel, by default of every GPU kernel
    ledger=X     the speed ledger against X, a commit, a checkout that is built, or a library
    sweep, dispatch     random calls for speed, beside peers and beside the library's other kernels

A step that has not ended at its share of the time is ended, and its processes with it. Steps that can be of any length
(fuzz, sweep, dispatch) share what is left. The output folder has a log for each process; a line for each is printed as
it ends, with the last line of its log."""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = "attention transformer llama integrations bench fuzz distributed experiments ladder".split()
SHARE = {"native": 0.5, "tests": 0.8, "first": 0.6, "memcheck": 0.6, "ledger": 0.5}  # of what is left, at most
OPEN = ("fuzz", "sweep", "dispatch")
ATTEMPTS = 8  # of a shard
GPU_DEAD = 77  # exit status of a shard whose GPU refuses all further work; see shard.py


@dataclass
class Job:
    """A process. again: the exit status after which it is started again."""

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    again: int | None = None
    all_gpus: bool = False


class Machine:
    def __init__(self, output: Path, ends: float):
        self.output, self.ends, self.began = output, ends, time.monotonic()
        self.gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if self.gpus == [""]:
            found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
            self.gpus = [str(i) for i, _ in enumerate(found.stdout.splitlines())]
        self.cores = len(os.sched_getaffinity(0))
        self.failed: list[str] = []
        self.lock = threading.Lock()

    def left(self) -> float:
        return self.ends - time.monotonic()

    def say(self, text: str) -> None:
        with self.lock:
            print(f"[{time.monotonic() - self.began:4.0f} s] {text}", flush=True)

    def run(self, step: str, jobs: list[Job], at_once: int, seconds: float) -> None:
        """Runs jobs, `at_once` on each GPU, and ends what has not ended after so many seconds."""
        ends, waiting = time.monotonic() + seconds, queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        gpus = [None] if jobs and jobs[0].all_gpus else self.gpus
        work = [threading.Thread(target=self._work, args=(step, waiting, gpu, ends)) for gpu in gpus * at_once]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        self.say(f"{step}: done")

    def _work(self, step: str, waiting: queue.SimpleQueue, gpu: str | None, ends: float) -> None:
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            began, log = time.monotonic(), self.output / f"{step}_{job.name}.log"
            for _ in range(ATTEMPTS):
                status = self._one(job, log, gpu, ends)
                if status is None or status != job.again:
                    break
            took = time.monotonic() - began
            if status is None:
                what = "out of time" if log.exists() else "no time is left"
            else:
                what = f"FAILED ({status})" if status else "ok"
                self.failed += [f"{step} {job.name}"] * bool(status)
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            last = next((line for line in lines[::-1] if line.strip()), "")
            self.say(f"{step} {job.name}: {what}, {took:.0f} s: {last[:160]}")

    def _one(self, job: Job, log: Path, gpu: str | None, ends: float) -> int | None:
        """The exit status of a process; None if it did not end in time, or there was no time for it."""
        left = ends - time.monotonic()
        if left < 3:
            return None
        env = os.environ | job.env | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
        with log.open("a") as out:
            process = subprocess.Popen(
                job.command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                return process.wait(left)
            except subprocess.TimeoutExpired:
                return None
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()


def environment(library: Path) -> dict[str, str]:
    """For processes of Python: this tree and its library."""
    path = os.pathsep.join(filter(None, [str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "FLASH_ATTN_LIBRARY": str(library), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def chunks(names: list[str], count: int) -> list[list[str]]:
    return [part for i in range(count) if (part := names[i::count])]


def gpu_kernels() -> list[str]:
    import flash_attn_minimal as fa

    every = [*fa.kernels(), *fa.backward_kernels()]
    return list(dict.fromkeys(kernel["name"] for kernel in every if kernel["device"] == "cuda"))


def jobs_of(step: str, options, machine: Machine, seconds: float) -> tuple[list[Job], int]:
    """The processes of a step, and how many of them a GPU has at a time."""
    library = Path(os.environ.get("FLASH_ATTN_LIBRARY") or options.build / "libflash_attn_minimal.so").resolve()
    env, python = environment(library), sys.executable
    kernels = options.kernel or gpu_kernels()
    each = max(1, machine.cores // len(machine.gpus))
    verb, _, of = step.partition("=")
    if verb == "native":
        env = {"LD_LIBRARY_PATH": str(options.build)}
        main = str(options.build / "test_flash_attn")
        jobs = [Job(name, [main, "--device", "cuda", "--kernel", name], env) for name in kernels]
        others = [p for p in sorted(options.build.glob("test_*")) if os.access(p, os.X_OK) and p.is_file()]
        return jobs + [Job(p.name, [str(p)], env) for p in others if p.name != "test_flash_attn"], min(each, 6)
    if verb == "tests":
        count = len(machine.gpus) * min(max(each // 2, 1), 8)
        paths = options.tests or [str(ROOT / "tests" / name) for name in TESTS]
        pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "shard", *paths]
        env["PYTHONPATH"] += os.pathsep + str(ROOT / "tests")
        env["OMP_NUM_THREADS"] = "2"
        shard = {"TEST_SHARDS": str(count), "TEST_SHARD_FOLDER": str(machine.output)}
        jobs = [Job(str(i), pytest, env | shard | {"TEST_SHARD": str(i)}, GPU_DEAD) for i in range(count)]
        return jobs, count // len(machine.gpus)
    if verb in ("first", "memcheck"):
        sys.path.insert(0, str(ROOT / "tests"))
        import sample_calls

        script, more = ("first_calls.py", []) if verb == "first" else ("sanitize.py", ["--tool", "memcheck"])
        names = [name for name in sample_calls.names("cuda") if not options.kernel or name in options.kernel]
        jobs = []
        for i, part in enumerate(chunks(names, len(machine.gpus))):
            named = [word for name in part for word in ("--name", name)]
            command = [python, str(ROOT / "tests" / script), *more, *named, "--jobs", str(min(each, 12))]
            jobs.append(Job(str(i), [*command, "--json", str(machine.output / f"{verb}_{i}.json")], env))
        return jobs, 1
    lab = [python, "-m", "flash_attn_lab"]
    if verb == "fuzz":
        rounds = max(1, -(-len(kernels) // len(machine.gpus)))
        limit = max(10, int(seconds / rounds) - 12)
        command = [*lab, "fuzz", "--device", "cuda", "--seconds", str(limit), "--cases", "1000000"]
        command += ["--workers", str(min(each, 12)), "--shrink-seconds", "5"]
        jobs = [
            Job(name, [*command, "--kernel", name, "--json", str(machine.output / f"fuzz_{name}.json")], env)
            for name in kernels
        ]
        return jobs, 1
    command = [*lab, "bench", "--output", str(machine.output)]
    if verb == "ledger":
        return [Job("ledger", [*command, "--suite", "ledger", "--against", of], env, all_gpus=True)], 1
    seed = ["--seed", of] if of else []
    command += ["--suite", verb, "--seconds", str(max(10, int(seconds) - 15)), *seed]
    return [Job(verb, command, env, all_gpus=True)], 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="+", help="see above; sweep=N and dispatch=N: of this seed")
    parser.add_argument("--seconds", type=int, default=1800, help="of all steps together; default: 1800")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "on_gpus")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder of the library and native tests")
    parser.add_argument("--kernel", action="append", help="for native, first, memcheck and fuzz")
    parser.add_argument("--resume", action="store_true", help="tests: go on behind those that have begun in --output")
    parser.add_argument("--tests", action="append", help="a file or folder, for tests")
    options = parser.parse_args(argv)
    options.build = options.build.resolve()
    for step in options.step:
        verb, _, of = step.partition("=")
        if verb not in (*SHARE, *OPEN) or bool(of) is not (verb == "ledger") and verb not in ("sweep", "dispatch"):
            parser.error(f"{step!r} is not a step; ledger needs a commit or library: ledger=NAME")
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        for path in options.output.glob("shard_*.txt"):
            path.unlink()
    sys.path.insert(0, str(ROOT / "python"))
    machine = Machine(options.output, time.monotonic() + options.seconds)
    for i, step in enumerate(options.step):
        verb = step.partition("=")[0]
        open_steps = sum(later.partition("=")[0] in OPEN for later in options.step[i:])
        last = i + 1 == len(options.step)
        share = 1.0 if last else 1 / open_steps if verb in OPEN else SHARE[verb]
        seconds = machine.left() * share
        if seconds < 10:
            machine.say(f"{step}: no time is left")
            continue
        jobs, at_once = jobs_of(step, options, machine, seconds)
        machine.run(verb, jobs, at_once, seconds)
    for path in sorted(options.output.glob("shard_*_failed.txt")):
        for line in path.read_text().splitlines():
            if line.startswith(("FAILED", "DEAD")):
                print(line)
                machine.failed.append(line.split()[-2 if line.startswith("FAILED") else -1])
    print("failed: " + ", ".join(dict.fromkeys(machine.failed)) if machine.failed else "nothing failed")
    return bool(machine.failed)


if __name__ == "__main__":
    sys.exit(main())
