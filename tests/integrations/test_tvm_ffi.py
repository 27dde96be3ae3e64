"""The module for tvm-ffi, loaded by tvm-ffi's own loader from NumPy, PyTorch and JAX: the bits of the Python layer, and
refusals that name the argument. tests/native/test_tvm_ffi.cpp is the same from C++."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import NO_CUDA, ROOT, torch

import flash_attn_minimal as fa
from flash_attn_lab.fuzz.arrays import random_intervals
from flash_attn_minimal._core import library as _library

tvm_ffi = pytest.importorskip("tvm_ffi", reason="the package apache-tvm-ffi is not installed")

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
SOURCE = ROOT / "cuda/tvm_ffi/exports.cpp"
FUNCTIONS = ("forward", "backward", "kvcache", "quantize_kvcache", "merge", "quantize_fp8")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The module beside the library, else one that is compiled here for that library."""
    library = _library.path()
    built = library.with_name("libflash_attn_minimal_tvm_ffi.so")
    if built.exists():
        return built
    compiler = shutil.which("c++")
    if compiler is None or not SOURCE.exists():
        pytest.skip("no module for tvm-ffi beside the library, and no compiler or source to make one")
    made = tmp_path_factory.mktemp("tvm_ffi") / built.name
    headers = [tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
    command = [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'cuda'}"]
    command += [word for header in headers for word in ("-isystem", header)]
    command += [SOURCE, "-o", made, library, f"-Wl,-rpath,{library.parent}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def module(path):
    return tvm_ffi.load_module(str(path))


def call(function, **arguments):
    return function(" ".join(arguments), *arguments.values())


def normal(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape, dtype=np.float32)


def qkv(seqlen_q=19, seqlen_k=23, dim=32, dim_v=48):
    return normal(2, seqlen_q, 4, dim), normal(2, seqlen_k, 2, dim), normal(2, seqlen_k, 2, dim_v)


def intervals(*shape):
    return random_intervals(np.random.default_rng(0), shape, 19)


def nans(*shape):
    return np.full(shape, np.nan, np.float32)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_left": 5, "window_right": 2, "softmax_scale": 0.3, "top_left": True},
    "softcap": {"softcap": 3.0, "softmax_scale": 1},
    "chunk": {"attention_chunk": 8, "causal": 1},
    "heads": {"alibi_slopes": normal(4), "sinks": normal(4)},
    "slopes of sequences": {"alibi_slopes": normal(2, 4)},
    "scores": {"bias": normal(4, 1, 23), "mask": normal(2, 1, 19, 23) > -1},
    "mask of bytes": {"mask": (normal(19, 23) > 0).view(np.uint8)},
    "intervals": {"startend_row_indices": intervals(2, 2, 23, 1), "causal": True},
    "intervals of all sequences": {"startend_row_indices": intervals(1, 1, 23, 4)[..., ::-1, :]},
    "blocks": {"block_mask": normal(2, 4, 1, 1) > 0},
    "blocks of bytes": {"block_mask": (normal(1, 2, 1, 1) > 0).view(np.uint8)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 11, "dropout_offset": 5},
    "kernel": {"kernel": "cpu_naive", "num_threads": 1},
}


def in_python(options):
    """The same options for flash_attn_func."""
    options = dict(options)
    if "window_left" in options:
        options["window_size"] = (options.pop("window_left"), options.pop("window_right"))
    if "causal" in options:
        options["causal"] = bool(options["causal"])
    return options


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_forward_of_numpy_arrays(module, options):
    q, k, v = qkv()
    out, lse = nans(2, 19, 4, 48), nans(2, 4, 19)
    call(module.forward, q=q, k=k, v=v, out=out, lse=lse, **options)
    same, same_lse = fa.flash_attn_func(q, k, v, return_lse=True, **in_python(options))
    assert np.array_equal(out, same) and np.array_equal(lse, same_lse)


def test_statistics(module):
    q, k, v = qkv()
    out, greatest, sums = nans(2, 19, 4, 48), nans(2, 4), nans(2, 4, 23)
    call(module.forward, q=q, k=k, v=v, out=out, max_score=greatest, key_sums=sums, causal=True)
    scores = np.einsum("bihd,bjhd->bhij", q, np.repeat(k, 2, axis=2)) / np.sqrt(32)
    scores = np.where(np.tri(19, 23, 4, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(greatest, scores.max((2, 3)), rtol=1e-5)
    np.testing.assert_allclose(sums, (weights / weights.sum(-1, keepdims=True)).sum(2), atol=1e-5)


@pytest.mark.parametrize("batch, seqlen_q", [(0, 5), (2, 0)])
def test_empty_arrays(module, batch, seqlen_q):
    """NumPy gives them strides of 0."""
    shapes = {"q": (batch, seqlen_q, 4, 16), "k": (batch, 7, 2, 16), "v": (batch, 7, 2, 16)}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    arrays |= {"out": np.zeros(shapes["q"], np.float32), "lse": np.zeros((batch, 4, seqlen_q), np.float32)}
    call(module.forward, **arrays)
    grads = {f"d{name}": np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    call(module.backward, **arrays, dout=arrays["out"], **grads)
    assert all((x == 0).all() for x in grads.values())


def test_slices_and_reversed_rows_are_read_where_they_lie(module):
    buffer = normal(2, 19, 3, 2, 64)
    q, k, v = (buffer[:, ::-1, i, :, :32] for i in range(3))
    out = nans(2, 2, 19, 32).transpose(0, 2, 1, 3)
    call(module.forward, q=q, k=k, v=v, out=out)
    assert np.array_equal(out, fa.flash_attn_func(*(x.copy() for x in (q, k, v))))


@pytest.mark.parametrize(
    "masks", [{}, {"startend_row_indices": intervals(2, 40, 1), "block_mask": np.array([1, 0]).reshape(2, 1, 1, 1) > 0}]
)
def test_packed_sequences(module, masks):
    q, k, v = normal(30, 4, 32), normal(40, 2, 32), normal(40, 2, 32)
    starts_q, starts_k = np.array([0, 7, 30], np.int32), np.array([0, 25, 40], np.int32)
    lengths = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": 23, "max_seqlen_k": 25}
    out, lse = nans(30, 4, 32), nans(4, 30)
    call(module.forward, q=q, k=k, v=v, out=out, lse=lse, causal=True, **lengths, **masks)
    same, same_lse = fa.flash_attn_varlen_func(q, k, v, **lengths, **masks, causal=True, return_lse=True)
    assert np.array_equal(out, same) and np.array_equal(lse, same_lse)
    dout, gradients = normal(30, 4, 32, seed=1), [nans(*x.shape) for x in (q, k, v)]
    named = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    call(module.backward, q=q, k=k, v=v, out=out, lse=lse, dout=dout, causal=True, **named, **lengths, **masks)
    theirs = fa.backward(dout, q, k, v, out, lse, **lengths, **masks, causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(gradients, theirs, strict=True))


def test_backward(module):
    q, k, v = qkv()
    bias, sinks = normal(4, 19, 23), normal(4)
    out, lse = fa.flash_attn_func(q, k, v, bias=bias, sinks=sinks, return_lse=True)
    dout, dlse = normal(2, 19, 4, 48, seed=1), normal(2, 4, 19, seed=1)
    given = {"dq": nans(*q.shape), "dk": nans(*k.shape), "dv": nans(*v.shape)}
    given |= {"dbias": nans(*bias.shape), "dsinks": nans(4)}
    call(module.backward, q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse, bias=bias, sinks=sinks, **given)
    wanted = {"return_dbias": True, "return_dsinks": True}
    theirs = fa.backward(dout, q, k, v, out, lse, dlse=dlse, bias=bias, sinks=sinks, **wanted)
    for name, gradient, same in zip(given, given.values(), theirs, strict=True):
        assert np.array_equal(gradient, same), name
    twice = {name: x.copy() for name, x in given.items()}
    inputs = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse, "bias": bias, "sinks": sinks}
    call(module.backward, **inputs, **twice, accumulate=True)
    for name, gradient in given.items():
        np.testing.assert_allclose(twice[name], 2 * gradient, rtol=1e-5, atol=1e-6)


# ---- caches ----


def test_a_step_over_a_cache(module):
    caches, theirs = ([np.zeros((2, 50, 2, 32), np.float32) for _ in "kv"] for _ in range(2))
    cos, sin = np.cos(normal(60, 16)), np.sin(normal(60, 16))
    lengths, leftpad = np.array([3, 20], np.int32), np.array([1, 0], np.int32)
    q, k, v = normal(2, 5, 4, 32), normal(2, 5, 2, 32, seed=1), normal(2, 5, 2, 32, seed=2)
    out, lse = nans(2, 5, 4, 32), nans(2, 4, 5)
    shared = {"cache_seqlens": lengths, "cache_leftpad": leftpad, "rotary_cos": cos, "rotary_sin": sin}
    given = {"k_cache": caches[0], "v_cache": caches[1], "k_new": k, "v_new": v, "rotary_interleaved": True}
    call(module.kvcache, q=q, out=out, lse=lse, **given, **shared, causal=True)
    same, same_lse = fa.flash_attn_with_kvcache(q, *theirs, k, v, **shared, causal=True, return_softmax_lse=True)
    assert np.array_equal(out, same) and np.array_equal(lse, same_lse)
    assert np.array_equal(caches, theirs) and caches[0].any()


def test_pages_and_one_length_for_all(module):
    q, k_cache, v_cache = normal(2, 1, 4, 32), normal(8, 16, 2, 32), normal(8, 16, 2, 32, seed=1)
    table = np.array([[5, 1, 0], [2, 7, 3]], np.int32)
    out, shared = nans(2, 1, 4, 32), {"block_table": table, "cache_seqlens": 37, "num_splits": 2}
    call(module.kvcache, q=q, k_cache=k_cache, v_cache=v_cache, out=out, **shared, batch_invariant=True)
    assert np.array_equal(out, fa.flash_attn_with_kvcache(q, k_cache, v_cache, **shared, batch_invariant=True))


def test_a_tree_of_draft_tokens(module):
    q, k_cache, v_cache = normal(2, 3, 4, 32), normal(2, 16, 2, 32), normal(2, 16, 2, 32, seed=1)
    tree, out = np.array([0b001, 0b011, 0b101], np.uint64), nans(2, 3, 4, 32)
    call(module.kvcache, q=q, k_cache=k_cache, v_cache=v_cache, out=out, tree_mask=tree, cache_seqlens=11)
    assert np.array_equal(out, fa.flash_attn_with_kvcache(q, k_cache, v_cache, tree_mask=tree, cache_seqlens=11))


@pytest.mark.parametrize("shape", [(2,), (3, 1, 2), (3, 20, 2)], ids=["heads", "entries", "tokens"])
def test_an_8_bit_cache(module, shape):
    rng, entries = np.random.default_rng(0), np.array([2, 0], np.int32)
    k_cache, v_cache = (rng.integers(-127, 128, (3, 20, 2, 32), np.int8) for _ in "kv")
    k_scale, v_scale = (rng.random(shape, np.float32) / 50 for _ in "kv")
    theirs = [x.copy() for x in (k_cache, v_cache, k_scale, v_scale)]
    q, new, lengths = normal(2, 2, 4, 32), normal(2, 2, 2, 32), np.array([4, 9], np.int32)
    out, shared = nans(2, 2, 4, 32), {"cache_seqlens": lengths, "cache_batch_idx": entries, "causal": True}
    given = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale}
    call(module.kvcache, q=q, k_new=new, v_new=new, out=out, **given, **shared)
    factors = {"k_scale": theirs[2], "v_scale": theirs[3]}
    assert np.array_equal(out, fa.flash_attn_with_kvcache(q, *theirs[:2], new, new, **shared, **factors))
    for ours, same in zip(given.values(), theirs, strict=True):
        assert np.array_equal(ours, same)


def test_quantize_kvcache(module):
    k, v = normal(3, 20, 2, 32), normal(3, 20, 2, 48)
    given = {"k_cache": np.ones(k.shape, np.int8), "v_cache": np.ones(v.shape, np.int8)}
    given |= {"k_scale": nans(3, 20, 2), "v_scale": nans(3, 20, 2)}
    call(module.quantize_kvcache, k=k, v=v, **given)
    for ours, theirs in zip(given.values(), fa.quantize_kvcache(k, v, "int8"), strict=True):
        assert np.array_equal(ours, theirs)


def test_merge(module):
    q, k, v = qkv()
    parts = [fa.flash_attn_func(q, k[:, half], v[:, half], return_lse=True) for half in (np.s_[:9], np.s_[9:])]
    (out_a, lse_a), (out_b, lse_b) = parts
    out, lse = nans(*out_a.shape), nans(*lse_a.shape)
    call(module.merge, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)
    same, same_lse = fa.flash_attn_func(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, same, atol=1e-5)
    np.testing.assert_allclose(lse, same_lse, atol=1e-5)


# ---- PyTorch ----


@needs_torch
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_forward_and_backward_of_torch_tensors(module, dtype):
    q, k, v, dout = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in (*qkv(dim_v=32), normal(2, 19, 4, 32)))
    out, lse = torch.full_like(q, torch.nan), torch.empty(2, 4, 19)
    call(module.forward, q=q, k=k, v=v, out=out, lse=lse, causal=True)
    same, same_lse = fa.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, same) and torch.equal(lse, same_lse)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    call(module.backward, q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv, causal=True)
    theirs = fa.backward(dout, q, k, v, out, lse, causal=True)
    assert all(torch.equal(a, b) for a, b in zip((dq, dk, dv), theirs[:3], strict=True))


