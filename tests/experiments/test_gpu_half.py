"""The part of the experiments that needs a GPU, on a machine that pretends to have one, and with made-up rows."""

import json
import random
from types import SimpleNamespace

import pytest
from pretend import VARIANTS, gpu, variants_library  # noqa: F401  (fixtures)
from test_command import needs_matplotlib, run

from flash_attn_lab import experiments
from flash_attn_lab.bench.report import NotAResult
from flash_attn_lab.bench.systems import Shape
from flash_attn_lab.experiments import (
    _calls,
    _ncu,
    _variants,
    block_size,
    dtype,
    optimisation,
    report,
    roofline,
    traffic,
)
from flash_attn_lab.experiments.experiment import EXPERIMENTS
from flash_attn_lab.fuzz.edits import edit_json
from flash_attn_minimal.errors import LibraryNotFound

KERNELS = [
    {_ncu.DURATION: 1e-5, "dram__bytes_read.sum": 3e6, "dram__bytes_write.sum": 1e6, "lts__t_bytes.sum": 5e7,
     _ncu.WAVEFRONTS: 1e6, _ncu.TENSOR[0]: 61.0}
]  # fmt: skip


def small(monkeypatch, module):
    """Makes the shapes of a module so small that a CPU computes them quickly."""

    def shape(batch, seqlen, nheads, nheads_k, headdim, *rest, **more):
        return Shape(1, min(seqlen, 96), 2, 2, headdim, *rest, **more)

    monkeypatch.setattr(module, "Shape", shape)


# ---- variants ----


def test_the_table_of_variants(gpu):  # noqa: F811
    variants = _variants.Variants("cuda")
    assert [v.name for v in variants.all] == [row[0] for row in VARIANTS]
    assert [v.name for v in variants.of("optimisation", 128)] == ["forward_01", "forward_02", "backward_01"]
    assert [v.name for v in variants.of("optimisation", 64)] == ["forward_01"]
    one = variants.named("tile_d128_128x64")
    assert (one.tile_m, one.tile_n, one.registers, one.spill_bytes, one.backward) == (128, 64, 168, 8, False)
    assert _variants.Variants("cpu").named("tile_d128_128x64").registers == 0
    assert variants.named("nonsense") is None


def test_a_missing_library_of_variants_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_EXPERIMENTS", str(tmp_path / "nowhere.so"))
    with pytest.raises(LibraryNotFound, match=r"nowhere.so\).*FLASH_ATTN_EXPERIMENTS=ON"):
        _variants.Variants("cuda")
    (tmp_path / "nowhere.so").write_text("no library")
    with pytest.raises(LibraryNotFound, match="does not load"):
        _variants.Variants("cuda")


def test_block_sizes_of_variants(tmp_path, monkeypatch, gpu):  # noqa: F811
    small(monkeypatch, block_size)
    data, text = run(tmp_path, "block-size", "--quick")
    assert {row["name"] for row in data["rows"]} == {"tile_d128_64x64", "tile_d128_128x64"}
    assert data["machine"]["gpu"] == "NVIDIA H200"
    reasons = {item["system"]: item["reason"] for item in data["left_out"]}
    assert reasons["broken"] == "broken: it refuses" and "minimal" in reasons
    assert "| 128 x 64 | 2 | 128 |" in text and "minimal, headdim 128: the fastest tile is" in text


def test_without_variants_the_experiment_says_how_to_get_them(tmp_path, monkeypatch, gpu, capsys):  # noqa: F811
    monkeypatch.setenv("FLASH_ATTN_EXPERIMENTS", str(tmp_path / "nowhere.so"))
    _, text = run(tmp_path, "block-size", "--quick", code=1)
    assert "FLASH_ATTN_EXPERIMENTS=ON" in capsys.readouterr().err and "FLASH_ATTN_EXPERIMENTS=ON" in text


def test_the_climb(tmp_path, monkeypatch, gpu):  # noqa: F811
    small(monkeypatch, optimisation)
    asked = []

    def profile(metrics, framework, calls):
        asked.append([(call["name"], call["variant"], call["backward"]) for call in calls])
        if calls[0]["backward"]:
            raise _ncu.NcuError("no permission")
        return [[], KERNELS]

    monkeypatch.setattr(_ncu, "profile", profile)
    data, text = run(tmp_path, "optimisation", "--quick")
    steps = [(row["kernel"], row["pass"], row.get("tensor_share")) for row in data["rows"]]
    assert steps == [("forward_01", "fwd", None), ("forward_02", "fwd", 0.61), ("backward_01", "bwd", None)]
    assert asked == [[("forward_01", True, False), ("forward_02", True, False)], [("backward_01", True, True)]]
    assert "### Forward: headdim 128" in text and "| 61% |" in text and "no permission" in text
    assert "Forward: 2 steps make" in text


