"""Weights of 4 bits: the formats against ml_dtypes, the library's bytes against NumPy's, files."""

import json

import accuracy
import numpy as np
import pytest
from conftest import CPU, NO_CUDA, jax, ml_dtypes, torch

from flash_attn_lab import reference_w4 as reference
from flash_attn_minimal import BadArgument
from flash_attn_minimal.transformer import _safetensors, quantized
from flash_attn_minimal.transformer.quantized import BLOCK, W4Weight

FORMATS = tuple(BLOCK)
SHAPES = ((1, 1), (7, 172), (65, 288), (33, 1000), (2, 4097))


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def awkward(shape):
    """Rows of very different size, zeros, huge and denormal numbers, an infinity and a NaN."""
    rng = np.random.default_rng(1)
    w = normal(shape) * np.exp(rng.uniform(-20, 20, (shape[0], 1))).astype(np.float32)
    if shape[0] > 6:
        w[1], w[2], w[3] = 0, w[2] * 1e-34, np.clip(w[3] * 1e30, -1e38, 1e38)
        w[4, ::3], w[5, -1], w[6, 0] = -0.0, np.nan, -np.inf
    return w


def inside_int4(w):
    """w without the numbers that int4 refuses on the CPU."""
    return np.where(np.isfinite(w), np.clip(w, -4e5, 4e5), w)


def same_bytes(got, wanted):
    got, wanted = np.ascontiguousarray(got), np.ascontiguousarray(wanted)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))


def numpy_of(device, array):
    """The array as NumPy, without conversion to float32."""
    return array.cpu().numpy() if device.framework == "torch" else array.get() if device.framework == "cupy" else array


# ---- numbers ----


def test_e2m1_is_that_of_ml_dtypes():
    native = pytest.importorskip("ml_dtypes").float4_e2m1fn
    ties = [sign * x for sign in (1, -1) for x in (0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7, 1e30)]
    near = np.concatenate([np.nextafter(np.float32(ties), np.float32(to)) for to in (-np.inf, np.inf)])
    x = np.concatenate([np.linspace(-8, 8, 4001), ties, near, [np.inf, -np.inf, np.nan]]).astype(np.float32)
    same_bytes(reference.encode_e2m1(x), x.astype(native).view(np.uint8))
    codes = np.arange(16, dtype=np.uint8)
    same_bytes(reference.E2M1, codes.view(native).astype(np.float32))


def test_scales_are_those_of_ml_dtypes():
    pytest.importorskip("ml_dtypes")
    codes = np.arange(256, dtype=np.uint8)
    for decode, native in (
        (reference.decode_e4m3, ml_dtypes.float8_e4m3fn),
        (reference.decode_e8m0, ml_dtypes.float8_e8m0fnu),
    ):
        np.testing.assert_array_equal(decode(codes), codes.view(native).astype(np.float32))
    numbers = codes[:127].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    between = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, between, np.nextafter(between, np.float32(0)), np.nextafter(between, np.float32(500))])
    same_bytes(reference.encode_e4m3(x), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_under_every_scale(device, format):
    """A row with all 16 codes for each possible scale."""
    scales = np.arange(256, dtype=np.uint8)
    if format == "int4":
        scales = np.arange(0, 1 << 16, 97, dtype=np.uint16).view(np.float16)
    codes = np.tile(np.arange(0, 16, 2, dtype=np.uint8) | np.arange(1, 16, 2, dtype=np.uint8) << 4, (len(scales), 1))
    tensor_scale = np.array([3.7 if format == "nvfp4" else 1], np.float32)
    weight = W4Weight(format, *map(device.array, (codes, scales[:, None], tensor_scale)), 16)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2) * np.repeat([1, -1], 8)
    if format == "int4":
        values = np.arange(16) - np.repeat([0, 16], 8)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = values * reference.decode_scales(scales, format).astype(np.float64)[:, None]
        wanted = exact.astype(np.float32) * tensor_scale
        np.testing.assert_array_equal(device.numpy(weight.dequantize()), wanted)
        for dtype in ("float16", "bfloat16"):
            np.testing.assert_array_equal(device.numpy(weight.dequantize(dtype)), accuracy.round_to(wanted, dtype))


