"""A case through JAX: one process has all devices, and context_parallel_attention runs inside jax.shard_map.

Forward passes of one sequence alone: JAX's backward pass is not a call of its own. The time of one device comes from
the processes of this library's own ranks, in the same run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from ..bench.suite import rounded
from .crew import Meeting, Spec
from .rank import Host, Order, difference, verdict


class JaxRanks:
    """For serve()."""

    def __init__(self, spec: Spec):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        if spec.devices[0] == "cpu":  # before JAX counts its devices
            os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={spec.size}"
            os.environ["JAX_PLATFORMS"] = "cpu"
        import jax

        self.jax, self.threads = jax, spec.threads
        numbers = range(spec.size) if spec.devices[0] == "cpu" else map(int, spec.devices)
        self.devices = [jax.devices()[number] for number in numbers]
        self.about = {"jax": jax.__version__}

    def measure(self, order: Order) -> list[dict[str, Any]]:
        case = order.case
        if case.of != "forward" or len(case.lengths) > 1:
            why = "through JAX only forward passes of one sequence are timed"
            return [case.row() | {"asked": mode, "error": why, "refused": True} for mode in order.modes]
        return [rounded(case.row() | {"asked": mode, "mode": mode} | self._row(order, mode)) for mode in order.modes]

    def _row(self, order: Order, mode: str) -> dict[str, Any]:
        from flash_attn_minimal import flash_attn_func
        from flash_attn_minimal.jax import context_parallel_attention, shard_tokens, unshard_tokens

        jax, case, size = self.jax, order.case, len(self.devices)
        from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

        options = case.options | {"num_threads": self.threads}
        mesh, tokens = Mesh(np.array(self.devices), ("context",)), PartitionSpec(None, "context")
        alone = SingleDeviceSharding(self.devices[0])
        heads = (case.nheads, case.nheads_k, case.nheads_k)
        whole = [
            jax.device_put(
                jax.random.normal(jax.random.key(17 + i), (1, case.tokens, n, case.headdim), case.dtype), alone
            )
            for i, n in enumerate(heads)
        ]
        want = jax.jit(functools.partial(flash_attn_func, **options))(*whole)
        shards = [jax.device_put(shard_tokens(x, size, case.layout), NamedSharding(mesh, tokens)) for x in whole]
        attend = functools.partial(
            context_parallel_attention, axis_name="context", layout=case.layout, mode=mode, **options
        )
        attend = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens))
        got = unshard_tokens(jax.device_put(attend(*shards), alone), size, case.layout)
        host = Host()
        found = [difference(host, *(np.asarray(x[0].astype("float32")) for x in (got, want)), np.arange(case.tokens))]
        row = verdict(found, case.dtype)
        del whole, want, got
        if row.get("wrong"):
            return row

        def seconds(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                out = attend(*shards)
            out.block_until_ready()
            return (time.perf_counter() - start) / count

        single = median(seconds(1) for _ in range(4))
        count = order.protocol.count(single)
        rounds = order.protocol.turns(single)
        times = [1e3 * seconds(count) for _ in range(rounds)]
        row |= {"ms": median(times), "ms_min": min(times), "ms_max": max(times), "single_ms": 1e3 * single}
        return row | {"calls": count, "rounds": rounds}


@contextlib.contextmanager
def open_jax(spec: Spec, rank: int, meeting: Meeting) -> Iterator[JaxRanks]:
    """Opens JAX in this process, on all devices of the crew."""
    yield JaxRanks(spec)
