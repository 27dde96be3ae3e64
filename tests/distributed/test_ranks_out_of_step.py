"""GPUs that come late, and inputs that change right after a call: transfers wait for the data that they read, and
nothing is read too late.

Messages have many sizes, so that both kernels and copy engines transfer them. Each piece of heads has its own stream.
"""

import numpy as np
import pytest
from conftest import CUDA, CUDA_DEVICES, NO_CUDA, torch
from ranks import LEAST, new_groups, watchdog

import flash_attn_minimal as fa
from flash_attn_minimal import distributed as fad

pytestmark = pytest.mark.skipif(bool(NO_CUDA) or torch is None, reason=NO_CUDA or "needs PyTorch")

TOKENS, DIM = 12345, 128
CALLS, LATEST = 20, 3_000_000  # cycles that a GPU is held up before a call, at most: 2 ms


def arrays(seed: int, heads: int, heads_k: int, device: str) -> list:
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(1, TOKENS, n, DIM) for n in (heads, heads_k, heads_k, heads)]
    return [torch.randn(x, generator=generator, device=device, dtype=torch.bfloat16) for x in shapes]


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
@pytest.mark.parametrize("size", sorted({max(size, LEAST) for size in (2, 3)}))
@pytest.mark.parametrize("heads", [(16, 8), (12, 1)], ids=["16_8", "12_1"])  # with 1, all pieces share the keys
@pytest.mark.parametrize("pieces", [0, 3])
def test_ranks_out_of_step(pieces, heads, size, mode):
    groups = new_groups(size, CUDA, timeout=60)
    options = {"causal": True, "layout": "zigzag", "mode": mode, "groups": pieces, "seqlen_q": TOKENS}

    def rank(group: fad.Group) -> list[str]:
        device = f"cuda:{group.rank % CUDA_DEVICES}"
        torch.cuda.set_device(device)
        rng, wrong = np.random.default_rng(group.rank), []
        with torch.cuda.stream(torch.cuda.Stream(device)):
            whole = [arrays(seed, *heads, device) for seed in (1, 2)]
            mine = [[fad.shard(x, "zigzag", group.rank, size) for x in one] for one in whole]

            def call(q, k, v, dout) -> list:
                out, lse = fad.forward(group, q, k, v, return_lse=True, **options)
                return [out, lse, *fad.backward(group, dout, q, k, v, out, lse, deterministic=True, **options)]

            right = []
            for one, part in zip(whole, mine, strict=True):
                right.append(call(*part))
                torch.cuda.synchronize(device)
                exact = fad.shard(fa.flash_attn_func(*one[:3], causal=True), "zigzag", group.rank, size)
                torch.testing.assert_close(right[-1][0], exact, atol=2e-2, rtol=2e-2)
            del whole
            given, same = [torch.empty_like(x) for x in mine[0]], []
            for i in range(CALLS):
                torch.cuda._sleep(int(rng.integers(LATEST)))
                for x, y in zip(given, mine[i % 2], strict=True):
                    x.copy_(y)
                found = call(*given)
                for x in given:  # when the stream arrives here, other ranks must have read them
                    x.fill_(float("nan"))
                same.append(torch.stack([(x == y).all() for x, y in zip(found, right[i % 2], strict=True)]))
            for i, each in enumerate(torch.stack(same).tolist()):
                names = ("out", "lse", "dq", "dk", "dv")
                wrong += [f"call {i}: {name}" for name, equal in zip(names, each, strict=True) if not equal]
        return wrong

    with watchdog(120, groups):
        found = fad.run(groups, rank)
        fad.run(groups, lambda group: group.close())
    assert found == [[]] * size