def test_traffic_from_counters(tmp_path, monkeypatch, gpu):  # noqa: F811
    def profile(metrics, framework, calls):
        if calls[0]["name"] == "mma_sm80":
            raise _ncu.NcuError("ncu: no luck")
        return [KERNELS] * (len(calls) - 1) + [[]]

    monkeypatch.setattr(_ncu, "profile", profile)
    monkeypatch.setattr(traffic, "MOST_SCORES", 1 << 30)
    monkeypatch.setattr(traffic, "COUNTED_SEQLENS", (1024, 4096, 8192, 16384))
    data, text = run(tmp_path, "traffic")
    rows = [row for row in data["rows"] if row["level"] == "ncu"]
    found = {(row["kernel"], row["order"], row["seqlen"]) for row in rows}
    assert found == {("naive", "standard", 1024)} | {
        (kernel, order, seqlen)
        for kernel, order in (("minimal", "v2"), ("wgmma_sm90", "v2"), ("order_v1", "v1"))
        for seqlen in (1024, 4096, 8192)
    }
    assert rows[0]["dram_bytes"] == 4e6 and rows[0]["shared_bytes_moved"] == 1.28e8 and rows[0]["ncu_us"] == 10
    reasons = [(item["system"], item["reason"].split()[0]) for item in data["left_out"]]
    assert reasons == [
        ("naive", "S"), ("naive", "S"), ("naive", "it"), ("minimal", "it"), ("mma_sm80", "ncu:"), ("wgmma_sm90", "it"),
        ("order_v1", "it"),
    ]  # fmt: skip
    assert "Counted by the GPU" in text and "`minimal` on the GPU, up to seqlen 8192: HBM bytes grow" in text
    assert "portable" not in data


def test_ncu_is_not_asked_for_ever(tmp_path, monkeypatch, gpu):  # noqa: F811
    asked = []

    def profile(metrics, framework, calls):
        asked.append(calls[0]["name"])
        raise _ncu.NcuError("ERR_NVGPUCTRPERM")

    monkeypatch.setattr(_ncu, "profile", profile)
    data, text = run(tmp_path, "traffic", "--quick")
    assert asked == ["naive", "minimal"] and "not tried after two failures" in text
    assert data["rows"] and not [row for row in data["rows"] if row["level"] == "ncu"]


def test_the_profiled_process(gpu, capsys):  # noqa: F811
    shapes = [Shape(1, 33, 2, 2, 128, True, "bfloat16", backward=backward) for backward in (False, True)]
    calls = [
        _calls.call_of(name, shape, True)
        for name, shape in zip(("tile_d128_64x64", "backward_01"), shapes, strict=True)
    ]
    calls += [_calls.call_of("nonsense", shapes[0], True), _calls.call_of("wgmma_sm90", shapes[0], False)]
    _calls.main(json.dumps({"framework": "torch", "calls": calls}))
    assert gpu.marks == ["start", "stop"] * 4
    said = capsys.readouterr().err
    assert "has no variant nonsense" in said and "wgmma_sm90, seqlen 33" in said and "tile" not in said


@pytest.mark.parametrize("name", ["seqlen", "heads", "causal"])
def test_sweeps_on_a_gpu(tmp_path, monkeypatch, gpu, name):  # noqa: F811
    from flash_attn_lab.experiments import sweeps

    def shape(batch, seqlen, nheads, nheads_k, headdim, *rest):
        return Shape(1, min(seqlen, 512), min(nheads, 2), min(nheads_k, 2), 64, *rest[:1], "float32")

    monkeypatch.setattr(sweeps, "Shape", shape)
    data, _ = run(tmp_path, name, "--quick")
    assert data["rows"] and {item["system"] for item in data["left_out"]} == {"mma_sm80", "wgmma_sm90"}


def test_dtypes_on_a_gpu(tmp_path, monkeypatch, gpu):  # noqa: F811
    def shape(*sizes):
        return Shape(1, 64, 2, 2, 64, False, "float32")

    monkeypatch.setattr(dtype, "Shape", shape)
    monkeypatch.setattr(dtype, "_cache", lambda run, size, inputs: run.step("no cache"))
    data, _ = run(tmp_path, "dtype", "--quick")
    assert {row["name"] for row in data["rows"]} >= {"float32", "bfloat16", "float16"}
    assert "float8" in {item["system"] for item in data["left_out"]}


