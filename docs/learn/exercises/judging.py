"""Runs the judge of an exercise on what the reader wrote, or with --solution on ours, and says what came of it. With
--hint 1, 2 or 3 it gives a hint instead."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import inspect
import linecache
import os
import re
import select
import signal
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np


class Wrong(AssertionError):
    """What the judge found. The text says which call, and what was expected."""


class Unavailable(Exception):
    """The exercise cannot be judged here. The text says what is missing."""


def require(condition: bool, text: str):
    if not condition:
        raise Wrong(text)


def close(what: str, got, want, tolerance: float = 1e-10):
    """`got` has the shape of `want`, infinities in the same places, and is elsewhere no further away than tolerance."""
    got, want = np.asarray(got), np.asarray(want)
    require(got.shape == want.shape, f"{what}: the shape is {got.shape}, expected {want.shape}")
    require(not np.isnan(got).any(), f"{what}: {int(np.isnan(got).sum())} of {got.size} numbers are NaN")
    infinite = np.isinf(want)
    places = infinite != np.isinf(got)
    places |= infinite & (got != want)
    places |= ~infinite & (np.abs(np.where(infinite, 0, got) - np.where(infinite, 0, want)) > tolerance)
    if places.any():
        at = tuple(int(i) for i in np.argwhere(places)[0]) if want.ndim else ()
        count = f"{int(places.sum())} of {want.size} are wrong"
        raise Wrong(f"{what}: {count}, the first at {at}: got {got[at]:.6g}, expected {want[at]:.6g}")


def load(path: Path):
    """The module of a file, whatever the file is called."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parts(exercise: dict, path: Path, solution: bool = False) -> dict[str, object]:
    """The functions that the judge of an exercise takes, or its kernel; the reader's, or ours."""
    ours = path.parent.parent / "solutions"
    if "KERNEL" in exercise:
        from kernels import CudaKernel, Kernel

        file = exercise["KERNEL"]
        kind = CudaKernel if file.endswith(".cu") else Kernel
        return {"kernel": kind(path.parent / file, (ours / file).read_text(encoding="utf-8") if solution else None)}
    found = vars(load(ours / path.name)) if solution else exercise
    return {name: found[name] for name in exercise["TO_WRITE"]}


def verdict(judge: Callable, written: dict[str, object]) -> str:
    """What the judge says of the parts that an exercise asks for; "passed" if nothing is wrong. A kernel in CUDA that
    passes on the CPU, where races show, is judged again on the GPU, if there is one; so is one that the stand-in for
    CUDA lacks a function for."""
    said = _verdict(judge, written)
    kernel = written.get("kernel")
    further = said == "passed" or said.startswith("wrong: it does not compile")
    there = kernel.on_gpu() if further and hasattr(kernel, "on_gpu") else None
    if there is None:
        return said
    again = _verdict(judge, {**written, "kernel": there})
    kernel.said = there.said or kernel.said
    return said if again.startswith("skipped: ") else again


def _verdict(judge: Callable, written: dict[str, object]) -> str:
    returned: dict[str, object] = {}  # by the last call of each

    def watched(name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*arguments, **options):
            returned[name] = function(*arguments, **options)
            return returned[name]

        return call

    try:
        judge(**{name: watched(name, part) if inspect.isroutine(part) else part for name, part in written.items()})
    except NotImplementedError as error:
        return f"not written yet: {error}"
    except Unavailable as error:
        return f"skipped: {error}"
    except Wrong as error:
        return f"wrong: {error}{_idea(judge, str(error))}"
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        codes = [getattr(function, "__code__", None) for function in written.values()]
        first = next((at for at, (code, _) in enumerate(frames) if code in codes), None)
        if first is not None:  # it was raised by a function of the reader's, or by what that called
            file = frames[first][0].co_filename
            code, line = [frame for frame in frames[first:] if frame[0].co_filename == file][-1]
            return f"wrong: {code.co_name} raised {what}\n    line {line}: {linecache.getline(file, line).strip()}"
        if not returned:
            raise
        said = "; ".join(f"{name} returned {_short(value)}" for name, value in returned.items())
        return f"wrong: {said}, from which the judge cannot go on ({what})"
    return "passed"


