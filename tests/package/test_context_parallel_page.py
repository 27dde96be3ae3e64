"""docs/context_parallel.md: its pictures equal those that their script draws, its table agrees with the library's
plans."""

import ctypes as ct
import importlib.util
import re
from pathlib import Path

import pytest

from flash_attn_minimal._core import library as _library
from flash_attn_minimal._core import structs

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/context_parallel"
LAYOUTS = {"contiguous": 1, "zigzag": 2, "flat": 3}
MODES = {"gather": 1, "ulysses": 2}
THREADS, CPU, FLOAT16 = 1, 1, 2


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    spec = importlib.util.spec_from_file_location("pictures", FOLDER / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_shown_and_there():
    shown = re.findall(r"!\[.+\]\(context_parallel/(\w+\.svg)\)", (ROOT / "docs/context_parallel.md").read_text())
    assert sorted(shown) == sorted(path.name for path in FOLDER.glob("*.svg"))
    assert len(shown) == 4


def test_the_script_draws_the_pictures_again(script, tmp_path):
    import matplotlib

    script.draw(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in FOLDER.glob("*.svg"))
    for drawn in tmp_path.iterdir():
        committed = (FOLDER / drawn.name).read_text()
        if f"Matplotlib v{matplotlib.__version__}," not in committed:
            pytest.skip(f"{drawn.name} is not from matplotlib {matplotlib.__version__}")
        assert drawn.read_text() == committed, f"run python docs/context_parallel/pictures.py: {drawn.name} differs"


class Segment(ct.Structure):
    _fields_ = [("sequence", ct.c_int32), ("begin", ct.c_int32), ("end", ct.c_int32)]


@pytest.fixture(scope="module")
def library():
    lib = ct.CDLL(str(_library.path()))
    lib.fa_last_error.restype = ct.c_char_p
    return lib


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pictures_show_the_segments_of_the_library(script, library, layout, size):
    for cu_seqlens in ([0, 24], [0, 7, 18, 23], [0, 0, 1, 1, 6], [0, 1001, 1001, 4096]):
        for rank in range(size):
            found, count = (Segment * 64)(), ct.c_int64()
            lengths = (ct.c_int32 * len(cu_seqlens))(*cu_seqlens)
            status = library.fa_distributed_segments(
                LAYOUTS[layout], rank, size, len(cu_seqlens) - 1, lengths, found, ct.c_int64(64), ct.byref(count)
            )
            assert status == 0, library.fa_last_error()
            segments = [(s.sequence, s.begin, s.end) for s in found[: count.value]]
            assert segments == script.segments(layout, rank, size, cu_seqlens)


class Args(ct.Structure):  # fa_distributed_args
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("attention", ct.c_void_p),
        ("cu_seqlens_q", ct.c_void_p),
        ("cu_seqlens_k", ct.c_void_p),
        ("batch", ct.c_int32),
        ("layout", ct.c_int32),
        ("mode", ct.c_int32),
        ("groups", ct.c_int32),
    ]


class BackwardArgs(ct.Structure):  # fa_distributed_backward_args
    _fields_ = [("struct_size", ct.c_size_t), ("forward", ct.c_void_p), ("gradients", ct.c_void_p)]


class Plan(ct.Structure):  # fa_distributed_plan
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("status", ct.c_int32),
        ("mode", ct.c_int32),
        ("groups", ct.c_int32),
        ("calls", ct.c_int32),
        ("rows_q", ct.c_int64),
        ("rows_k", ct.c_int64),
        ("workspace_bytes", ct.c_size_t),
        ("shared_bytes", ct.c_size_t),
        ("received_bytes", ct.c_int64),
        ("why_not", ct.c_char * 1472),
    ]


T, DIM, DIM_V, ELEMENT = 1 << 16, 64, 128, 2


def put(struct, name, heads, dim):
    """Puts a packed array of the rank's rows into a struct. Its memory is never read."""
    setattr(struct, f"{name}_data", ("q", "k", "v", "out", "dout", "dq", "dk", "dv").index(name) + 1 << 36)
    setattr(struct, f"{name}_row_stride", heads * dim)
    setattr(struct, f"{name}_head_stride", dim)


