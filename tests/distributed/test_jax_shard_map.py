"""Context parallelism of JAX: the tests of shard_map_cases.py, in processes with several devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import jax_platforms

jax = pytest.importorskip("jax")

CASES = Path(__file__).with_name("shard_map_cases.py")
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"  # compiles in half the time
CPU = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}


def run(environment, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, CASES]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900, cwd=CASES.parent.parent
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-20000:] + done.stderr[-5000:]
    return done.stdout


def test_cases_on_the_cpu():
    if not hasattr(jax, "shard_map"):
        pytest.skip("this JAX has no jax.shard_map")
    assert "skipped" not in run(CPU)


def test_cases_on_gpus():
    """Runs the cases for which there are enough GPUs."""
    if "gpu" not in jax_platforms() or len(jax.devices("gpu")) < 2:
        pytest.skip("fewer than two GPUs for the library and JAX")
    run({})
