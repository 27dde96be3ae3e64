"""Ranks that disagree, and ranks with wrong arguments: all raise, and the group stays usable."""

import numpy as np
import pytest
from ranks import OPTIONS, Q, attend, each, new_groups, shared_groups, still_works

import flash_attn_minimal as fa
from flash_attn_minimal import distributed as fad

INDICES = np.full((1, 1, Q.shape[1], 2), Q.shape[1], np.int32)  # nothing is hidden


@pytest.mark.parametrize(
    "ours, theirs, text",
    [
        ({"causal": True}, {}, "causal=0 on rank 1, but 1 on rank 0: all ranks make the same call"),
        ({"softmax_scale": 0.5}, {"softmax_scale": 0.25}, "softmax_scale=0.25 on rank 1, but 0.5 on rank 0"),
        ({"mode": "gather"}, {"mode": "ulysses"}, "mode=2 on rank 1, but 1 on rank 0"),
        ({"layout": "contiguous"}, {}, "layout=2 on rank 1, but 1 on rank 0"),
        ({"window_size": (3, 0)}, {}, r"window_size\[0\]=-1 on rank 1, but 3 on rank 0|mode=2 on rank 1"),
        ({"softcap": 2.0}, {}, "softcap=0 on rank 1, but 2 on rank 0"),
        ({"return_lse": True}, {}, "lse wanted=0 on rank 1, but 1"),
        ({"sinks": np.zeros(2, np.float32)}, {}, "sinks set=0 on rank 1, but 1"),
        ({"dropout_p": 0.5, "dropout_seed": 1}, {"dropout_p": 0.5, "dropout_seed": 2}, "dropout_seed=2 on rank 1"),
        ({"startend_row_indices": INDICES, "mode": "gather"}, {"mode": "gather"}, "row_indices set=0 on rank 1, but 1"),
        ({"startend_row_indices": INDICES, "causal": True, "mode": "gather"},
         {"startend_row_indices": INDICES[..., :1], "causal": True, "mode": "gather"},
         "startend_row_indices.numbers=1 on rank 1, but 2"),
        ({"softmax_scale": 0.5}, {}, "softmax_scale=0.25 on rank 1, but 0.5 on rank 0"),
        ({"groups": 2}, {}, "groups=0 on rank 1, but 2"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_about_an_option(ours, theirs, text):
    groups = shared_groups(2)
    raised = each(groups, lambda group: attend(group, **(theirs if group.rank else ours)))
    for error in raised:
        with pytest.raises(fa.BadArgument, match=text):
            raise error
    still_works(groups)


def forward_of(group, shape_q, shape_k=None, **options):
    q, k = (np.zeros(shape, np.float32) for shape in (shape_q, shape_k or shape_q))
    return fad.forward(group, q, k, k, **OPTIONS, **options)


@pytest.mark.parametrize(
    "shapes, text",
    [
        ([(1, 8, 2, 16), (1, 6, 2, 16)], "total_q=12 on rank 1, but 16 on rank 0"),
        ([(1, 8, 2, 16), (1, 8, 4, 16)], "nheads=4 on rank 1, but 2"),
        ([(1, 8, 2, 16), (1, 8, 2, 8)], "headdim=8 on rank 1, but 16"),
        ([(2, 8, 2, 16), (4, 4, 2, 16)], "batch=4 on rank 1, but 2"),
        ([(1, 8, 2, 16), (1, 4000, 2, 16)], "total_q=8000 on rank 1, but 16"),  # with memory to be shared on one alone
    ],
)
@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_ranks_that_disagree_about_shapes(shapes, text, mode):
    groups = new_groups(2)
    for error in each(groups, lambda group: forward_of(group, shapes[group.rank], mode=mode)):
        with pytest.raises(fa.BadArgument, match=text):
            raise error
    still_works(groups)


def test_ranks_that_disagree_about_lengths_of_equal_sum():
    groups = shared_groups(2)
    cu = [[0, 8, 16], [0, 4, 16]]
    raised = each(groups, lambda g: forward_of(g, (8, 2, 16), cu_seqlens_q=cu[g.rank], layout="contiguous"))
    assert all("a checksum of cu_seqlens_q" in str(error) for error in raised)
    still_works(groups)


def test_ranks_that_call_different_functions():
    groups = shared_groups(2)

    def rank(group):
        if group.rank == 0:
            return attend(group)
        return fad.merge(group, np.zeros((4, 2, 16), np.float32), np.zeros((2, 4), np.float32))

    for error in each(groups, rank):
        with pytest.raises(
            fa.BadArgument, match="the operation=4 on rank 1, but 1 on rank 0.*_merge and fa_distributed_forw"
        ):
            raise error
    still_works(groups)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "wrong, kind, text",
    [
        (lambda g, q: fad.forward(g, q.astype(np.float64), q, q), fa.BadArgument, "q is float64: expected float32"),
        (lambda g, q: fad.forward(g, q, q[:, :1], q), fa.BadArgument, "v has shape .* but k has"),
        (lambda g, q: fad.forward(g, q, q, q, mode="fast"), fa.BadArgument, "mode='fast' is not one of 'auto'"),
        (lambda g, q: fad.forward(g, q, q, q, layout=2), fa.BadArgument, "layout=2 is not one of"),
        (lambda g, q: fad.forward(g, q, q, q, groups=17), fa.BadArgument, "groups=17 is outside 0 .. 16"),
        (lambda g, q: fad.forward(g, q, q, q, groups=2**40), fa.BadArgument, "groups=1099511627776 is outside"),
        (lambda g, q: fad.forward(g, q, q, q, kernel="no"), fa.BadArgument, "kernel=no"),
        (lambda g, q: fad.forward(g, q, q, q, num_threads=-1), fa.BadArgument, "num_threads=-1"),
        (lambda g, q: fad.forward(g, q, q, q, out=q), fa.BadArgument, "out starts at the same address as q"),
        (lambda g, q: fad.forward(g, q, q, q, dropout_p=0.5), fa.BadArgument, "dropout_p=0.5 without dropout_seed"),
        (lambda g, q: fad.forward(g, q, q, q, dropout_p=2, dropout_seed=1), fa.BadArgument, "dropout_p=2 is outside"),
        (lambda g, q: fad.forward(g, q, q, q, window_size=(-2, 0)), fa.BadArgument, r"window_size\[0\]=-2"),
        (lambda g, q: fad.forward(g, q, q, q, window_size=3), fa.BadArgument, "window_size=3 is not a pair"),
        (lambda g, q: fad.forward(g, q, q, q, fast_accum=True), fa.Unsupported, "fast_accum=True: float8 is not"),
        (lambda g, q: fad.forward(g, q, q, q, out_dtype="float16"), fa.Unsupported, "out_dtype='float16'"),
        (lambda g, q: fad.forward(g, q, q, q, sinks=Q), fa.BadArgument, "sinks has shape"),
        (lambda g, q: fad.forward(g, q, q, q, bias=Q[0, :4, :, :4]), fa.BadArgument, "bias has shape"),
        (lambda g, q: fad.forward(g, q, q, q, nope=1), TypeError, "unexpected keyword argument 'nope'"),
        (lambda g, q: fad.forward(g, q, q, q, seqlen_q=99), fa.BadArgument, "q has shape .* holds .* of the 99 tokens"),
        (lambda g, q: fad.forward(g, q, q, q, cu_seqlens_q=[0, 8]), fa.BadArgument, r"cu_seqlens_q=\[0, 8\] with q of"),
        (lambda g, q: fad.forward(g, q[0], q[0], q[0]), fa.BadArgument, "cu_seqlens_q is None: packed arrays need"),
        (lambda g, q: fad.forward(g, q[0], q[0], q[0], cu_seqlens_q=[1, 8]), fa.BadArgument, r"cu_seqlens_q=\[1, 8\]"),
        (lambda g, q: fad.forward(g, q[0], q[0], q[0], cu_seqlens_q=[0.5]), fa.BadArgument, r"cu_seqlens_q=\[0.5\] is"),
        (
            lambda g, q: fad.forward(g, q[0], q[0], q[0], cu_seqlens_q=[0, 8], seqlen_k=8),
            fa.BadArgument,
            "seqlen_k=8 with packed",
        ),
        (lambda g, q: fad.forward(g, q[..., ::2], q, q), fa.BadArgument, "q has stride 2 along its last axis"),
        (lambda g, q: fad.forward(g, q[:, :, ::-1], q, q), fa.Unsupported, "q.head_stride=-16"),
        (lambda g, q: fad.forward(g, q.tolist(), q, q), fa.BadArgument, "q is a list"),
        (lambda g, q: fad.forward(g, *[np.repeat(q, 2, 0)[:, :-1]] * 3), fa.BadArgument, "q has strides"),
    ],
)  # fmt: skip
def test_one_rank_with_a_wrong_argument(wrong, kind, text, size):
    groups = shared_groups(size)
    culprit = size - 1

    def rank(group):
        if group.rank != culprit:
            return attend(group)
        return wrong(group, fad.shard(Q, "zigzag", group.rank, group.size))

    raised = each(groups, rank)
    with pytest.raises(kind, match=text):
        raise raised[culprit]
    told = fa.BadArgument if kind is TypeError else kind
    for error in raised[:culprit]:
        with pytest.raises(told, match=f"^rank {culprit}: .*({text})"):
            raise error
    still_works(groups)


MISTAKES = {
    "ulysses_bias": ({"mode": "ulysses", "bias": np.zeros((4, 8), np.float32)}, "mode=ulysses: bias has rows"),
    "ulysses_mask": ({"mode": "ulysses", "mask": np.ones((4, 8), bool)}, "mode=ulysses: mask has rows"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_modes_that_do_not_serve_a_call(mistake):
    options, text = MISTAKES[mistake]
    groups = shared_groups(2)
    part = fad.shard(Q, "zigzag", 0, 2)
    plan = fad.plan((0, 2), part, part, part, seqlen_q=8, seqlen_k=8, **options)
    assert plan.status == "FA_UNSUPPORTED" and text in plan.error
    assert list(plan.why_not) == [options["mode"]]
    for error in each(groups, lambda group: attend(group, **options)):
        with pytest.raises(fa.Unsupported, match=text):
            raise error
    still_works(groups)


def test_ulysses_refuses_a_bias_of_which_no_rank_can_say_whether_it_has_rows():
    """Two tokens on two ranks: a bias with one row may be the rank's own, or one that all share."""
    groups = shared_groups(2)
    bias = np.array([[0.0, 1.0]], np.float32)
    right = fa.flash_attn_func(*[Q[:, :2]] * 3, bias=bias)
    for shared, mode in ((bias, "gather"), (bias[0], "ulysses")):
        parts = fad.run(groups, lambda group, x=shared, m=mode: attend(group, 2, bias=x, mode=m))
        np.testing.assert_allclose(fad.unshard(parts, "zigzag"), right, atol=1e-6)
    for error in each(groups, lambda group: attend(group, 2, bias=bias, mode="ulysses")):
        with pytest.raises(fa.Unsupported, match="mode=ulysses: bias has rows"):
            raise error
    still_works(groups)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"num_threads": 4097}, "num_threads=4097 is outside"),
        ({"softcap": -1.0}, "softcap=-1 is not a finite"),
        ({"softmax_scale": float("inf")}, "softmax_scale=inf is not finite"),
    ],
)
def test_a_rank_without_queries_checks_the_options(options, text):
    groups = shared_groups(2)
    for tokens in (1, 0):
        for error in each(groups, lambda group, n=tokens: attend(group, n, **options)):
            with pytest.raises(fa.BadArgument, match=text):
                raise error
    still_works(groups)


