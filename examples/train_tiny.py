"""Train a tiny Llama on made-up stories, with this library's attention, forward and backward.

    python examples/train_tiny.py              on the GPU if there is one (about a minute), else a small run on the CPU
    python examples/train_tiny.py --compare    trains again with PyTorch's attention: the losses agree
    python examples/train_tiny.py --out DIR    writes stories.bin and tokenizer.bin (llama2.c's formats),
                                               held_out.txt, losses.json and losses.png into DIR;
                                               python -m flash_attn_minimal generate DIR/stories.bin tells a story

PyTorch runs the optimiser and the matrix products. The script needs torch and rich, and matplotlib for the picture. The
text comes from story_grammar.py. A tokenizer is trained on this text first.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import json
import re
import sys
import time
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from story_grammar import story

import flash_attn_minimal as fa
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.llama2c import save_checkpoint
from flash_attn_minimal.llama.tokenizer import BOS, Tokenizer, save_tokenizer

try:
    import torch
    import torch.nn.functional as F
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from torch import nn
except ImportError as error:
    raise SystemExit(f"{error} (pip install torch rich)") from None

HELD_OUT = 1 << 40  # stories from this number on are held out: no model is trained on them
WRITTEN = 110  # held-out stories that go into held_out.txt: 16,000 tokens


@dataclass(frozen=True)
class Preset:
    config: Config
    stories: int  # to train on
    steps: int
    batch: int  # sequences in a step, of config.seq_len tokens each


PRESETS = {
    # 0.5 million parameters, 2.2 MB: the model that comes with the package.
    "full": Preset(Config(128, 256, 3, 4, 2, 768, 256), 60_000, 2000, 64),
    # A minute on two CPU cores: enough to see the loss fall, and to see that the two curves coincide.
    "tiny": Preset(Config(64, 128, 2, 4, 2, 384, 128), 2_000, 60, 8),
}

# ---- the tokenizer: byte-pair encoding (Sennrich et al. 2016) within words ----

WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s")


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """The pieces are <unk>, BOS, EOS, the 256 bytes, the characters of the texts, then the most frequent pairs. As in
    llama2.c, a piece that was merged earlier has the higher score."""
    words = Counter(word for text in texts for word in WORD.findall(" " + text))
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n"] + [b"<0x%02X>" % byte for byte in range(256)]
    characters = sorted({c for word in words for c in word})
    pieces += [c.encode() for c in characters]
    scores = [0.0] * len(pieces)
    split = {word: tuple(word) for word in words}
    pairs: Counter[tuple[str, str]] = Counter()
    where: dict[tuple[str, str], set[str]] = {}
    for word, parts in split.items():
        for pair in zip(parts, parts[1:], strict=False):
            pairs[pair] += words[word]
            where.setdefault(pair, set()).add(word)
    queue = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(queue)
    while len(pieces) < vocab_size and queue:
        count, best = heapq.heappop(queue)
        if -count != pairs[best]:
            continue  # the queue's count is out of date
        pieces.append("".join(best).encode())
        scores.append(-float(len(pieces)))
        changed = set()
        for word in list(where[best]):
            parts, merged, i = split[word], [], 0
            for pair in zip(parts, parts[1:], strict=False):
                pairs[pair] -= words[word]
                changed.add(pair)
            while i < len(parts):
                both = parts[i : i + 2] == best
                merged.append(parts[i] + parts[i + 1] if both else parts[i])
                i += 2 if both else 1
            split[word] = tuple(merged)
            for pair in zip(merged, merged[1:], strict=False):
                pairs[pair] += words[word]
                where.setdefault(pair, set()).add(word)
                changed.add(pair)
        for pair in changed:
            if pairs[pair] > 0:
                heapq.heappush(queue, (-pairs[pair], pair))
    return Tokenizer(pieces, scores)


def held_out_text() -> str:
    return "\n\n".join(story(HELD_OUT + i) for i in range(WRITTEN)) + "\n"


def tokens_of(texts: list[str], tokenizer: Tokenizer) -> torch.Tensor:
    """The tokens of all texts, one text after another, each after a BOS. No piece spans two words, so each distinct
    word is encoded only once. `encode` puts a space before its text, so a word is encoded after a character of another
    kind, and that character's tokens are cut off."""
    known: dict[str, list[int]] = {}
    ids: list[int] = []
    for text in texts:
        ids.append(BOS)
        for word in WORD.findall(" " + text):
            if word not in known:
                before = "" if word[0] == " " else '"' if word[0].isalnum() else "x"
                known[word] = tokenizer.encode(before + word.removeprefix(" "))[len(tokenizer.encode(before)) :]
            ids += known[word]
    return torch.tensor(ids)


