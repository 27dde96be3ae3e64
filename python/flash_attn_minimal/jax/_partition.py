"""How a call is cut when its arrays are spread over the devices of a mesh.

Some axes of its arrays may be cut, such as batch and heads. Every device then makes the call for its own share, and a
result that lacks a cut axis is summed over the devices. All other axes are whole on every device. So an input that is
spread over its batch stays spread, and so does the result.

    axes of the mesh    who decides how arrays are spread    how the call is cut
    Auto                XLA, while it compiles               custom_partitioning, by a rule of Shardy
    Explicit            the types of the arrays              jax.shard_map
    Manual              the caller, who has cut them         not at all
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec


class Rule(NamedTuple):
    """The names of the axes of each array; None is an axis that is not cut. Axes with the same name are cut together. A
    pair (outer, inner) is an axis of which only `outer` may be cut, as in heads = (key head, head of its group)."""

    operands: tuple[tuple, ...]
    results: tuple[tuple, ...]


def partitioned(call: Callable[..., tuple], rule: Rule) -> Callable[..., tuple]:
    """The call for arrays that may be spread over devices. `call` takes arrays of any sizes that fit together."""

    def run(*arrays):
        if jax.device_count() == 1 or is_manual():
            return call(*arrays)
        if (mesh := _explicit_mesh(arrays)) is not None:
            return _by_shard_map(call, rule, mesh, arrays)
        return _by_partitioner(call, rule, arrays)

    return run


def is_manual() -> bool:
    """Whether the call is inside jax.shard_map."""
    return bool(hasattr(jax.sharding, "get_abstract_mesh") and jax.sharding.get_abstract_mesh().manual_axes)


def _explicit_mesh(arrays) -> Any | None:
    if not hasattr(jax, "typeof"):  # before JAX 0.6
        return None
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if mesh.explicit_axes:
            return mesh
    return None


def laid_like(array, other) -> Any:
    """The array, spread as the type of `other` says, if types say so: a gradient must have the type of its input."""
    if is_manual() or _explicit_mesh([other]) is None:
        return array
    return jax.reshard(array, jax.typeof(other).sharding)


# ---- which axes of the mesh cut which axes of the call ----


class _Cut(NamedTuple):
    """For each name of a call's axis, the axes of the mesh that it is spread over."""

    axes: dict[str, tuple[str, ...]]

    def spec(self, names: tuple) -> PartitionSpec:
        return PartitionSpec(*(self.axes.get(_outer(name)) for name in names))

    def summed(self, names: tuple) -> tuple[str, ...]:
        """The axes of the mesh over which a result with these axes is a sum."""
        there = {_outer(name) for name in names}
        return tuple(itertools.chain(*(axes for name, axes in self.axes.items() if name not in there)))

    def local(self, call: Callable[..., tuple], rule: Rule) -> Callable[..., tuple]:
        """The function that each device runs."""

        def run(*arrays):
            return tuple(_sum(x, self.summed(names)) for x, names in zip(call(*arrays), rule.results, strict=True))

        return run


def _sum(array, axes):
    return jax.lax.psum(array.astype(jnp.float32), axes).astype(array.dtype) if axes else array


def _outer(name):
    return name[0] if isinstance(name, tuple) else name


def _cut(rule: Rule, shapes: Sequence, specs: Sequence, mesh: Any) -> _Cut:
    """Cuts a call as its operands lie, if possible: an axis of the mesh cuts one axis of the call, into equal
    shares."""
    sizes = {name: min(found) for name, found in _sizes(rule.operands, shapes).items()}
    axes: dict[str, tuple[str, ...]] = {}
    for names, spec in zip(rule.operands, specs, strict=True):
        for name, on in zip(names, spec, strict=False):
            if (name := _outer(name)) is None or name in axes or on is None:
                continue
            used, mine, shares = set(itertools.chain(*axes.values())), [], 1
            for axis in (on,) if isinstance(on, str) else on:
                if axis in used or sizes[name] % (shares * mesh.shape[axis]):
                    break
                mine.append(axis)
                shares *= mesh.shape[axis]
            if shares > 1:
                axes[name] = tuple(mine)
    return _Cut(axes)


