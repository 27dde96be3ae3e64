"""Times the rows of the ledger with one library. This file is run by its path, with PYTHONPATH and FLASH_ATTN_LIBRARY
of the library's own commit, which may be older than this file: it uses nothing but the public functions, and imports no
other module of the bench.

    python worker.py '{"device": "cuda", "bursts": 3, "burst_s": 0.01}'
    in   a row a line: {"name": ..., "kind": "attention", ...}
    out  {"ready": ...} once, then {"us": time of a call, "answer": numbers of its result} or {"error": why} for each;
         with "ends": true the device does not work after the error, and this process ends
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import random
import sys
import time
from statistics import median

import numpy as np

MAX_LAUNCHES = 512
HOST_CALLS = 200  # of a row of kind host: fewer kernels than a stream queues before the host has to wait
L2_SETS = 8  # copies of weights, so that they come from memory


class Cpu:
    device = "cpu"
    middle = staticmethod(min)  # of the bursts: what else the machine does only adds to them

    def normal(self, shape, dtype, seed):
        values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        return self.cast(values, dtype)

    def cast(self, array, dtype):
        if dtype in ("bfloat16", "float8_e4m3fn"):
            import ml_dtypes

            return array.astype(getattr(ml_dtypes, dtype))
        return array.astype(dtype)

    def integers(self, values):
        return np.asarray(values, np.int32)

    def floats(self, values):
        return np.asarray(values, np.float32)

    def numbers(self, array, places):
        flat = np.asarray(array).reshape(-1).astype(np.float32)
        return [float(np.abs(flat).mean(dtype=np.float64)), *(float(x) for x in flat[places])]

    def synchronize(self):
        pass

    def works(self):
        return True

    def release(self):
        pass

    def time(self, launch, bursts, burst_s, host=False):
        """Seconds of a call in each burst."""
        launch()
        start = time.perf_counter()
        launch()
        once = time.perf_counter() - start
        count = HOST_CALLS if host else max(1, min(MAX_LAUNCHES, math.ceil(burst_s / max(once, 1e-7))))
        found = []
        for _ in range(bursts):
            start = time.perf_counter()
            for _ in range(count):
                launch()
            found.append((time.perf_counter() - start) / count)
        return found


class Cuda:
    device = "cuda"
    middle = staticmethod(median)

    def __init__(self):
        import torch

        self.torch = torch
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)

    def normal(self, shape, dtype, seed):
        generator = self.torch.Generator("cuda").manual_seed(seed)
        values = self.torch.randn(shape, generator=generator, device="cuda", dtype=self.torch.float32)
        return self.cast(values, dtype)

    def cast(self, array, dtype):
        return array.to(getattr(self.torch, dtype))

    def integers(self, values):
        return self.torch.tensor(values, dtype=self.torch.int32, device="cuda")

    def floats(self, values):
        return self.torch.tensor(values, dtype=self.torch.float32, device="cuda")

    def numbers(self, array, places):
        flat = array.detach().reshape(-1)  # on the GPU: copying a gradient of 256 MB would take longer than timing it
        mean = flat.abs().mean(dtype=self.torch.float32)
        return [mean.item(), *flat[self.torch.tensor(places, device="cuda")].float().tolist()]

    def synchronize(self):
        self.torch.cuda.synchronize()

    def works(self):
        """After an error in a kernel the device refuses everything."""
        try:
            self.torch.ones(1, device="cuda")
            self.synchronize()
            return True
        except RuntimeError:
            return False

    def release(self):
        self.torch.cuda.empty_cache()

    def time(self, launch, bursts, burst_s, host=False):
        for _ in range(3):
            launch()
        self.synchronize()
        if host:
            return self._host(launch, bursts)
        start = time.perf_counter()
        launch()
        self.synchronize()
        once = time.perf_counter() - start
        count = max(1, min(MAX_LAUNCHES, math.ceil(burst_s / once)))
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self.stream):
            for _ in range(count):
                launch()
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        found = []
        for _ in range(bursts):
            graph.replay()
            first.record(self.stream)
            graph.replay()
            last.record(self.stream)
            last.synchronize()
            found.append(first.elapsed_time(last) * 1e-3 / count)
        return found

    def _host(self, launch, bursts):
        """Nothing is waited for while the calls are counted."""
        found = []
        for _ in range(bursts):
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                launch()
            found.append((time.perf_counter() - start) / HOST_CALLS)
            self.synchronize()
        return found


def attention(machine, row):
    """(launch, its results) of flash_attn_func, flash_attn_varlen_func, backward."""
    import flash_attn_minimal as fam

    dtype, (n_q, n_k), (heads, heads_k), (d, d_v) = row["dtype"], row["seqlens"], row["heads"], row["dims"]
    batch, lengths, options = row["batch"], row.get("lengths"), dict(row.get("options", {}))
    rows_q, rows_k = ((sum(lengths),), (sum(lengths),)) if lengths else ((batch, n_q), (batch, n_k))
    q = machine.normal((*rows_q, heads, d), dtype, 0)
    k, v = (machine.normal((*rows_k, heads_k, width), dtype, seed) for seed, width in ((1, d), (2, d_v)))
    if options.pop("alibi", False):
        slopes = [2.0 ** (-8 * (i + 1) / heads) for i in range(heads)]
        options["alibi_slopes"] = machine.floats(slopes)
    if options.pop("sinks", False):
        options["sinks"] = machine.normal((heads,), "float32", 4)
    if mask := options.pop("mask", None):
        shape = {"keys": (batch, 1, 1, n_k), "pairs": (1, 1, n_q, n_k)}[mask]
        options["mask"] = machine.normal(shape, "float32", 5) > -1.28
    if options.pop("bias", False):
        options["bias"] = machine.normal((1, heads, n_q, n_k), dtype, 6)
    if "window_size" in options:
        options["window_size"] = tuple(options["window_size"])
    if "dropout_p" in options:
        options["dropout_seed"] = 7
    if row.get("fp8"):
        (q, a), (k, b), (v, c) = (fam.quantize_fp8(x) for x in (q, k, v))
        options |= {"q_descale": a, "k_descale": b, "v_descale": c}
    where, call = (), fam.flash_attn_func
    if lengths:
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        starts = machine.integers(starts)
        where, call = (starts, starts, max(lengths), max(lengths)), fam.flash_attn_varlen_func
    if not row.get("backward"):
        out = call(q, k, v, *where, **options)
        return lambda: call(q, k, v, *where, out=out, **options), [out]
    out, lse = call(q, k, v, *where, return_lse=True, **options)
    dout = machine.normal(tuple(out.shape), dtype, 3)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    given = dict(zip(names, where, strict=False)) | options
    results = fam.backward(dout, q, k, v, out, lse, **given)[:3]
    places = dict(zip(("dq", "dk", "dv"), results, strict=True))
    return lambda: fam.backward(dout, q, k, v, out, lse, **places, **given), list(results)


def cache(machine, row):
    """flash_attn_with_kvcache: queries over caches of different lengths, in pages or not."""
    import flash_attn_minimal as fam

    dtype, (n_q, n_k), (heads, heads_k), (d, d_v) = row["dtype"], row["seqlens"], row["heads"], row["dims"]
    batch, page, options = row["batch"], row.get("page", 0), dict(row.get("options", {}))
    q = machine.normal((batch, n_q, heads, d), dtype, 0)
    shape = (batch * (n_k // page), page) if page else (batch, n_k)
    caches = [machine.normal((*shape, heads_k, width), dtype, seed) for seed, width in ((1, d), (2, d_v))]
    if page:
        order = random.Random(0).sample(range(shape[0]), shape[0])
        each = n_k // page
        options["block_table"] = machine.integers([order[i * each : (i + 1) * each] for i in range(batch)])
    draw = random.Random(1)
    options["cache_seqlens"] = machine.integers([n_k, *(draw.randint(n_k // 2, n_k) for _ in range(batch - 1))])
    out = fam.flash_attn_with_kvcache(q, *caches, **options)
    return lambda: fam.flash_attn_with_kvcache(q, *caches, out=out, **options), [out]


def of_transformers(module):
    """A module of the package's transformer, which was not a package of its own before."""
    try:
        return importlib.import_module(f"flash_attn_minimal.transformer.{module}")
    except ModuleNotFoundError:
        return importlib.import_module(f"flash_attn_minimal.{module}")