# ---- the model: llama2.c's architecture ----


def flash(q, k, v):
    return fa.flash_attn_func(q, k, v, causal=True)


def pytorch(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        dim, hidden, hs = config.dim, config.hidden_dim, config.head_dim
        self.heads, self.kv_heads, self.hs = config.n_heads, config.n_kv_heads, hs
        self.rms_att, self.rms_ffn = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)
        self.wq = nn.Linear(dim, config.n_heads * hs, bias=False)
        self.wk = nn.Linear(dim, config.n_kv_heads * hs, bias=False)
        self.wv = nn.Linear(dim, config.n_kv_heads * hs, bias=False)
        self.wo = nn.Linear(config.n_heads * hs, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, rope, attention, dtype):
        batch, seqlen, _ = x.shape
        y = self.rms_att(x)
        q = turn(self.wq(y).view(batch, seqlen, self.heads, self.hs), rope)
        k = turn(self.wk(y).view(batch, seqlen, self.kv_heads, self.hs), rope)
        v = self.wv(y).view(batch, seqlen, self.kv_heads, self.hs)
        out = attention(q.to(dtype), k.to(dtype), v.to(dtype)).to(x.dtype)
        x = x + self.wo(out.reshape(batch, seqlen, -1))
        y = self.rms_ffn(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def turn(x, rope):
    """RoPE on neighbouring pairs: x (batch, seqlen, heads, headdim), rope (seqlen, 1, headdim / 2, 2), cos and sin."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rope.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Llama(nn.Module):
    rope: torch.Tensor  # (positions, 1, headdim / 2, 2): cosines and sines

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.rms_final = nn.RMSNorm(config.dim, 1e-5)
        angle = torch.arange(config.seq_len)[:, None] * 10000.0 ** (
            -torch.arange(0, config.head_dim, 2) / config.head_dim
        )
        self.register_buffer("rope", torch.stack([angle.cos(), angle.sin()], -1)[:, None], persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                deep = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(p, std=0.02 / (2 * config.n_layers) ** 0.5 if deep else 0.02)

    def forward(self, tokens, attention, dtype, positions=None):
        """positions: the positions of the tokens in their sequences; None stands for 0, 1, 2, ..."""
        x = self.embedding(tokens)
        rope = self.rope[: tokens.shape[1]] if positions is None else self.rope[positions]
        for block in self.blocks:
            x = block(x, rope, attention, dtype)
        return F.linear(self.rms_final(x), self.embedding.weight)  # the classifier is the embedding

    def tensors(self) -> dict[str, np.ndarray]:
        """The parameters by their names in a llama2.c checkpoint."""
        array = {name: p.detach().float().cpu().numpy() for name, p in self.named_parameters()}
        out = {"token_embedding": array["embedding.weight"], "rms_final": array["rms_final.weight"]}
        for name in ("rms_att", "rms_ffn", "wq", "wk", "wv", "wo", "w1", "w2", "w3"):
            out[name] = np.stack([array[f"blocks.{i}.{name}.weight"] for i in range(self.config.n_layers)])
        return out


# ---- training ----


def batches(tokens: torch.Tensor, seqlen: int, batch: int, steps: int, seed: int):
    """Windows (batch, seqlen + 1) of the text. Runs with the same seed get the same windows."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        start = torch.randint(len(tokens) - seqlen - 1, (batch,), generator=generator)
        yield tokens[start[:, None] + torch.arange(seqlen + 1)]


def loss_of(model, window, attention, dtype):
    logits = model(window[:, :-1], attention, dtype)
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model, tokens, preset, attention, dtype, device) -> float:
    windows = batches(tokens, preset.config.seq_len, preset.batch, 4, seed=1)
    return sum(loss_of(model, window.to(device), attention, dtype).item() for window in windows) / 4


