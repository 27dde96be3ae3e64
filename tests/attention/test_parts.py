"""Varlen calls on parts of sequences, through the C ABI: the results of the parts of a batch, put together, are the
results of the whole batch."""

import ctypes as ct
import itertools
import re

import numpy as np
import pytest
from accuracy import EPSILON, Case, check, expected, expected_backward, gradient_floor, rounding_floor

import flash_attn_minimal as fa
from flash_attn_minimal._core import library, structs

LENGTHS = ((200, 77, 1, 0, 150), (333, 77, 129, 40, 61))  # the rows and keys of five sequences
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "top_left": {"causal": True, "top_left": True},
    "window": {"window_size": (50, 20)},
    "left": {"window_size": (37, -1)},
    "right": {"window_size": (-1, 30)},
    "causal_window": {"causal": True, "window_size": (64, 0)},
    "alibi": {"alibi": 1},
    "alibi_causal": {"alibi": 2, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout_p": 0.3},
    "dropout_causal": {"dropout_p": 0.2, "causal": True},
    "bias_mask": {"bias": (True, True, True), "mask": (True, False, True)},
    "many": {"window_size": (90, 3), "dropout_p": 0.2, "alibi": 2, "softcap": 3.0, "bias": (True, True, True)},
}


def case_of(lengths=LENGTHS, **options) -> Case:
    rows, keys = lengths
    cu = [(0, *np.cumsum(x).tolist()) for x in lengths]
    options = {"headdim": 64, "nheads": 4, "nheads_k": 2, **options}
    return Case(max(rows), max(keys), cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], **options)


