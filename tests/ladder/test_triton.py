"""The Triton rungs without a GPU: their arithmetic in Triton's interpreter, and their machine code for Hopper."""

import importlib.util
import os
import subprocess
import sys

import accuracy
import pytest
from conftest import CUDA, NO_CUDA, ROOT

for module in ("triton", "torch"):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed", allow_module_level=True)
if not (ROOT / "ladder").is_dir():
    pytest.skip("the ladder is not beside the tests", allow_module_level=True)

sys.path.insert(0, str(ROOT))

from ladder.triton_ import gluon_refusal  # noqa: E402

INTERPRETED = """
import sys
import numpy as np, torch
sys.path[:0] = sys.argv[1:]
import accuracy
from ladder.triton_ import flash_attention

SHAPES = (
    dict(seqlen_q=1, seqlen_k=1),
    dict(seqlen_q=77, seqlen_k=203, batch=2, nheads=4, nheads_k=2),
    dict(seqlen_q=130, seqlen_k=35, headdim=128),  # rows that see no key
)
for dtype in ("float16", "float32"):  # the interpreter does not multiply bfloat16
    for causal in (False, True):
        for sizes in SHAPES:
            case = accuracy.Case(dtype=dtype, causal=causal, **sizes)
            (q, k, v, _), exact, plain = accuracy.expected(case)
            given = lambda *arrays: [torch.tensor(x).to(getattr(torch, dtype)) for x in arrays]
            out, lse = flash_attention.forward(*given(q, k, v), causal)
            floor = accuracy.rounding_floor(q, k)
            accuracy.check("lse", lse.numpy(), exact[1], plain[1], "float32", floor=floor)
            accuracy.check("out", out.float().numpy(), exact[0], plain[0], dtype, floor=floor)
            (dout, q, k, v, out, lse, _), exact, plain = accuracy.expected_backward(case)
            found = flash_attention.backward(*given(dout, q, k, v, out), torch.tensor(lse), causal)
            for name, got in zip(("dq", "dk", "dv"), found, strict=True):
                true = getattr(exact, name)
                floor = accuracy.gradient_floor(case, true)
                accuracy.check(name, got.float().numpy(), true, getattr(plain, name), dtype, floor=floor)
            print("right:", case, flush=True)
"""


def test_the_interpreter_computes_attention():
    folders = [str(ROOT), str(ROOT / "tests"), str(ROOT / "python")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", INTERPRETED, *folders], env=environment, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in run.stderr:
        pytest.skip("the interpreter of Triton 3.6 does not work with NumPy 2.4 and newer")
    assert not run.returncode, run.stderr[-3000:]
    assert run.stdout.count("right:") == 12


@pytest.mark.parametrize("headdim", [64, 128])
def test_compiled_for_hopper(headdim, tmp_path):
    """The first configuration of each kernel, with each mask, uses wgmma, fits and does not spill."""
    command = [sys.executable, "-m", "ladder.triton_.compile", "--quick", "--headdim", str(headdim)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not run.returncode, run.stderr[-3000:]
    _, *rows, _ = run.stdout.splitlines()
    seen = set()
    for row in rows:
        kernel, _, spilled, shared, blocks, products, _, configuration = row.split()
        assert int(spilled) == 0 and int(shared) <= 227 << 10 and int(blocks) > 0, row
        assert int(products) or kernel == "_delta", row
        seen.add((kernel, "CAUSAL=True" in configuration))
    kernels = ["_forward", "_backward_keys", "_backward_queries"]
    for kernel in kernels if gluon_refusal() else [*kernels, "gluon_forward"]:
        assert {(kernel, False), (kernel, True)} <= seen, run.stdout


@pytest.mark.skipif(bool(NO_CUDA) or CUDA.framework != "torch", reason=NO_CUDA or "the rung takes PyTorch tensors")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [64, 128])
def test_every_configuration_computes_attention(headdim, causal):
    """Tuning may choose any configuration, but the short calls of test_rungs.py run with only one."""
    from ladder.triton_ import flash_attention

    sizes = {"seqlen_q": 300, "seqlen_k": 417, "nheads": 4, "nheads_k": 2}
    case = accuracy.Case(headdim=headdim, dtype="float16", causal=causal, **sizes)
    (q, k, v, _), exact, plain = accuracy.expected(case)
    (dout, *_, out, lse, _), exact_backward, plain_backward = accuracy.expected_backward(case)
    q, k, v, dout, out = (CUDA.array(x, case.dtype) for x in (q, k, v, dout, out))
    lse = CUDA.array(lse)
    floor = accuracy.rounding_floor(*(CUDA.numpy(x) for x in (q, k)))

    def forward():
        found, _ = flash_attention.forward(q, k, v, causal)
        accuracy.check("out", CUDA.numpy(found), exact[0], plain[0], case.dtype, floor=floor)

    def backward():
        for name, got in zip(
            ("dq", "dk", "dv"), flash_attention.backward(dout, q, k, v, out, lse, causal), strict=True
        ):
            true = getattr(exact_backward, name)
            floor = accuracy.gradient_floor(case, true)
            accuracy.check(name, CUDA.numpy(got), true, getattr(plain_backward, name), case.dtype, floor=floor)

    kernels = {"_forward": forward, "_backward_keys": backward, "_backward_queries": backward}
    for name, check in kernels.items():
        tuner = getattr(flash_attention, name)
        before = tuner.configs
        try:
            for config in before[1:]:
                tuner.configs = [config]
                check()
        finally:
            tuner.configs = before
