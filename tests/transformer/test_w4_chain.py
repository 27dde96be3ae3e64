"""linear_chain: products with 4-bit weights one after another. Every kernel of the build against float64: each product
is checked with the inputs that earlier products wrote."""

import ctypes as ct
import itertools
import threading

import numpy as np
import pytest
from conftest import CPU, CUDA, NO_CUDA, torch
from test_w4_linear import FORMATS, check, exact, normal, packed_on, weight_of

from flash_attn_minimal import BadArgument, Unsupported, WorkspaceTooSmall
from flash_attn_minimal.transformer import _library as transformer
from flash_attn_minimal.transformer import ops
from flash_attn_minimal.transformer.quantized import W4Weight

KERNELS = [(CPU, "cpu"), *((CUDA, name) for name in ("one_by_one", "chain_w4_sm90") if not NO_CUDA)]


@pytest.fixture(params=[pytest.param(kernel, id=kernel[1]) for kernel in KERNELS])
def chain(request):
    """(device, name of the kernel)."""
    return request.param


class Chain:
    """Products of random numbers. Links are (out_features, in_features, options), with x and residual as linear_chain
    takes them; x=None stands for a separate array."""

    def __init__(self, device, rows, links, format="nvfp4", dtype="bfloat16", seed=0, programmatic=False):
        self.device, self.format, self.dtype = device, format, dtype
        self.products, self.numbers = [], []
        for i, (n, k, options) in enumerate(links):
            options, about = dict(options), {"eps": 1e-3, "swiglu": options.get("swiglu", False)}
            plain, w = weight_of(format, n, k, seed + i, spread=0.1)
            columns = n // 2 if about["swiglu"] else n
            product = {"weight": packed_on(device, plain, dtype, pair=about["swiglu"]), **about}
            product |= {"x": options.get("x"), "programmatic": programmatic}
            if product["x"] is None:
                x_dtype = options.get("x_dtype", dtype)
                about["x"] = normal((rows, k), x_dtype, seed + 10 + i)
                product["x"] = device.array(about["x"], x_dtype)
            for name, shape, kind in (
                ("bias", n, "float16"),
                ("norm_weight", k, options.get("norm_dtype", "float32")),
                ("residual", (rows, columns), "float32"),
            ):
                given = options.get(name)
                if given is True:
                    about[name] = normal(shape, kind, seed + 20 + i)
                    given = device.array(about[name], kind)
                if given is not None and given is not False:
                    product[name] = given
            about["out_dtype"] = options.get("out_dtype", "float32")
            product["out"] = device.nans((rows, columns), about["out_dtype"])
            self.products.append(product)
            self.numbers.append((w, about))

    def __call__(self, kernel, **options):
        plan = ops.linear_chain_query(self.products, kernel=kernel)
        if plan.status == "FA_UNSUPPORTED" and kernel == "chain_w4_sm90":
            pytest.skip(plan.error)
        assert (plan.status, plan.kernel) == ("FA_OK", kernel), plan
        results = ops.linear_chain(self.products, kernel=kernel, **options)
        assert all(got is product["out"] for got, product in zip(results, self.products, strict=True))
        return [self.device.numpy(got) for got in results]

    def check(self, results):
        for (w, about), product, got in zip(self.numbers, self.products, results, strict=True):
            about = dict(about)
            for name in ("x", "residual"):
                if isinstance(product.get(name), int):
                    about[name] = results[product[name]]
            x, out_dtype = about.pop("x"), about.pop("out_dtype")
            arrays = {name: a.astype(np.float64) for name, a in about.items() if isinstance(a, np.ndarray)}
            check(got, *exact(x, w, self.format, self.dtype, out_dtype, **(about | arrays)))