@needs_torch
def test_float8_of_torch(module):
    x = torch.from_numpy(normal(2, 10, 2, 32))
    out, descale = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(2, 2)
    call(module.quantize_fp8, x=x, out=out, descale=descale, hadamard=True, seed=3)
    same, same_descale = fa.quantize_fp8(x, hadamard=True, seed=3)
    assert torch.equal(out.float(), same.float()) and torch.equal(descale, same_descale)
    k8, v8 = (torch.empty(x.shape, dtype=torch.float8_e4m3fn) for _ in "kv")
    k_scale, v_scale = torch.empty(2, 10, 2), torch.empty(2, 10, 2)
    call(module.quantize_kvcache, k=x, v=x, k_cache=k8, v_cache=v8, k_scale=k_scale, v_scale=v_scale)
    attended = torch.empty_like(x)
    call(module.kvcache, q=x, k_cache=k8, v_cache=v8, k_scale=k_scale, v_scale=v_scale, out=attended)
    torch.testing.assert_close(attended, fa.flash_attn_func(x, x, x), atol=0.15, rtol=0)


@needs_torch
@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
def test_work_goes_to_the_stream_of_torch(module):
    q, k, v = (torch.from_numpy(x).cuda().half() for x in qkv(dim_v=32))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # what follows must wait for it
        late = q + 1
        out = torch.full_like(q, torch.nan)
        call(module.forward, q=late, k=k, v=v, out=out)
        total = out.float().sum()
    stream.synchronize()
    assert torch.equal(out, fa.flash_attn_func(q + 1, k, v)) and torch.isfinite(total)
    with pytest.raises(ValueError, match="k is on CPU 0, but q is on CUDA device 0"):
        call(module.forward, q=q, k=k.cpu(), v=v, out=out)


