"""PyTorch over context parallelism: processes on gloo against one call of attention over all tokens."""

import functools
import json
import os
import re
import subprocess
import sys
import threading

import pytest
from conftest import CUDA_DEVICES, ROOT

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

from torch_crew import Crew  # noqa: E402

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal import distributed  # noqa: E402
from flash_attn_minimal.torch import context_parallel as across  # noqa: E402

RANKS, HEADS, HEADS_K, DIM = 4, 6, 3, 8
LENGTHS = [0, 17, 17, 45, 46]  # one sequence is empty, one is a token
MODES = ["gather", "ulysses"]


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    crew = Crew(RANKS, tmp_path_factory.mktemp("crew"))
    yield crew
    crew.close()


# ---- on the ranks ----


@functools.cache
def subgroup(*ranks):
    return dist.new_group(ranks)


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator)


def inputs(varlen):
    lead = (LENGTHS[-1],) if varlen else (2, 30)
    return [normal(*lead, heads, DIM, seed=i) for i, heads in enumerate((HEADS, HEADS_K, HEADS_K))]


def whole(q, k, v, varlen, **options):
    """(out, lse) of one device; lse (nheads, rows) as on the ranks."""
    if varlen:
        cu = torch.tensor(LENGTHS, dtype=torch.int32, device=q.device)
        return fa.flash_attn_varlen_func(q, k, v, cu, cu, 28, 28, return_lse=True, **options)
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, **options)
    return out, lse


def loss_of(out, lse, weight, weight_lse):
    lse = lse if lse.dim() == 2 else lse.transpose(0, 1).flatten(1)
    return (out * weight).sum() + (lse.masked_fill(lse.isinf(), 0) * weight_lse).sum()


