"""A training step in JAX: this library's attention inside jax.jit and jax.grad, where XLA calls it without Python.

    python examples/jax_train.py                    trains twice, with JAX's attention and with ours: the losses agree
    python examples/jax_train.py --steps 500 --width 256 --length 512

A Transformer learns to repeat: the second half of each sequence equals the first, so the loss of the second half falls
only when attention finds the matching tokens in the first. Needs jax.
"""

from __future__ import annotations

import argparse
import functools

import numpy as np

from flash_attn_minimal import flash_attn_func

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise SystemExit(f"{error} (pip install jax)") from None

VOCABULARY = 16


def jaxs(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def ours(q, k, v):
    return flash_attn_func(q, k, v, causal=True)


ATTENTIONS = {"jax": jaxs, "ours": ours}


def normalise(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def make_parameters(rng: np.random.Generator, width: int, layers: int, length: int) -> dict:
    """Matrices by their names; those of the layers are stacked, (layers, in, out)."""
    shapes = {
        "embedding": (VOCABULARY, width),
        "position": (length, width),
        "qkv": (layers, width, 3 * width),
        "proj": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
        "out": (width, VOCABULARY),
    }
    return {n: rng.standard_normal(shape, np.float32) * np.float32(shape[-2] ** -0.5) for n, shape in shapes.items()}


def loss_of(parameters, tokens, attend, heads: int):
    """Mean cross entropy, in nats, of the second half of tokens (batch, length)."""
    x = parameters["embedding"][tokens] + parameters["position"]

    def layer(x, matrices):
        q, k, v = jnp.split((normalise(x) @ matrices["qkv"]).reshape(*x.shape[:2], 3 * heads, -1), 3, 2)
        x = x + attend(q, k, v).reshape(x.shape) @ matrices["proj"]
        return x + jax.nn.gelu(normalise(x) @ matrices["up"]) @ matrices["down"], None

    x, _ = jax.lax.scan(layer, x, {name: parameters[name] for name in ("qkv", "proj", "up", "down")})
    scores = jax.nn.log_softmax(normalise(x) @ parameters["out"])
    half = tokens.shape[1] // 2
    return -jnp.take_along_axis(scores[:, half - 1 : -1], tokens[:, half:, None], 2).mean()


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=(0, 1))
def train_step(parameters, moments, tokens, attend, heads: int):
    """One step of Adam. moments: the step's number, and the means of the gradients and of their squares."""
    loss, gradients = jax.value_and_grad(loss_of)(parameters, tokens, attend, heads)
    step, first, second = moments
    step = step + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, second, gradients)
    rate = 3e-3 * jnp.sqrt(1 - 0.99**step) / (1 - 0.9**step)
    parameters = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), parameters, first, second)
    return parameters, (step, first, second), loss


def train(args: argparse.Namespace, attend) -> list[float]:
    """The losses of a run. Runs with the same seed begin with the same weights and see the same tokens."""
    rng = np.random.default_rng(args.seed)
    parameters = jax.device_put(make_parameters(rng, args.width, args.layers, args.length))
    moments = jax.device_put((np.float32(0), *(jax.tree.map(np.zeros_like, parameters) for _ in range(2))))
    losses = []
    for _ in range(args.steps):
        half = rng.integers(VOCABULARY, size=(args.batch, args.length // 2), dtype=np.int32)
        tokens = np.concatenate([half, half], 1)
        parameters, moments, loss = train_step(parameters, moments, tokens, attend, args.heads)
        losses.append(loss)
    return [float(loss) for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--attention", choices=(*ATTENTIONS, "both"), default="both")
    for name, value in (("steps", 100), ("batch", 16), ("length", 32), ("layers", 2), ("heads", 4), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    runs = {}
    for name in ATTENTIONS if args.attention == "both" else [args.attention]:
        runs[name] = train(args, ATTENTIONS[name])
        print(f"{name:8} loss {runs[name][0]:.4f} -> {runs[name][-1]:.4f} after {args.steps} steps")
    if len(runs) == 2:
        apart = max(abs(a - b) for a, b in zip(*runs.values(), strict=True))
        print(f"the losses differ by {apart:.1e} at most")


if __name__ == "__main__":
    main()