def test_the_roofline_on_a_gpu(tmp_path, monkeypatch, gpu):  # noqa: F811
    monkeypatch.setattr(roofline, "measured_roofs", lambda options, *rest: ROOFS)
    monkeypatch.setattr(roofline, "kernels", lambda: [{"name": "minimal", "device": "cuda"}])
    monkeypatch.setattr(roofline, "kernel", lambda name: experiments._measure.kernel(None))
    small(monkeypatch, roofline)
    from flash_attn_lab.bench import timing

    monkeypatch.setattr(timing, "SUSTAINED_S", 0.001)
    data, text = run(tmp_path, "roofline", "--quick")
    assert "The roofs meet at 162 operations a byte" in text
    assert any("intensity" in row for row in data["rows"])


# ---- made-up rows of a GPU ----

ROOFS = [
    {"suite": "roofline", "system": "cublas", "pass": "linear", "dtype": "bfloat16", "m": 8, "n": 8, "k": 8, "us": 1.0,
     "tflops": 650.0},
    {"suite": "roofline", "system": "copy", "pass": "copy", "us": 1.0, "tbps": 4.0},
]  # fmt: skip


def timed(name, us, seqlen=4096, causal=False, nheads=16, **more):
    shape = Shape(4, seqlen, nheads, nheads, 128, causal, "bfloat16")
    row = {"name": name, "kernel": more.pop("kernel", name), "pass": "fwd"} | shape.keys()
    row |= {"max_err": 1e-3, "err_budget": 2e-3, "us": us, "us_min": us, "us_spread": 0.0}
    return row | {"tflops": shape.flops / us * 1e-6} | more


def variant(name, us, **more):
    row = {"variant_of": "mma_sm80", "about": "what is new", "order": 1, "tile_m": 64, "tile_n": 64, "stages": 2}
    row |= {"threads": 128, "registers": 168, "shared_bytes": 65536, "spill_bytes": 0, "blocks_per_sm": 2}
    return timed(name, us, **(row | more))


def sweep(axis):
    from flash_attn_lab.experiments.sweeps import waves

    for name in ("best", "wgmma_sm90", "mma_sm80"):
        kernel = "wgmma_sm90" if name == "best" else name
        for causal in (False, True) if axis == "causal" else (False,):
            for size in (1, 2, 4, 8, 16, 32, 64):
                sizes = {"nheads": size, "seqlen": 1024} if axis == "heads" else {"seqlen": 128 * size}
                row = timed(name, (5.0 + size) * (0.6 if causal else 1), kernel=kernel, causal=causal, **sizes)
                row["batch"] = 1
                one = Shape(1, row["seqlen_q"], row["nheads"], row["nheads"], 128, causal, "bfloat16")
                yield row | waves(kernel, one, 132)


def power(name, us, watts):
    row = timed(name, us)
    more = {"sustained_us": us, "sustained_tflops": row["tflops"], "sustained_w": watts, "sustained_mhz": 1700.0}
    return row | more | roofline.modelled(name, Shape(4, 4096, 16, 16, 128, False, "bfloat16"))


def error(group, name, inputs, rms):
    row = timed(name, 100.0) | {"group": group, "inputs": inputs, "rms": rms, "largest": 10 * rms, "bytes": 10**9}
    return row