# ---- quantise ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_the_bytes_are_those_of_numpy(device, format, search, dtype):
    for shape in SHAPES:
        for w in (normal(shape), awkward(shape)):
            if format == "int4" and device.name == "cpu":
                w = inside_int4(w)
            w = accuracy.round_to(w, dtype)
            weight = W4Weight.quantize(device.array(w, dtype), format, search)
            codes, scales, tensor_scale = reference.quantize(w, format, search)
            same_bytes(numpy_of(device, weight.tensor_scale), np.float32([tensor_scale]))
            same_bytes(numpy_of(device, weight.scales), scales)
            same_bytes(numpy_of(device, weight.codes), codes)
            assert weight.shape == shape
            assert weight.bytes == codes.nbytes + scales.nbytes + 4
            wanted = reference.dequantize(codes, scales, tensor_scale, format, shape[1])
            np.testing.assert_array_equal(device.numpy(weight.dequantize()), wanted)  # any NaN is like any other


@pytest.mark.parametrize("search", [False, True])
def test_numbers_that_int4_does_not_hold(search):
    """The CPU refuses such numbers by name. They used to become 0, or to be limited to 7 x 65504."""
    w = normal((4, 300))
    w[2, 130] = -1e6
    with pytest.raises(BadArgument, match=r"w\[2, 128:256\] reaches 1e\+06: a block of int4.* up to 4\.5e5"):
        W4Weight.quantize(w, "int4", search)
    with pytest.raises(BadArgument, match=r"w reaches 1e-08, and every number of it would become 0"):
        W4Weight.quantize(np.full((4, 300), -1e-8, np.float32), "int4", search)
    w[2, 130], w[1] = 4.5e5, 1e-8  # one block too small is one of zeros
    weight = W4Weight.quantize(w, "int4", search).dequantize()
    assert not weight[1].any()
    assert abs(weight[2, 130] - 4.5e5) < 0.1 * 4.5e5
    assert not W4Weight.quantize(np.zeros((4, 300), np.float32), "int4", search).dequantize().any()
    for format in ("nvfp4", "mxfp4"):
        for size in (1e-8, 1e6):
            back = W4Weight.quantize(size * normal((4, 300)), format, search).dequantize()
            assert np.abs(back - size * normal((4, 300))).max() < size


@pytest.mark.parametrize("format", FORMATS)
def test_rows_apart_and_one_thread(device, format):
    w = normal((9, 2, 100))
    given = device.array(w)[:, 1]
    weight = W4Weight.quantize(given, format, num_threads=1)
    codes, scales, _ = reference.quantize(w[:, 1], format)
    same_bytes(numpy_of(device, weight.codes), codes)
    same_bytes(numpy_of(device, weight.scales), scales)


def test_the_error_is_that_of_the_format(device):
    """The root mean square of the error on normal numbers, whose root mean square is 1; and search makes it smaller."""
    w = normal((256, 1024))
    for format, plain, searched in (("nvfp4", 0.0955, 0.082), ("mxfp4", 0.115, 0.112), ("int4", 0.118, 0.101)):
        errors = [
            np.sqrt(np.mean((device.numpy(W4Weight.quantize(device.array(w), format, search).dequantize()) - w) ** 2))
            for search in (False, True)
        ]
        assert errors[0] <= plain
        assert errors[1] <= searched
        assert errors[1] < errors[0]


@pytest.mark.parametrize("format", FORMATS)
def test_search_never_makes_a_block_worse(format):
    w = awkward((40, 512))[7:]
    if format == "int4":
        w = inside_int4(w)
    blocks = [
        ((W4Weight.quantize(w, format, search).dequantize().astype(np.float64) - w) ** 2)
        .reshape(len(w), -1, BLOCK[format])
        .sum(-1)
        for search in (False, True)
    ]
    assert (blocks[1] <= blocks[0] * (1 + 1e-5)).all()


def test_what_can_be_said_exactly_is():
    """Numbers of the format come back unchanged; so do zeros and numbers at the ends of float32."""
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    w = np.concatenate([codes, -codes, codes, -codes])[None] * 2.0 ** np.array([[-120], [-30], [0], [90]], np.float32)
    np.testing.assert_array_equal(W4Weight.quantize(w, "mxfp4").dequantize(), w)
    np.testing.assert_array_equal(W4Weight.quantize(w[2:3] * 448, "nvfp4").dequantize(), w[2:3] * 448)
    integers = np.arange(-7, 8, dtype=np.float32)[None] * np.float32(0.25)
    np.testing.assert_array_equal(W4Weight.quantize(integers, "int4").dequantize(), integers)
    for format in FORMATS:
        zeros = W4Weight.quantize(np.zeros((3, 40), np.float32), format)
        np.testing.assert_array_equal(zeros.dequantize(), 0)
        assert zeros.tensor_scale[0] == 1


