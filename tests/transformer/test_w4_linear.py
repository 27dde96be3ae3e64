"""linear with a packed 4-bit weight: every kernel of the build against float64, and the refusals.

The exact answer uses the weight that dequantize returns. Kernels round x to the 16-bit type of the products, may round
int4's weight, too, and sum in float32."""

import ctypes as ct
import functools
import itertools

import accuracy
import numpy as np
import pytest
from conftest import CPU, CUDA, NO_CUDA, cupy, jax, torch

from flash_attn_lab.fuzz.weights import product as exact
from flash_attn_minimal import BadArgument, FlashAttnError, Unsupported, WorkspaceTooSmall, kernel_tables
from flash_attn_minimal.transformer import _library as transformer
from flash_attn_minimal.transformer import ops
from flash_attn_minimal.transformer.quantized import BLOCK, W4Weight

FORMATS = tuple(BLOCK)
DTYPES = ("float16", "bfloat16")
# rows of x, out_features, in_features
SHAPES = (
    (1, 1, 1), (1, 7, 172), (2, 65, 288), (3, 64, 1000), (7, 130, 64), (8, 128, 4096), (9, 33, 65), (16, 256, 512),
    (17, 65, 1000), (31, 130, 288), (33, 64, 2048), (64, 384, 128), (65, 7, 192), (127, 200, 172), (129, 129, 320),
    (260, 272, 1152), (513, 64, 64), (12, 300, 20480), (5, 2200, 1500), (3, 17100, 128),
    (1, 200, 768), (1, 66, 1376), (1, 40, 4096), (1, 3300, 192), (1, 3290, 2048), (1, 3280, 4096),
)  # fmt: skip
KERNELS = kernel_tables()["w4_linear"]
kernels = [
    pytest.param((CPU if kernel["device"] == "cpu" else CUDA, kernel["name"]), id=kernel["name"])
    for kernel in KERNELS
    if kernel["device"] == "cpu" or not NO_CUDA
]


@pytest.fixture(params=kernels)
def product(request):
    """(device, name of the kernel)."""
    return request.param


@functools.lru_cache(maxsize=256)
def weight_of(format, rows, columns, seed=0, spread=0.02):
    """(the quantized weight, its numbers in float64), made on the CPU."""
    w = spread * np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    plain = W4Weight.quantize(w, format)
    return plain, plain.dequantize().astype(np.float64)


def packed_on(device, plain, dtype, pair=False):
    return plain.to(device.array).pack(dtype, pair=pair)


def check(got, y, error):
    got = np.asarray(got, np.float64)
    assert got.shape == y.shape
    bad = ~np.isfinite(y)
    np.testing.assert_array_equal(np.isnan(got) | np.isinf(got), bad)
    off = np.where(bad, 0, np.abs(np.where(bad, 0, got) - np.where(bad, 0, y)) - np.where(bad, 0, error))
    at = np.unravel_index(off.argmax(), off.shape) if off.size else ()
    assert not off.size or off[at] <= 0, f"{tuple(map(int, at))}: got {got[at]}, want {y[at]} within {error[at]}"


def call(product, x, packed, **options):
    """linear with this kernel, into an array of NaN. Skips the test if the kernel does not serve the call."""
    device, name = product
    about = {key: options[key] for key in ("bias", "norm_weight", "residual", "swiglu") if key in options}
    plan = ops.linear_query(x, packed, kernel=name, **about)
    if plan.status == "FA_UNSUPPORTED" and name != "cpu":
        pytest.skip(plan.error)
    assert (plan.status, plan.kernel) == ("FA_OK", name), plan
    columns = packed.shape[0] // (2 if packed.pair else 1)
    if options.get("out") is None:
        options["out"] = device.nans((*x.shape[:-1], columns), options.pop("out_dtype", "float32"))
    got = ops.linear(x, packed, kernel=name, **options)
    assert got is options["out"]
    return device.numpy(got)