class Cut:
    """A batch of sequences in parts. Their rows and keys are packed, with rows of NaN between them that belong to no
    part. A chunk of a sequence's rows is one part, or several parts with different keys; the rows are then repeated.

    shared: the parts of a sequence use one copy of its keys, as the forward pass allows. Otherwise every part has its
    own copy."""

    def __init__(self, case: Case, shared: bool, merges: bool = True, seed: int = 0):
        self.case, rng = case, np.random.default_rng(seed)
        self.parts, key_rows, gap = [], [], 200
        for sequence in range(len(case.cu_seqlens_q) - 1):
            (q0, q1), (k0, k1) = (cu[sequence : sequence + 2] for cu in (case.cu_seqlens_q, case.cu_seqlens_k))
            rows, keys, begin = q1 - q0, k1 - k0, len(key_rows) + gap
            cuts = sorted({0, rows, *rng.integers(0, rows + 1, 3).tolist()})
            for r0, r1 in [*zip(cuts, cuts[1:], strict=False), (rows // 2, rows // 2)]:
                for first, last in self._keys(rng, r0, r1, rows, keys, merges):
                    if not shared:
                        begin = len(key_rows) + gap
                        key_rows += [None] * gap + [*range(k0 + first, k0 + last)]
                        gap = int(rng.integers(0, 9))
                    self.parts.append((sequence, q0, r0, r1, k0, first, last, begin + first * shared))
            if shared:
                key_rows += [None] * gap + [*range(k0, k1)]
                gap = 5
        self.lengths = [r1 - r0 for _, _, r0, r1, *_ in self.parts]
        self.longest = max(self.lengths), max(last - first for *_, first, last, _ in self.parts)
        self.cu = np.cumsum([0, *self.lengths], dtype=np.int32)
        self.rows = np.concatenate([np.arange(q0 + r0, q0 + r1) for _, q0, r0, r1, *_ in self.parts])
        used = np.zeros(len(key_rows) + 3, bool)
        for *_, first, last, begin in self.parts:
            used[begin : begin + last - first] = True
        self.keys = np.array([-1 if row is None else row for row in key_rows] + [-1] * 3)
        self.keys[~used] = -1  # in the copies, too: keys of no part

    def _keys(self, rng, r0, r1, rows, keys, merges):
        """Ranges of keys for rows r0 .. r1 - 1 of a sequence. Together they contain all keys that the rows see."""
        case = self.case
        shift = 0 if case.top_left else keys - rows
        left, right = case.window_size
        right = 0 if case.causal else right
        low = 0 if left < 0 else min(max(r0 + shift - left, 0), keys) // 64 * 64
        high = keys if right < 0 else min(max(r1 + shift + right, low), keys)
        how = rng.choice(["all", "seen", "cut", "cut"] if merges else ["all", "seen"])
        if how == "cut":
            cuts = sorted([0, keys, *(rng.integers(0, keys + 1, 2) // 64 * 64).tolist()])
            return [*zip(cuts, cuts[1:], strict=False)]
        return [(0, keys) if how == "all" else (low, high)]

    def gather(self, x, index):
        """Rows of x; NaN where the index is -1."""
        return np.where((index < 0).reshape(-1, *[1] * (x.ndim - 1)), np.nan, x[np.maximum(index, 0)]).astype(
            np.float32
        )

    def queries(self, x):
        return np.concatenate([x[self.rows], np.full((7, *x.shape[1:]), np.nan)]).astype(np.float32)

    def array(self):
        """The parts in the form that the library reads."""
        found = np.zeros(len(self.parts), structs.PART_DTYPE)
        for b, (sequence, _, r0, _, _, first, last, begin) in enumerate(self.parts):
            rows, keys = (cu[sequence + 1] - cu[sequence] for cu in (self.case.cu_seqlens_q, self.case.cu_seqlens_k))
            shift = 0 if self.case.top_left else keys - rows
            found[b] = (begin, last - first, r0 + shift - first, r0, first, sequence, 0, 0)
        return found

    def scores(self, x, fill):
        """A bias or mask of the whole batch, cut: (parts, heads, rows, keys)."""
        found = np.full((len(self.parts), x.shape[1], *self.longest), fill, x.dtype)
        for b, (sequence, _, r0, r1, _, first, last, _) in enumerate(self.parts):
            found[b, :, : r1 - r0, : last - first] = x[sequence, :, r0:r1, first:last]
        return found

    def options(self, options):
        options = {name: x for name, x in options.items() if name != "top_left"}
        if np.ndim(options.get("alibi_slopes")) == 2:
            options["alibi_slopes"] = options["alibi_slopes"][[part[0] for part in self.parts]]
        for name, fill in (("bias", np.nan), ("mask", True)):
            if name in options:
                options[name] = self.scores(options[name], fill)
        return options

    def merge(self, out, lse):
        """The rows of the whole batch from those of all parts, in float64."""
        whole = np.zeros((self.case.cu_seqlens_q[-1], *out.shape[1:]))
        whole_lse = np.full((lse.shape[0], len(whole)), -np.inf)
        for b in range(len(self.parts)):
            np.logaddexp.at(
                whole_lse, (slice(None), self.rows[self.cu[b] : self.cu[b + 1]]), lse[:, self.cu[b] : self.cu[b + 1]]
            )
        known = np.where(np.isneginf(whole_lse), 0, whole_lse)[:, self.rows]
        weight = np.exp(lse - known).T[..., None]
        assert not out[(weight == 0)[..., 0]].any()  # rows that see nothing are 0
        np.add.at(whole, self.rows, weight * out)
        return whole, whole_lse


class Memory:
    """Arguments of a call: structs filled with the addresses of arrays. It keeps the arrays alive."""

    def __init__(self, kernel, dtype):
        self.kernel, self.dtype, self.device, self.alive = kernel, dtype, kernel.device, []

    def put(self, x, dtype=None):
        array = self.device.array(np.ascontiguousarray(x), dtype)
        self.alive.append(array)
        return array

    def address(self, array):
        if hasattr(array, "data_ptr"):
            return array.data_ptr()
        return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr

    def tensor(self, args, name, array):
        rows, heads, dim = array.shape
        setattr(args, f"{name}_data", self.address(array))
        setattr(args, f"{name}_row_stride", heads * dim)
        setattr(args, f"{name}_head_stride", dim)

    def forward(self, q, k, v, cu, longest, parts, options, out=None, lse=None, first_head=0):
        args = structs.new(structs.AttentionArgs)
        args.device, args.dtype = (
            structs.CPU if self.device.name == "cpu" else structs.CUDA,
            structs.DTYPES[self.dtype],
        )
        args.batch, args.nheads, args.nheads_k = len(cu) - 1, q.shape[1], k.shape[1]
        args.headdim, args.headdim_v = q.shape[2], v.shape[2]
        args.seqlen_q, args.seqlen_k, args.total_q, args.total_k = *longest, len(q), len(k)
        for name, x in (("q", q), ("k", k), ("v", v)):
            self.tensor(args, name, self.put(x, self.dtype))
        self.out = self.put(np.full((*q.shape[:2], v.shape[2]), np.nan) if out is None else out, self.dtype)
        self.lse = self.put(
            np.full((q.shape[1], len(q)), np.nan, np.float32) if lse is None else lse.astype(np.float32)
        )
        self.tensor(args, "out", self.out)
        args.lse = self.address(self.lse)
        args.cu_seqlens_q = self.address(self.put(np.asarray(cu, np.int32)))
        args.parts = self.address(self.put(parts.view(np.int32)))
        args.first_head = first_head
        for name in ("dropout_p", "dropout_seed", "dropout_offset", "softcap", "causal", "deterministic"):
            setattr(args, name, options.get(name, 0))
        if "window_size" in options:
            args.has_window, (args.window_left, args.window_right) = 1, options["window_size"]
        if "alibi_slopes" in options:
            slopes = options["alibi_slopes"]
            args.alibi_slopes = self.address(self.put(slopes))
            args.alibi_batch_stride = slopes.shape[1] if slopes.ndim == 2 else 0
        if "sinks" in options:
            args.sinks = self.address(self.put(options["sinks"]))
        for name in ("bias", "mask"):
            if name in options:
                x = options[name]
                setattr(args, f"{name}_data", self.address(self.put(x.astype(np.uint8) if name == "mask" else x)))
                for axis, stride in zip(("batch", "head", "row"), self.score_strides(x), strict=True):
                    setattr(args, f"{name}_{axis}_stride", stride)
        args.bias_dtype = structs.DTYPES["float32"] if "bias" in options else 0
        args.kernel = self.kernel.name.encode()
        return args

    @staticmethod
    def score_strides(x):
        return tuple(
            0 if size == 1 else stride // x.itemsize for size, stride in zip(x.shape[:3], x.strides, strict=False)
        )

    def launch(self, name, query, args, attention):
        lib, plan = library.load(), structs.new(structs.AttentionPlan)
        if status := getattr(lib, query)(args, plan):
            if status == 2 and not self.kernel.general:
                pytest.skip(str(library.failure(status)))
            raise library.failure(status)
        assert plan.kernel == self.kernel.name.encode()
        workspace = self.put(np.zeros(plan.workspace_bytes + 1, np.uint8))
        attention.workspace, attention.workspace_bytes = self.address(workspace), plan.workspace_bytes
        getattr(lib, name)(args, None)


def run_forward(kernel, dtype, *arrays, **more):
    """out and lse of one call; see Memory.forward. Rows after the last part are not written."""
    memory = Memory(kernel, dtype)
    args = memory.forward(*arrays, **more)
    memory.launch("fa_attention_forward", "fa_attention_query", args, args)
    out, lse, end = kernel.device.numpy(memory.out), kernel.device.numpy(memory.lse), arrays[3][-1]
    assert np.isnan(out[end:]).all() and np.isnan(lse[:, end:]).all()
    return out[:end], lse[:, :end]


def run_backward(kernel, dtype, dout, *arrays, **more):
    """dq, dk, dv and dbias of one call. They are filled with NaN before it."""
    memory, q, k, v = Memory(kernel, dtype), *arrays[:3]
    forward = memory.forward(*arrays, **more)
    args = structs.new(structs.AttentionBackwardArgs)
    args.forward = ct.pointer(forward)
    memory.tensor(args, "dout", memory.put(dout, dtype))
    gradients = [memory.put(np.full(x.shape, np.nan), dtype) for x in (q, k, v)]
    for name, array in zip(("dq", "dk", "dv"), gradients, strict=True):
        memory.tensor(args, name, array)
    if "bias" in arrays[6]:
        bias = arrays[6]["bias"]
        gradients.append(memory.put(np.full(bias.shape, np.nan, np.float32)))
        args.dbias_data = memory.address(gradients[-1])
        for axis, stride in zip(("batch", "head", "row"), memory.score_strides(bias), strict=True):
            setattr(args, f"dbias_{axis}_stride", stride)
    memory.launch("fa_attention_backward", "fa_attention_backward_query", args, forward)
    dq, *others = [kernel.device.numpy(x) for x in gradients]
    end = arrays[3][-1]
    assert np.isnan(dq[end:]).all()
    return dq[:end], *others


def check_forward(kernel, case: Case, shared: bool, seed: int = 0):
    (q, k, v, options), exact, plain = expected(case)
    cut = Cut(case, shared, merges=not case.sinks, seed=seed)
    arrays = cut.queries(q), cut.gather(k, cut.keys), cut.gather(v, cut.keys)
    out, lse = cut.merge(
        *run_forward(kernel, case.dtype, *arrays, cut.cu, cut.longest, cut.array(), cut.options(options))
    )
    floor = rounding_floor(q, k)
    check("lse", lse, exact[1], plain[1], "float32", floor=floor)
    check("out", out, exact[0], plain[0], case.dtype, floor=floor)


def runs(index):
    """The runs of consecutive numbers in an index, without its negative entries."""
    index = np.where(index < 0, -9, index)  # never 1 below another entry
    ends = np.flatnonzero(np.diff(index, prepend=-9, append=-9) != 1)
    return [(start, stop) for start, stop in itertools.pairwise(ends.tolist()) if index[start] >= 0]


def check_backward(kernel, case: Case, deterministic: int = 0, seed: int = 0):
    (dout, q, k, v, out, lse, options), exact, plain = expected_backward(case)
    cut = Cut(case, shared=False, seed=seed)
    arrays = cut.queries(q), cut.gather(k, cut.keys), cut.gather(v, cut.keys)
    given = {"out": cut.queries(out), "lse": cut.queries(lse.T).T}
    options = cut.options(options) | {"deterministic": deterministic}
    dq, dk, dv, *dbias = run_backward(
        kernel,
        case.dtype,
        cut.queries(dout),
        *arrays,
        cut.cu,
        cut.longest,
        cut.array(),
        options,
        **given,
    )
    assert np.isnan(dk[cut.keys < 0]).all() and np.isnan(dv[cut.keys < 0]).all()
    for name, x, index in (("dq", dq, cut.rows), ("dk", dk, cut.keys), ("dv", dv, cut.keys)):
        want, sums = getattr(exact, name), [np.zeros(getattr(exact, name).shape) for _ in range(2)]
        for start, stop in runs(index):
            to = slice(index[start], index[start] + stop - start)
            sums[0][to] += x[start:stop]
            sums[1][to] += np.abs(x[start:stop])
        floor = gradient_floor(case, want) + EPSILON[case.dtype] * sums[1].max()  # every part is rounded
        check(name, sums[0], want, getattr(plain, name), case.dtype, floor=floor)
    if dbias:
        whole = np.zeros(exact.dbias.shape)
        for b, (sequence, _, r0, r1, _, first, last, _) in enumerate(cut.parts):
            whole[sequence, :, r0:r1, first:last] += dbias[0][b, :, : r1 - r0, : last - first]
            assert not dbias[0][b, :, r1 - r0 :].any() and not dbias[0][b, :, :, last - first :].any()
        check("dbias", whole, exact.dbias, plain.dbias, "float32", floor=gradient_floor(case, exact.dbias))


@pytest.mark.parametrize(
    ("dtype", "shared"), [("float32", True), ("float32", False), ("float16", False), ("bfloat16", True)]
)
@pytest.mark.parametrize("options", OPTIONS)
def test_forward(kernel, options, dtype, shared):
    check_forward(kernel, case_of(dtype=dtype, **OPTIONS[options]), shared)


@pytest.mark.parametrize(("dtype", "deterministic"), [("float32", 0), ("float16", 1), ("bfloat16", 0), ("bfloat16", 1)])
@pytest.mark.parametrize("options", OPTIONS)
def test_backward(backward_kernel, options, dtype, deterministic):
    check_backward(backward_kernel, case_of(dtype=dtype, **OPTIONS[options]), deterministic)


HEAD_DIMS = [(40, 24), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]


@pytest.mark.parametrize("options", ["full", "causal", "dropout_causal"])
@pytest.mark.parametrize("headdim", HEAD_DIMS, ids=str)
def test_head_dims(kernel, headdim, options):
    for dtype in ("float16", "float32") if kernel.general else ("float16",):
        case = case_of(headdim=headdim[0], headdim_v=headdim[1], nheads=6, dtype=dtype, **OPTIONS[options])
        check_forward(kernel, case, shared=True, seed=1)


@pytest.mark.parametrize("options", ["full", "causal", "dropout_causal"])
@pytest.mark.parametrize("headdim", HEAD_DIMS, ids=str)
def test_head_dims_backward(backward_kernel, headdim, options):
    for dtype in ("float16", "float32") if backward_kernel.general else ("float16",):
        case = case_of(headdim=headdim[0], headdim_v=headdim[1], nheads=6, dtype=dtype, **OPTIONS[options])
        check_backward(backward_kernel, case, seed=1)


LONG = ((700, 300), (2600, 300))  # kernels change their tiles with the length


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [64, 128])
def test_long(kernel, headdim, causal):
    case = case_of(LONG, headdim=headdim, nheads=2, nheads_k=1, dtype="bfloat16", causal=causal)
    for seed in range(2):
        check_forward(kernel, case, shared=bool(seed), seed=seed)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [64, 128])
def test_long_backward(backward_kernel, headdim, causal):
    case = case_of(LONG, headdim=headdim, nheads=2, nheads_k=1, dtype="bfloat16", causal=causal)
    for seed in range(2):
        check_backward(backward_kernel, case, deterministic=seed, seed=seed)


def whole(case: Case, options=None):
    """A batch whose parts are its sequences: the arguments of run_forward after the kernel and the dtype."""
    (q, k, v, given), *_ = expected(case)
    rows, keys = np.diff(case.cu_seqlens_q), np.diff(case.cu_seqlens_k)
    parts = np.zeros(len(rows), structs.PART_DTYPE)
    parts["key_begin"], parts["seqlen_k"], parts["shift"] = case.cu_seqlens_k[:-1], keys, keys - rows
    parts["sequence"] = np.arange(len(rows))
    return [q, k, v, case.cu_seqlens_q, (case.seqlen_q, case.seqlen_k), parts, {**given, **(options or {})}]


@pytest.mark.parametrize("options", ["full", "causal", "window", "dropout_causal", "many"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_sequences_are_parts(kernel, dtype, options):
    """Bit for bit."""
    case = case_of(dtype=dtype, **OPTIONS[options])
    (q, k, v, given), *_ = expected(case)
    out, lse = run_forward(kernel, dtype, *whole(case))
    if "bias" in given:
        given = given | {"bias": given["bias"].astype(np.float32)}
    cu = case.cu_seqlens_q, case.cu_seqlens_k, case.seqlen_q, case.seqlen_k
    want_out, want_lse = kernel(q, k, v, dtype, cu, **given)
    np.testing.assert_array_equal(lse, want_lse)
    np.testing.assert_array_equal(out, want_out)


@pytest.mark.parametrize("shift", [-(2**30), -2000, 2000, 2**30])
@pytest.mark.parametrize("options", [{"causal": 1}, {"window_size": (100, -1)}, {"window_size": (3, 3)}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_that_see_nothing_or_all(kernel, dtype, options, shift):
    case = case_of(dtype=dtype)
    arrays = whole(case, options)
    arrays[5]["shift"] = shift
    out, lse = run_forward(kernel, dtype, *arrays)
    sees = shift > 0 if "causal" in options else shift < 0 and options["window_size"][1] < 0
    if not sees:
        assert not out.any() and np.isneginf(lse).all()
        return
    (q, k, *_), exact, plain = expected(case)
    check("lse", lse, exact[1], plain[1], "float32", floor=rounding_floor(q, k))
    check("out", out, exact[0], plain[0], dtype, floor=rounding_floor(q, k))


@pytest.mark.parametrize("shift", [-(2**30), 2**30])
@pytest.mark.parametrize("deterministic", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_of_rows_that_see_nothing_or_all(backward_kernel, dtype, deterministic, shift):
    case = case_of(dtype=dtype)
    (dout, *_, out, lse, _), exact, plain = expected_backward(case)
    arrays = whole(case, {"causal": 1, "deterministic": deterministic})
    arrays[5]["shift"] = shift
    got = run_backward(backward_kernel, dtype, dout, *arrays, out=out, lse=lse)
    for name, x in zip(("dq", "dk", "dv"), got, strict=True):
        if shift < 0:
            assert not x.any(), name
        else:
            want = getattr(exact, name)
            check(name, x, want, getattr(plain, name), dtype, floor=gradient_floor(case, want))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_first_head(kernel, dtype):
    """A call on some heads drops the same elements as the call on all heads."""
    case = case_of(dtype=dtype, nheads=6, nheads_k=3, **OPTIONS["dropout_causal"])
    (_, exact, plain), arrays = expected(case), whole(case)
    for first, last in ((0, 2), (2, 6)):
        q, k, v = arrays[0][:, first:last], arrays[1][:, first // 2 : last // 2], arrays[2][:, first // 2 : last // 2]
        out, lse = run_forward(kernel, dtype, q, k, v, *arrays[3:], first_head=first)
        floor = rounding_floor(q, k)
        check("lse", lse, exact[1][first:last], plain[1][first:last], "float32", floor=floor)
        check("out", out, exact[0][:, first:last], plain[0][:, first:last], dtype, floor=floor)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_first_head_backward(backward_kernel, dtype):
    case = case_of(dtype=dtype, nheads=6, nheads_k=3, **OPTIONS["dropout_causal"])
    (dout, q, k, v, out, lse, _), exact, plain = expected_backward(case)
    rest, heads, keys = whole(case)[3:], slice(2, 6), slice(1, 3)
    arrays = (x[:, s] for x, s in ((dout, heads), (q, heads), (k, keys), (v, keys)))
    got = run_backward(backward_kernel, dtype, *arrays, *rest, out=out[:, heads], lse=lse[heads], first_head=2)
    for name, x, part in zip(("dq", "dk", "dv"), got, (heads, keys, keys), strict=True):
        want = getattr(exact, name)
        check(name, x, want[:, part], getattr(plain, name)[:, part], dtype, floor=gradient_floor(case, want))


def test_no_keys(kernel):
    """Parts without keys, in a call that has no keys at all."""
    q, k = np.ones((9, 2, 16), np.float32), np.zeros((0, 1, 16), np.float32)
    parts = np.zeros(2, structs.PART_DTYPE)
    out, lse = run_forward(kernel, "float32", q, k, k, (0, 4, 9), (5, 0), parts, {"causal": 1})
    assert not out.any() and np.isneginf(lse).all()


# ---- refusals: on the CPU, where the parts can be read ----


class Host:
    """Stands in for a kernel, with the attributes that Memory uses."""

    general, name = True, "cpu_portable"

    class device:  # noqa: N801
        name = "cpu"
        array = staticmethod(lambda x, dtype=None: x.astype(dtype or x.dtype))


def refused(change, text, **more):
    case = case_of(((5, 6), (9, 8)))
    memory, arrays = Memory(Host, "float32"), whole(case, {"dropout_p": 0.1})
    args = memory.forward(*arrays, **more)
    parts = memory.alive[-1].view(structs.PART_DTYPE)[:2]
    change(args, parts)
    with pytest.raises(fa.BadArgument, match=re.escape(text)):
        memory.launch("fa_attention_forward", "fa_attention_query", args, args)
    assert np.isnan(memory.out).all()


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("key_begin", -1, "parts[1].key_begin=-1 is outside 0 .. 17"),
        ("key_begin", 18, "parts[1].key_begin=18 is outside 0 .. 17"),
        ("key_begin", 10, "parts[1].seqlen_k=8 is outside 0 .. 7"),
        ("seqlen_k", -3, "parts[1].seqlen_k=-3 is outside 0 .. 8"),
        ("seqlen_k", 9, "parts[1].seqlen_k=9 is outside 0 .. 8"),
        ("shift", 2**30 + 1, "parts[1].shift=1073741825 is outside -1073741824 .. 1073741824"),
        ("first_row", -1, "parts[1].first_row=-1 is outside"),
        ("first_key", -64, "parts[1].first_key=-64 is outside"),
        ("first_key", 72, "parts[1].first_key=72 is not a multiple of 64"),
        ("sequence", -1, "parts[1].sequence=-1 is outside"),
    ],
)
def test_refused_parts(field, value, text):
    def change(args, parts):
        parts[field][1] = value

    refused(change, text)


def test_refused_calls():
    refused(lambda args, parts: parts["reserved"].__setitem__(0, 4), "parts[0].reserved=4 is outside 0 .. 0")
    refused(lambda args, parts: setattr(args, "cu_seqlens_k", args.cu_seqlens_q), "cu_seqlens_k are both set")
    refused(
        lambda args, parts: setattr(args, "cu_seqlens_q", None), "cu_seqlens_q is NULL: only a varlen call has parts"
    )
    refused(lambda args, parts: setattr(args, "top_left", 1), "top_left=True with parts")
    refused(lambda args, parts: setattr(args, "parts", args.parts + 2), "parts.data=")
    refused(lambda args, parts: None, "first_head=-1 is outside 0 .. 2147483643", first_head=-1)
    refused(lambda args, parts: None, "first_head=2147483644 is outside", first_head=2**31 - 4)


def test_gradients_need_keys_in_order():
    case = case_of(((5, 6), (9, 8)))
    (dout, *_, out, lse, _), *_ = expected_backward(case)
    arrays = whole(case)
    arrays[5]["key_begin"][1] = 8
    with pytest.raises(
        fa.BadArgument, match=re.escape("parts[1].key_begin=8 is below 9, where the keys of parts[0] end")
    ):
        run_backward(Host, "float32", dout, *arrays, out=out, lse=lse)


def test_queries_read_no_parts():
    case = case_of(((5, 6), (9, 8)))
    memory = Memory(Host, "float32")
    args, plan = memory.forward(*whole(case)), structs.new(structs.AttentionPlan)
    for name in ("q_data", "k_data", "v_data", "out_data", "lse"):
        setattr(args, name, None)
    args.parts = args.cu_seqlens_q = 4096  # an address of nothing
    assert library.load().fa_attention_query(args, plan) == library.OK and plan.kernel == b"cpu_portable"


def test_a_cache_has_no_parts():
    case = case_of(((5, 6), (9, 8)))
    args = Memory(Host, "float32").forward(*whole(case))
    call, plan = structs.new(structs.KVCacheArgs), structs.new(structs.AttentionPlan)
    call.attention, call.cache_batch = ct.pointer(args), 2
    assert library.load().fa_kvcache_query(call, plan) == 2
    assert "cu_seqlens_q is set" in library.load().fa_last_error().decode()
    args.cu_seqlens_q = None
    assert library.load().fa_kvcache_query(call, plan) == 1
    assert "cu_seqlens_q is NULL: only a varlen call has parts" in library.load().fa_last_error().decode()