def close(got, want, tolerance=2e-5):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def part_of(group, layout, varlen):
    """A function that returns the rank's part of an array of all tokens."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return lambda x, axis=None: distributed.shard(x, layout, rank, size, LENGTHS if varlen else None, axis)


def agrees(group, call=across.context_parallel_attention, *, layout="zigzag", mode="auto", varlen=False,
           device="cpu", **options):  # fmt: skip
    """Compares out, lse and all gradients of a group's ranks with those of one device. call may be compiled."""
    if dist.get_rank(group) < 0:
        return
    part = part_of(group, layout, varlen)
    arrays = dict(zip("qkv", inputs(varlen), strict=True))
    arrays |= {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    full = {
        name: x.to(device, copy=True).requires_grad_(x.is_floating_point() and name != "alibi_slopes")
        for name, x in arrays.items()
    }
    with_rows = {name for name in ("bias", "mask") if name in full and full[name].shape[-2] > 1}
    mine = {}
    for name, x in full.items():
        x = x.detach()
        if name in "qkv":
            x = part(x)
        elif name in with_rows:
            x = distributed.shard(x, layout, dist.get_rank(group), dist.get_world_size(group), axis=x.dim() - 2)
        mine[name] = x.clone().requires_grad_(full[name].requires_grad)
    options = {name: x for name, x in options.items() if name not in full}
    weight = normal(*full["q"].shape, seed=7).to(device)
    weight_lse = normal(HEADS, *weight.shape[:-2], seed=8).to(device)

    out, lse = whole(varlen=varlen, **full, **options)
    loss_of(out, lse, weight, weight_lse if varlen else weight_lse.flatten(1)).backward()
    lengths = {"cu_seqlens_q": torch.tensor(LENGTHS, dtype=torch.int32)} if varlen else {"seqlen_q": 30, "seqlen_k": 30}
    my_out, my_lse = call(**mine, group=group, layout=layout, mode=mode, return_lse=True, **lengths, **options)
    my_weight_lse = part(weight_lse, 1 if varlen else 2)
    loss_of(my_out, my_lse, part(weight), my_weight_lse if varlen else my_weight_lse.flatten(1)).backward()

    close(my_out, part(out))
    close(my_lse, part(lse, 1) if varlen else part(lse.transpose(0, 1), 2).flatten(1))
    for name in "qkv":
        close(mine[name].grad, part(full[name].grad), 1e-4)
    for name in ("bias", "sinks"):
        if name in full and name in with_rows:
            want = distributed.shard(full[name].grad, layout, dist.get_rank(group), dist.get_world_size(group),
                                     axis=full[name].dim() - 2)  # fmt: skip
            close(mine[name].grad, want, 1e-4)
        elif name in full:
            total = mine[name].grad.clone()
            dist.all_reduce(total, group=group)  # as of every weight
            close(total, full[name].grad, 1e-4)


def every_mode(ranks):
    group = subgroup(*ranks)
    for mode in MODES:
        if mode == "ulysses" and HEADS % len(ranks):
            continue
        agrees(group, mode=mode, causal=True)
        agrees(group, mode=mode, varlen=True, layout="flat" if mode == "gather" else "zigzag", causal=True)
    agrees(group, layout="contiguous", window_size=(9, 3), softcap=5.0)


def options():
    group = subgroup(0, 1)
    sinks, slopes = normal(HEADS), torch.linspace(0.1, 0.6, HEADS)
    for mode in MODES:
        agrees(group, mode=mode, sinks=sinks, alibi_slopes=slopes)
        agrees(group, mode=mode, sinks=sinks, varlen=True, causal=True)
    agrees(group, bias=normal(1, HEADS, 30, 30))  # each rank has its own rows
    agrees(group, bias=normal(2, 1, 1, 30))  # shared by the ranks
    agrees(group, mask=normal(2, 1, 30, 30) > -0.5)
    ends = torch.tensor([12] * 12 + [30] * 18, dtype=torch.int32).view(1, 1, 30, 1)  # documents
    agrees(group, startend_row_indices=ends, causal=True)  # of all keys, on each rank


def on_gpus(ranks):
    """Ranks share GPUs if there are fewer GPUs than ranks."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device, group = f"cuda:{torch.cuda.current_device()}", subgroup(*ranks)
    sinks, compiled = normal(HEADS), torch.compile(across.context_parallel_attention, fullgraph=True)
    for mode in MODES:
        agrees(group, mode=mode, device=device, causal=True, sinks=sinks)
        agrees(group, mode=mode, device=device, varlen=True)
    agrees(group, device=device, bias=normal(1, HEADS, 30, 30))
    agrees(group, compiled, device=device, varlen=True, causal=True)
    agrees(group, compiled, device=device, dropout_p=0.2, dropout_seed=9)


def dropout():
    group = subgroup(0, 1, 2)
    for mode in ("gather", "ulysses"):
        agrees(group, mode=mode, dropout_p=0.3, dropout_seed=2**64 - 5, dropout_offset=3)


def default_group_of_all():
    agrees(None, causal=True)
    assert across.group_of() is across.group_of(dist.group.WORLD, "cpu")
    assert across.group_of().size == RANKS
    with distributed.create_group(dist.get_rank(), RANKS, gather) as group:  # one that the caller has made
        part = part_of(None, "zigzag", False)
        q, k, v = inputs(False)
        got = across.context_parallel_attention(part(q), part(k), part(v), group=group, seqlen_q=30, seqlen_k=30)
        close(got, part(fa.flash_attn_func(q, k, v)))


def gather(mine):
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, mine)
    return everything


def mesh_of_two_by_two():
    """Each process belongs to two groups, a row and a column of a mesh, and uses both in one graph."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        agrees(mesh[name].get_group(), causal=True)
    q, k, v = inputs(False)
    q.requires_grad_()
    parts = {name: part_of(mesh[name].get_group(), "zigzag", False) for name in ("a", "b")}
    both = {name: across.context_parallel_attention(*map(part, (q, k, v)), group=mesh[name])
            for name, part in parts.items()}  # fmt: skip
    (both["a"].sum() * 2 + (both["b"] ** 2).sum()).backward()
    got = q.grad.clone()
    dist.all_reduce(got)  # every token is on two of the four ranks, in each of the groups
    q.grad = None
    out = fa.flash_attn_func(q, k, v)
    (out.sum() * 4 + (out**2).sum() * 2).backward()
    close(got, q.grad, 1e-4)
    with pytest.raises(fa.BadArgument, match="has 2 dimensions"):
        across.context_parallel_attention(q, k, v, group=mesh)


def compiled(backend):
    group = subgroup(0, 1)
    if dist.get_rank(group) < 0:
        return
    call = torch.compile(across.context_parallel_attention, fullgraph=True, backend=backend)
    agrees(group, call, causal=True)
    agrees(group, call, varlen=True, causal=True, sinks=normal(HEADS), softmax_scale=0.4)
    if backend == "aot_eager":
        agrees(group, call, dropout_p=0.2, dropout_seed=2**63 + 1, layout="contiguous")
        own = across.group_of(group)
        part = part_of(group, "zigzag", False)
        mine = [part(x) for x in inputs(False)]
        close(call(*mine, group=own), across.context_parallel_attention(*mine, group=group), 0)


def compiles_once_for_all_lengths():
    group = subgroup(0, 1)
    if dist.get_rank(group) < 0:
        return
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(across.context_parallel_attention, fullgraph=True, backend=counter, dynamic=True)
    q, k, v = inputs(True)
    counts = []
    for cu in ([0, 20, 46], [0, 13, 46], [0, 31, 46]):
        mine = [distributed.shard(x, "zigzag", dist.get_rank(group), 2, cu) for x in (q, k, v)]
        cu = torch.tensor(cu, dtype=torch.int32)
        got = call(*mine, group=group, cu_seqlens_q=cu)
        want = fa.flash_attn_varlen_func(q, k, v, cu, cu, 46, 46)
        close(got, distributed.shard(want, "zigzag", dist.get_rank(group), 2, cu))
        counts.append(counter.frame_count)
    assert 0 < counts[0] == counts[-1], counts


def checkpointed():
    from torch.utils.checkpoint import checkpoint

    def call(q, k, v, **options):
        return checkpoint(across.context_parallel_attention, q, k, v, use_reentrant=False, **options)

    agrees(subgroup(0, 1), call, causal=True, dropout_p=0.2, dropout_seed=4)


def autocast():
    group = subgroup(0, 1)
    if dist.get_rank(group) < 0:
        return
    part = part_of(group, "zigzag", False)
    linear = torch.nn.Linear(DIM, DIM, bias=False)
    torch.nn.init.eye_(linear.weight)
    q, k, v = map(part, inputs(False))
    with torch.autocast("cpu", torch.bfloat16):
        out = across.context_parallel_attention(*(linear(x) for x in (q, k, v)), group=group)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert linear.weight.grad.dtype == torch.float32 and linear.weight.grad.abs().sum() > 0
    plain = across.context_parallel_attention(q, k, v, group=group)
    close(out.float(), plain, 3e-2)


def backward_on_another_thread():
    """Runs the backward pass on another thread, as autograd does for GPUs."""
    group = subgroup(0, 1)
    if dist.get_rank(group) < 0:
        return
    part = part_of(group, "zigzag", False)
    grads = []
    for on_thread in (False, True):
        mine = [part(x).requires_grad_() for x in inputs(False)]
        out = across.context_parallel_attention(*mine, group=group)
        if on_thread:
            thread = threading.Thread(target=out.sum().backward)
            thread.start()
            thread.join()
        else:
            out.sum().backward()
        grads.append([x.grad for x in mine])
    for got, want in zip(*grads, strict=True):
        close(got, want, 0)


def torch_s_own_sharding():
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    F = torch.nn.functional
    original = F.scaled_dot_product_attention
    # PyTorch's head and tail chunks; lengths that are no multiple of 4 have contiguous chunks, which older PyTorch
    # refuses.
    for length in (24, 22) if torch.__version__ >= torch.torch_version.TorchVersion("2.12") else (24,):
        q, k, v = (normal(2, heads, length, DIM, seed=i) for i, heads in enumerate((4, 2, 2)))
        mask = normal(2, 1, length, length) > -0.5
        want = [original(q, k, v, is_causal=True, enable_gqa=True), original(q, k, v, mask, enable_gqa=True)]
        buffers = [x.clone() for x in (q, k, v, mask)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4), across.sdpa_across_ranks(mesh):
            q, k, v, mask = (x.clone() for x in buffers)
            assert q.shape[2] == length // 2
            got = [
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
            ]
            with pytest.raises(fa.BadArgument, match="enable_gqa"):
                F.scaled_dot_product_attention(q, k, v)
            with pytest.raises(fa.BadArgument, match="dropout_seed"):
                F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
            run = torch.compile(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                backend="aot_eager", fullgraph=True,
            )  # fmt: skip
            close(run(q, k, v), got[0], 0)
            got = context_parallel_unshard(mesh, got, [2, 2])
        assert F.scaled_dot_product_attention is original
        close(got[0], want[0])
        close(got[1], want[1])


def errors():
    """An error on one rank is raised on both ranks at once, and the group stays usable."""
    group = subgroup(0, 1)
    rank = dist.get_rank(group)
    if rank < 0:
        return
    part = part_of(group, "zigzag", False)
    q, k, v = map(part, inputs(False))
    call = functools.partial(across.context_parallel_attention, group=group)
    wrong = {
        "softcap=True is not a number": ({"softcap": True}, fa.BadArgument),
        "mode='fast'": ({"mode": "fast"}, fa.BadArgument),
        "alibi_slopes is a list": ({"alibi_slopes": [0.5] * HEADS}, fa.BadArgument),
        "alibi_slopes requires a gradient": ({"alibi_slopes": torch.ones(HEADS, requires_grad=True)}, fa.Unsupported),
        "out_dtype='float16': float8 is not served": ({"out_dtype": "float16"}, fa.Unsupported),
        "dropout_p=0.5 without dropout_seed": ({"dropout_p": 0.5}, fa.BadArgument),
        "cu_seqlens_q='short' is no sequence": ({"cu_seqlens_q": "short"}, fa.BadArgument),
        "causal=1": ({"causal": True}, fa.BadArgument),  # 0 on the other rank
    }
    for text, (options, kind) in wrong.items():
        with pytest.raises(kind, match=re.escape(text)):
            call(q, k, v, **(options if rank == 1 else {}))
    out, lse = call(q, k, v, return_lse=True)
    with pytest.raises(fa.BadArgument, match="dout has shape"):
        torch.ops.flash_attn_minimal.context_parallel_backward(
            out if rank == 0 else out[:, :1], None, out, lse, False, False, *_operator_arguments(q, k, v, group)
        )
    agrees(group, causal=True)
    with pytest.raises(fa.Unsupported, match="double backward"):
        q.requires_grad_()
        (grad,) = torch.autograd.grad(call(q, k, v).sum(), q, create_graph=True)
        grad.sum().backward()
    with pytest.raises(fa.Unsupported, match="transform of torch.func"):
        torch.func.vmap(call)(*(x.detach()[None] for x in (q, k, v)))
    with pytest.raises(fa.BadArgument, match="neither a Group nor a process group"):
        call(q, k, v, group="gloo")


def _operator_arguments(q, k, v, group):
    from flash_attn_minimal._core.options import Options

    return across._arguments(q, k, v, across.calls.split_options("", {})[0], Options(), group.group_name)


def lost():
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return
    part = part_of(group, "zigzag", False)
    mine = [part(x).requires_grad_() for x in inputs(False)]
    out = across.context_parallel_attention(*mine, group=group)
    if dist.get_rank() == 1:
        across.group_of(group).abort("the pump broke")
    with pytest.raises(fa.RankLost, match="the pump broke"):
        out.sum().backward()
    with pytest.raises(fa.RankLost, match="the pump broke"):
        across.context_parallel_attention(*mine, group=group)


def groups_are_made_again():
    """After close_groups the next call makes a new group."""
    before = across.group_of()
    across.close_groups()
    agrees(None)
    assert across.group_of() is not before and "closed" in repr(before)


# ---- the tests ----


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2)], ids=len)
def test_modes_layouts_dense_and_packed(crew, ranks):
    crew(every_mode, ranks)


