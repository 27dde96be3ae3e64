"""A repeated call takes a shortcut (_core/repeats.py). Only its time may change: no answer, no error, no reference that
is kept."""

import ctypes as ct
import gc
import inspect
import re
import sys
import threading
import weakref

import numpy as np
import pytest
from conftest import CUDA, NO_CUDA, cupy, torch

import flash_attn_minimal as fa
from flash_attn_minimal import kvcache
from flash_attn_minimal._core import launch as _launch
from flash_attn_minimal._core import recordings, structs
from flash_attn_minimal._core import repeats as _repeat
from flash_attn_minimal._core.forward import repeats
from flash_attn_minimal.backward import _repeats as gradients

SHAPES = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))

KINDS = [
    "numpy",
    pytest.param("torch", marks=pytest.mark.skipif(torch is None, reason="PyTorch is not installed")),
    pytest.param("torch cuda", marks=pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA")),
    pytest.param("cupy", marks=pytest.mark.skipif(bool(NO_CUDA) or cupy is None, reason="needs CuPy and a GPU")),
]
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, x):
    if kind.startswith("torch"):
        return torch.tensor(x, device="cuda" if kind == "torch cuda" else "cpu")
    return cupy.asarray(x) if kind == "cupy" else np.array(x)


def host(results):
    """Any results as NumPy arrays."""
    if isinstance(results, tuple):
        return tuple(map(host, results))
    return (
        results.get()
        if cupy and isinstance(results, cupy.ndarray)
        else np.asarray(results.cpu() if torch and isinstance(results, torch.Tensor) else results)
    )


def arrays(kind, seed=0):
    rng = np.random.default_rng(seed)
    return [make(kind, rng.standard_normal(shape, dtype=np.float32)) for shape in SHAPES]


@pytest.fixture(autouse=True)
def fresh():
    repeats.clear()


def long_way(*arguments, **options):
    """Makes the call without any remembered calls."""
    repeats.clear()
    return fa.flash_attn_func(*arguments, **options)


def warm(q, k, v, **options):
    """Makes the call often enough that it is remembered."""
    for _ in range(3):  # the first call of a type loads its support; the first two of a signature are remembered
        fa.flash_attn_func(q, k, v, **options)
    assert any(repeats.known.values())


@pytest.fixture
def shortcuts(monkeypatch):
    """Counts the calls that took the shortcut."""
    taken, make = [], _repeat.Repeats._repeat

    def counting(*about):
        repeat = make(*about)

        def counted(*arguments):
            results = repeat(*arguments)
            taken.extend([True] * (results is not None))
            return results

        return counted

    monkeypatch.setattr(_repeat.Repeats, "_repeat", counting)
    return taken


COMMON = [
    {},
    {"causal": True},
    {"softmax_scale": 0.3},
    {"window_size": (2, 1)},
    {"return_lse": True},
    {"num_threads": 1, "causal": True, "return_lse": True, "softmax_scale": 2.0, "window_size": (3, -1)},
]


@every_kind
def test_same_bits(kind, shortcuts):
    """With new values, every set of options gives the same bits as the long way; calls with different options do not
    mix."""
    for options in COMMON:
        warm(*arrays(kind), **options)
    shortcuts.clear()
    kept = dict(repeats.known), dict(repeats.latest)
    for seed, options in enumerate(COMMON, 1):
        repeats.clear()
        expected = host(fa.flash_attn_func(*arrays(kind, seed), **options))
        for table, entries in zip((repeats.known, repeats.latest), kept, strict=True):
            table.update(entries)
        results = fa.flash_attn_func(*arrays(kind, seed), **options)
        np.testing.assert_equal(host(results), expected)
    assert shortcuts == [True] * len(COMMON)