def test_four_bits_are_an_eighth_of_float32():
    w = normal((64, 4096))
    for format, bits in (("nvfp4", 4.5), ("mxfp4", 4.25), ("int4", 4.125)):
        weight = W4Weight.quantize(w, format, search=False)
        assert weight.codes.nbytes * 8 == w.nbytes
        assert weight.bytes == w.size * bits / 8 + 4


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_torch_and_jax_arrays(framework):
    pytest.importorskip(framework)
    array = torch.tensor if framework == "torch" else jax.numpy.asarray
    w = normal((6, 40))
    given = array(w)
    for format in FORMATS:
        weight = W4Weight.quantize(given, format)
        assert type(weight.codes) is type(weight.dequantize()) is type(given)
        same_bytes(np.asarray(weight.codes), reference.quantize(w, format)[0])
        same_bytes(np.asarray(weight.dequantize()), W4Weight.quantize(w, format).dequantize())
        with pytest.raises(BadArgument, match="scales is a NumPy array, but codes is a"):
            W4Weight(format, weight.codes, np.asarray(weight.scales), weight.tensor_scale, 40)


# ---- pack ----


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS)
def test_both_devices_pack_the_same_bytes(format, dtype):
    from conftest import CUDA

    for shape in ((1, 1), (6, 172), (66, 288), (130, 1000)):
        for w in (normal(shape), awkward(shape)):
            if format == "int4":
                w = inside_int4(w)
            for pair in {False, shape[0] % 2 == 0}:
                host, device = (
                    W4Weight.quantize(where.array(w), format).pack(dtype, pair=pair) for where in (CPU, CUDA)
                )
                same_bytes(numpy_of(CUDA, device.data)[: device.bytes], host.data)


# ---- files ----


@pytest.fixture
def file(tmp_path):
    weights = {f"layer.{format}": W4Weight.quantize(normal((6, 100)), format) for format in FORMATS}
    path = tmp_path / "w.safetensors"
    quantized.save(path, {**weights, "norm": normal(5).astype(np.float16)}, {"made by": "a test"})
    return path, weights


def test_files(file):
    path, weights = file
    found, metadata = quantized.load_file(path)
    assert metadata == {"made by": "a test"}
    assert set(found) == {*weights, "norm"}
    same_bytes(found.pop("norm"), normal(5).astype(np.float16))
    for name, weight in weights.items():
        assert (found[name].format, found[name].shape) == (weight.format, weight.shape)
        for part in ("codes", "scales", "tensor_scale"):
            same_bytes(getattr(found[name], part), getattr(weight, part))
        same_bytes(W4Weight.load(path, name).dequantize("float16"), weight.dequantize("float16"))
    assert path.stat().st_size < sum(weight.bytes for weight in weights.values()) + 10 + 2048  # the header


def test_one_weight_alone(tmp_path):
    weight = W4Weight.quantize(normal((3, 20)))
    weight.save(tmp_path / "w")
    same_bytes(W4Weight.load(tmp_path / "w").codes, weight.codes)
    with pytest.raises(BadArgument, match="has no 4-bit weight 'v', but weight"):
        W4Weight.load(tmp_path / "w", "v")


def test_the_formats_own_library_reads_them(file):
    theirs = pytest.importorskip("safetensors", reason="the safetensors package is not installed")
    with theirs.safe_open(file[0], "np") as opened:
        assert set(opened.keys()) == set(_safetensors.read_safetensors(file[0], _safetensors.ALL))
        same_bytes(opened.get_tensor("layer.int4.scales"), file[1]["layer.int4"].scales)