# ---- JAX ----


@pytest.fixture(scope="module")
def in_jax(module):
    """jax.ffi.ffi_call of a function of the module on the CPU: attributes after arrays, by name."""
    pytest.importorskip("jax", reason="JAX is not installed")
    jax_tvm_ffi = pytest.importorskip("jax_tvm_ffi", reason="the package jax-tvm-ffi is not installed")
    import jax

    numbers = itertools.count()

    def make(function, names, *attributes):
        target = f"test_tvm_ffi_{next(numbers)}"  # a name is registered once
        spec = ["args", "rets", *(f"attrs.{name}" for name in attributes)]
        jax_tvm_ffi.register_ffi_target(target, module.bind(function, names), spec, platform="cpu")
        return lambda results, *arrays, **rest: jax.ffi.ffi_call(target, results, **rest.pop("how", {}))(
            *arrays, **rest
        )

    with jax.default_device(jax.devices("cpu")[0]):
        yield make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_in_a_program_of_jax(in_jax, dtype):
    import jax

    attend = in_jax("forward", "q k v sinks out lse causal softmax_scale", "causal", "softmax_scale")
    q, k, v = (jax.numpy.asarray(x, dtype) for x in qkv())
    sinks = jax.numpy.asarray(normal(4))
    shapes = (jax.ShapeDtypeStruct((2, 19, 4, 48), dtype), jax.ShapeDtypeStruct((2, 4, 19), "float32"))

    @jax.jit
    def program(q, k, v):
        return attend(shapes, q, k, v, sinks, causal=True, softmax_scale=np.float32(0.25))

    options = {"causal": True, "softmax_scale": 0.25, "return_lse": True}
    for ours, theirs in zip(program(q, k, v), fa.flash_attn_func(q, k, v, sinks=sinks, **options), strict=True):
        assert jax.numpy.array_equal(ours, theirs)