@contextlib.contextmanager
def at_most(seconds: float = 60):
    """Raises TimeoutError in the line that is at work when the time is over, where there are timers."""

    def over(*_):
        raise TimeoutError(f"no answer within {seconds:g} s: a loop that does not end?")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def hints(name: str) -> tuple[list[str], dict[str, str]]:
    """Of an exercise, from hints.md: its three hints, and ideas by the words of the findings that point to them."""
    text = Path(__file__).with_name("hints.md").read_text(encoding="utf-8")
    sections = {part.split("\n", 1)[0]: part for part in text.split("\n## ")[1:]}
    shared = sections["Every kernel"].partition("\n")[2]
    kernel = any(Path(__file__).with_name(name + kind).exists() for kind in (".c", ".cu"))
    own = re.split(r"\n(?=[123]\. |\* `)", sections[name] + shared * kernel)
    lines = [" ".join(line.split()) for line in own]
    steps = [line[3:] for line in lines if line[0] in "123" and line[1:3] == ". "]
    return steps, {line.split("`")[1]: line.split("` ", 1)[1] for line in lines if line.startswith("* `")}


def _idea(judge: Callable, found: str) -> str:
    """The idea that is probably missing: that of the first words of hints.md that stand in what the judge found."""
    ideas = hints(Path(judge.__globals__["__file__"]).stem)[1]
    idea = next((idea for words, idea in ideas.items() if words in found), None)
    return f"\n    idea: {idea}" if idea else ""


def _short(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if isinstance(value, tuple) and value:
        return f"({', '.join(map(_short, value))})"
    return "a generator" if isinstance(value, types.GeneratorType) else repr(value)[:60]


def apart(run: Callable[[], str], seconds: float = 240) -> str:
    """The text that `run` returns, from a process that may crash or never end: compiled code may do both."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler waits for compiled code to return
        text = "wrong: the judge itself failed"
        try:
            text = run()
        except BaseException as error:
            text += f": {error!r}"
        finally:
            ctypes.CDLL(None).fflush(None)  # what compiled code has printed
            os.write(into, text.encode(errors="replace")[:60000])  # a pipe takes that much at once
            os._exit(0)
    os.close(into)
    ready = []
    try:
        ready = select.select([out], [], [], seconds)[0]
    finally:  # also after Ctrl-C
        if not ready:
            os.kill(child, signal.SIGKILL)
        said = os.read(out, 65536).decode(errors="replace") if ready else ""
        status = os.waitpid(child, 0)[1]
        os.close(out)
    if not ready:
        return f"wrong: no answer within {seconds:g} s: a loop that does not end, or threads that wait for each other"
    if os.WIFSIGNALED(status) and not said:
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"wrong: the kernel ended the process by {name}: it reads or writes far outside of its arrays"
    return said or f"wrong: the kernel ended the process with the status {os.waitstatus_to_exitcode(status)}"


def main(names: dict):
    """The end of every exercise file: main(globals())."""
    path = Path(names["__file__"]).resolve()
    words = sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):  # a terminal may not have every character of the reader's
        stream.reconfigure(errors="backslashreplace")
    if len(words) == 2 and words[0] == "--hint" and words[1] in ("1", "2", "3"):
        print(f"{path.stem}, hint {words[1]}: {hints(path.stem)[0][int(words[1]) - 1]}")
        return
    if words not in ([], ["--solution"]):
        sys.exit(f"usage: python {path.name} [--solution | --hint 1, 2 or 3]")

    def run() -> str:
        said = verdict(names["judge"], written)
        more = getattr(written.get("kernel"), "said", None)
        return f"{said}\n    {more}" if said == "passed" and more else said

    try:
        written = parts(names, path, bool(words))
        if "KERNEL" in names:
            said = apart(run)
        else:
            with at_most():
                said = run()
    except KeyboardInterrupt as error:
        at = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        print(f"{path.stem}: stopped" + (f" at line {at[-1].lineno}: {at[-1].line}" if at else ""))
        sys.exit(130)
    print(f"{path.stem}: {said}")
    sys.exit(not said.startswith("passed"))