@pytest.mark.parametrize(
    "function",
    [
        options, dropout, default_group_of_all, mesh_of_two_by_two, compiles_once_for_all_lengths, checkpointed,
        autocast, backward_on_another_thread, torch_s_own_sharding, errors, lost, groups_are_made_again,
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_on_ranks(crew, function):
    crew(function)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(crew, backend):
    crew(compiled, backend)


@pytest.mark.skipif(
    not (CUDA_DEVICES and torch.cuda.is_available()), reason="no CUDA device for the library and PyTorch"
)
@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2)], ids=len)
def test_on_gpus(crew, ranks):
    crew(on_gpus, ranks)


@pytest.mark.skipif(
    not (CUDA_DEVICES and torch.cuda.is_available()), reason="no CUDA device for the library and PyTorch"
)
def test_ranks_that_are_threads_of_one_gpu():
    """Autograd has only one thread for each GPU, in which ranks would wait for each other."""
    q, k, v = (x.cuda() for x in inputs(False))

    def rank(group):
        mine = [distributed.shard(x, "contiguous", group.rank, group.size).requires_grad_() for x in (q, k, v)]
        with torch.autograd.set_multithreading_enabled(False):
            across.context_parallel_attention(*mine, group=group, layout="contiguous").square().sum().backward()
        return mine[0].grad

    got = distributed.unshard(distributed.run(distributed.thread_groups(devices=[0, 0]), rank), "contiguous")
    torch.cuda.synchronize()
    q.requires_grad_()
    fa.flash_attn_func(q, k, v).square().sum().backward()
    close(got, q.grad, 1e-4)