def test_a_donated_cache_in_a_program_of_jax(in_jax):
    import jax
    import jax.numpy as jnp

    # the caches are read where they are written
    step = in_jax("kvcache", "q k_new v_new cache_seqlens _ _ out k_cache v_cache")

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def program(q, k, v, length, k_cache, v_cache):
        results = (like(q), like(k_cache), like(v_cache))
        how = {"input_output_aliases": {4: 1, 5: 2}}
        return step(results, q, k, v, length, k_cache, v_cache, how=how)

    q, k, v = (jnp.asarray(normal(2, 6, heads, 32, seed=heads)) for heads in (4, 2, 2))
    k_cache, v_cache, outs = jnp.zeros((2, 16, 2, 32)), jnp.zeros((2, 16, 2, 32)), []
    program = jax.jit(program, donate_argnums=(4, 5))
    for t in range(6):
        now = [x[:, t : t + 1] for x in (q, k, v)]
        out, k_cache, v_cache = program(*now, jnp.full((2,), t, jnp.int32), k_cache, v_cache)
        outs.append(out)
    assert jnp.array_equal(k_cache[:, :6], k)
    exact = fa.flash_attn_func(q, k, v, causal=True)
    assert jnp.allclose(jnp.concatenate(outs, 1), exact, atol=1e-5)


