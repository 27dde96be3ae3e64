"""The suite `transformers`: a Llama of Hugging Face transformers with random weights, once for each attention.

A prompt in one pass, then decode steps, one token each. Steps are timed in two ways: over a dynamic cache, which is
copied as it grows each step, with plain calls; and over a static cache, on a GPU as a replayed CUDA graph, which needs
no host time. All systems have the same weights and decode the same tokens. Before anything is timed, the logits of the
last token of the prompt and of the last step are compared with those of the model in a wider dtype. The error may be
twice that of PyTorch's attention.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from flash_attn_minimal._commands.report import plural

from ..report import table as markdown_table
from .machine import BenchError, first_line, load_average, open_machine
from .rows import label, number
from .suite import Outcome, Suite, measuring, register, rounded
from .timing import Protocol, Timing

MODELS = {  # LlamaConfig
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "rope_theta": 500000.0,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": True,
    },
}  # fmt: skip
PLANS = {"cuda": ("1b", 8192, 512), "cpu": ("tiny", 64, 16)}  # model, prompt, steps
QUICK_STEPS = 128
SYSTEMS = {
    "ours": "attn_minimal",
    "activated": "sdpa",  # with this library as PyTorch's flash backend, and without cuDNN's
    "torch": "sdpa",
    "fa2": "flash_attention_2",
}  # name here -> attn_implementation
FLOOR = 1e-3  # the least budget, in standard deviations of the logits; 1e-5 in float32
ROUNDS = 3


class _Runs:
    """One model, its prompt and the tokens that it decodes."""

    def __init__(self, machine, name: str, dtype: str, batch: int, prompt: int, steps: int, seed: int):
        import transformers

        self.torch, self.transformers, self.machine = machine.torch, transformers, machine
        torch = self.torch
        self.steps, self.total = steps, prompt + steps
        self.active = contextlib.ExitStack()
        config = transformers.LlamaConfig(**MODELS[name], max_position_embeddings=self.total + 1)
        generator = torch.Generator(machine.device).manual_seed(seed)
        with torch.device(machine.device):
            self.model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
        self.model.eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim > 1:  # activations keep their size
                    parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
                parameter.data = parameter.to(getattr(torch, dtype))  # the frequencies of positions stay float32
        shape = (batch, self.total)
        self.ids = torch.randint(config.vocab_size, shape, generator=generator, device=machine.device)
        self.prompt = self.ids[:, :prompt]

    def use(self, system: str) -> None:
        self.active.close()
        if system == "activated":
            from torch.nn.attention import SDPBackend, sdpa_kernel

            from flash_attn_minimal.torch import activate

            others = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH  # for calls with a mask
            self.active.enter_context(activate())
            self.active.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION, *others]))
        self.model.set_attn_implementation(SYSTEMS[system])

    def logits(self, ids, cache=None) -> Any:
        """Logits (batch, vocabulary) of the last token."""
        with self.torch.no_grad():
            out = self.model(input_ids=ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1)
        return out.logits[:, -1]

    def exact(self) -> list[np.ndarray]:
        """The logits of the last token of the prompt and of the last step, in a wider dtype."""
        torch, parameters = self.torch, list(self.model.parameters())
        wider = torch.float64 if parameters[0].dtype == torch.float32 else torch.float32
        self.use("torch")
        weights = [parameter.data for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.data = parameter.to(wider)
            return [self.host(self.logits(ids)) for ids in (self.prompt, self.ids)]
        finally:
            for parameter, data in zip(parameters, weights, strict=True):
                parameter.data = data

    def host(self, logits) -> np.ndarray:
        return logits.double().cpu().numpy()

    def cache(self, static: bool) -> Any:
        if not static:
            return self.transformers.DynamicCache(config=self.model.config)
        return self.transformers.StaticCache(config=self.model.config, max_cache_len=self.total)

    def prefill(self) -> Any:
        return self.logits(self.prompt, self.cache(False))

    def dynamic(self) -> tuple[Any, float]:
        """(logits of the last step, seconds of all steps) over a dynamic cache."""
        cache = self.cache(False)
        self.logits(self.prompt, cache)
        self.machine.synchronize()
        start = time.perf_counter()
        for i in range(self.prompt.shape[1], self.total):
            out = self.logits(self.ids[:, i : i + 1], cache)
        self.machine.synchronize()
        return out, time.perf_counter() - start

    def static(self) -> Callable[[], tuple[Any, float]]:
        """A function like `dynamic` over one static cache, which every call rewinds to the end of the prompt."""
        torch, cache = self.torch, self.cache(True)
        self.logits(self.prompt, cache)
        layers = cache.layers
        after_prompt = [layer.cumulative_length.clone() for layer in layers]
        token = self.ids[:, self.prompt.shape[1] :][:, :1].clone()

        def rewind() -> None:
            for layer, length in zip(layers, after_prompt, strict=True):
                layer.cumulative_length.copy_(length)

        def step() -> Any:
            return self.logits(token, cache)

        if self.machine.device == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # the first calls of a process set up things that must not be captured
                for _ in range(2):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step()

            def step() -> Any:
                graph.replay()
                return captured

        def run() -> tuple[Any, float]:
            rewind()
            self.machine.synchronize()
            start = time.perf_counter()
            for i in range(self.prompt.shape[1], self.total):
                token.copy_(self.ids[:, i : i + 1])
                out = step()
            self.machine.synchronize()
            return out, time.perf_counter() - start

        return run


def run(options, protocol: Protocol) -> tuple[Any, Outcome]:
    machine = open_machine(options.device, "torch", "transformers")
    try:
        from flash_attn_minimal.integrations import transformers as adapter
    except ImportError as error:
        raise BenchError(f"transformers, 4.57 or newer, is not installed ({first_line(error)})") from None
    assert adapter.register() == SYSTEMS["ours"]
    name, prompt, steps = PLANS[machine.device]
    name = options.model or name
    if name not in MODELS:
        raise BenchError(f"--model {name} is not one of {', '.join(MODELS)}")
    prompts = options.seqlen or [prompt]
    steps = min(steps, QUICK_STEPS) if options.quick else steps
    dtype = options.dtype or ("bfloat16" if machine.device == "cuda" else "float32")
    outcome = Outcome(load=load_average())
    print(f"{machine.title}: {name}, {dtype}", flush=True)
    with measuring(outcome, machine, len(prompts), "transformers") as (_, progress):
        for prompt in prompts:
            runs = _Runs(machine, name, dtype, options.batch or 1, prompt, steps, options.seed or 0)
            row = {"suite": "transformers", "model": name, "dtype": dtype, "batch": options.batch or 1}
            _one(runs, row | {"tokens": steps, "seqlen_k": prompt}, options.rounds or ROUNDS, options.seed, outcome)
            machine.release()
            progress.step(f"prompts of {plural(prompt, 'token')}, {plural(steps, 'step')}")
    return machine, outcome


def _error(got: np.ndarray, exact: np.ndarray) -> float:
    """The root mean square difference of the logits, for the worst row of the batch, over their standard deviation."""
    error = float(np.sqrt(np.square(got - exact).mean(-1)).max() / exact.std())
    return error if math.isfinite(error) else math.inf


def _one(runs: _Runs, row: dict[str, Any], rounds: int, seed: int | None, outcome: Outcome) -> None:
    """Checks and times all systems on one length of the prompt."""
    exact = runs.exact()
    passes: dict[tuple[str, str], Callable[[], float]] = {}
    checks: dict[tuple[str, str], float] = {}
    for system in SYSTEMS:
        try:
            runs.use(system)
            checks[system, "prefill"] = _error(runs.host(runs.prefill()), exact[0])
            checks[system, "dynamic"] = _error(runs.host(runs.dynamic()[0]), exact[1])
        except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
            if system not in ("activated", "fa2"):
                raise
            outcome.left_out.append({"system": system, "shape": "all", "reason": first_line(error)})
            continue
        passes[system, "prefill"] = lambda: _prefill_seconds(runs)
        passes[system, "dynamic"] = lambda: runs.dynamic()[1] / runs.steps
        try:
            static = runs.static()
            checks[system, "static"] = _error(runs.host(static()[0]), exact[1])
        except (AttributeError, TypeError, RuntimeError) as error:  # not possible with this transformers or attention
            outcome.left_out.append({"system": system, "shape": "static cache", "reason": first_line(error)})
            continue
        passes[system, "static"] = lambda static=static: static()[1] / runs.steps
    if broken := [mode for (system, mode), error in checks.items() if system == "torch" and not math.isfinite(error)]:
        raise BenchError(f"{row['dtype']}: PyTorch's logits ({', '.join(broken)}) are not finite: there is no budget")
    floor = FLOOR / 100 if row["dtype"] == "float32" else FLOOR
    timings = {}
    for (system, mode), error in checks.items():
        budget = 2 * checks["torch", mode if ("torch", mode) in checks else "dynamic"] + floor
        found = row | {"system": system, "mode": mode, "pass": "fwd" if mode == "prefill" else "step"}
        found |= {"max_err": error, "err_budget": budget}
        if error <= budget:
            timings[system, mode] = found, Timing()
            continue
        reason = f"logits {error:.3g} standard deviations off, {budget:.3g} allowed"
        if system in ("ours", "activated"):
            outcome.wrong += 1
            outcome.rows.append(rounded(found | {"wrong": True}))
            print(
                f"  {system}, {mode}: WRONG, the logits are {error:.3g} standard deviations off, {budget:.3g} allowed"
            )
        else:
            reason = f"logits {error:.3g} standard deviations off, {budget:.3g} allowed"
            outcome.left_out.append({"system": system, "shape": mode, "reason": reason})
    order = random.Random(seed or 0)
    for _ in range(rounds):
        for system, mode in order.sample(list(timings), len(timings)):
            runs.use(system)
            timings[system, mode][1].bursts.append(passes[system, mode]() * 1e6)
    runs.use("torch")  # nothing stays active
    for (system, mode), (found, timing) in timings.items():
        times = timing.row(0.0)
        del times["tflops"]
        if mode != "prefill":
            times["steps_per_s"] = 1e6 / times["us"]
        outcome.rows.append(rounded(found | times))
        print(f"  {plural(row['seqlen_k'], 'token')}, {system}, {mode}: {times['us'] / 1e3:.2f} ms", flush=True)


def _prefill_seconds(runs: _Runs) -> float:
    runs.machine.synchronize()
    start = time.perf_counter()
    runs.prefill()
    runs.machine.synchronize()
    return time.perf_counter() - start


# ---- the table ----


def table(data: dict, rows: list[dict]) -> list[str]:
    """A line for each length of the prompt and each system."""
    found = {(row["seqlen_k"], row["system"], row["mode"]): row for row in rows}
    graph = "gpu" in data["machine"]
    head = ["prompt", "attention", "prefill, ms", "tokens/s", "of PyTorch's time"]
    for mode in ("dynamic", "CUDA graph, static" if graph else "static"):
        head += [f"steps/s, {mode} cache", "of PyTorch's time"]
    body = []
    for prompt in dict.fromkeys(row["seqlen_k"] for row in rows):
        for system in SYSTEMS:
            line = []
            for mode in ("prefill", "dynamic", "static"):
                row, other = found.get((prompt, system, mode)), found.get((prompt, "torch", mode))
                speed = [""] * (1 + (mode == "prefill"))
                if row:
                    speed = [number(row["us"] / 1e3), f"{prompt * row['batch'] / row['us'] * 1e6:.0f}"]
                    speed = speed if mode == "prefill" else [number(row["steps_per_s"])]
                line += [*speed, f"{row['us'] / other['us']:.2f}" if row and other else ""]
            if any(line):
                body.append([str(prompt), label(system), *line])
    first = rows[0]
    about = f"## Llama {first['model']}, batch {first['batch']}: a prompt, then {first['tokens']} steps of one token"
    return [about, "", *markdown_table(head, body)]


register(
    Suite(
        name="transformers",
        about="a Hugging Face Llama with each attention: a prompt, then decode steps (--seqlen: of the prompt)",
        options=frozenset({"device", "dtype", "model", "batch", "seqlen", "rounds", "quick", "seed", "output"}),
        run=run,
        table=table,
        how="median of the rounds, systems in shuffled turns, host time until the device is done",
        device_time=False,
        checked="logits compared first with the model in a wider dtype: at most twice the error of PyTorch's attention",
    )
)