def plan(library, size, heads, heads_k, mode, backward, rank=0, causal=0, window=None, layout="zigzag"):
    a = structs.new(structs.AttentionArgs)
    a.device, a.dtype, a.batch, a.nheads, a.nheads_k, a.headdim, a.headdim_v = (
        CPU,
        FLOAT16,
        1,
        heads,
        heads_k,
        DIM,
        DIM_V,
    )
    a.total_q = a.total_k = T // size
    a.causal = causal
    if window:
        a.has_window, a.window_left, a.window_right = 1, *window
    for name, count, dim in (("q", heads, DIM), ("k", heads_k, DIM), ("v", heads_k, DIM_V), ("out", heads, DIM_V)):
        put(a, name, count, dim)
    lengths = (ct.c_int32 * 2)(0, T)
    args = Args(
        ct.sizeof(Args), ct.addressof(a), ct.addressof(lengths), None, 1, LAYOUTS[layout], MODES.get(mode, 0), 0
    )
    found = Plan(struct_size=ct.sizeof(Plan))
    call, query = args, library.fa_distributed_query
    if backward:
        g = structs.new(structs.AttentionBackwardArgs)
        for name, count, dim in (
            ("dout", heads, DIM_V),
            ("dq", heads, DIM),
            ("dk", heads_k, DIM),
            ("dv", heads_k, DIM_V),
        ):
            put(g, name, count, dim)
        call = BackwardArgs(ct.sizeof(BackwardArgs), ct.addressof(args), ct.addressof(g))
        query = library.fa_distributed_backward_query
    assert query(ct.byref(call), THREADS, rank, size, ct.byref(found)) == 0, library.fa_last_error()
    return found


# `written` is the page's w. 16 heads over 4 on 4 ranks: a rank has one key head, and three pieces of its query heads.
@pytest.mark.parametrize(
    "heads, heads_k, size, written", [(16, 16, 2, 16), (16, 4, 2, 4), (16, 4, 4, 12), (8, 2, 4, 4), (16, 16, 8, 16)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_and_memory_of_the_table(library, heads, heads_k, size, written, layout):
    """Checked without a mask, when every rank fetches everything."""
    rounds = 2 if layout == "zigzag" else 1
    keys = ELEMENT * T * heads_k * (DIM + DIM_V)
    shared = max(heads_k, size)
    both, out_too = DIM + DIM_V, 2 * DIM + DIM_V
    q_share = heads * out_too + (shared + written) * both
    staged = written * both if written > heads_k else 0
    received = {
        ("gather", False): keys * (size - 1) // size,
        ("gather", True): (1 + rounds) * keys * (size - 1) // size,
        ("ulysses", False): ELEMENT * T * (heads + shared) * both * (size - 1) // size**2,
        ("ulysses", True): (ELEMENT * q_share + 8 * heads) * T * (size - 1) // size**2,  # lse and the row sums
    }
    memory = {
        ("gather", False): keys,
        ("gather", True): (1 + 2 * rounds) * keys,
        ("ulysses", False): ELEMENT * T // size * (heads + shared) * both,
        ("ulysses", True): ELEMENT * T // size * (q_share + staged) + 12 * T // size * heads,
    }
    for backward in (False, True):
        for mode in MODES:
            found = plan(library, size, heads, heads_k, mode, backward, layout=layout)
            assert found.received_bytes == received[mode, backward], (mode, backward)
            # The plan adds float32 rows, tables and the workspaces of two launches: large ones in the backward pass.
            taken = found.workspace_bytes + found.shared_bytes - memory[mode, backward]
            assert taken >= 0, (mode, backward)
            if not backward:
                assert taken < 0.1 * memory[mode, backward], (mode, backward)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_under_a_causal_mask(library, size):
    keys = ELEMENT * T * 4 * (DIM + DIM_V)
    for rank in range(size):
        contiguous = plan(library, size, 16, 4, "gather", False, rank, causal=1, layout="contiguous")
        assert contiguous.received_bytes == keys * rank // size
        zigzag = plan(library, size, 16, 4, "gather", False, rank, causal=1, layout="zigzag")
        assert zigzag.received_bytes == keys * (2 * size - 2 - rank) // (2 * size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads, heads_k", [(16, 16), (16, 4), (16, 1), (12, 3), (9, 9)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_default_mode(library, size, heads, heads_k, layout):
    even = heads % size == 0 and (heads_k % size == 0 or size % heads_k == 0)
    for window in (None, (100, -1), (-1, 100)):
        for backward in (False, True):
            found = plan(library, size, heads, heads_k, "", backward, causal=0, window=window, layout=layout)
            ulysses = even and window != (100, -1)
            ulysses = ulysses and (backward or heads // heads_k <= size - 1 or layout != "zigzag")
            assert found.mode == MODES["ulysses" if ulysses else "gather"], (window, backward)
