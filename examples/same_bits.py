"""A rollout token by token and a training step with the same bits: no difference between the two policies.

    python examples/same_bits.py

On the CPU; docs/contract.md says which calls have the same bits."""

import numpy as np

from flash_attn_minimal import flash_attn_func, flash_attn_with_kvcache

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 150, heads, 64), dtype=np.float32) for heads in (8, 2, 2))


def rollout(**options):
    k_cache, v_cache = np.zeros((1, 200, 2, 64), np.float32), np.zeros((1, 200, 2, 64), np.float32)
    outs = []
    for step in [slice(0, 100), *(slice(t, t + 1) for t in range(100, 150))]:  # a prompt, then tokens
        options |= {"cache_seqlens": step.start, "causal": True}
        outs.append(flash_attn_with_kvcache(q[:, step], k_cache, v_cache, k[:, step], v[:, step], **options))
    return np.concatenate(outs, axis=1)


padded = [np.pad(x, ((0, 0), (0, -150 % 64), (0, 0), (0, 0))) for x in (q, k, v)]  # to a multiple of 64 rows
training = flash_attn_func(padded[0], padded[1], padded[2], causal=True)[:, :150]
print("rows with other bits by default:     ", int((rollout() != training).any((0, 2, 3)).sum()))
different = int((rollout(batch_invariant=True) != training).any((0, 2, 3)).sum())
print("rows with other bits, batch_invariant:", different)
assert not different