@every_kind
@pytest.mark.parametrize("mixed", [False, True])
def test_dropout_takes_another_seed_in_each_call(kind, mixed, shortcuts):
    """A step of a training has a seed of its own: it repeats the step before, with its seed."""
    seeds = [(3, 0), (4, 0), (2**64 - 1, 0), (4, 2**64 - 1), (0, 7), (3, 0)]
    mask = {"mask": make(kind, np.random.default_rng(3).random((5, 7)) < 0.9)} if mixed else {}
    options = [
        {"dropout_p": 0.25, "dropout_seed": s, "dropout_offset": o, "return_lse": True, **mask} for s, o in seeds
    ]
    wanted = [host(long_way(*arrays(kind, i), **each)) for i, each in enumerate(options)]
    repeats.clear()
    warm(*arrays(kind), **options[0])
    shortcuts.clear()
    got = [host(fa.flash_attn_func(*arrays(kind, i), **each)) for i, each in enumerate(options)]
    assert len(shortcuts) == len(seeds)
    np.testing.assert_equal(got, wanted)
    assert len({each[0].tobytes() for each in got}) == len(seeds)
    same = {name: x for name, x in options[0].items() if "dropout" not in name}
    np.testing.assert_equal(host(fa.flash_attn_func(*arrays(kind), **same)), host(long_way(*arrays(kind), **same)))


@pytest.mark.parametrize("wrong", [
    {"dropout_seed": -1}, {"dropout_seed": 2**64}, {"dropout_seed": 1.0}, {"dropout_seed": True},
    {"dropout_seed": None}, {"dropout_offset": -1}, {"dropout_offset": 2**64}, {"dropout_offset": 0.0},
])  # fmt: skip
def test_seeds_are_checked_in_every_call(wrong):
    options = {"dropout_p": 0.25, "dropout_seed": 3, "dropout_offset": 4}
    q, k, v = arrays("numpy")
    expected = outcome(long_way, q, k, v, **options | wrong)
    repeats.clear()
    warm(q, k, v, **options)
    assert outcome(fa.flash_attn_func, q, k, v, **options | wrong) == expected
    assert isinstance(expected, tuple) and "dropout" in expected[1]
    seed = np.int64(3)  # a seed of another type is as good
    np.testing.assert_array_equal(
        fa.flash_attn_func(q, k, v, **options | {"dropout_seed": seed}), long_way(q, k, v, **options)
    )


@every_kind
def test_given_out(kind, shortcuts):
    q, k, v = arrays(kind)
    expected = host(long_way(q, k, v))
    for _ in range(4):
        out = make(kind, np.full(SHAPES[0], np.nan, np.float32))
        assert fa.flash_attn_func(q, k, v, out=out) is out
        np.testing.assert_array_equal(host(out), expected)
    assert shortcuts[-1]
    with pytest.raises(fa.BadArgument, match="out starts at the same address as q"):
        fa.flash_attn_func(q, k, v, out=q)