def _sizes(operands, shapes) -> dict[str, set[int]]:
    """The sizes by axis name. An outer axis, which also occurs alone, gets its own size and that of the pair."""
    sizes: dict[str, set[int]] = {}
    for names, shape in zip(operands, shapes, strict=True):
        for name, size in zip(names, shape, strict=True):
            if name is not None:
                sizes.setdefault(_outer(name), set()).add(size)
    return sizes


# ---- the two ways ----


def _by_shard_map(call, rule: Rule, mesh, arrays) -> tuple:
    specs = [jax.typeof(x).sharding.spec for x in arrays]
    cut = _cut(rule, [x.shape for x in arrays], specs, mesh)
    wanted = tuple(map(cut.spec, rule.operands))
    arrays = [jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, wanted, strict=True)]
    local = jax.shard_map(
        cut.local(call, rule), mesh=mesh, in_specs=wanted, out_specs=tuple(map(cut.spec, rule.results)),
        axis_names=set(mesh.explicit_axes),
    )  # fmt: skip
    return local(*arrays)


def _by_partitioner(call, rule: Rule, arrays) -> tuple:
    whole = custom_partitioning(lambda *arrays: call(*arrays))

    def found(mesh, operands) -> _Cut | None:
        """The cut, or None if JAX does not know the mesh: then nothing is cut."""
        shardings = [x.sharding for x in operands]
        if not all(isinstance(x, NamedSharding) for x in shardings):
            return None
        return _cut(rule, [x.shape for x in operands], [x.spec for x in shardings], mesh)

    def partition(mesh, operands, results):
        cut = found(mesh, operands)
        if cut is None:
            replicated = [[_everywhere(x.sharding) for x in xs] for xs in (results, operands)]
            return mesh, call, *map(tuple, replicated)
        shardings = [
            [NamedSharding(mesh, cut.spec(names)) for names in arrays] for arrays in (rule.results, rule.operands)
        ]
        return mesh, cut.local(call, rule), *map(tuple, shardings)

    def infer(mesh, operands, results):  # for XLA's partitioner from before Shardy
        cut = found(mesh, operands)
        if cut is None:
            return tuple(_everywhere(operands[0].sharding) for _ in results)
        return tuple(NamedSharding(mesh, cut.spec(names)) for names in rule.results)

    text, more = _for_shardy(rule, [x.shape for x in arrays])
    whole.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=text, **more)
    return whole(*arrays)


def _everywhere(sharding) -> Any:
    """A sharding with the whole array on every device, of the kind of the given one, which has no mesh."""
    return type(sharding).get_replicated(sharding._device_assignment)


def _for_shardy(rule: Rule, shapes) -> tuple[str, dict]:
    """The rule in Shardy's notation: "b i0 h i1, ... -> b i2 h i3". An axis that is not cut gets a unique name."""
    sizes = {name: min(found) for name, found in _sizes(rule.operands, shapes).items()}
    inner = {
        name[1]: size // sizes[name[0]]
        for names, shape in zip(rule.operands, shapes, strict=True)
        for name, size in zip(names, shape, strict=True)
        if isinstance(name, tuple)
    }
    whole: dict[str, None] = {}  # names of axes that are not cut, in order of appearance

    def words(names):
        for name in names:
            own = name[1] if isinstance(name, tuple) else None if name else f"i{len(whole)}"
            if own:
                whole[own] = None
            yield f"({' '.join(name)})" if isinstance(name, tuple) else name or own

    def text(arrays) -> str:
        return ", ".join(" ".join(words(names)) for names in arrays)

    notation = f"{text(rule.operands)} -> {text(rule.results)}"
    return notation, {**inner, "need_replication_factors": tuple(whole)}