def layer(dim, hidden, heads, dtype="bfloat16"):
    """The products of a decoder between two attentions."""
    return [
        (dim, heads, {"residual": True}),
        (2 * hidden, dim, {"x": 0, "norm_weight": True, "swiglu": True, "out_dtype": dtype}),
        (dim, hidden, {"x": 1, "residual": 0}),
        (heads + 64, dim, {"x": 2, "norm_weight": True, "bias": True, "out_dtype": dtype}),
    ]


# ---- answers ----


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("format, dtype", [("nvfp4", "bfloat16"), ("mxfp4", "float16"), ("int4", "bfloat16")])
@pytest.mark.parametrize(
    "sizes", [(64, 128, 64), (192, 200, 128), (260, 1001, 516), (1024, 2752, 1024)], ids=lambda s: "x".join(map(str, s))
)
def test_a_decoder_layer(chain, sizes, format, dtype, rows):
    made = Chain(chain[0], rows, layer(*sizes, dtype), format, dtype)
    made.check(made(chain[1]))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sizes", [(2048, 4160, 2048), (8192, 320, 512)], ids=lambda s: "x".join(map(str, s)))
def test_a_large_layer(chain, format, sizes):
    made = Chain(chain[0], 1, layer(*sizes), format)
    made.check(made(chain[1]))


@pytest.mark.parametrize("n, k", [(1, 1), (7, 172), (65, 288), (64, 1000), (3300, 65), (40, 4100), (2200, 4096)])
@pytest.mark.parametrize("rows", [1, 3])
def test_one_product(chain, rows, n, k):
    for x_dtype, norm, bias in itertools.product(("float32", "bfloat16"), (False, True), (False, True)):
        options = {"x_dtype": x_dtype, "norm_weight": norm, "bias": bias}
        made = Chain(chain[0], rows, [(n, k, options)])
        made.check(made(chain[1]))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("count", [2, 5, 8])