ROWS = {
    "block-size": [
        variant("a", 100.0), variant("b", 80.0, tile_m=128), variant("c", 300.0, tile_n=256, spill_bytes=64),
        variant("d", 70.0, causal=True), timed("mma_sm80", 75.0),
    ],
    "seqlen": list(sweep("seqlen")),
    "heads": list(sweep("heads")),
    "causal": list(sweep("causal")),
    "optimisation": [
        variant("forward_01", 900.0, tensor_share=0.2), variant("forward_02", 950.0, order=2),
        variant("forward_03", 90.0, order=3, tile_m=0, registers=0, shared_bytes=0),
        variant("backward_01", 90000.0) | {"pass": "bwd"}, variant("backward_02", 300.0, order=2) | {"pass": "bwd"},
    ],
    "roofline": [*ROOFS, power("naive", 1e5, 300.0), power("minimal", 1e4, 500.0), power("wgmma_sm90", 400.0, 690.0)],
    "dtype": [
        error(group, name, inputs, (1 + i) * 1e-3 * (3 if inputs == "outliers" else 1))
        for group, names in (
            ("attention", ("float32", "tf32", "bfloat16", "float16", "float8", "float8, q and k rotated")),
            ("cache", ("bfloat16", "int8, a factor for every token", "int8, a factor for every head")),
        )
        for i, name in enumerate(names) for inputs in ("normal", "outliers")
    ],
}  # fmt: skip
SAID = {
    "block-size": ["the fastest tile is 128 x 64 (80.0 us)", "1 of 3 tiles spill registers", "its own tiles: 75.0 us"],
    "seqlen": ["all blocks run at once", "waves of blocks on 132 SMs", "The machine is full"],
    "heads": ["The steepest step is from", "16 times the heads of the first call take 3.5 times as long"],
    "causal": ["causal takes 0.60 of the time of full at seqlen 128", "at most 0.6 first at 128"],
    "optimisation": ["Forward: 3 steps make 10.0 times", "`forward_02`: slower than the step before", "| 20% |"],
    "roofline": ["The roofs meet at 162 operations a byte", "whatever the arithmetic: naive.", "A watt buys", "690 W"],
    "dtype": ["Rotating q and k", "three more bits of mantissa", "A cache in int8 with one factor for a head"],
}


def made_up(name, rows):
    machine = {"gpu": "NVIDIA H200", "host": "a host", "cuda": "13.0", "sm_clock_mhz": 1700.0, "power_w": 600.0}
    return {
        "experiment": name,
        "machine": machine,
        "date": "2000-01-01",
        "command": "python",
        "rows": rows,
        "left_out": [],
    }


@pytest.mark.parametrize("name", ROWS)
def test_pages_of_a_gpu(tmp_path, name):
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(made_up(name, ROWS[name])))
    report.redraw(file)
    text = file.with_suffix(".md").read_text()
    for sentence in SAID[name]:
        assert sentence in text, text
    assert "NVIDIA H200" in text and "the worst error at 50% of its budget" in text


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_run_cut_off_at_once_has_a_page(tmp_path, name):
    """A page without rows, and pages with each single made-up row; pictures for the first and the last row."""
    rows = ROWS.get(name, [])
    for row in rows:
        assert "## Question" in report.page(made_up(name, [row]), [])
    for part in ([], rows[:1], rows[-1:]):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(made_up(name, part)))
        assert report.redraw(file)


@pytest.mark.parametrize("name", ROWS)
def test_damaged_results_are_refused_or_read(tmp_path, name):
    """Any file is read as a result, or is refused with an error that names it."""
    rng, file = random.Random(name), tmp_path / "result.json"
    whole = json.dumps(made_up(name, ROWS[name])).encode()
    refused = 0
    for _ in range(150):
        file.write_bytes(edit_json(rng, whole))
        try:
            report.read(file)
        except NotAResult as error:
            assert "result.json" in str(error)
            refused += 1
    assert 0 < refused < 150


@needs_matplotlib
@pytest.mark.parametrize("name", ROWS)
def test_pictures_show_every_row(name):
    data = made_up(name, ROWS[name])
    rows = [row for row in ROWS[name] if row not in ROOFS]
    for maker in EXPERIMENTS[name].pictures.values():
        drawn = maker(data, rows)
        texts = " ".join(text.get_text() for text in drawn.findobj(lambda artist: hasattr(artist, "get_text")))
        assert "NVIDIA H200" in texts
        for axis in drawn.axes:
            (left, right), (low, high) = sorted(axis.get_xlim()), sorted(axis.get_ylim())
            for line in axis.lines:
                if line.get_marker() == "o":
                    assert all(left <= x <= right and low <= y <= high for x, y in line.get_xydata()), name


def test_one_machine_of_each_kind_reports_its_multiprocessors():
    from flash_attn_lab.experiments._tiles import multiprocessors

    cuda = SimpleNamespace(
        current_device=lambda: 0, get_device_properties=lambda i: SimpleNamespace(multi_processor_count=132)
    )
    assert multiprocessors(SimpleNamespace(framework="torch", torch=SimpleNamespace(cuda=cuda))) == 132
    device = SimpleNamespace(Device=lambda: SimpleNamespace(attributes={"MultiProcessorCount": 108}))
    assert multiprocessors(SimpleNamespace(framework="cupy", cupy=SimpleNamespace(cuda=device))) == 108