ENDS = """
import sys, torch, torch.distributed as dist
from flash_attn_minimal.torch import context_parallel_attention

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
q = torch.ones(1, 4, 2, 8)
context_parallel_attention(q, q, q)
if rank == 1:
    raise ValueError("no more coffee")
context_parallel_attention(q, q, q)
"""


def test_a_rank_that_raises_tells_the_others(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert all(rank.returncode == 1 for rank in ranks)
    assert "RankLost" in said[0] and "rank 1 ended with ValueError: no more coffee" in said[0], said[0]


def test_training_over_ranks_has_the_losses_of_one(tmp_path):
    """The example itself compares the losses. 25 tokens on two ranks give unequal numbers of rows."""
    for module in ("rich", "matplotlib"):
        pytest.importorskip(module)
    example = ROOT / "examples/context_parallel/train.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", example, "--device", "cpu"]
    done = subprocess.run(
        [*command, "--steps", "4", "--seq-len", "25", "--out", tmp_path], text=True, capture_output=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "losses.json").read_text())
    losses, of_one = report["losses"], report["losses_of_one"]
    assert len(losses) == 4 and 5 < losses[3] < losses[0] < 7
    assert losses == pytest.approx(of_one, abs=1e-4)
    assert (tmp_path / "losses.png").stat().st_size > 1000