def linear(machine, row):
    """A product with 4-bit weights."""
    ops, W4Weight = of_transformers("ops"), of_transformers("quantized").W4Weight
    m, n, k = row["mnk"]
    sixteen = row["dtype"]
    weight = W4Weight.quantize(machine.normal((n, k), "float32", 0) * k**-0.5, row["format"])
    packed = [weight.pack(sixteen) for _ in range(L2_SETS if machine.device == "cuda" else 1)]
    x = machine.normal((m, k), sixteen if machine.device == "cuda" else "float32", 1)
    out = ops.linear(x, packed[0])
    turns = itertools.cycle(packed)
    return lambda: ops.linear(x, next(turns), out=out), [out]


def operation(machine, row):
    """rms_norm, swiglu: the small operations of a decoder."""
    ops = of_transformers("ops")
    rows, width = row["shape"]
    x = machine.normal((rows, width), row["dtype"], 0)
    if row["op"] == "rms_norm":
        weight = machine.normal((width,), row["dtype"], 1)
        out = ops.rms_norm(x, weight)
        return lambda: ops.rms_norm(x, weight, out=out), [out]
    if row["op"] == "swiglu":
        out = ops.swiglu(x)
        return lambda: ops.swiglu(x, out=out), [out]
    raise ValueError(f"no operation {row['op']}")


KINDS = {"attention": attention, "cache": cache, "linear": linear, "operation": operation}


def answer(machine, results) -> list[float]:
    """A few numbers of each result and its mean magnitude: enough to see that two libraries compute the same."""
    found: list[float] = []
    for result in results:
        found += machine.numbers(result, np.linspace(0, math.prod(result.shape) - 1, 8).astype(int))
    return found


def main() -> int:
    about = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import flash_attn_minimal

    flash_attn_minimal.kernels()  # loads the library: one that does not load ends the process here
    machine = Cuda() if about["device"] == "cuda" else Cpu()
    print(json.dumps({"ready": machine.device}), file=out, flush=True)
    for line in sys.stdin:
        row = json.loads(line)
        try:
            launch, results = KINDS[row["kind"]](machine, row)
            launch()
            machine.synchronize()
            numbers = answer(machine, results)
            seconds = machine.time(launch, about["bursts"], about["burst_s"], row.get("host", False))
            found = {"us": machine.middle(seconds) * 1e6, "answer": numbers}
        except Exception as error:  # an older library may not know the call
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            found |= {} if machine.works() else {"ends": True}
        print(json.dumps(found), file=out, flush=True)
        if "ends" in found:
            return 1
        launch = results = None
        machine.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
