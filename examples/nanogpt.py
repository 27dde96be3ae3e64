"""A GPT in the manner of nanoGPT, trained on characters: what changes when its attention becomes this library's.

    python examples/nanogpt.py                    trains twice, with PyTorch's attention and with ours: the losses agree
    python examples/nanogpt.py --attention ours   trains once
    python examples/nanogpt.py --device cuda --layers 6 --heads 6 --width 384 --block 256 --batch 64 --steps 2000

The swap is the function `ours`, three lines. It saves the two transposes: q, k and v stay (batch, seqlen, heads, dim),
as the projection made them. Needs torch. The text comes from story_grammar.py.
"""

from __future__ import annotations

import argparse

from story_grammar import story

from flash_attn_minimal import flash_attn_func

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
except ImportError as error:
    raise SystemExit(f"{error} (pip install torch)") from None


def pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


ATTENTIONS = {"pytorch": pytorch, "ours": ours}


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # (batch, seqlen, heads, dim) each
        return self.c_proj(self.attend(q, k, v).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attend):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, attend)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, block: int, layers: int, heads: int, width: int, attend):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, seqlen, vocabulary) of tokens (batch, seqlen)."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.ln_f(self.blocks(x)), self.wte.weight)


def train(args: argparse.Namespace, text: Tensor, vocabulary: int, attend) -> list[float]:
    """The losses of a run. Runs with the same seed begin with the same weights and see the same text."""
    torch.manual_seed(args.seed)
    model = GPT(vocabulary, args.block, args.layers, args.heads, args.width, attend).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for _ in range(args.steps):
        start = torch.randint(len(text) - args.block - 1, (args.batch, 1))
        window = text[start + torch.arange(args.block + 1)].to(args.device)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            logits = model(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attention", choices=(*ATTENTIONS, "both"), default="both")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16, as one trains on a GPU")
    for name, value in (("steps", 60), ("batch", 8), ("block", 64), ("layers", 2), ("heads", 4), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    characters = "\n".join(story(seed) for seed in range(500))
    alphabet = sorted(set(characters))
    number = {character: i for i, character in enumerate(alphabet)}
    text = torch.tensor([number[character] for character in characters])

    runs = {}
    for name in ATTENTIONS if args.attention == "both" else [args.attention]:
        runs[name] = train(args, text, len(alphabet), ATTENTIONS[name])
        print(f"{name:8} loss {runs[name][0]:.4f} -> {runs[name][-1]:.4f} after {args.steps} steps")
    if len(runs) == 2:
        apart = max(abs(a - b) for a, b in zip(*runs.values(), strict=True))
        print(f"the losses differ by {apart:.1e} at most")


if __name__ == "__main__":
    main()
