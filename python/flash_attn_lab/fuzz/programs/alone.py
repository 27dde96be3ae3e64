"""A process that makes single calls: each on new memory and on the default stream, with no other call at the same
time."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from .answers import Answer, alone
from .places import Places
from .steps import prepare

_LENGTH = struct.Struct("=Q")


class Alone:
    """Starts such a process, and talks to it."""

    def __init__(self, device: str, framework: str | None):
        about = json.dumps({"device": device, "framework": framework})
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, about], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answers(self, calls: Sequence[tuple]) -> list[Answer]:
        """The answers of calls, given as (step, variables, bytes of its arrays, bytes of its cache)."""
        _send(self.process.stdin, calls)
        return _receive(self.process.stdout)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()


def _send(stream: Any, message: Any) -> None:
    text = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(text)))
    stream.write(text)
    stream.flush()


def _receive(stream: Any) -> Any:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("the process for calls alone has ended")
    return pickle.loads(stream.read(_LENGTH.unpack(head)[0]))


def main() -> int:
    about = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    place = Places(about["device"], about["framework"])[0]
    while True:
        try:
            calls = _receive(sys.stdin.buffer)
        except EOFError:
            return 0
        found = []
        for step, env, before, cache_before in calls:
            found.append(alone(prepare(step, env, before), cache_before, place))
        _send(out, found)


if __name__ == "__main__":
    sys.exit(main())
