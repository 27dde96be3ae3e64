"""Masks by intervals in JAX programs: jit, gradients, vmap, meshes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from conftest import jax_platforms  # noqa: E402
from jax import numpy as jnp  # noqa: E402

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_lab import reference  # noqa: E402
from flash_attn_lab.fuzz.arrays import random_intervals  # noqa: E402

FORMS = [(True, 1, 1), (True, 2, 2), (False, 2, 4), (False, 4, 1)]  # causal, numbers, heads


@pytest.fixture(params=jax_platforms())
def place(request):
    device = jax.devices(request.param)[0]
    return lambda x, dtype=None: jax.device_put(jnp.asarray(x, dtype), device)


def inputs(place, form, seed=0, batch=2):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((batch, n, h, 16), np.float32) for n, h in ((70, 4), (90, 2), (90, 2)))
    causal, numbers, heads = form
    indices = random_intervals(rng, (batch, heads, 90, numbers), 70)
    seen = reference.dense_from_intervals(indices, 70, causal).repeat(4 // heads, axis=1)
    return [place(x) for x in (q, k, v)], place(indices), place(seen)


def loss(out, lse):
    return jnp.sin(out).sum() + jnp.cos(jnp.where(jnp.isneginf(lse), 0, lse)).sum()


def close(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=3e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_jit_and_gradients(place, form):
    arrays, indices, seen = inputs(place, form)

    def attend(q, k, v, indices):
        return fa.flash_attn_func(q, k, v, causal=form[0], startend_row_indices=indices, return_lse=True)

    want = fa.flash_attn_func(*arrays, causal=form[0], mask=seen, return_lse=True)
    close(jax.jit(attend)(*arrays, indices), want)
    close(attend(*arrays, indices), want)

    def dense(q, k, v):
        return loss(*fa.flash_attn_func(q, k, v, causal=form[0], mask=seen, return_lse=True))

    got = jax.jit(jax.grad(lambda *x: loss(*attend(*x)), (0, 1, 2)))(*arrays, indices)
    close(got, jax.grad(dense, (0, 1, 2))(*arrays))


@pytest.mark.parametrize("over", ["everything", "intervals"])
def test_vmap(place, over):
    form = (False, 2, 2)
    sets = [inputs(place, form, seed) for seed in range(3)]
    indices = jnp.stack([s[1] for s in sets])
    arrays = [jnp.stack(x) for x in zip(*(s[0] for s in sets), strict=True)] if over == "everything" else sets[0][0]
    axes = (0,) * 4 if over == "everything" else (None, None, None, 0)

    def attend(q, k, v, indices):
        return loss(*fa.flash_attn_func(q, k, v, startend_row_indices=indices, return_lse=True))

    got = jax.jit(jax.vmap(jax.value_and_grad(attend, (0, 1, 2)), axes))(*arrays, indices)
    for i in range(3):
        own = sets[i][0] if over == "everything" else sets[0][0]
        value, grads = jax.value_and_grad(attend, (0, 1, 2))(*own, indices[i])
        close([got[0][i], *(x[i] for x in got[1])], [value, *grads])


def test_varlen(place):
    rng = np.random.default_rng(0)
    q, k, v = (place(rng.standard_normal((n, h, 16), np.float32)) for n, h in ((70, 4), (90, 2), (90, 2)))
    cu_q, cu_k = place([0, 30, 70], jnp.int32), place([0, 41, 90], jnp.int32)
    indices = place(random_intervals(rng, (2, 90, 2), 40))

    def packed(q, k, v, indices):
        return fa.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 40, 49, causal=True, startend_row_indices=indices, return_lse=True
        )

    arrays = [np.asarray(x) for x in (q, k, v, cu_q, cu_k)]
    want = reference.varlen(
        reference.standard_attention, *arrays, causal=True, startend_row_indices=np.asarray(indices)
    )
    close(jax.jit(packed)(q, k, v, indices), want)


@pytest.mark.parametrize("indices_heads", [1, 2, 4])
def test_shares_of_devices_get_their_own_numbers(indices_heads):
    """The heads' axis of the numbers is cut like that of q or of k."""
    from flash_attn_minimal._core.options import Options
    from flash_attn_minimal.jax._attention import _Passes

    (q, k, v), indices, _ = inputs(lambda x, dtype=None: jnp.asarray(x, dtype), (True, 1, indices_heads))
    given = {"q": q, "k": k, "v": v, "startend_row_indices": indices}
    axes, _ = _Passes(tuple(given), (), Options(causal=True))._axes(given)
    heads = {1: None, 2: "heads", 4: ("heads", "group")}[indices_heads]
    assert axes["startend_row_indices"] == ("batch", heads, None, None)


def test_traced_numbers_of_another_dtype_are_refused():
    q = jnp.zeros((1, 5, 2, 8))
    with pytest.raises(fa.BadArgument, match="startend_row_indices is float32: expected int32"):
        jax.jit(lambda q, x: fa.flash_attn_func(q, q, q, startend_row_indices=x))(q, jnp.zeros((1, 1, 5, 2)))


ON_A_MESH = """
import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import flash_attn_minimal as fa
from flash_attn_minimal import masks

q = jnp.asarray(np.random.default_rng(0).standard_normal((4, 20, 4, 8), np.float32))
spread = jax.device_put(q, NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2), ("b", "h")), P("b", None, "h")))
attend = jax.jit(lambda q, indices: fa.flash_attn_func(q, q, q, causal=True, startend_row_indices=indices))
got, want = (attend(x, masks.documents([8, 12], like=x)["startend_row_indices"]) for x in (spread, q))
assert len(got.devices()) == 4
np.testing.assert_allclose(got, want, atol=1e-6)
print("the same")
"""


def test_makers_put_the_numbers_where_q_is_spread():
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", ON_A_MESH], env=environment, capture_output=True, text=True)
    assert done.stdout == "the same\n", done.stderr[-2000:]