def other_values(kind):
    """A value that is not the default for every option, in arrays of this kind."""
    f32 = np.float32
    rng = np.random.default_rng(1)
    factors = {name: make(kind, np.ones((2, heads), f32)) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    return {
        "dropout_p": 0.5,  # refused: there is no seed
        "softmax_scale": 0.7,
        "causal": True,
        "window_size": (1, 0),
        "softcap": 1.5,
        "alibi_slopes": make(kind, rng.random(4, f32)),
        "deterministic": True,
        "return_lse": True,
        "return_softmax_lse": True,
        "return_max_score": True,
        "return_key_sums": True,
        "bias": make(kind, rng.random((5, 7), f32)),
        "mask": make(kind, rng.random((5, 7)) < 0.5),
        "block_mask": make(kind, np.zeros((1, 1, 1, 1), bool)),
        "startend_row_indices": make(kind, rng.integers(1, 5, (1, 1, 7, 1), np.int32)),
        "sinks": make(kind, rng.random(4, f32)),
        "top_left": True,
        "dropout_seed": 3,
        "dropout_offset": 2**64,  # refused
        "out": make(kind, np.zeros(SHAPES[0], f32)),
        "kernel": "no such kernel",  # refused
        "allow_tf32": True,
        "num_threads": 2,
        **{f"{name}_descale": factor for name, factor in factors.items()},
        "out_dtype": "float16",
        "fast_accum": True,  # refused: not float8
        "attention_chunk": 2,
    }


OPTIONS = list(inspect.signature(fa.flash_attn_func).parameters)[3:]


@every_kind
@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_is_ignored(kind, name):
    """A remembered plain call does not replace a call with an option: neither its result nor its refusal."""
    q, k, v = arrays(kind)
    usual = {} if name == "causal" else {"causal": True}  # which top_left needs to make a difference
    unusual = {**usual, name: other_values(kind)[name]}  # a new option needs a value there
    expected = outcome(long_way, q, k, v, **unusual)
    repeats.clear()
    warm(q, k, v, **usual)
    np.testing.assert_equal(outcome(fa.flash_attn_func, q, k, v, **unusual), expected)


def outcome(call, *arguments, **options):
    try:
        return host(call(*arguments, **options))
    except fa.FlashAttnError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("usual,odd", [
    ({"causal": True}, {"causal": 1.0}),
    ({"causal": False}, {"causal": 0.0}),
    ({"return_lse": False}, {"return_lse": 0.0}),
    ({"window_size": (1, 2)}, {"window_size": (1.0, 2)}),
    ({"window_size": (1, 2)}, {"window_size": [1.0, 2]}),
    ({"num_threads": 1}, {"num_threads": 1.0}),
    ({"softmax_scale": 1.0}, {"softmax_scale": "x"}),
])  # fmt: skip
def test_equal_is_not_legal(usual, odd):
    """1.0 equals 1 and True, but is still refused."""
    q, k, v = arrays("numpy")
    warm(q, k, v, **usual)
    with pytest.raises(fa.BadArgument, match=next(iter(odd))):
        fa.flash_attn_func(q, k, v, **odd)


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_scale_that_is_an_array():
    q, k, v = arrays("torch")
    scale = torch.tensor(0.1)
    before = fa.flash_attn_func(q, k, v, softmax_scale=scale)
    fa.flash_attn_func(q, k, v, softmax_scale=scale)
    scale.fill_(3.0)
    after = fa.flash_attn_func(q, k, v, softmax_scale=scale)
    assert not torch.equal(before, after) and torch.equal(after, fa.flash_attn_func(q, k, v, softmax_scale=3.0))


@every_kind
def test_other_arrays(kind):
    """Other strides, dtypes, shapes and types after a remembered call have the same outcome as without that call."""
    q, k, v = arrays(kind)
    wide = make(kind, np.random.default_rng(5).standard_normal((2, 7, 2, 16), dtype=np.float32))
    half = np.float16 if kind in ("numpy", "cupy") else torch.float16
    as_half = [x.astype(half) if kind in ("numpy", "cupy") else x.to(half) for x in (q, k, v)]
    for case in (
        (q, wide[..., :8], v),  # strided rows
        (q, k, wide),  # headdim_v = 16
        (q, wide[..., ::2], v),  # refused: the last axis is strided
        (q[:1], k, v),  # refused
        (q, k[:, :6], v),  # refused
        (q[:, :0], k, v),
        (q, k[:, :0], v[:, :0]),
        as_half,
        (q, as_half[1], v),  # refused
        (q, k, [1.0]),  # refused
    ):
        expected = outcome(long_way, *case)
        repeats.clear()
        warm(q, k, v)
        for _ in range(3):
            np.testing.assert_equal(outcome(fa.flash_attn_func, *case), expected)


def options_with_arrays(kind, seed=0):
    rng = np.random.default_rng(100 + seed)
    return {
        "bias": make(kind, rng.standard_normal((5, 7), dtype=np.float32)),
        "mask": make(kind, rng.random((2, 1, 5, 7)) < 0.6),
        "alibi_slopes": make(kind, rng.random(4, dtype=np.float32)),
        "sinks": make(kind, rng.standard_normal(4, dtype=np.float32)),
    }


@every_kind
@pytest.mark.parametrize("names", [("bias",), ("mask",), ("alibi_slopes",), ("sinks",), ("mask", "sinks", "bias"), ()])
def test_arrays_among_the_options(kind, names, shortcuts):
    """New values in these arrays are read, and a call with one array more or less counts as a different call."""
    more = {"causal": True, "top_left": True, "deterministic": True, "kernel": None, "return_lse": True}

    def call(seed, names):
        options = options_with_arrays(kind, seed)
        return host(fa.flash_attn_func(*arrays(kind, seed), **{name: options[name] for name in names}, **more))

    sets = [names, (*names, "alibi_slopes") if "alibi_slopes" not in names else ("bias", *names)]
    expected = []
    for names in sets:
        repeats.clear()
        expected.append(call(7, names))
    repeats.clear()
    for seed in range(3):
        for names in sets:
            call(seed, names)
    shortcuts.clear()
    for names, want in zip(sets, expected, strict=True):
        np.testing.assert_equal(call(7, names), want)
    assert len(shortcuts) == 2


@every_kind
@pytest.mark.parametrize("names", [("sinks",), ("k_scale", "v_scale"), ("tree_mask",), ("tree_mask", "sinks")])
def test_arrays_among_the_options_of_a_cache(kind, names, shortcuts):
    def call(seed):
        rng = np.random.default_rng(seed)
        cache = np.rint(rng.uniform(-9, 9, (2, 2, 7, 2, 8))).astype(np.int8 if "k_scale" in names else np.float32)
        options = {
            "sinks": rng.standard_normal(4, dtype=np.float32),
            "k_scale": rng.random(2, dtype=np.float32) + 0.5,
            "v_scale": rng.random((2, 7, 2), dtype=np.float32) + 0.5,
            "tree_mask": rng.integers(0, 8, (2, 3)),
        }
        q = make(kind, rng.standard_normal((2, 3, 4, 8), dtype=np.float32))
        chosen = {name: make(kind, options[name]) for name in names}
        return host(fa.flash_attn_with_kvcache(q, *[make(kind, x) for x in cache], **chosen, return_lse=True))

    kvcache._repeats.clear()
    expected = call(7)
    for seed in range(3):
        call(seed)
    shortcuts.clear()
    np.testing.assert_equal(call(7), expected)
    assert shortcuts


@every_kind
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_other_bias_or_mask(kind, name):
    """Other shapes, strides and dtypes of bias or mask after a remembered call have the same outcome as without it."""
    q, k, v = arrays(kind)
    usual = {name: options_with_arrays(kind)[name]}
    rng = np.random.default_rng(5)
    wide = make(kind, rng.random((2, 4, 5, 14)) if name == "bias" else rng.random((2, 4, 5, 14)) < 0.5)
    wide = wide if name == "mask" else make(kind, rng.random((2, 4, 5, 14), dtype=np.float32))
    other = (np.uint8, torch and torch.uint8) if name == "mask" else (np.float16, torch and torch.float16)
    recast = wide.to(other[1]) if kind.startswith("torch") else wide.astype(other[0])
    cases = [wide[..., :7], wide[:, :1, :, 7:], wide[0, 0, 0, :7], wide[..., ::2], wide[..., :6], wide[:1, :3, :, :7]]
    cases += [recast[..., :7], q, None, [1.0] * 7]
    for case in cases:
        expected = outcome(long_way, q, k, v, **{name: case})
        repeats.clear()
        warm(q, k, v, **usual)
        for _ in range(3):
            np.testing.assert_equal(outcome(fa.flash_attn_func, q, k, v, **{name: case}), expected)


@every_kind
def test_changes_in_place(kind, shortcuts):
    q, k, v = arrays(kind)
    options = options_with_arrays(kind)
    warm(q, k, v, **options)
    before = host(fa.flash_attn_func(q, k, v, **options))
    for array in (q, options["bias"], options["sinks"]):
        array += 1
    options["mask"][...] = False
    options["mask"][0, 0, 2, 3] = True
    shortcuts.clear()
    after = host(fa.flash_attn_func(q, k, v, **options))
    assert shortcuts and not np.array_equal(before, after)
    np.testing.assert_array_equal(after, host(long_way(q, k, v, **options)))


@every_kind
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_lengths(kind, given, return_lse, shortcuts):
    """The lengths are read again at every call. Rows that belong to no sequence are 0 and -inf."""
    rng = np.random.default_rng(0)
    q, k = (make(kind, rng.standard_normal((rows, heads, 8), dtype=np.float32)) for rows, heads in ((9, 4), (11, 2)))
    lengths = [([0, 4, 9], [0, 5, 11]), ([0, 1, 9], [0, 11, 11]), ([0, 4, 7], [0, 5, 11]), ([0, 0, 0], [0, 5, 9])]
    lengths = [tuple(make(kind, np.array(cu, np.int32)) for cu in pair) for pair in lengths]

    def call(cu):
        out = {"out": make(kind, np.full((9, 4, 8), 7, np.float32))} if given else {}
        return host(fa.flash_attn_varlen_func(q, k, k, *cu, 9, 11, causal=True, return_lse=return_lse, **out))

    expected = []
    for cu in lengths:
        repeats.clear()
        expected.append(call(cu))
    for first in (0, 2):  # one that covers all rows, and one that does not
        repeats.clear()
        for _ in range(3):
            call(lengths[first])
        shortcuts.clear()
        for cu, want in zip(lengths, expected, strict=True):
            np.testing.assert_equal(call(cu), want)
        assert shortcuts
        with pytest.raises(fa.BadArgument, match="max_seqlen_q=9.0 is not an integer"):
            fa.flash_attn_varlen_func(q, k, k, *lengths[0], 9.0, 11, causal=True, return_lse=return_lse)
    if kind in ("numpy", "torch"):
        with pytest.raises(fa.BadArgument, match="cu_seqlens_q"):
            call((make(kind, np.array([0, 5, 4], np.int32)), lengths[0][1]))


def test_numpy_flags():
    q, k, v = arrays("numpy")
    out = np.empty_like(q)
    warm(q, k, v, out=out)
    out.flags.writeable = False
    with pytest.raises(fa.BadArgument, match="out is a read-only NumPy array"):
        fa.flash_attn_func(q, k, v, out=out)
    shifted = np.frombuffer(bytearray(q.nbytes + 1), np.uint8)[1:].view(np.float32).reshape(q.shape)
    with pytest.raises(fa.BadArgument, match="q is not aligned"):
        fa.flash_attn_func(shifted, k, v)
    with pytest.raises(fa.BadArgument, match="q has dtype '>f4'"):
        fa.flash_attn_func(q.astype(">f4"), k, v)
    with pytest.raises(fa.BadArgument, match="v is a masked array"):
        fa.flash_attn_func(q, k, np.ma.masked_array(v))


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_torch_tensors_that_only_look_alike():
    q, k, v = arrays("torch")
    warm(q, k, v)
    assert fa.flash_attn_func(q, k.clone().requires_grad_(), v).requires_grad
    with torch.no_grad():
        assert not fa.flash_attn_func(q, k.clone().requires_grad_(), v).requires_grad
    assert fa.flash_attn_func(q, k.clone().requires_grad_(), v).requires_grad
    with pytest.raises(fa.BadArgument, match="k is on cpu, but q is on meta"):
        fa.flash_attn_func(q.to("meta"), k, v)
    with pytest.raises(fa.BadArgument, match="v has layout torch.sparse_coo"):
        fa.flash_attn_func(q, k, v.to_sparse())
    with pytest.raises(fa.BadArgument, match="v is a lazily negated view"):
        fa.flash_attn_func(q, k, torch._neg_view(v))
    subclass = torch.nn.Parameter(q, requires_grad=False)
    assert type(fa.flash_attn_func(subclass, k, v)) is torch.Tensor
    # A sparse tensor, too, reports a zero stride everywhere: one element that stands for all.
    one = torch.zeros(()).expand(2, 7, 2, 1)
    warm(one, one, one)
    with pytest.raises(fa.BadArgument, match="q has layout torch.sparse_coo"):
        fa.flash_attn_func(torch.zeros(2, 7, 2, 1).to_sparse(), one, one)


@every_kind
def test_nothing_is_kept(kind):
    """The table of remembered calls keeps no array, no output and no memory alive."""
    q, k, v = arrays(kind)
    warm(q, k, v, return_lse=True)
    counts = [sys.getrefcount(x) for x in (q, k, v)]
    results = [fa.flash_attn_func(q, k, v, return_lse=True) for _ in range(3)]
    gone = [weakref.ref(x) for pair in results for x in pair]
    del results
    gc.collect()
    assert not any(ref() is not None for ref in gone)
    assert [sys.getrefcount(x) for x in (q, k, v)] == counts


def test_the_table_is_bounded(monkeypatch):
    monkeypatch.setattr(_repeat, "_MOST_REPEATS", 4)
    for seqlen in range(1, 20):
        q = np.ones((1, seqlen, 1, 4), np.float32)
        for _ in range(3):
            np.testing.assert_array_equal(fa.flash_attn_func(q, q, q), q)
        assert any(repeats.known.values()) and len(repeats.known) <= 4


def test_forced_by_the_environment(monkeypatch):
    """The library reads FLASH_ATTN_KERNEL at every call. A kernel that needs more workspace than the last one gets
    it."""
    q, k, v = arrays("numpy")
    expected = fa.flash_attn_func(q, k, v)
    warm(q, k, v)
    monkeypatch.setenv("FLASH_ATTN_KERNEL", "cpu_naive")
    naive = fa.flash_attn_func(q, k, v)
    np.testing.assert_array_equal(naive, fa.flash_attn_func(q, k, v, kernel="cpu_naive"))
    monkeypatch.setenv("FLASH_ATTN_KERNEL", "nonsense")
    with pytest.raises(fa.BadArgument, match="FLASH_ATTN_KERNEL=nonsense is not a kernel of this build"):
        fa.flash_attn_func(q, k, v)
    monkeypatch.delenv("FLASH_ATTN_KERNEL")
    np.testing.assert_array_equal(fa.flash_attn_func(q, k, v), expected)


def test_a_thread_that_has_no_scratch_yet():
    q, k, v = arrays("numpy")
    expected = long_way(q, k, v)
    warm(q, k, v)
    results = []
    thread = threading.Thread(target=lambda: results.extend(fa.flash_attn_func(q, k, v) for _ in range(2)))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(results, [expected, expected])


@pytest.mark.parametrize("way", ["long", "plain", "with lse"])
def test_scratch_lives_until_the_launch_is_over(way, monkeypatch):
    """The scratch stays alive, whatever a finalizer or signal handler does in this thread between looking it up and the
    launch."""
    q, k, v = (np.random.default_rng(i).standard_normal((1, 300, 2, 64), dtype=np.float32) for i in range(3))
    options = {"num_threads": 2, "return_lse": way == "with lse"}
    monkeypatch.setattr(_launch, "_scratch", _launch._Scratch())
    monkeypatch.setattr(_repeat, "_scratch", _launch._scratch)
    expected, alive, run = host(fa.flash_attn_func(q, k, v, **options)), [], _repeat.runner()
    repeats.clear()
    assert _launch._scratch.place[0] is not None, "this call needs scratch"

    def grow():
        held = weakref.ref(_launch._scratch.place[0])
        buffer = (ct.c_char * (2 << 20))()  # as a larger call leaves it
        _launch._scratch.place = buffer, ct.addressof(buffer), 2 << 20
        gc.collect()
        alive.append(held() is not None)

    if way == "long":
        launch = recordings.run
        monkeypatch.setattr(recordings, "run", lambda *a: (grow(), launch(*a)))
    else:
        monkeypatch.setattr(_repeat, "runner", lambda: lambda *a: (grow(), run(*a))[1])
    for _ in range(5):
        results = host(fa.flash_attn_func(q, k, v, **options))
        for got, want in zip(results, expected, strict=True):
            np.testing.assert_array_equal(got, want)
    assert alive and all(alive)


@pytest.mark.parametrize("table,kinds,constant", [
    (repeats, [structs.AttentionArgs], "parts|kernel|max_score|key_sums"),
    (gradients, [structs.AttentionArgs, structs.AttentionBackwardArgs], "parts|kernel|max_score|key_sums"),
    (
        kvcache._repeats,
        [structs.AttentionArgs, structs.KVCacheArgs],
        "parts|kernel|descale|max_score|key_sums|cu_|bias|^mask|^block_mask|startend",
    ),
], ids=["forward", "backward", "kvcache"])  # fmt: skip
def test_every_address_is_filled_in(table, kinds, constant):
    """All fields that hold addresses are filled in, except the kernel's name and fields that no repeated call has."""
    pointers, constant = (ct.c_void_p, ct.c_char_p), re.compile(constant)
    wanted = {
        (kind, name)
        for kind in kinds
        for name, of in kind._fields_
        if of in pointers and not constant.search(name) or name == "workspace_bytes"
    }
    numbers = {(structs.AttentionArgs, name) for name in ("seqlen_k", *_repeat.SEEDS)}
    assert wanted == set(table.fields.values()) - numbers
