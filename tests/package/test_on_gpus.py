"""tests/on_gpus.py and its plugin: shards that fail, hang, or lose their GPU. Any program can stand for nvidia-smi."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = """
    import os, time
    from pathlib import Path

    import pytest

    @pytest.mark.parametrize("i", range(40))
    def test_gpu(i):
        assert i != 7
        if i == 11:
            os._exit(77)  # as the plugin does where the GPU is dead

    def test_visible():
        assert os.environ["CUDA_VISIBLE_DEVICES"] in ("0", "1")

    def test_hangs():
        time.sleep(HANGS)
"""


def on_gpus(tmp_path, *words):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text("#!/bin/sh\necho GPU 0\necho GPU 1\n")
    tool.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env["PATH"] = f"{tool.parent}:{env['PATH']}"
    command = [sys.executable, str(ROOT / "tests" / "on_gpus.py"), "--output", str(tmp_path / "out"), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("hangs", [False, True])
def test_shards(tmp_path, hangs):
    file = tmp_path / "test_cases.py"
    file.write_text(textwrap.dedent(CASES).replace("HANGS", "1000" if hangs else "0"))
    done = on_gpus(tmp_path, "--seconds", "25" if hangs else "100", "--tests", str(file), "tests")
    assert done.returncode == 1, done.stdout + done.stderr
    begun = [x for path in (tmp_path / "out").glob("shard_*_begun.txt") for x in path.read_text().splitlines()]
    assert len(begun) == len(set(begun)) == 42  # each test once, those behind the dead GPU too
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert len(failures) == 1 and "test_gpu[7] (call)" in failures[0]
    assert ("out of time" in done.stdout) is hangs
    assert "test_gpu[7]" in done.stdout.splitlines()[-1]
    again = on_gpus(tmp_path, "--seconds", "25", "--tests", str(file), "--resume", "tests")
    assert again.returncode == 1 and "passed" not in again.stdout  # nothing is left to do, and what failed has failed


def test_what_it_refuses(tmp_path):
    for words, said in ((["tset"], "'tset' is not a step"), (["ledger"], "ledger=NAME"), (["tests=3"], "'tests=3'")):
        done = on_gpus(tmp_path, *words)
        assert done.returncode == 2 and said in done.stderr