def test_a_refusal_in_a_program_of_jax(in_jax):
    import jax

    attend = in_jax("forward", "q k v out softcap", "softcap")
    q, k, v = qkv(dim_v=32)
    with pytest.raises(Exception, match="softcap=-1 is not a finite number"):
        shape = jax.ShapeDtypeStruct(q.shape, "float32")
        jax.block_until_ready(attend(shape, q, k, v, softcap=np.float32(-1)))


# ---- workspaces ----


@pytest.mark.parametrize("function", ["forward", "backward", "kvcache"])
def test_a_workspace_of_the_caller(module, function):
    q, k, v = qkv(dim_v=32)
    out, lse = nans(*q.shape), nans(2, 4, 19)
    call(module.forward, q=q, k=k, v=v, out=out, lse=lse)
    given = {"q": q, "k": k, "v": v, "out": out}
    if function == "backward":
        given |= {
            "lse": lse,
            "dout": normal(*q.shape),
            "dq": nans(*q.shape),
            "dk": nans(*k.shape),
            "dv": nans(*v.shape),
        }
    if function == "kvcache":
        given = {"q": q, "k_cache": k, "v_cache": v, "out": nans(*q.shape)}
    bytes_ = call(module[f"{function}_workspace"], **given)
    assert isinstance(bytes_, int) and bytes_ > 0
    written = given["dq" if function == "backward" else "out"]
    call(module[function], **given)
    alone = written.copy()
    written[:] = np.nan
    call(module[function], **given, workspace=np.full(bytes_, 255, np.uint8))
    assert np.array_equal(written, alone)
    with pytest.raises(ValueError, match=f"workspace_bytes={bytes_ - 1} .* needs {bytes_}"):
        call(module[function], **given, workspace=np.empty(bytes_ - 1, np.uint8))