def test_ulysses_needs_as_many_heads_as_ranks():
    groups = shared_groups(3)
    for error in each(groups, lambda group: attend(group, mode="ulysses")):
        with pytest.raises(fa.Unsupported, match="mode=ulysses: nheads=2 is below the 3 ranks"):
            raise error
    still_works(groups)


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"return_dbias": True}, "return_dbias=True, but bias is None"),
        ({"return_dsinks": True}, "return_dsinks=True, but sinks is None"),
        ({"return_dsinks": 2}, "return_dsinks=2 is neither True nor False"),
        ({"dlse": np.zeros((2, 9), np.float32)}, r"dlse has shape \(2, 9\): expected \(2, 4\)"),
        ({"lse": np.zeros((1, 2, 4), np.float32)}, r"lse has shape \(1, 2, 4\): expected \(2, 4\)"),
        ({"dout": Q}, r"dout has shape \(1, 8, 2, 16\): expected \(1, 4, 2, 16\)"),
        ({"dq": Q}, "dq is float32 .*: expected float32"),
        ({"accumulate": True}, "unexpected keyword argument 'accumulate'"),
        ({"bias": np.zeros((1, 8), np.float32), "return_dbias": True, "mode": "ulysses"}, "mode=ulysses: dbias"),
        (
            {"startend_row_indices": np.zeros((1, 1, 8, 2), np.int32), "mode": "ulysses", "causal": False},
            "mode=ulysses: startend_row_indices is set, which only gather takes",
        ),
    ],
)
def test_refusals_of_backward(wrong, text):
    groups = shared_groups(2)

    def rank(group):
        part = fad.shard(Q, "zigzag", group.rank, group.size)
        given = {"dout": part, "q": part, "k": part, "v": part, "out": part, "lse": np.zeros((2, 4), np.float32)}
        fad.backward(group, **{**given, **OPTIONS, **wrong})

    for error in each(groups, rank):
        with pytest.raises((fa.BadArgument, fa.Unsupported, TypeError), match=text):
            raise error
    still_works(groups)


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_results_that_overlap_inputs_are_refused_before_anything_is_written(mode):
    """Other ranks may still read the inputs. A kernel would not notice the overlap, because it works on copies."""
    groups = shared_groups(2)
    buffers = np.random.default_rng(0).standard_normal((2, 4, 1, 5, 2, 16), dtype=np.float32)
    before = buffers.copy()

    def forward(group):
        q, k, v = buffers[group.rank, :3, :, :4]
        out = buffers[group.rank, 2, :, 1:] if group.rank else np.empty_like(q)
        fad.forward(group, q, k, v, out=out, mode=mode, **OPTIONS)

    def backward(group):
        q, k, v, dk = buffers[group.rank, :, :, :4]
        dv = buffers[group.rank, 3, :, 1:] if group.rank else np.empty_like(q)
        lse = np.zeros((2, 4), np.float32)
        fad.backward(group, q, q, k, v, v, lse, dk=dk, dv=dv, mode=mode, **OPTIONS)

    def backward_over_lse(group):
        q, k, v, dk = buffers[group.rank, :, :, :4]
        lse = buffers[group.rank, 3].reshape(-1)[:8].reshape(2, 4) if group.rank else np.zeros((2, 4), np.float32)
        fad.backward(group, q, q, k, v, v, lse, dk=dk, mode=mode, **OPTIONS)

    for function, text in (
        (forward, "out.data=.* overlaps v"),
        (backward, "dv.data=.* overlaps dk"),
        (backward_over_lse, "dk.data=.* overlaps lse"),
    ):
        for error in each(groups, function):
            with pytest.raises(fa.BadArgument, match=text):
                raise error
    assert np.array_equal(buffers, before)
    still_works(groups)


@pytest.mark.parametrize("group", [None, 3, (0, 2)])
def test_what_is_no_group(group):
    with pytest.raises(fa.BadArgument, match="expected a Group"):
        fad.forward(group, Q, Q, Q)
