"""Times a transformers model with this library as PyTorch's flash backend: prefill, decode and a training step.

    python examples/torch_backend_speed.py [--json FILE]

On a GPU a Llama of 1.1 billion random weights in bfloat16, on a CPU a small one in float32. Times in turns, median."""

import argparse
import contextlib
import json
import statistics
import time

try:
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f"{error} (pip install torch transformers)") from None
from flash_attn_minimal.torch import activate

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--json", help="write the rows to this file")
given = arguments.parse_args()
gpu = torch.cuda.is_available()
device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
width, inner, layers, heads, heads_k = (2048, 8192, 16, 32, 8) if gpu else (128, 256, 2, 4, 2)
config = LlamaConfig(
    vocab_size=32000, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
    num_attention_heads=heads, num_key_value_heads=heads_k, max_position_embeddings=32768,
)  # fmt: skip
torch.manual_seed(0)
with torch.device(device):
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)


def seconds(work):
    start = time.perf_counter()
    work()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def prefill(batch, tokens):
    ids = torch.randint(32000, (batch, tokens), device=device)
    with torch.no_grad():
        seconds(lambda: model(ids, use_cache=False, logits_to_keep=1))
        return seconds(lambda: model(ids, use_cache=False, logits_to_keep=1))


def decode(batch, tokens, steps=8):
    ids = torch.randint(32000, (batch, tokens), device=device)
    with torch.no_grad():
        cache = model(ids, past_key_values=DynamicCache(config=config), logits_to_keep=1).past_key_values
        step = lambda: model(ids[:, :1], past_key_values=cache)  # noqa: E731
        seconds(step)
        return seconds(lambda: [step() for _ in range(steps)]) / steps


def train(batch, tokens):
    ids = torch.randint(32000, (batch, tokens), device=device)

    def step():
        model(ids, use_cache=False, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    seconds(step)
    return seconds(step)


cases = [(prefill, 1, 16384), (prefill, 4, 4096), (decode, 8, 8192), (train, 4, 4096), (train, 1, 16384)]
if not gpu:
    cases = [(prefill, 1, 256), (decode, 1, 256), (train, 1, 256)]
rows = []
for work, batch, tokens in cases:
    times: dict[str, list[float]] = {"pytorch": [], "ours": []}
    for _ in range(3):
        for name, way in (("pytorch", contextlib.nullcontext), ("ours", activate)):
            with way():
                times[name].append(work(batch, tokens) * 1e3)
    row = {
        "work": work.__name__,
        "batch": batch,
        "tokens": tokens,
        **{n: statistics.median(t) for n, t in times.items()},
    }
    rows.append(row)
    print(
        f"{work.__name__:8} {batch} x {tokens}: PyTorch {row['pytorch']:.2f} ms, ours {row['ours']:.2f} ms", flush=True
    )
ids = torch.randint(32000, (1, 1024 if gpu else 128), device=device)
with torch.no_grad():
    theirs = model(ids).logits
    with activate():
        ours = model(ids).logits
    exact = model.float()(ids).logits
errors = {name: ((x - exact).norm() / exact.norm()).item() for name, x in (("pytorch", theirs), ("ours", ours))}
print("errors of the logits, of their norm:", ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
if given.json:
    about = {
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
        "errors": errors,
    }
    with open(given.json, "w") as file:
        json.dump(about | {"rows": rows}, file, indent=1)
assert errors["ours"] < 1.2 * errors["pytorch"] + 1e-5
