"""python -m flash_attn_minimal: help without imports, info, verify, exit statuses."""

import os
import subprocess
import sys

import pytest
from conftest import NO_CUDA

import flash_attn_minimal as fa
from flash_attn_minimal import cli, verify


def run(*arguments, **environment):
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-m", "flash_attn_minimal", *arguments], capture_output=True, text=True, env=env
    )


def test_help_lists_the_commands_without_importing_them():
    said = run("--help", FLASH_ATTN_LIBRARY="/nowhere")
    assert said.returncode == 0 and not said.stderr
    for command in ("info", "verify", "bench", "experiment", "context-parallel", "generate"):
        assert f"\n  {command} " in said.stdout


@pytest.mark.parametrize("arguments", [(), ("nonesuch",), ("--nonesuch",)])
def test_wrong_usage(arguments):
    said = run(*arguments)
    assert said.returncode == 2 and not said.stdout and "usage: python -m flash_attn_minimal COMMAND" in said.stderr
    assert not arguments or f"unknown command {arguments[0]!r}" in said.stderr


@pytest.mark.parametrize("command", ["info", "verify"])
def test_help_of_a_command(command):
    said = run(command, "--help")
    assert said.returncode == 0 and f"usage: python -m flash_attn_minimal {command}" in said.stdout
    assert run(command, "--nonesuch").returncode == 2


def test_info():
    said = run("info")
    assert said.returncode == 0, said.stderr
    assert fa.__version__ in said.stdout and str(fa._library.path()) in said.stdout
    for kernel in fa.kernels():
        assert kernel["name"] in said.stdout
    assert "(4, 4096x4096, 32/8, 128)" in said.stdout
    assert NO_CUDA == "" or "none found" in said.stdout or "GPU" in said.stdout
    lacks = not any(kernel["name"].startswith("mma_") for kernel in fa.kernels()) and "naive" in said.stdout.split()
    assert ("--all-kernels builds them" in said.stdout) == lacks


def test_missing_library():
    said = run("info", FLASH_ATTN_LIBRARY="/nowhere.so")
    assert (
        said.returncode == 1
        and "FLASH_ATTN_LIBRARY=/nowhere.so: no such file" in said.stderr
        and "Traceback" not in said.stderr
    )


def test_verify_quick():
    said = run("verify", "--quick", "--device", "cpu")
    assert said.returncode == 0, said.stdout + said.stderr
    assert "0 failed" in said.stdout and said.stdout.count("\nok") >= 2
    assert said.stderr.count("/4] ") == 4, "one line of progress per case when no one watches"


def test_verify_reports_failure(monkeypatch, capsys):
    """A wrong answer is a FAIL line and exit status 1."""

    def wrong(q, k, v, **options):
        out, lse = fa.flash_attn_func(q, k, v, **options)
        out[0, -1, 0, 0] += 0.1
        return out, lse

    monkeypatch.setattr(verify, "flash_attn_func", wrong)
    monkeypatch.setattr(verify, "_QUICK", verify._QUICK[:1])
    assert cli.main(["verify", "--quick", "--device", "cpu"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_verify_cuda_without_cuda():
    if not NO_CUDA:
        pytest.skip("there is a CUDA device")
    said = run("verify", "--quick", "--device", "cuda")
    assert said.returncode == 1 and "--device cuda" in said.stderr and "Traceback" not in said.stderr