def optimizer_of(model, steps: int):
    """AdamW and its learning rate: a short warm-up, then a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    warm = max(1, steps // 30)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.02 + 0.49 * (1 + np.cos(np.pi * min(1.0, step / steps)))),
    )
    return optimizer, schedule


def train(name, preset, tokens, held_out, dtype, device, seed, progress) -> tuple[Llama, dict]:
    attention = {"flash": flash, "pytorch": pytorch}[name]
    torch.manual_seed(seed)
    model = Llama(preset.config).to(device)
    optimizer, schedule = optimizer_of(model, preset.steps)
    task = progress.add_task(name, total=preset.steps, loss="")
    losses, checks, started = [], [], time.perf_counter()
    for step, window in enumerate(batches(tokens, preset.config.seq_len, preset.batch, preset.steps, seed)):
        if step % max(1, preset.steps // 20) == 0:
            checks.append((step, held_out_loss(model, held_out, preset, attention, dtype, device)))
        loss = loss_of(model, window.to(device), attention, dtype)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % 10 == 9:
            progress.update(task, completed=step + 1, loss=f"loss {loss.item():.3f}")
    losses = [loss.item() for loss in losses]
    seconds = time.perf_counter() - started
    checks.append((preset.steps, held_out_loss(model, held_out, preset, attention, dtype, device)))
    progress.update(task, completed=preset.steps, loss=f"loss {losses[-1]:.3f}")
    return model, {"attention": name, "seconds": seconds, "losses": losses, "held_out": checks}


def draw(runs: list[dict], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    styles: tuple[dict[str, Any], ...] = {"lw": 2.5, "alpha": 0.5}, {"lw": 0.8, "color": "black"}
    for run, style in zip(runs, styles, strict=False):
        label = {"flash": "flash-attn-minimal", "pytorch": "PyTorch"}[run["attention"]]
        axes.plot(run["losses"], label=f"{label}, training", **style)
        steps, checks = zip(*run["held_out"], strict=True)
        axes.plot(steps, checks, "o--", ms=4, lw=0.8, label=f"{label}, held out")
    axes.set(xlabel="step", ylabel="loss, nats a token", title=title, yscale="log")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of q, k and v; in bfloat16 two runs round differently, and part for a while where the loss is flat",
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), help="size of the run (default: full on a GPU, else tiny)")
    parser.add_argument("--steps", type=int, help="optimiser steps instead of the preset's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="train again with PyTorch's attention")
    parser.add_argument("--out", type=Path, help="folder for the model, the losses and the picture")
    args = parser.parse_args(argv)
    if args.out and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"--out {args.out} draws a picture, which needs matplotlib (pip install matplotlib)")
    preset = PRESETS[args.preset or ("full" if args.device == "cuda" else "tiny")]
    if args.steps is not None:
        if args.steps < 1:
            parser.error(f"--steps {args.steps} is below 1")
        preset = Preset(preset.config, preset.stories, args.steps, preset.batch)
    dtype = getattr(torch, args.dtype)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)

    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}")) as progress:
        task = progress.add_task("text", total=4, loss="")
        texts = [story(args.seed * preset.stories + i) for i in range(preset.stories)]
        progress.advance(task)
        tokenizer = train_tokenizer(texts[:5000], preset.config.vocab_size)
        assert tokenizer.vocab_size == preset.config.vocab_size, "the text has too few pairs for this vocabulary"
        progress.advance(task)
        tokens = tokens_of(texts, tokenizer)
        progress.advance(task)
        held_out = tokens_of([story(HELD_OUT + i) for i in range(max(200, preset.stories // 20))], tokenizer)
        progress.update(task, completed=4, loss=f"{len(tokens):,} tokens")
        runs, models = [], []
        for name in ("flash", "pytorch") if args.compare else ("flash",):
            trained, run = train(name, preset, tokens, held_out, dtype, args.device, args.seed, progress)
            models.append(trained)
            runs.append(run)

    model = models[0]
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{count:,} parameters ({preset.config}), "
        f"{preset.steps} steps of {preset.batch} x {preset.config.seq_len} tokens"
    )
    for run in runs:
        print(
            f"{run['attention']:>10}: held-out loss {run['held_out'][0][1]:.4f} -> {run['held_out'][-1][1]:.4f}, "
            f"{run['seconds']:.1f} s"
        )
    if args.compare:
        apart = np.abs(np.subtract(runs[0]["losses"], runs[1]["losses"]))
        print(f"   between: training losses differ by {apart.mean():.5f} on average, {apart.max():.5f} at most")
    if args.out:
        save_checkpoint(args.out / "stories.bin", preset.config, model.tensors())
        save_tokenizer(args.out / "tokenizer.bin", tokenizer.pieces, tokenizer.scores)
        (args.out / "held_out.txt").write_text(held_out_text())
        about = {
            "command": " ".join(["examples/train_tiny.py", *(argv or sys.argv[1:])]),
            "config": astuple(preset.config),
        }
        about["machine"] = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        (args.out / "losses.json").write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n")
        draw(runs, args.out / "losses.png", f"{count / 1e6:.1f} M parameters, {about['machine']}")
        print(f"wrote {args.out}/stories.bin, tokenizer.bin, held_out.txt, losses.json, losses.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
