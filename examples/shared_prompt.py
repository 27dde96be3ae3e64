"""One prompt, eight answers: a GRPO-like step with the prompt computed once, against a step that repeats the prompt.

    python examples/shared_prompt.py                            on the CPU
    python examples/shared_prompt.py --prompt 2000 --answers 16

Both steps have the same loss and the same gradients, up to rounding. docs/masks.md draws the mask. Needs torch and
rich."""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
from train_tiny import Llama, torch

import flash_attn_minimal as fa
from flash_attn_minimal import masks
from flash_attn_minimal.llama.config import Config


def loss_of(model, tokens, positions, mask, predicting, predicted, weight) -> torch.Tensor:
    """The policy gradient's loss on the first step, where the old policy is the new one: minus the mean over the
    answers of advantage x mean log-probability. Row predicting[i] predicts token predicted[i]."""

    def attention(q, k, v):
        return fa.flash_attn_func(q, k, v, **mask)

    logits = model(tokens[None], attention, torch.float32, torch.as_tensor(positions))[0]
    log_probability = logits[predicting].log_softmax(-1).gather(1, tokens[predicted][:, None])[:, 0]
    return -(weight * log_probability).sum()


def once(prompt, answers, advantages):
    """The prompt, then all answers: the arguments of loss_of."""
    lengths = [len(answer) for answer in answers]
    first = len(prompt) + np.cumsum([0, *lengths])
    predicting = [[len(prompt) - 1, *range(i, i + n - 1)] for i, n in zip(first, lengths, strict=False)]
    positions = masks.shared_prompt_positions([len(prompt)], [lengths])
    mask = masks.shared_prompt([len(prompt)], [lengths], like=prompt)
    return _arguments([prompt, *answers], positions, mask, predicting, np.arange(first[0], first[-1]), advantages)


def repeated(prompt, answers, advantages):
    """The prompt and one answer, the prompt again and the next answer, ..., as documents."""
    texts = [torch.cat([prompt, answer]) for answer in answers]
    lengths = [len(text) for text in texts]
    first = np.cumsum([0, *lengths]) + len(prompt)
    predicted = [np.arange(i, i + len(answer)) for i, answer in zip(first, answers, strict=False)]
    positions = np.concatenate([np.arange(n) for n in lengths])
    mask = masks.documents(lengths, like=prompt)
    return _arguments(texts, positions, mask, [i - 1 for i in predicted], np.concatenate(predicted), advantages)


def _arguments(parts, positions, mask, predicting, predicted, advantages):
    weight = [
        np.full(len(rows), a / len(rows) / len(predicting)) for rows, a in zip(predicting, advantages, strict=True)
    ]
    rows = np.concatenate([np.asarray(x) for x in predicting])
    return torch.cat(parts), positions, mask, rows, predicted, torch.tensor(np.concatenate(weight), dtype=torch.float32)


def step(model, arguments) -> tuple[float, list[torch.Tensor], float]:
    """The loss, the gradients of all parameters, and the seconds of the best of three steps."""
    seconds, loss = [], torch.zeros(())
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        loss = loss_of(model, *arguments)
        loss.backward()
        seconds.append(time.perf_counter() - started)
    return loss.item(), [p.grad for p in model.parameters()], min(seconds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--prompt", type=int, default=768, help="tokens of the prompt")
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--length", type=int, default=96, help="tokens of the longest answer")
    args = parser.parse_args(argv)
    for name, least in (("prompt", 1), ("answers", 2), ("length", 8)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} is below {least}")
    torch.manual_seed(0)
    model = Llama(Config(64, 128, 2, 4, 2, 384, args.prompt + args.length))
    lengths = torch.randint(args.length // 2, args.length + 1, (args.answers,)).tolist()
    prompt, answers = torch.randint(384, (args.prompt,)), [torch.randint(384, (n,)) for n in lengths]
    rewards = torch.rand(args.answers)
    advantages = ((rewards - rewards.mean()) / rewards.std()).tolist()

    results = {}
    for name, make in (("repeated", repeated), ("once", once)):
        arguments = make(prompt, answers, advantages)
        results[name] = step(model, arguments)
        loss, _, seconds = results[name]
        print(f"prompt {name:<8}  {len(arguments[0]):>6} tokens  {1e3 * seconds:8.1f} ms a step  loss {loss:.6f}")
    apart = max(
        (a - b).abs().max().item() / a.abs().max().item()
        for a, b in zip(*(r[1] for r in results.values()), strict=True)
    )
    print(f"gradients differ by {apart:.1e} of the largest of each parameter")
    assert apart < 1e-3 and abs(results["once"][0] - results["repeated"][0]) < 1e-5
    return 0


if __name__ == "__main__":
    sys.exit(main())
