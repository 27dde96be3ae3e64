"""Every kernel as the first call of a new process, in every way to make a call: tests/first_calls.py."""

import subprocess
import sys

import pytest
from conftest import CUDA, NO_CUDA, ROOT

pytest.importorskip("ml_dtypes")


def run(*arguments: str) -> None:
    command = [sys.executable, str(ROOT / "tests/first_calls.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(bool(NO_CUDA) or CUDA.framework != "torch", reason=NO_CUDA or "needs PyTorch"),
        ),
    ],
)
@pytest.mark.parametrize("what", [(), ("--repeat", "5")], ids=["first", "again"])
def test_sample_calls(device, what):
    run("--device", device, *what)


@pytest.mark.skipif(bool(NO_CUDA) or CUDA.framework != "torch", reason=NO_CUDA or "needs PyTorch")
def test_many_pieces_of_work_for_each_block():
    run("--repeat", "9", "--load", "--items")
