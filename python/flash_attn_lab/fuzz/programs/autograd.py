"""PyTorch's gradients through flash_attn_func and flash_attn_varlen_func, from a graph that is used twice, or later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flash_attn_minimal import attention

from ..attention import plain_tf32_head
from ..backward import Backward
from ..judge import Wrong

NOT_FORWARD = ("accumulate", "return_dbias", "return_dsinks")


class Autograd(Backward):
    """The forward pass, and its gradients twice from one graph."""

    name, weight, capturable = "autograd backward", 1.0, False

    def kernels(self, backend):
        return []

    def draw(self, draw, backend):
        spec = super().draw(draw, backend) | {"given": [], "accumulate": False, "return_dbias": False}
        spec |= {"return_dsinks": False, "dlse": False, "max_score": False, "key_sums": False}
        spec["bias"] = None  # PyTorch sums the gradient of a bias in its own way
        return spec

    def call(self, spec, views, options):
        return self.begin(spec, views, options)()

    def begin(self, spec, views, options) -> Callable[[], dict[str, Any]]:
        """Runs the forward pass. Returns a function that computes the gradients."""
        import torch

        views = {n: x for n, x in views.items() if n not in ("out", "lse", "dlse")}
        dout = views.pop("dout")
        inputs = [views.pop(name).detach().requires_grad_() for name in "qkv"]
        function = attention.flash_attn_func if self.get(spec, "lens") is None else attention.flash_attn_varlen_func
        options = {n: x for n, x in options.items() if n not in NOT_FORWARD}
        with torch.enable_grad():
            out, lse = function(*inputs, return_lse=True, **views, **options)

        def end() -> dict[str, Any]:
            once, again = (torch.autograd.grad(out, inputs, dout, retain_graph=True) for _ in range(2))
            if not out.is_cuda or self.get(spec, "deterministic"):
                for name, x, y in zip("qkv", once, again, strict=True):
                    if not torch.equal(x.nan_to_num(), y.nan_to_num()):
                        raise Wrong(f"d{name} is another one when the graph is used again")
            return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), once, strict=True))}

        return end

    # With tf32, out and lse of the forward pass have fewer bits than the backward pass, whose products are in float32.

    def _plain(self, spec):
        plain = super()._plain(spec)
        return functools.partial(plain, forward=plain_tf32_head) if self.get(spec, "allow_tf32") else plain

    def _floor(self, spec, q, k, lse, want):
        floor = super()._floor(spec, q, k, lse, want)
        return 1e-5 + (floor - 1e-5) * 2**11 if self.get(spec, "allow_tf32") else floor

    def _noise(self, spec, values):
        """With tf32, delta comes from an out that is as inexact as one rounded to float16; P and v were rounded,
        too."""
        if not self.get(spec, "allow_tf32"):
            return super()._noise(spec, values)
        return {name: 2 * noise for name, noise in super()._noise(spec | {"dtype": "float16"}, values).items()}

    def values(self, spec):
        values = super().values(spec)
        repeats = "repeat" in self.get(spec, "layouts").get("dout", {})  # then all rows are the same one, and visible
        if self.get(spec, "lens") is not None and "dout" in values and not repeats:
            values["dout"][self._cu(spec)[0][-1] :] = 0
        return values


FUNCTIONS = (Autograd("autograd backward", varlen=False, weight=1),)