def rewritten(path, change):
    """The file with its header changed."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def set_format(header, name, **wrong):
    about = json.loads(header["__metadata__"]["flash_attn_minimal.w4"])
    about[name].update(wrong)
    header["__metadata__"]["flash_attn_minimal.w4"] = json.dumps(about)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda h: h["__metadata__"].pop("flash_attn_minimal.w4"), "it holds no 4-bit weights of this package"),
        (lambda h: h.update(x=h.pop("layer.nvfp4.scales")), "it lacks the tensor 'layer.nvfp4.scales'"),
        (lambda h: set_format(h, "layer.mxfp4", format="fp5"), "weight 'layer.mxfp4': format='fp5' is not one of"),
        (lambda h: set_format(h, "layer.mxfp4", format="nvfp4"), r"scales is uint8 \(6, 4\): expected uint8 \(6, 7\)"),
        (lambda h: set_format(h, "layer.int4", in_features=300), r"codes is uint8 \(6, 50\): expected uint8 .*150"),
        (lambda h: set_format(h, "layer.int4", in_features="x"), "'layer.int4'.in_features='x' is not an int"),
        (lambda h: set_format(h, "layer.int4", in_features=100.0), "'layer.int4'.in_features=100.0 is not an int"),
        (lambda h: set_format(h, "layer.int4", format=["int4"]), "'layer.int4'.format=.'int4'. is not a str"),
        (lambda h: h["__metadata__"].update({"flash_attn_minimal.w4": "[]"}), "its metadata are damaged"),
        (lambda h: h["layer.nvfp4.codes"].update(shape=[5, 60]), "layer.nvfp4.*codes is uint8|CRC-32"),
        (lambda h: h["layer.nvfp4.codes"].update(shape=[6, 51]), "needs 306 bytes, but lies at"),
    ],
)
def test_mismatched_files_are_refused(file, change, message):
    rewritten(file[0], change)
    with pytest.raises(BadArgument, match=message):
        quantized.load_file(file[0])


def test_damaged_files_are_refused(file):
    path, _ = file
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 4
    path.write_bytes(raw)
    with pytest.raises(BadArgument, match="tensor '.*' is damaged: its CRC-32 is"):
        quantized.load_file(path)
    path.write_bytes(raw[:-40])
    with pytest.raises(BadArgument, match="truncated or damaged"):
        quantized.load_file(path)


# ---- refusals ----


def test_wrong_arguments():
    w = normal((4, 40))
    weight = W4Weight.quantize(w)
    codes, scales, tensor_scale = weight.codes, weight.scales, weight.tensor_scale
    for call, message in (
        (lambda: W4Weight.quantize(w, "fp4"), "format='fp4' is not one of 'nvfp4', 'mxfp4', 'int4'"),
        (lambda: W4Weight.quantize(w[0]), r"w has shape \(40,\)"),
        (lambda: W4Weight.quantize(w[:0]), r"w has shape \(0, 40\)"),
        (lambda: W4Weight.quantize(w.T), "w has stride 40 along its last axis"),
        (lambda: W4Weight.quantize(w.astype(np.float64)), "w is float64"),
        (lambda: W4Weight.quantize(w, search=2), "search=2 is neither True nor False"),
        (lambda: W4Weight("nvfp4", codes, scales[:3], tensor_scale, 40), r"scales is uint8 \(3, 3\): expected"),
        (lambda: W4Weight("nvfp4", codes, scales, tensor_scale, 42), r"codes is uint8 \(4, 20\): expected.*21"),
        (lambda: W4Weight("nvfp4", codes.view(np.int8), scales, tensor_scale, 40), "codes is int8"),
        (lambda: W4Weight("nvfp4", codes, scales, np.float32([1, 2]), 40), r"tensor_scale is float32 \(2,\)"),
        (lambda: W4Weight("int4", codes, scales, tensor_scale, 40), r"scales is uint8 .*expected float16 \(4, 1\)"),
        (
            lambda: W4Weight("nvfp4", codes[::2], scales[::2], tensor_scale, 40),
            r"codes has strides \(40, 1\): it must be contiguous",
        ),
        (lambda: W4Weight("nvfp4", codes, scales, tensor_scale, 0), "in_features=0 is outside"),
        (lambda: weight.dequantize("int8"), "dtype='int8' is not one of"),
        (lambda: weight.pack("float32"), "dtype='float32' is neither 'float16' nor 'bfloat16'"),
        (lambda: W4Weight.quantize(w[:3]).pack(pair=True), "out_features=3 is odd, but pair=True"),
    ):
        with pytest.raises(BadArgument, match=message):
            call()
