"""Programs drawn from a seed and a number."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from flash_attn_minimal.errors import FlashAttnError

from .. import invalid
from ..arrays import Arena, Layout
from ..case import _options as options_of
from ..draw import Draw
from ..function import World
from .steps import CACHE, functions

SIZES = {
    "batch", "seqlen_q", "seqlen_k", "nheads_k", "group", "headdim", "headdim_v", "lens", "lengths", "rows", "pages",
    "spare", "seqlen_new", "shape", "lead", "dim", "half", "n", "k", "vocab", "extra", "longer", "links", "ranks",
    "latent", "rotary_rows", "function", "seed", "descale", "dtype",
}  # fmt: skip
# Functions whose options do not depend on the seed, so that a recording may be replayed with other contents.
KEPT = {
    "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "merge", "quantize_fp8", "rms_norm", "rope",
    "swiglu", "linear",
}  # fmt: skip
GENERAL = ("naive", "minimal", "simple", "mma_sm80", "cpu_naive", "cpu_portable")  # kernels of most calls
MOST_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}  # the largest arrays of a call


class Small(Draw):
    """Draws small sizes, because a program has many calls."""

    def __init__(self, rng: np.random.Generator, most: int, elements: float):
        super().__init__(rng)
        self.most, self.elements = most, elements

    def size(self, high: int, low: int = 0) -> int:
        return super().size(min(high, max(low, self.most)), low)

    def headdim(self, most: int = 512) -> int:
        return self.pick((8, 16, 32, 33, 64, 64)) if self.chance(0.5) else super().headdim(most)

    def budget(self, large: float = 0.02) -> tuple[float, float]:
        part = float(np.exp(self.rng.uniform(np.log(0.05), 0)))
        return min(400 * self.elements, 4e7) * part, self.elements * part


def generate(seed: int, number: int, world: World, ranks: bool = False) -> dict[str, Any]:
    """The program of this number. It depends only on these arguments, the device and the kernels of the build."""
    return Drawer(seed, number, world, ranks).program()


class Drawer:
    """Draws one program. Most calls vary an earlier call, to find state that is kept from call to call and wrong."""

    def __init__(self, seed: int, number: int, world: World, ranks: bool):
        rng = np.random.default_rng([seed, number, 0xF00D])
        self.world, self.backend, self.ranks = world, world.backend, ranks
        self.cuda = self.backend.device == "cuda"
        sizes = ((128, 1e5), (600, 3e5), (5000, 6e5)) if self.cuda else ((64, 2e4), (128, 5e4), (200, 1e5))
        self.draw = Small(rng, *sizes[int(rng.integers(len(sizes)))])
        self.known = functions()
        self.specs: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.sessions: list[Session] = []
        self.kept: list[dict[str, Any]] = []  # steps that keep a recording
        self.recordings = 0

    def program(self) -> dict[str, Any]:
        draw = self.draw
        names = [self.world.function] if self.world.function else [n for n in self.known if self._fits(n)]
        shares = np.array([self.known[n].weight for n in names])
        count = min(draw.pick((1, 2, 2, 3, 4)), len(names))
        self.theme = [str(n) for n in draw.rng.choice(names, size=count, replace=False, p=shares / shares.sum())]
        self.threads = 1 if self.ranks else draw.pick((1, 1, 1, 2, 3, 4))
        self.later = "autograd backward" in self.theme and draw.chance(0.5)
        length = 5 + min(int(draw.rng.exponential(6)), 45)
        for _ in range(10 * length):
            self._step()
            if len(self.steps) >= length:
                break
        return {"function": "program", "steps": self.steps}

    def _fits(self, name: str) -> bool:
        if self.world.kernel and self.world.kernel not in self.known[name].kernels(self.backend):
            return False
        if name == "autograd backward" and self.backend.framework != "torch":
            return False
        return ("distributed" in name) == self.ranks

    # ---- steps ----

    def _step(self) -> None:
        draw, kind = self.draw, self.draw.rng.random()
        if self.steps and "env" in self.steps[-1] and self.specs and draw.chance(0.7):
            spec = draw.pick(self.specs[-3:])  # like a call before the change, without a forced kernel
            forced = ("mutation",) if self.ranks else ("mutation", "kernel")
            self._add({n: x for n, x in spec.items() if n not in forced} | {"seed": draw.seed()})
        elif kind < (0.12 if self.ranks else 0.06):
            if not self.later and not self.world.kernel:  # gradients that end later see later variables
                self.steps.append({"env": self._env()})
        elif self.ranks and kind < 0.15:
            size = draw.pick((2, 3, 4))
            self.steps.append({"leave": draw.below(size), "ranks": size})
        elif kind < 0.25 and self.kept:
            kept = draw.pick(self.kept)
            spec = self._other_contents(kept["spec"])
            self.steps.append({"spec": spec, "replay": kept["keep"]} | _placed(kept))
        elif kind < 0.6 and "flash_attn_with_kvcache" in self.theme:
            self._session_step()
        elif kind < 0.85 and self.specs:
            self._add(self._varied(draw.pick(self.specs[-4:])))
        else:
            self._add(self._new(draw.pick(self.theme)))

    def _env(self) -> dict[str, str | None]:
        draw = self.draw
        tables = {
            "FLASH_ATTN_KERNEL": "flash_attn_func", "FLASH_ATTN_BACKWARD_KERNEL": "backward",
            "FLASH_ATTN_DENSE_LINEAR_KERNEL": "linear", "FLASH_ATTN_LINEAR_KERNEL": "linear (4 bits)",
            "FLASH_ATTN_CHAIN_KERNEL": "linear_chain",
        }  # fmt: skip
        found: dict[str, str | None] = {}
        for name, function in tables.items():
            kernels = self.known[function].kernels(self.backend)
            used = any(self.known[n].kernels(self.backend) == kernels for n in self.theme)
            if draw.chance(0.8 if used or (self.ranks and function in ("flash_attn_func", "backward")) else 0.1):
                general = [k for k in kernels if k in GENERAL]
                found[name] = (
                    None if draw.chance(0.3) else draw.pick(general if general and draw.chance(0.7) else kernels)
                )
        if not self.cuda and draw.chance(0.4):
            found["FLASH_ATTN_NUM_THREADS"] = draw.pick((None, "1", "2", "3", "5"))
        return found or {"FLASH_ATTN_KERNEL": None}

    def _add(self, spec: dict[str, Any] | None, session: int | None = None) -> None:
        if spec is None or not self._possible(spec):
            return
        draw, ranks = self.draw, "distributed" in spec["function"]
        step: dict[str, Any] = {"spec": spec}
        if session is not None:
            step["session"] = session
        if self.threads > 1 and not ranks and (thread := draw.below(self.threads)):
            step["thread"] = thread
            if draw.chance(0.6):
                step["beside"] = True
        if draw.chance(0.55):
            step["memory"] = draw.below(3)
        if draw.chance(0.3):
            step["times"] = draw.pick((2, 3, 4))
        kind = draw.rng.random()
        if spec["function"] == "autograd backward":
            step |= {"way": "later"} if self.later and kind < 0.5 and "mutation" not in spec else {}
        elif kind < 0.15:
            step["way"] = "exact"
        elif ranks:
            pass
        elif kind < 0.25:
            step["way"] = "record"
        elif kind < 0.35 and spec["function"] in KEPT and not spec.get("dropout_p") and "mutation" not in spec:
            step = {n: x for n, x in step.items() if n not in ("memory", "times")} | {"keep": self.recordings}
            self.recordings += 1
            self.kept.append(step)
        elif kind < 0.38 and not self.cuda and self.threads == 1 and session is None:
            step["way"] = "fork"
        gpus = self.backend.torch.cuda.device_count() if self.cuda and hasattr(self.backend, "torch") else 1
        if gpus > 1 and not ranks and "mutation" not in spec and draw.chance(0.25):
            step["device"] = 1 + draw.below(gpus - 1)
        self.specs.append(spec)
        self.steps.append(step)

    def _possible(self, spec: dict[str, Any]) -> bool:
        """Whether the call can be made, and is small enough. A varied spec may be neither."""
        try:
            layout = Layout(self.known[spec["function"]].arrays(spec))
            options_of(self.known[spec["function"]], spec)
        except Exception:
            return False
        return layout.size <= MOST_BYTES[self.backend.device]

    # ---- calls ----

    def _new(self, name: str) -> dict[str, Any]:
        """A new call. With a forced kernel on a GPU, up to eight calls are drawn until the kernel serves one."""
        draw, function = self.draw, self.known[name]
        kernels = function.kernels(self.backend)
        kernel = self.world.kernel or (draw.pick(kernels) if kernels and draw.chance(0.35) else None)
        spec: dict[str, Any] = {}
        for attempt in range(8 if kernel and self.cuda else 1):
            draw.plain = min(attempt / 5, 0.95) if kernel else float(draw.rng.uniform(0, 0.9))
            spec = {"function": name, **function.trimmed(function.draw(draw, self.backend)), "seed": draw.seed()}
            spec.pop("repeats", None)
            if kernel:
                spec["kernel"] = kernel
            if not kernel or not self.cuda or name.startswith("distributed") or self._served(function, spec):
                break
        draw.plain = 0.0
        # No wrong calls of distributed.decode: a rank appends before it learns that another rank refuses.
        if draw.chance(0.04) and name != "distributed_decode":
            wrong = invalid.mutated(function, spec, draw, self.backend)
            spec = wrong if wrong.get("mutation", [""])[0] in ("option", "dtype", "shape", "none", "keyword") else spec
        return spec

    def _served(self, function, spec) -> bool:
        if not self._possible(spec):
            return False
        try:
            arena = Arena(self.backend, function.arrays(spec), None)
            plan = function.query(spec, arena.views, options_of(function, spec))
            return plan is None or plan.status == "FA_OK"
        except FlashAttnError:
            return False

    def _varied(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The call with other contents, and often with one more change: a size, an option, the kernel, an address."""
        draw, kind = self.draw, self.draw.rng.random()
        spec = {**copy.deepcopy(spec), "seed": draw.seed()}
        spec.pop("mutation", None)
        if kind < 0.3:
            return spec
        if kind < 0.6:
            return self._resized(spec)
        if kind < 0.75:
            return self._aligned(spec)
        function = self.known[spec["function"]]
        if kind < 0.85 and not self.world.kernel:
            kernels = function.kernels(self.backend)
            spec.pop("kernel", None)
            return spec | {"kernel": draw.pick(kernels)} if kernels and draw.chance(0.6) else spec
        draw.plain = 0.3
        other = function.trimmed(function.draw(draw, self.backend))
        draw.plain = 0.0
        names = sorted((other.keys() | spec.keys()) - SIZES - {"kernel", "repeats", "layouts", "mutation"})
        for name in draw.rng.permutation(names)[: draw.pick((1, 1, 2))]:
            spec.pop(name, None)
            if name in other:
                spec[str(name)] = other[name]
        return spec

    def _resized(self, spec: dict[str, Any]) -> dict[str, Any]:
        draw = self.draw
        names = [n for n in spec if n in SIZES and n not in ("function", "seed", "latent", "descale", "dtype", "ranks")]
        if not names:
            return spec
        name, factor = draw.pick(names), draw.pick((0.25, 0.5, 0.5, 1, 1, 2, 2, 4))

        def resized(value: Any) -> Any:
            if isinstance(value, list):
                return [resized(x) for x in value]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                return value
            least = max(self.known[spec["function"]].LEAST.get(name, 0), 1)
            return max(least, int(value * factor) + (draw.pick((-1, 1)) if factor == 1 else 0))

        if name != "links":
            spec[name] = resized(spec[name])
        return spec

    def _aligned(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The call with less, or more, aligned addresses of its arrays. Shapes and strides stay."""
        draw = self.draw
        layouts = {name: dict(layout) for name, layout in spec.get("layouts", {}).items()}
        if any(layout.pop("offset", 0) for layout in layouts.values()):
            return spec | {"layouts": {n: layout for n, layout in layouts.items() if layout}}
        arrays = [n for n, a in self.known[spec["function"]].arrays(spec).items() if a.inside is None]
        for name in draw.rng.permutation(arrays)[: draw.pick((1, 1, 3))]:
            if "." not in name and name not in ("cos", "sin", "workspace"):
                layouts.setdefault(str(name), {})["offset"] = draw.pick((1, 1, 2, 4))
        return spec | {"layouts": layouts}

    def _other_contents(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The call of a recording with other contents of its arrays, and nothing else changed. The lengths of a cache
        are such contents."""
        draw = self.draw
        spec = {**copy.deepcopy(spec), "seed": draw.seed()}
        if spec["function"] == "flash_attn_with_kvcache" and isinstance(spec.get("lengths"), list):
            function = self.known[spec["function"]]
            most = function.capacity(spec) - function.new(spec)
            spec["lengths"] = [max(min(n + draw.pick((1, 1, 7, most // 2)), most), 0) for n in spec["lengths"]]
        return spec

    # ---- sessions: a cache that is appended to ----

    def _session_step(self) -> None:
        draw = self.draw
        if not self.sessions or (len(self.sessions) < 3 and draw.chance(0.15)):
            session = Session.drawn(self, len(self.sessions))
            if session is None:
                return
            self.sessions.append(session)
        session = draw.pick(self.sessions)
        before = len(self.steps)
        self._add(session.step(draw, self), session.number)
        if len(self.steps) == before:
            return
        session.advance(self.steps[-1]["spec"])
        self.steps[-1].pop("keep", None)
        self.steps[-1] |= _placed(session.first)
        for name in ("thread", "device"):  # the same for all steps of a session
            if name not in session.first:
                self.steps[-1].pop(name, None)
        if "thread" not in session.first:
            self.steps[-1].pop("beside", None)
        self.kept = [kept for kept in self.kept if "keep" in kept]


def _placed(step: dict[str, Any]) -> dict[str, Any]:
    return {name: step[name] for name in ("thread", "device") if name in step}


class Session:
    """A cache and its sequences. Each step appends some keys and attends, with options that it draws."""

    def __init__(self, number: int, spec: dict[str, Any], lengths: list[int], first: dict[str, Any]):
        self.number, self.spec, self.lengths, self.first = number, spec, lengths, first

    @classmethod
    def drawn(cls, drawer: Drawer, number: int) -> Session | None:
        draw, function = drawer.draw, drawer.known["flash_attn_with_kvcache"]
        draw.plain = 0.5
        spec = function.trimmed(function.draw(draw, drawer.backend))
        draw.plain = 0.0
        for name in ("repeats", "kernel", "tree", "trees", "leftpad", "attention_chunk", "batch_idx", "latent"):
            spec.pop(name, None)
        batch = min(function.batch(spec), 4)
        lengths = [draw.below(draw.pick((1, 4, 20))) for _ in range(batch)]
        room = max(draw.size(4 * draw.most, 32), max(lengths) + 16)
        if spec.get("pages"):  # the table is that of the first step: it has the pages of all
            spec["pages"], spec["whole_table"] = -(-room // function.get(spec, "rows")), True
        else:
            spec["rows"] = room
        spec |= {"function": function.name, "lengths": lengths, "batch": batch, "seed": draw.seed()}
        spec["layouts"] = {n: x for n, x in spec.get("layouts", {}).items() if n in CACHE}
        if not drawer._possible(spec):
            return None
        first = {"thread": draw.below(drawer.threads)} if drawer.threads > 1 else {}
        return cls(number, spec, lengths, {n: x for n, x in first.items() if x})

    def step(self, draw: Small, drawer: Drawer) -> dict[str, Any]:
        function = drawer.known["flash_attn_with_kvcache"]
        room = function.capacity(self.spec)
        if max(self.lengths) >= room - 2 or draw.chance(0.03):  # a sequence ends, and another one takes its place
            self.lengths[int(np.argmax(self.lengths))] = 0
        left = room - max(self.lengths)
        spec = copy.deepcopy(self.spec)
        spec["seqlen_new"] = min(draw.pick((1, 1, 1, 1, 0, 2, 5, 33)), left)
        spec["seqlen_q"] = draw.pick((1, 1, 1, max(spec["seqlen_new"], 1), 3))
        spec["seed"] = draw.seed()
        spec["lengths"] = [-1 if n and draw.chance(0.05) else n for n in self.lengths]
        for name in ("num_splits", "causal", "batch_invariant", "return_softmax_lse", "out", "softcap", "num_threads"):
            if draw.chance(0.15):
                spec.pop(name, None)
        if draw.chance(0.15):
            spec["num_splits"] = draw.pick((1, 2, 3, 7))
        kernels = function.kernels(drawer.backend)
        if drawer.world.kernel or draw.chance(0.25):
            spec["kernel"] = drawer.world.kernel or draw.pick(kernels)
        if not drawer.cuda and draw.chance(0.3):
            spec["num_threads"] = draw.pick((1, 2, 3))
        if draw.chance(0.2):
            spec["causal"] = True
        return spec

    def advance(self, spec: dict[str, Any]) -> None:
        for b, n in enumerate(spec["lengths"]):
            if n >= 0:
                self.lengths[b] = n + spec.get("seqlen_new", 0)
