"""Train the model of train_tiny.py with every sequence spread over the ranks, and again on one: the losses agree.

    torchrun --nproc-per-node 2 examples/context_parallel/train.py                  a GPU for each rank
    torchrun --nproc-per-node 2 examples/context_parallel/train.py --device cpu     two processes

A rank has its tokens of each sequence, their labels and positions (for RoPE), and all weights. Only attention needs the
tokens of other ranks. The loss of a rank is its share of the mean over all tokens, so gradients summed over the ranks
equal those of one GPU.

It needs torch and rich, and with --out matplotlib.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import time
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np

try:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
except ImportError as error:
    raise SystemExit(f"{error} (pip install torch rich)") from None

from flash_attn_minimal.distributed import positions, shard
from flash_attn_minimal.torch import close_groups, context_parallel_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from story_grammar import story  # noqa: E402
from train_tiny import PRESETS, Llama, batches, flash, optimizer_of, tokens_of, train_tokenizer  # noqa: E402


def text_of(preset) -> torch.Tensor:
    texts = [story(i) for i in range(preset.stories)]
    return tokens_of(texts, train_tokenizer(texts[:5000], preset.config.vocab_size))


def train(preset, tokens, attention, part, where, dtype, device, seed, advance) -> list[float]:
    """The loss of every step. part(x): this rank's part of x (batch, seqlen). where: the positions of this rank's
    tokens. Both are None on one rank."""
    torch.manual_seed(seed)  # the same weights on every rank
    model = Llama(preset.config).to(device)
    optimizer, schedule = optimizer_of(model, preset.steps)
    losses = []
    for window in batches(tokens, preset.config.seq_len, preset.batch, preset.steps, seed):
        given, labels = window[:, :-1].to(device), window[:, 1:].to(device)
        count = labels.numel()
        if part:
            given, labels = part(given), part(labels)
        logits = model(given, attention, dtype, where)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        loss = loss.detach()
        if part:
            for x in (loss, *(p.grad for p in model.parameters())):
                dist.all_reduce(x)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss)
        advance(loss)
    return [loss.item() for loss in losses]


def draw(report: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), layout="constrained", sharex=True, height_ratios=(2, 1))
    above.plot(report["losses_of_one"], lw=2.5, alpha=0.5, label="one rank")
    above.plot(report["losses"], lw=0.8, color="black", label=f"{report['ranks']} ranks, {report['layout']}")
    above.set(ylabel="loss, nats a token", title=f"sequences of {report['seq_len']} tokens")
    above.legend()
    below.plot(np.abs(np.subtract(report["losses"], report["losses_of_one"])), lw=0.8, color="black")
    below.set(xlabel="step", ylabel="difference")
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of q, k and v")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="size of the run (default: full on GPUs, else tiny)")
    parser.add_argument("--steps", type=int, help="optimiser steps instead of the preset's")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence instead of the preset's")
    parser.add_argument("--layout", choices=("zigzag", "contiguous"), default="zigzag")
    parser.add_argument("--mode", choices=("auto", "gather", "ulysses"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for losses.json and losses.png")
    args = parser.parse_args(argv)
    if args.out and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"--out {args.out} draws a picture, which needs matplotlib (pip install matplotlib)")
    if "RANK" not in os.environ:
        parser.error("the ranks come from torchrun: torchrun --nproc-per-node 2 examples/context_parallel/train.py")
    preset = PRESETS[args.preset or ("full" if args.device == "cuda" else "tiny")]
    for name, value in (("steps", args.steps), ("seq-len", args.seq_len)):
        if value is not None and value < 1:
            parser.error(f"--{name} {value} is below 1")
    config = replace(preset.config, seq_len=args.seq_len or preset.config.seq_len)
    preset = replace(preset, config=config, steps=args.steps or preset.steps)

    local, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device, backend = torch.device("cpu"), "gloo"
    if args.device == "cuda":
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if ranks_here <= torch.cuda.device_count() else "gloo"  # NCCL shares no GPU
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype, seqlen = getattr(torch, args.dtype), config.seq_len
    attention = functools.partial(
        context_parallel_attention, causal=True, layout=args.layout, mode=args.mode, seqlen_q=seqlen, seqlen_k=seqlen
    )

    columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}"), disable=rank != 0) as progress:

        def run(name: str, attention, part, where) -> tuple[list[float], float]:
            task = progress.add_task(name, total=preset.steps, loss="")

            def advance(loss: torch.Tensor) -> None:
                done = progress.tasks[task].completed + 1
                progress.advance(task)
                if done % 10 == 0:
                    progress.update(task, loss=f"loss {loss.item():.3f}")

            started = time.perf_counter()
            losses = train(preset, tokens, attention, part, where, dtype, device, args.seed, advance)
            return losses, time.perf_counter() - started

        tokens = text_of(preset)
        where = torch.from_numpy(positions(args.layout, rank, size, [0, seqlen])).to(device)
        part = functools.partial(shard, layout=args.layout, rank=rank, size=size)
        losses, seconds = run(f"{size} ranks", attention, part, where)
        close_groups()
        dist.destroy_process_group()
        if rank != 0:
            return 0
        losses_of_one, seconds_of_one = run("one rank", flash, None, None)

    apart = np.abs(np.subtract(losses, losses_of_one))
    print(
        f"{preset.steps} steps of {preset.batch} x {seqlen} tokens, loss {losses[0]:.4f} -> {losses[-1]:.4f}\n"
        f"{size} ranks, layout {args.layout}, mode {args.mode}: {seconds:.1f} s; one rank: {seconds_of_one:.1f} s\n"
        f"losses differ by {apart.mean():.2e} on average, {apart.max():.2e} at most"
    )
    if args.out:
        report = {
            "command": " ".join(["examples/context_parallel/train.py", *(argv or sys.argv[1:])]),
            "machine": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
            "ranks": size, "layout": args.layout, "mode": args.mode, "dtype": args.dtype,
            "config": astuple(config), "seq_len": seqlen,
            "seconds": seconds, "seconds_of_one": seconds_of_one, "losses": losses, "losses_of_one": losses_of_one,
        }  # fmt: skip
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "losses.json").write_text(json.dumps(report, indent=1) + "\n")
        draw(report, args.out / "losses.png")
        print(f"wrote {args.out}/losses.json, losses.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