# ---- names ahead of the call ----


def test_bound_names(module):
    q, k, v = qkv()
    out, same = nans(2, 19, 4, 48), nans(2, 19, 4, 48)
    attend = module.bind("forward", "q k v out causal")
    call(module.forward, q=q, k=k, v=v, out=same, causal=True)
    attend(q, k, v, out, True)
    assert np.array_equal(out, same)
    assert module.bind("forward_workspace", "q k v out")(q, k, v, out) > 0
    with pytest.raises(ValueError, match=r"k has shape \(2, 19, 4, 16\): .*headdim=32"):
        attend(q, q[..., :16].copy(), v, out, True)
    with pytest.raises(TypeError, match="forward has 5 names for 4 arguments"):
        attend(q, k, v, out)
    for arguments, kind, text in (
        (("forward",), TypeError, "bind takes two texts"),
        (("backwards", "q"), ValueError, "there is no function backwards"),
        (("forward", "q q"), TypeError, "forward is named twice: q"),
    ):
        with pytest.raises(kind, match=text):
            module.bind(*arguments)


# ---- refusals ----


def replaced(**changes):
    """The arguments of a forward call with changes; None takes one away."""
    q, k, v = qkv()
    given = {"q": q, "k": k, "v": v, "out": nans(2, 19, 4, 48)} | changes
    return {name: value for name, value in given.items() if value is not None}