def test_chains_of_any_length(chain, count, rows):
    """Odd sizes, and every option somewhere. Some products read the result of two products before."""
    links, widths = [], []
    for i in range(count):
        n, swiglu = (130, 64, 1000, 70, 516, 33, 2048, 192)[i], i % 3 == 1
        x = None if i == 0 else i - 1 if i < 3 or i % 2 else i - 2
        options = {
            "x": x,
            "swiglu": swiglu,
            "norm_weight": i % 2 == 1,
            "bias": i % 3 == 0,
            "residual": i % 4 == 2 or None,
        }
        options["norm_dtype"] = ("float32", "float16")[i // 2 % 2]
        links.append((2 * n if swiglu else n, 200 if x is None else widths[x], options))
        widths.append(n)
    made = Chain(chain[0], rows, links)
    made.check(made(chain[1]))


@pytest.mark.parametrize("rows", [1, 2])
def test_in_place(chain, rows):
    """x is the residual stream: the first and the third product overwrite it, and the second reads it."""
    device, name = chain
    made = Chain(device, rows, layer(192, 256, 128))
    results = made(name)
    x = made.products[0]["residual"]
    for i in (0, 2):
        made.products[i] |= {"out": x, "residual": x}
    again = ops.linear_chain(made.products, kernel=name)
    assert again[0] is x and again[2] is x
    for i in (1, 2, 3):
        np.testing.assert_array_equal(device.numpy(again[i]), results[i])


def test_rows_apart(chain):
    """Strided rows of x and out; if no result is given, there is a new array."""
    device, name = chain
    made = Chain(device, 3, [(96, 192, {}), (64, 96, {"x": 0})])
    x = device.array(normal((3, 2, 192), "bfloat16"), "bfloat16")
    out = device.nans((3, 3, 64), "float32")
    made.products[0]["x"] = x[:, 1]
    made.products[1]["out"] = out[:, 2]
    del made.products[0]["out"]
    made.products[0]["out_dtype"] = "float32"
    first, second = ops.linear_chain(made.products, kernel=name)
    made.numbers[0][1]["x"] = device.numpy(x)[:, 1]
    made.check([device.numpy(first), device.numpy(second)])
    assert np.isnan(device.numpy(out)[:, :2]).all()


# ---- the same again ----


@pytest.mark.parametrize("rows", [1, 4])
def test_repeats_bit_for_bit(chain, rows):
    device, name = chain
    made = Chain(device, rows, layer(512, 1376, 512))
    first = made(name)
    for _ in range(100 if name == "chain_w4_sm90" else 3):
        again = ops.linear_chain(made.products, kernel=name)
    for got, want in zip(again, first, strict=True):
        np.testing.assert_array_equal(device.numpy(got), want)


def test_what_lies_ahead_changes_nothing(chain):
    device, name = chain
    made = Chain(device, 1, layer(192, 200, 128))
    first = made(name)
    ahead = [packed_on(device, weight_of("nvfp4", n, 64)[0], "float16") for n in (1, 70, 400, 6000)]
    for count in range(5):
        for got, want in zip(made(name, ahead=ahead[:count]), first, strict=True):
            np.testing.assert_array_equal(got, want)
    for wrong, message in (
        (5 * ahead[:1], "ahead has 5 weights, more than 4"),
        ([1], r"ahead\[0\] is a int, not a PackedW4"),
    ):
        with pytest.raises(BadArgument, match=message):
            made(name, ahead=wrong)


def test_workspace(chain):
    device, name = chain
    made = Chain(device, 9 if name != "chain_w4_sm90" else 1, layer(192, 200, 128))
    size = ops.linear_chain_query(made.products, kernel=name).workspace_bytes
    made.check(made(name, workspace=device.array(np.full(size + 1, 255, np.uint8))[1:]))
    if size:
        with pytest.raises(WorkspaceTooSmall, match=f"kernel {name} needs {size}"):
            made(name, workspace=device.array(np.zeros(size - 1, np.uint8)))


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
@pytest.mark.parametrize("programmatic", [False, True])
@pytest.mark.parametrize("name", ["one_by_one", "chain_w4_sm90"])
def test_in_a_graph_between_programmatic_launches(name, programmatic):
    if CUDA.framework != "torch":
        pytest.skip("captures with PyTorch")
    made = Chain(CUDA, 1, layer(512, 1376, 512), programmatic=programmatic)
    want = made(name)
    x, ones = made.products[0]["residual"], CUDA.array(np.ones(512, np.float32))
    start, before, behind = x.clone(), torch.empty_like(x), torch.empty_like(made.products[2]["out"])

    def body():
        for _ in range(5):  # rms_norm reads what the chain wrote, and writes what it reads
            ops.rms_norm(start, ones, out=before, programmatic=programmatic)
            ops.linear_chain(made.products, kernel=name)
            ops.rms_norm(made.products[2]["out"], ones, out=behind, programmatic=programmatic)

    made.products[0]["residual"] = before
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    for scale in (1, 2):
        start.copy_(scale * x)
        for product in made.products:
            product["out"].fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        made.numbers[0][1]["residual"] = CUDA.numpy(before)
        results = [CUDA.numpy(product["out"]) for product in made.products]
        made.check(results)
    assert not np.array_equal(results[0], want[0])


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
@pytest.mark.parametrize("graphs", [False, True])
def test_two_streams_at_once(graphs):
    """Neither stream may hold resources that the other waits for."""
    if CUDA.framework != "torch":
        pytest.skip("streams of PyTorch")
    chains = [Chain(CUDA, 1, layer(1024, 2752, 1024), seed=seed, programmatic=True) for seed in (0, 100)]
    wants = [made("chain_w4_sm90") for made in chains]
    torch.cuda.synchronize()

    def launch(made):
        for _ in range(50):
            ops.linear_chain(made.products, kernel="chain_w4_sm90")

    launches = [lambda made=made: launch(made) for made in chains]
    if graphs:
        captured = [torch.cuda.CUDAGraph() for _ in chains]
        for graph, body in zip(captured, launches, strict=True):
            with torch.cuda.graph(graph):
                body()
        launches = [graph.replay for graph in captured]

    def repeat(body):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(6):
                body()

    threads = [threading.Thread(target=repeat, args=[body]) for body in launches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for made, want in zip(chains, wants, strict=True):
        for product, exactly in zip(made.products, want, strict=True):
            np.testing.assert_array_equal(CUDA.numpy(product["out"]), exactly)


# ---- refusals ----


def test_what_chain_w4_sm90_refuses():
    if NO_CUDA:
        pytest.skip(NO_CUDA)
    made = Chain(CUDA, 1, layer(64, 128, 64))
    if ops.linear_chain_query(made.products, kernel="chain_w4_sm90").status != "FA_OK":
        pytest.skip("not on this GPU")
    plan = ops.linear_chain_query(made.products)
    assert plan.kernel == "one_by_one" and "rows=1, 4 products of 0 MB" in plan.why_not["chain_w4_sm90"]
    two = Chain(CUDA, 2, layer(64, 128, 64)).products
    assert ops.linear_chain_query(two).kernel == "chain_w4_sm90"
    assert "one product" in ops.linear_chain_query(two[:1]).why_not["chain_w4_sm90"]
    other = Chain(CUDA, 1, layer(64, 128, 64), "mxfp4")
    half = Chain(CUDA, 1, layer(64, 128, 64), "nvfp4", "float16")
    many = Chain(CUDA, 9, layer(64, 128, 64))
    wide = Chain(CUDA, 2, [(64, 16384, {"norm_weight": True})])
    for products, message in (
        (made.products[:1] + other.products[:1], r"products\[1\].format=2, but products\[0\] has 1"),
        (made.products[:1] + half.products[:1], r"products\[1\].compute_dtype=2, but products\[0\] has 3"),
        (made.products[:1] + many.products[:1], r"products\[1\].rows=9, but products\[0\] has 1"),
        (many.products, "rows=9: above 8"),
        (wide.products, r"products\[0\] norms rows=2 of in_features=16384"),
    ):
        plan = ops.linear_chain_query(products)
        assert (plan.status, plan.kernel) == ("FA_OK", "one_by_one")
        with pytest.raises(Unsupported, match=message):
            ops.linear_chain(products, kernel="chain_w4_sm90")


def test_refusals():
    plain, _ = weight_of("nvfp4", 64, 64)
    packed, x = plain.pack("float16"), np.ones((1, 64), np.float32)
    one = {"x": x, "weight": packed}
    for products, message in (
        ([], "products is empty"),
        ([one] * 9, "count=9 is outside 1 .. 8"),
        ([one, {"x": 1, "weight": packed}], r"products\[1\] has x=1: expected the number of one of those before"),
        ([{"x": -1, "weight": packed}], r"products\[0\] has x=-1: expected"),
        ([one | {"residual": 0}], r"products\[0\] has residual=0: expected"),
        ([one, one | {"kernel": "cpu"}], r"products\[1\] has kernel: expected x, weight"),
        ([{"x": x, "weight": x}], r"products\[0\] has a ndarray as its weight, not a PackedW4"),
        ([{"x": x}], r"products\[0\] has a NoneType as its weight"),
        ([one, {"x": x[:, :32], "weight": packed}], r"weight has shape \(64, 64\): expected \(out_features, 32\)"),
        ([one, one | {"norm_weight": x[0], "eps": -1.0}], r"products\[1\]: eps=-1 is not a finite number"),
    ):
        with pytest.raises(BadArgument, match=message):
            ops.linear_chain(products)
    with pytest.raises(BadArgument, match="kernel=chain is not a kernel of this build"):
        ops.linear_chain([one], kernel="chain")


def test_the_environment_forces(monkeypatch):
    plain, _ = weight_of("nvfp4", 64, 64)
    product = {"x": np.ones((1, 64), np.float32), "weight": plain.pack("float16")}
    monkeypatch.setenv("FLASH_ATTN_CHAIN_KERNEL", "nothing")
    with pytest.raises(BadArgument, match="FLASH_ATTN_CHAIN_KERNEL=nothing is not a kernel"):
        ops.linear_chain([product])
    monkeypatch.setenv("FLASH_ATTN_CHAIN_KERNEL", "cpu")
    assert ops.linear_chain_query([product]).kernel == "cpu"


AHEAD, BYTES = ct.c_void_p * 4, ct.c_int64 * 4


def test_the_c_struct_is_checked():
    plain, _ = weight_of("nvfp4", 8, 64)
    packed, x, out = plain.pack("float16"), np.ones((2, 64), np.float32), np.full((2, 2, 8), 7, np.float32)
    workspace = np.empty(1 << 16, np.uint8)

    def call(second=None, **wrong):
        usual = {
            "struct_size": ct.sizeof(transformer.W4LinearArgs),
            "device": 1, "dtype": 1, "compute_dtype": 2, "format": 1, "out_features": 8, "in_features": 64, "rows": 2,
            "x_data": x.ctypes.data, "x_row_stride": 64, "out_row_stride": 8, "packed": packed.data.ctypes.data,
        }  # fmt: skip
        made = [transformer.W4LinearArgs(**usual, out_data=out[i].ctypes.data) for i in range(2)]
        for field, value in (second or {}).items():
            setattr(made[1], field, value)
        fields = {"struct_size": ct.sizeof(transformer.W4LinearChainArgs), "count": 2}
        fields |= {"products": (transformer.W4LinearArgs * 2)(*made), "workspace": workspace.ctypes.data}
        fields |= {"workspace_bytes": workspace.size}
        transformer.load().fa_w4_linear_chain(transformer.W4LinearChainArgs(**(fields | wrong)), None)

    call()
    assert np.isfinite(out).all() and (out[0] == out[1]).all()
    for second, wrong, kind, message in (
        ({}, {"struct_size": 8}, BadArgument, "fa_w4_linear_chain_args.struct_size=8: set it to"),
        ({}, {"count": 0}, BadArgument, "count=0 is outside 1 .. 8"),
        ({}, {"count": 9}, BadArgument, "count=9 is outside"),
        ({}, {"ahead_count": 5}, BadArgument, "ahead_count=5 is outside 0 .. 4"),
        ({}, {"ahead_count": 1}, BadArgument, r"ahead\[0\]=\(nil\) is NULL or not aligned"),
        ({}, {"ahead_count": 1, "ahead": AHEAD(24)}, BadArgument, r"ahead\[0\]=0x18 is NULL or not aligned to 16"),
        ({}, {"ahead_count": 1, "ahead": AHEAD(16), "ahead_bytes": BYTES(-1)}, BadArgument, r"ahead_bytes\[0\]=-1"),
        ({}, {"products": None}, BadArgument, "products is NULL"),
        ({}, {"workspace": None}, WorkspaceTooSmall, "kernel cpu needs"),
        ({"struct_size": 8}, {}, BadArgument, r"products\[1\].struct_size=8, but products\[0\] has"),
        ({"device": 2}, {}, BadArgument, r"products\[1\].device=2, but products\[0\] has 1"),
        ({"out_features": 4}, {}, BadArgument, r"products\[1\]: out_features=4, but the weight was packed with 8"),
        ({"kernel": b"cpu"}, {}, BadArgument, r"products\[1\].kernel=cpu must be NULL"),
        ({"workspace": 8}, {}, BadArgument, r"products\[1\].workspace=0x8 must be NULL"),
    ):
        with pytest.raises(kind, match=message):
            call(second, **wrong)


def test_a_weight_that_is_not_packed():
    with pytest.raises(BadArgument, match="W4Weight as its weight"):
        ops.linear_chain([{"x": np.ones((1, 64), np.float32), "weight": weight_of("nvfp4", 8, 64)[0]}])
    assert isinstance(weight_of("nvfp4", 8, 64)[0], W4Weight)