def normal(shape, dtype="float32", seed=1):
    return accuracy.round_to(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), dtype)


# ---- answers ----


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("format", FORMATS)
def test_against_float64(product, format, shape):
    rows, n, k = shape
    plain, w = weight_of(format, n, k)
    for dtype, out_dtype in (("float16", "float32"), ("bfloat16", "bfloat16")):
        x = normal((rows, k), dtype)
        got = call(product, product[0].array(x, dtype), packed_on(product[0], plain, dtype), out_dtype=out_dtype)
        check(got, *exact(x, w, format, dtype, out_dtype))


OPTIONS = [
    options
    for options in itertools.product((False, True), repeat=4)  # swiglu, norm, bias, residual
    if sum(options) in (1, 4) or options in ((True, True, False, False), (False, True, False, True))
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(n for n, x in zip("snbr", o, strict=True) if x))
@pytest.mark.parametrize("one_row", [False, True], ids=["rows", "row"])
@pytest.mark.parametrize("format, dtype", [("nvfp4", "bfloat16"), ("mxfp4", "float16"), ("int4", "bfloat16")])
def test_options(product, format, dtype, one_row, options):
    """Norm, bias, SwiGLU and residual, with different types for x, out and the other arrays."""
    device, (swiglu, norm, bias, residual) = product[0], options
    types = itertools.cycle(("float32", "float16", "bfloat16"))
    shapes = ((1, 66, 288), (5, 130, 172), (18, 64, 1000), (130, 200, 320))
    if one_row:
        shapes = ((1, 66, 288), (1, 68, 4096), (1, 6600, 192), (1, 6600, 1288), (1, 66, 768), (1, 40, 2048))
    for (rows, n, k), x_dtype in zip(shapes, types):  # noqa: B905
        if one_row:
            x_dtype = dtype if x_dtype == "float16" and not norm else "float32"
        plain, w = weight_of(format, n, k, spread=0.1)
        x, out_dtype = normal((rows, k), x_dtype), next(types)
        given = {}
        if bias:
            given["bias"] = normal(n, "float16", 2), "float16"
        if norm:
            given["norm_weight"] = normal(k, "bfloat16", 3), "bfloat16"
        if residual:
            given["residual"] = normal((rows, n // 2 if swiglu else n), "float32", 4), "float32"
        packed = packed_on(device, plain, dtype, pair=swiglu)
        arrays = {name: device.array(array, kind) for name, (array, kind) in given.items()}
        got = call(product, device.array(x, x_dtype), packed, swiglu=swiglu, out_dtype=out_dtype, eps=1e-3, **arrays)
        arrays = {name: array.astype(np.float64) for name, (array, _) in given.items()}
        check(got, *exact(x, w, format, dtype, out_dtype, eps=1e-3, swiglu=swiglu, **arrays))


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("size", [1e-8, 1e-3, 1e6, 1e15])
def test_norm_of_x_that_float16_cannot_hold(product, size, rows):
    """Also with columns whose sizes differ by a factor of 2^20."""
    device = product[0]
    plain, w = weight_of("nvfp4", 66, 768)
    x, norm_weight = normal((rows, 768)) * np.float32(size), normal(768, seed=3)
    x[:, :64] *= np.float32(2.0**-20)
    packed = packed_on(device, plain, "float16")
    got = call(product, device.array(x), packed, norm_weight=device.array(norm_weight), eps=1e-12)
    arrays = {"norm_weight": norm_weight.astype(np.float64), "eps": 1e-12}
    y, error = exact(x, w, "nvfp4", "float16", "float32", **arrays)
    check(got, y, error + 1e-8 * np.abs(w).sum(-1))  # numbers below float16's normal ones


@pytest.mark.parametrize("rows", [1, 9, 20, 140])
def test_residual_in_place_and_rows_apart(product, rows):
    device = product[0]
    plain, w = weight_of("nvfp4", 96, 192)
    packed = packed_on(device, plain, "bfloat16")
    x, residual = normal((rows, 2, 192), "bfloat16"), normal((rows, 3, 96), seed=2)
    given, out = device.array(x, "bfloat16")[:, 1], device.array(residual)
    call(product, given, packed, residual=out[:, 1], out=out[:, 1])
    got = device.numpy(out)
    check(got[:, 1], *exact(x[:, 1], w, "nvfp4", "bfloat16", "float32", residual=residual[:, 1]))
    np.testing.assert_array_equal(got[:, ::2], residual[:, ::2])


@pytest.mark.parametrize("rows", [1, 16, 40, 200])
@pytest.mark.parametrize("format", FORMATS)
def test_nan_and_infinity_stay_in_their_row(product, format, rows):
    device = product[0]
    plain, w = weight_of(format, 70, 200)
    for dtype in DTYPES:
        x = normal((rows, 200), dtype)
        x[0, 3] = np.nan
        if rows > 2:
            x[1, 199], x[2, 64] = np.inf, -np.inf
        got = call(product, device.array(x, dtype), packed_on(device, plain, dtype))
        y, error = exact(x, w, format, dtype, "float32")
        assert np.isnan(got[0]).all()
        assert not np.isfinite(got[1 : min(rows, 3)]).any()  # infinite, or NaN under a weight of 0
        check(got[3:], y[3:], error[3:])


@pytest.mark.parametrize("rows", [1, 20, 200])
@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_that_is_not_finite(product, format, rows):
    """The block of such a weight has the scale NaN, which reaches only one column of the result."""
    device = product[0]
    w = 0.1 * np.random.default_rng(3).standard_normal((70, 300), dtype=np.float32)
    w[5, 17], w[64, 299] = np.nan, np.inf
    plain = W4Weight.quantize(w, format)
    x = normal((rows, 300), "float16")
    got = call(product, device.array(x, "float16"), packed_on(device, plain, "float16"))
    assert not np.isfinite(got[:, [5, 64]]).any()
    kept = [n for n in range(70) if n not in (5, 64)]
    y, error = exact(x, plain.dequantize()[kept].astype(np.float64), format, "float16", "float32")
    check(got[:, kept], y, error)


@pytest.mark.parametrize("rows", [1, 20, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_weights_of_any_size(product, format, dtype, rows):
    """Rows of zeros, and rows whose sizes differ by 2^20; the whole weight very small or very large."""
    device = product[0]
    rng = np.random.default_rng(4)
    w = rng.standard_normal((66, 256), dtype=np.float32) * 2.0 ** rng.integers(-10, 10, (66, 1)).astype(np.float32)
    w[::7], w[1, 32:] = 0, 0
    sizes = (1.0, 1e-30, 1e30) if format != "int4" else (1.0, 1e-4)  # its scales are float16
    for size in sizes:
        plain = W4Weight.quantize(w * np.float32(size), format)
        x = normal((rows, 256), dtype)
        got = call(product, device.array(x, dtype), packed_on(device, plain, dtype))
        y, error = exact(x, plain.dequantize().astype(np.float64), format, dtype, "float32")
        assert (got[:, ::7] == 0).all()
        check(got, y, error + 1e-6 * np.abs(w).max() * size)


# ---- the same again ----


@pytest.mark.parametrize("rows", [1, 4, 16, 24, 96, 300])
def test_repeats_bit_for_bit_in_a_dirty_workspace(product, rows):
    device, name = product
    plain, _ = weight_of("mxfp4", 192, 2048)
    packed = packed_on(device, plain, "bfloat16")
    x = device.array(normal((rows, 2048), "bfloat16"), "bfloat16")
    first = call(product, x, packed)
    size = ops.linear_query(x, packed, kernel=name).workspace_bytes
    for fill in (0, 255):
        workspace = device.array(np.full(size + 1, fill, np.uint8))
        np.testing.assert_array_equal(call(product, x, packed, workspace=workspace[1:]), first)  # any alignment
    with pytest.raises(WorkspaceTooSmall, match=f"kernel {name} needs {size}"):
        if not size:
            raise WorkspaceTooSmall(f"kernel {name} needs {size}")
        workspace = device.array(np.zeros(size - 1, np.uint8))
        ops.linear(x, packed, kernel=name, workspace=workspace)


def test_threads_change_no_bit():
    plain, _ = weight_of("nvfp4", 130, 512)
    packed, x = plain.pack("float16"), normal((5, 512))
    np.testing.assert_array_equal(*(ops.linear(x, packed, num_threads=n) for n in (1, 3)))


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
@pytest.mark.parametrize("rows", [1, 16, 48, 192])
@pytest.mark.parametrize("programmatic", [False, True])
def test_a_graph_replays_with_new_numbers(rows, programmatic):
    """A graph of products; each reads the result of the one before it."""
    first, second = weight_of("nvfp4", 512, 256), weight_of("int4", 256, 512)
    packed = packed_on(CUDA, first[0], "float16"), packed_on(CUDA, second[0], "float16")
    x = CUDA.array(normal((rows, 256), "float16"), "float16")
    middle, out = CUDA.nans((rows, 512), "float16"), CUDA.nans((rows, 256), "float32")
    queries = (ops.linear_query(a, w, programmatic=programmatic) for a, w in zip((x, middle), packed, strict=True))
    need = [plan.workspace_bytes for plan in queries]
    workspace = [CUDA.array(np.zeros(max(size, 1), np.uint8)) for size in need]

    def chain():
        ops.linear(x, packed[0], out=middle, workspace=workspace[0], programmatic=programmatic)
        ops.linear(middle, packed[1], out=out, workspace=workspace[1], programmatic=programmatic)

    if CUDA.framework == "torch":
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        replay = graph.replay
    else:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            chain()
            stream.synchronize()
            stream.begin_capture()
            chain()
            graph = stream.end_capture()

        def replay():
            graph.launch(stream)
            stream.synchronize()

    for seed in (5, 6):
        new = normal((rows, 256), "float16", seed)
        x[...] = CUDA.array(new, "float16")
        if CUDA.framework == "cupy":
            cupy.cuda.Device().synchronize()
        for _ in range(3):
            replay()
        y, _ = exact(new, first[1], "nvfp4", "float16", "float16")
        check(CUDA.numpy(middle), *exact(new, first[1], "nvfp4", "float16", "float16"))
        check(CUDA.numpy(out), *exact(CUDA.numpy(middle), second[1], "int4", "float16", "float32"))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_torch_and_jax_arrays(framework):
    pytest.importorskip(framework)
    array = torch.tensor if framework == "torch" else jax.numpy.asarray
    plain, w = weight_of("nvfp4", 24, 100)
    x = normal((2, 3, 100))
    given = array(x)
    got = ops.linear(given, plain.to(lambda part: array(np.array(part))).pack("float16"))
    assert type(got) is type(given)
    y, error = exact(x.reshape(6, 100), w, "nvfp4", "float16", "float32")
    check(np.asarray(got).reshape(6, 24), y, error)


def test_no_rows(device):
    packed = packed_on(device, weight_of("nvfp4", 8, 64)[0], "float16")
    assert ops.linear(device.array(np.ones((0, 64), np.float32)), packed).shape == (0, 8)


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
def test_the_query_says_what_runs(monkeypatch):
    for rows, (n, k) in itertools.product((1, 16, 17, 32, 33, 2048), ((4096, 4096), (7, 172))):
        packed = packed_on(CUDA, weight_of("mxfp4", n, k)[0], "bfloat16")
        x = CUDA.array(np.ones((rows, k), np.float32), "bfloat16")
        plan = ops.linear_query(x, packed)
        assert plan.status == "FA_OK", plan
        assert plan.kernel in [kernel["name"] for kernel in KERNELS if kernel["device"] == "cuda"]
        monkeypatch.setenv("FLASH_ATTN_LINEAR_KERNEL", plan.kernel)
        np.testing.assert_array_equal(
            CUDA.numpy(ops.linear(x, packed)), CUDA.numpy(ops.linear(x, packed, kernel=plan.kernel))
        )
        monkeypatch.delenv("FLASH_ATTN_LINEAR_KERNEL")


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
@pytest.mark.parametrize(
    "kernel, rows, features, programmatic, norm",
    [
        ("small_w4", 1, (4096, 4096), (False, True), (False, True)),
        ("mma_w4", 1, (256, 5120), (False, True), (True,)),
        ("few_w4_sm90", 1, (256, 5120), (False, True), (False,)),
        ("few_w4_sm90", 2, (256, 1024), (False, True), (False,)),
        ("mma_w4", 2, (256, 1024), (True,), (True,)),
        ("few_w4_sm90", 2, (256, 1024), (False,), (True,)),  # its norm is a separate launch
        ("mma_w4", 2, (256, 2048), (False, True), (True,)),
        ("few_w4_sm90", 8, (256, 4096), (False, True), (False, True)),  # too many numbers for mma_w4 to norm
        ("few_w4_sm90", 16, (256, 1024), (False, True), (False, True)),
        ("few_w4_sm90", 24, (7168, 1024), (False, True), (False,)),
        ("wgmma_w4_few_sm90", 24, (7168, 1024), (True,), (True,)),  # a product of a model, after its norm
        ("few_w4_sm90", 32, (256, 1024), (False, True), (False, True)),
        ("wgmma_w4_sm90", 300, (4096, 512), (False, True), (False, True)),
    ],
)
def test_first_choices_on_hopper(kernel, rows, features, programmatic, norm):
    packed = packed_on(CUDA, W4Weight.quantize(np.ones(features, np.float32), "nvfp4"), "bfloat16")
    x = np.ones((rows, features[1]), np.float32)
    if ops.linear_query(CUDA.array(x), packed, kernel="wgmma_w4_sm90").status != "FA_OK":
        pytest.skip("not a Hopper GPU")
    for p, normed in itertools.product(programmatic, norm):
        more = {"norm_weight": CUDA.array(np.ones(features[1], np.float32))} if normed else {}
        plan = ops.linear_query(CUDA.array(x, "float32" if normed else "bfloat16"), packed, programmatic=p, **more)
        assert plan.kernel == kernel, (p, normed, plan)


# ---- stores of the copy engine, and strides that it cannot follow ----


@pytest.mark.skipif(bool(NO_CUDA) or CUDA.framework != "torch", reason=NO_CUDA or "needs PyTorch with CUDA")
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "kernel, rows, columns",
    [
        ("wgmma_w4_few_sm90", 24, 64), ("wgmma_w4_few_sm90", 64, 64), ("wgmma_w4_few_sm90", 48, 128),
        ("wgmma_w4_sm90", 8, 64), ("wgmma_w4_sm90", 136, 64), ("wgmma_w4_sm90", 296, 64),
    ],
)  # fmt: skip
def test_a_block_waits_for_its_stores(kernel, rows, columns, residual):
    """Blocks with many short tiles, the last ones ragged, while copies keep the memory busy. A tile must not overwrite
    data of the previous tile that is still being stored."""
    torch.manual_seed(rows)
    features = 128 * torch.cuda.get_device_properties(0).multi_processor_count * (16 if rows <= 64 else 6)
    weight = W4Weight.quantize(
        torch.randn(features, columns, device="cuda", dtype=torch.bfloat16), "mxfp4", search=False
    )
    packed = weight.pack("bfloat16")
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    if ops.linear_query(x, packed, kernel=kernel).status != "FA_OK":
        pytest.skip("not a Hopper GPU")
    want = x.float() @ weight.dequantize("float32").T
    tolerance = 0.02 * want.abs().amax() + 0.1
    zeros = torch.zeros(rows, features, device="cuda", dtype=torch.bfloat16) if residual else None
    out = torch.empty(rows, features, device="cuda", dtype=torch.bfloat16)
    load, bytes_of = torch.cuda.Stream(), [torch.empty(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for _ in range(20):
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(load):
            for _ in range(4):
                bytes_of[0].copy_(bytes_of[1])
        for _ in range(3):
            ops.linear(x, packed, residual=zeros, out=out, kernel=kernel)
        torch.cuda.synchronize()
        wrong = ~((out.float() - want).abs() <= tolerance)
        assert not wrong.any(), f"{int(wrong.sum())} numbers, the first at {wrong.nonzero()[0].tolist()}"


@pytest.mark.skipif(bool(NO_CUDA) or CUDA.framework != "torch", reason=NO_CUDA or "needs PyTorch with CUDA")
@pytest.mark.parametrize("name", [None, *(row["name"] for row in KERNELS if row["device"] == "cuda")])
@pytest.mark.parametrize("rows", [2, 8, 24, 48, 300])
@pytest.mark.parametrize("descending", ["out", "x", "residual"])
def test_rows_in_descending_order(name, rows, descending):
    """A negative row stride, which the copy engine cannot follow. It is given by the C struct, because PyTorch has no
    negative strides."""
    plain, _ = weight_of("int4", 256, 128)
    packed = packed_on(CUDA, plain, "float16")
    x, residual = (CUDA.array(normal((rows, n), "float16", n), "float16") for n in (128, 256))
    if ops.linear_query(x, packed, kernel=name, residual=residual).status == "FA_UNSUPPORTED":
        pytest.skip("refuses")
    want = ops.linear(x, packed, residual=residual, out=torch.empty_like(residual), kernel=name)
    tensors = {"x": x, "residual": residual, "out": torch.full_like(residual, float("nan"))}
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    fields = {
        "struct_size": ct.sizeof(transformer.W4LinearArgs), "device": 2, "dtype": 2, "compute_dtype": 2, "format": 3,
        "residual_dtype": 2, "out_dtype": 2, "out_features": 256, "in_features": 128, "rows": rows,
        "packed": packed.data.data_ptr(), "kernel": name and name.encode(),
        "workspace": workspace.data_ptr(), "workspace_bytes": workspace.numel(),
    }  # fmt: skip
    for what, tensor in tensors.items():
        if what == descending and what != "out":
            tensor = tensor.flip(0)  # in memory; read from its end it is as before
        tensors[what], stride = tensor, tensor.stride(0)
        last = descending == what
        fields |= {
            f"{what}_data": tensor.data_ptr() + last * (rows - 1) * stride * 2,
            f"{what}_row_stride": -stride if last else stride,
        }
    torch.cuda.synchronize()
    transformer.load().fa_w4_linear(transformer.W4LinearArgs(**fields), None)
    torch.cuda.synchronize()
    got = tensors["out"].flip(0) if descending == "out" else tensors["out"]
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


# ---- refusals ----


def test_wrong_arguments():
    plain, _ = weight_of("nvfp4", 8, 64)
    packed, pair = plain.pack("float16"), plain.pack("float16", pair=True)
    x = np.ones((2, 64), np.float32)
    for call, kind, message in (
        (lambda: ops.linear(x, pair), BadArgument, "swiglu=False, but weight was packed with pair=True"),
        (lambda: ops.linear(x, packed, swiglu=True), BadArgument, "swiglu=True, but weight was packed with pair=False"),
        (
            lambda: ops.linear(x[:, :32], packed),
            BadArgument,
            r"weight has shape \(8, 64\): expected \(out_features, 32\)",
        ),
        (lambda: ops.linear(x, packed, np.ones(7, np.float32)), BadArgument, r"bias has shape \(7,\): expected \(8,\)"),
        (lambda: ops.linear(x, packed, kernel="fast"), BadArgument, "kernel=fast is not a kernel of this build"),
        (lambda: ops.linear(x, packed, kernel=3), BadArgument, "kernel=3 is not the name of a kernel"),
        (lambda: ops.linear(x, x, workspace=x), BadArgument, "workspace is for the products with a PackedW4"),
        (lambda: ops.linear(x, packed, workspace=x), BadArgument, "workspace is float32: expected uint8"),
        (lambda: ops.linear(x, plain), BadArgument, "weight is a W4Weight: expected"),
        (lambda: ops.linear(x, packed, workspace=np.empty(0, np.uint8)), WorkspaceTooSmall, "but kernel cpu needs"),
    ):
        with pytest.raises(kind, match=message):
            call()


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
def test_a_weight_on_the_other_device():
    packed = packed_on(CUDA, weight_of("nvfp4", 8, 64)[0], "float16")
    with pytest.raises(BadArgument, match="weight is on cuda:0, but x is on cpu"):
        ops.linear(np.ones((2, 64), np.float32), packed)


def c_call(**wrong):
    """Calls fa_w4_linear on the CPU by its struct, with fields replaced by `wrong`. A call that is refused must not
    change out."""
    plain, _ = weight_of("nvfp4", 8, 64)
    packed, x, out = plain.pack("float16"), np.ones((2, 64), np.float32), np.full((2, 8), 7, np.float32)
    workspace = np.empty(1 << 16, np.uint8)
    fields = {
        "struct_size": ct.sizeof(transformer.W4LinearArgs), "device": 1, "dtype": 1, "compute_dtype": 2, "format": 1,
        "out_features": 8, "in_features": 64, "rows": 2, "x_data": x.ctypes.data, "x_row_stride": 64,
        "out_data": out.ctypes.data, "out_row_stride": 8, "packed": packed.data.ctypes.data,
        "workspace": workspace.ctypes.data, "workspace_bytes": workspace.size,
    }  # fmt: skip
    try:
        transformer.load().fa_w4_linear(transformer.W4LinearArgs(**(fields | wrong)), None)
    except FlashAttnError:
        assert (out == 7).all()
        raise
    return out


def test_the_c_struct_is_checked():
    assert np.isfinite(c_call()).all()
    for wrong, kind, message in (
        ({"struct_size": 8}, BadArgument, "fa_w4_linear_args.struct_size=8: set it to"),
        ({"device": 3}, BadArgument, "device=3 is neither"),
        ({"dtype": 4}, BadArgument, "dtype=4 is none of"),
        ({"compute_dtype": 1}, BadArgument, "compute_dtype=1 is neither float16"),
        ({"compute_dtype": 3}, BadArgument, "compute_dtype=3, but the weight was packed with 2"),
        ({"format": 4}, BadArgument, "format=4 is none of"),
        ({"format": 2}, BadArgument, "format=2, but the weight was packed with 1"),
        ({"swiglu": 1}, BadArgument, "swiglu=1, but the weight was packed with 0"),
        ({"swiglu": 2}, BadArgument, "swiglu=2 is neither 0 nor 1"),
        ({"out_features": 7, "swiglu": 1}, BadArgument, "out_features=7 is odd, but swiglu=1"),
        ({"out_features": 4}, BadArgument, "out_features=4, but the weight was packed with 8"),
        ({"in_features": 48}, BadArgument, "in_features=48, but the weight was packed with 64"),
        ({"in_features": 0}, BadArgument, "in_features=0 is outside"),
        ({"rows": -1}, BadArgument, "rows=-1 is outside"),
        ({"x_data": None}, BadArgument, "x.data is NULL"),
        ({"out_data": None}, BadArgument, "out.data is NULL"),
        ({"out_row_stride": 7}, BadArgument, "out.row_stride=7 with 8 columns"),
        ({"packed": None}, BadArgument, "packed is NULL"),
        ({"packed": 64}, BadArgument, "packed=0x40 is not aligned to 128 bytes"),
        ({"eps": -1.0}, BadArgument, "eps=-1 is not a finite number"),
        ({"programmatic": 2}, BadArgument, "programmatic=2 is neither"),
        ({"kernel": b"gemv"}, BadArgument, "kernel=gemv is not a kernel of this build"),
        ({"workspace": None}, WorkspaceTooSmall, r"workspace=\(nil\)"),
        ({"workspace_bytes": 8}, WorkspaceTooSmall, "workspace_bytes=8"),
    ):
        with pytest.raises(kind, match=message):
            c_call(**wrong)


@pytest.mark.parametrize("name", [name for name in transformer.OPERATIONS if name.startswith("w4_")])
def test_the_other_c_structs_are_checked(name):
    if name.startswith("w4_linear"):  # test_the_c_struct_is_checked, here and in test_w4_chain.py
        return
    function, kind = getattr(transformer.load(), f"fa_{name}"), transformer.OPERATIONS[name]
    part = "out" if name == "w4_quantize" else "weight"
    memory = np.zeros(4096, np.uint8)
    at = memory.ctypes.data + -memory.ctypes.data % 128
    usual = {"struct_size": ct.sizeof(kind), "device": 1, "dtype": 2, "out_dtype": 2}
    usual |= {f"{part}_format": 1, f"{part}_out_features": 2, f"{part}_in_features": 32}
    usual |= {f"{part}_codes": at, f"{part}_scales": at + 64, f"{part}_tensor_scale": at + 128}
    usual |= {"w_data": at + 256, "w_row_stride": 32, "out_data": at + 256, "out_row_stride": 32, "packed": at + 1024}
    usual |= {"packed_bytes": 2432}
    fields = [field for field, _ in kind._fields_]

    def run(**wrong):
        return function(kind(**{field: x for field, x in (usual | wrong).items() if field in fields}), None)

    run()
    for field, value, message in (
        ("struct_size", 3, f"fa_{name}_args.struct_size=3"),
        ("device", 0, "device=0 is neither"),
        ("dtype", 4, "dtype=4 is n"),
        ("out_dtype", 4, "out_dtype=4 is none of"),
        (f"{part}_format", 0, "format=0 is none of nvfp4"),
        (f"{part}_out_features", 0, "out_features=0 is outside"),
        (f"{part}_in_features", 1 << 25, "in_features=33554432 is outside"),
        (f"{part}_reserved", 1, "reserved=1 must be 0"),
        (f"{part}_codes", None, "codes.data is NULL"),
        (f"{part}_scales", None, "scales.data is NULL"),
        (f"{part}_tensor_scale", None, "tensor_scale.data is NULL"),
        (f"{part}_tensor_scale", at + 2, "tensor_scale.data=.* is not aligned"),
        ("w_data", None, "w.data is NULL"),
        ("w_data", at + 1, "w.data=.* is not aligned"),
        ("out_data", None, "out.data is NULL"),
        ("out_row_stride", 31, "out.row_stride=31 with 32 columns"),
        ("search", 2, "search=2 is neither"),
        ("pair", 2, "pair=2 is neither"),
        ("num_threads", -1, "num_threads=-1 is outside"),
        ("packed", None, "packed is NULL"),
        ("packed", at + 64, "packed=.* is not aligned to 128 bytes"),
        ("packed_bytes", 2431, "packed_bytes=2431, but the packed weight has 2432"),
    ):
        if field in fields:
            with pytest.raises(BadArgument, match=message):
                run(**{field: value})
    with pytest.raises((BadArgument, Unsupported, FlashAttnError), match="bytes is NULL"):
        transformer.load().fa_w4_packed_bytes(1, 2, 32, 0, None)