REFUSED = {
    "missing": ({"v": None}, TypeError, "forward needs the argument v"),
    "unknown": ({"casual": True}, TypeError, "forward has no argument casual"),
    "not an array": ({"k": 3}, TypeError, r"k is not an array \(type index 1\)"),
    "axes": ({"k": normal(23, 2, 32)}, ValueError, r"k has shape \(23, 2, 32\): expected \(batch=2, seqlen_k, "),
    "headdim": ({"k": normal(2, 23, 2, 16)}, ValueError, r"k has shape \(2, 23, 2, 16\): .*headdim=32"),
    "keys": ({"v": normal(2, 22, 2, 48)}, ValueError, r"v has shape \(2, 22, 2, 48\): .*seqlen_k=23"),
    "axes of out": ({"out": nans(4)}, ValueError, r"out has shape \(4,\): expected \(batch=2, seqlen_q=19, "),
    "an empty out": ({"out": np.zeros((0, 19, 4, 48), np.float32)}, ValueError, r"out has shape \(0, 19, 4, 48\): exp"),
    "out": ({"out": nans(2, 19, 4, 32)}, ValueError, r"out has shape \(2, 19, 4, 32\): .*headdim_v=48"),
    "dtype": ({"v": normal(2, 23, 2, 48).astype(np.float16)}, ValueError, "v is float16: expected float32"),
    "float64": ({"q": np.zeros((2, 19, 4, 32))}, ValueError, "q is float64: expected float32, float16,"),
    "columns": ({"q": normal(2, 19, 4, 64)[..., ::2]}, ValueError, r"q has strides \(4864, 256, 64, 2\): the last"),
    "five axes": ({"q": normal(1, 2, 19, 4, 32)}, ValueError, "q has 5 axes: expected at most 4"),
    "lse": ({"lse": nans(2, 19, 4)}, ValueError, r"lse has shape \(2, 19, 4\): expected \(batch=2, nheads=4, "),
    "lse in float64": ({"lse": np.empty((2, 4, 19))}, ValueError, "lse is float64: expected float32"),
    "lse with gaps": ({"lse": nans(2, 4, 38)[..., ::2]}, ValueError, "lse has shape .*: it must be contiguous"),
    "bias": ({"bias": normal(3, 19, 23)}, ValueError, r"bias has shape \(3, 19, 23\), which does not broadcast to "),
    "columns of bias": ({"bias": normal(19, 1)}, ValueError, r"bias has shape \(19, 1\), which does not broadcast"),
    "mask": ({"mask": normal(19, 23)}, ValueError, "mask is float32: expected bool or uint8"),
    "intervals": (
        {"startend_row_indices": intervals(2, 1, 22, 2)},
        ValueError,
        "startend_row_indices has shape .*: exp",
    ),
    "numbers": ({"startend_row_indices": intervals(2, 1, 23, 1)}, ValueError, "startend_row_indices.numbers=1 without"),
    "blocks": ({"block_mask": np.ones((2, 1, 2, 1), bool)}, ValueError, r"block_mask has shape .*blocks of rows=1, b"),
    "heads of blocks": ({"block_mask": np.ones((2, 3, 1, 1), bool)}, ValueError, "block_mask.heads=3 is none of 1, nh"),
    "sinks": ({"sinks": normal(2)}, ValueError, r"sinks has shape \(2,\): expected \(nheads=4\)"),
    "seed": ({"dropout_p": 0.5}, TypeError, "dropout_p=0.5 needs a dropout_seed"),
    "flag": ({"causal": 1.5}, TypeError, r"causal is neither true nor false \(type index 3\)"),
    "flag of 2": ({"causal": 2}, ValueError, "causal=2 is neither 0 nor 1"),
    "number": ({"softcap": "3"}, TypeError, "softcap is not a number"),
    "integer": ({"num_threads": 1.0}, TypeError, "num_threads is not an integer"),
    "int32": ({"num_threads": 2**40}, ValueError, "num_threads=1099511627776 is outside -2147483648 .."),
    "the ABI's text": ({"softcap": -1.0}, ValueError, "softcap=-1 is not a finite number >= 0"),
    "window": ({"window_left": -2}, ValueError, "window_left=-2"),
    "kernel": ({"kernel": "quick"}, ValueError, "kernel=quick is not a kernel of this build"),
    "not served": ({"kernel": "cpu_neon"}, (NotImplementedError, RuntimeError), "cpu_neon"),
    "a letter of code 0": ({"kernel": "cpu_naive\0"}, ValueError, "kernel has a letter with the code 0"),
    "long name": ({"kernel": "x" * 99}, ValueError, "kernel=xxx.* is longer than 63 letters"),
    "half varlen": ({"max_seqlen_q": 3}, TypeError, "packed sequences need all of cu_seqlens_q, cu_seqlens_k, "),
}


@pytest.mark.parametrize("changes, kind, text", REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_the_argument(module, changes, kind, text):
    given = replaced(**changes)
    with pytest.raises(kind, match=text):
        call(module.forward, **given)
    if isinstance(out := given["out"], np.ndarray):
        assert np.isnan(out).all()


def test_names_and_arguments_must_agree(module):
    for arguments, text in (
        ((), "takes the names of its arguments first"),
        ((normal(3),), "takes the names of its arguments first"),
        (("q q", 1, 1), "forward is named twice: q"),
        (("q k", 1), "forward has 2 names for 1 arguments"),
        ((" ".join(f"x{i}" for i in range(65)), *range(65)), "at most 64 arguments"),
    ):
        with pytest.raises(TypeError, match=text):
            module.forward(*arguments)


def test_other_functions_name_the_argument_too(module):
    q, k, v = qkv(dim_v=32)
    out, lse = nans(*q.shape), nans(2, 4, 19)
    base = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": q}
    cache = {"q": q, "k_cache": k, "v_cache": v, "out": out}
    for function, given, text in (
        ("backward", {"q": q, "k": k, "v": v, "out": out}, "backward needs the argument lse"),
        ("backward", base | {"dq": q, "dk": k}, "needs the argument dv"),
        ("backward", base | {"dq": k, "dk": k, "dv": v}, r"dq has shape \(2, 23, 2, 32\)"),
        ("backward", base | {"dq": q, "dk": k, "dv": v, "dbias": k}, "dbias is given without a bias"),
        ("kvcache", cache | {"k_new": k}, "k_new is given without v_new"),
        ("kvcache", cache | {"cache_seqlens": 24}, "cache_seqlens=24 is outside 0 .. 23"),
        ("kvcache", cache | {"cache_seqlens": np.zeros(2)}, "cache_seqlens is float64: expected int32"),
        ("kvcache", cache | {"block_table": np.zeros((3, 1), np.int32)}, r"block_table has shape \(3, 1\)"),
        ("kvcache", cache | {"bias": q}, "kvcache has no argument bias"),
        ("kvcache", cache | {"k_scale": normal(2)}, "k_scale.data is set, but only an 8-bit cache has factors"),
        ("quantize_kvcache", {"k": k, "v": v, "k_cache": k, "v_cache": v}, "k_cache is float32: expected float8_e4m3"),
        ("merge", {"out_a": q, "lse_a": lse}, "merge needs the argument out_b"),
        ("quantize_fp8", {"x": q, "out": out, "descale": nans(2, 4)}, "out is float32: expected float8_e4m3fn"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            call(module[function], **given)


def test_read_only_outputs_do_not_get_through(module):
    given = replaced()
    given["out"].flags.writeable = False
    with pytest.raises(BufferError):
        call(module.forward, **given)


def test_errors_belong_to_their_thread(module):
    said, start = {}, threading.Barrier(4)

    def refused(cap):
        given = replaced(softcap=cap)
        start.wait()
        texts = set()
        for _ in range(200):
            try:
                call(module.forward, **given)
            except ValueError as error:
                texts.add(str(error).splitlines()[0])
        said[cap] = texts

    threads = [threading.Thread(target=refused, args=(-float(i),)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {-float(i): {f"softcap=-{i} is not a finite number >= 0"} for i in range(1, 5)}


# ---- what the module says of itself ----


def documented(module, function):
    """Two lists of names: the needed and the optional arguments."""
    needed, optional = re.fullmatch(r".* Needed: (.*)\. Optional:(.*)", module.get_function_doc(function)).groups()
    return needed.split(), optional.split()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_doc_text_lists_every_argument(module, function):
    needed, optional = documented(module, function)
    for name in needed:
        with pytest.raises(TypeError, match=r"needs the argument"):
            module[function](name, None)
    read = set(re.findall(r'"([a-z0-9_]+)"', SOURCE.read_text())) if SOURCE.exists() else set()
    assert not SOURCE.exists() or {*needed, *optional} <= read


def test_every_optional_argument_is_known(module):
    q, k, v = qkv(dim_v=32)
    out, lse = nans(*q.shape), nans(2, 4, 19)
    eight = {"k_cache": k.astype(np.int8), "v_cache": v.astype(np.int8), "k_scale": nans(2, 23, 2)}
    calls = {
        "forward": {"q": q, "k": k, "v": v, "out": out},
        "kvcache": {"q": q, "k_cache": k, "v_cache": v, "out": out},
        "quantize_kvcache": {"k": k, "v": v, **eight, "v_scale": nans(2, 23, 2)},
        "merge": {"out_a": q, "lse_a": np.zeros_like(lse), "out_b": q, "lse_b": np.zeros_like(lse)}
        | {"out": out, "lse": lse},
        "backward": {"q": q, "k": k, "v": v, "out": np.zeros_like(q), "lse": np.zeros_like(lse), "dout": q}
        | {"dq": out, "dk": nans(*k.shape), "dv": nans(*v.shape)},
        "quantize_fp8": {"x": q, "out": None, "descale": None},
    }
    for function, given in calls.items():
        needed, optional = documented(module, function)
        assert set(needed) == set(given)
        if function == "quantize_fp8":
            continue  # DLPack of NumPy has no float8: test_float8_of_torch
        call(module[function], **given, **dict.fromkeys(optional))


def test_the_example(path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, ROOT / "examples/tvm_ffi_arrays.py", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"a text at once and token by token: \de-0\d apart\n", done.stdout.replace(".", "")
    ) or re.match(r"a text at once and token by token: [\d.e+-]+ apart\n", done.stdout)
