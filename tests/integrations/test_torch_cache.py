"""flash_attn_with_kvcache as operators of PyTorch: graphs that contain it write the cache like a plain call."""

from __future__ import annotations

import pytest
from conftest import CUDA_DEVICES

torch = pytest.importorskip("torch", reason="it takes and returns PyTorch's tensors")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal.torch import flash_attn_with_kvcache as attend  # noqa: E402

HAS_CUDA = CUDA_DEVICES and torch.cuda.is_available()
NO_CUDA = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device for the library and PyTorch")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_CUDA)]
BATCH, HEADS, HEADS_K, ROOM, DIM = 2, 4, 2, 32, 16


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(device, *shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device)


def table(device, *numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def caches(device, name):
    """k_cache, v_cache, and the other arguments of a step of this kind."""
    k_cache, v_cache = normal(device, BATCH, ROOM, HEADS_K, DIM), normal(device, BATCH, ROOM, HEADS_K, DIM + 8)
    more = {"cache_seqlens": table(device, 3, 9), "causal": True}
    if name == "pages":
        k_cache, v_cache = (x.view(4, ROOM // 2, HEADS_K, -1) for x in (k_cache, v_cache))
        more["block_table"] = table(device, [2, 1], [3, 0])
    elif name == "rotary":
        angles = normal(device, ROOM, DIM // 4)
        more |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False}
    elif name == "eight bits":
        eight = fa.quantize_kvcache(k_cache, v_cache, "int8", "token")
        k_cache, v_cache, more["k_scale"], more["v_scale"] = eight
    elif name == "factors of heads":
        eight = fa.quantize_kvcache(k_cache, v_cache, "int8", "head")
        k_cache, v_cache, more["k_scale"], more["v_scale"] = eight
    elif name == "leftpad":
        more |= {"cache_leftpad": table(device, 1, 4), "window_size": (5, 0), "softcap": 3.0}
    elif name == "one length":
        more["cache_seqlens"] = 7
    elif name == "full":
        more["cache_seqlens"] = None
    return k_cache, v_cache, more


KINDS = ["plain", "pages", "rotary", "eight bits", "factors of heads", "leftpad", "one length", "full"]


def step(device, seqlen=1):
    return (
        normal(device, BATCH, seqlen, HEADS, DIM),
        normal(device, BATCH, seqlen, HEADS_K, DIM),
        normal(device, BATCH, seqlen, HEADS_K, DIM + 8),
    )


def same(got, want):
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **({"backend": "aot_eager"} | options))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", KINDS)
def test_a_compiled_step(device, name, mode):
    """The outputs, and every byte of the cache and of its factors, equal those of a plain call."""
    (q, k, v), graph = step(device), compiled(lambda *args, **more: attend(*args, return_lse=True, **more))
    for trial in range(2):
        (k_cache, v_cache, more), (mine_k, mine_v, mine) = caches(device, name), caches(device, name)
        want = fa.flash_attn_with_kvcache(q + trial, k_cache, v_cache, k, v, return_lse=True, **more)
        with mode():
            same(graph(q + trial, mine_k, mine_v, k, v, **mine), want)
        same((mine_k, mine_v), (k_cache, v_cache))
        same([x for x in mine.values() if torch.is_tensor(x)], [x for x in more.values() if torch.is_tensor(x)])


def test_by_inductor(device):
    """Compiled by inductor, which also has to keep tensors in place that an operator writes."""
    (q, k, v), graph = step(device), compiled(lambda *args, **more: attend(*args, **more) * 2, backend="inductor")
    (k_cache, v_cache, more), (mine_k, mine_v, mine) = caches(device, "plain"), caches(device, "plain")
    want = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **more) * 2
    place = mine_k.data_ptr()
    with torch.no_grad():
        same([graph(q, mine_k, mine_v, k, v, **mine), mine_k, mine_v], [want, k_cache, v_cache])
    assert mine_k.data_ptr() == place


def test_several_layers_of_one_graph(device):
    """Two layers that use parts of one cache tensor, and a step that reads what an earlier step has written."""
    q, k, v = step(device)
    v = v[..., :DIM].contiguous()

    def layers(cache, q, k, v, lengths):
        for layer in (0, 1, 0):
            q = attend(q, cache[layer, 0], cache[layer, 1], k, v, cache_seqlens=lengths, causal=True)
            lengths = lengths + 1
        return q, cache.sum()

    cache = normal(device, 2, 2, BATCH, ROOM, HEADS_K, DIM)
    mine, lengths = cache.clone(), table(device, 3, 9)
    with torch.no_grad():
        torch.testing.assert_close(compiled(layers)(mine, q, k, v, lengths), layers(cache, q, k, v, lengths))
    assert torch.equal(mine, cache)


def test_values_that_are_columns_of_keys(device):
    q, k, _ = step(device)
    cache = normal(device, BATCH, ROOM, HEADS_K, DIM)
    mine = cache.clone()

    def latent(q, cache, k):
        return attend(q, cache, cache[..., :8], k, k[..., :8], cache_seqlens=5)

    want = latent(q, cache, k)
    with torch.no_grad():
        same([compiled(latent)(q, mine, k), mine], [want, cache])


def test_reading_writes_nothing(device):
    """Without new keys the operator promises that it does not write: a graph need not copy the cache."""
    q, _, _ = step(device, 2)
    k_cache, v_cache, more = caches(device, "plain")
    schemas = {name: getattr(torch.ops.flash_attn_minimal, name).default._schema for name in
               ("kvcache_attention", "kvcache_append", "kvcache_append_scaled")}  # fmt: skip
    written = {
        name: [x.name for x in s.arguments if x.alias_info and x.alias_info.is_write] for name, s in schemas.items()
    }
    assert list(written.values()) == [[], ["k_cache", "v_cache"], ["k_cache", "v_cache", "k_scale", "v_scale"]]
    want = fa.flash_attn_with_kvcache(q, k_cache, v_cache, **more)
    with torch.no_grad():
        same([compiled(attend)(q, k_cache, v_cache, **more)], [want])


def test_one_graph_for_every_length(device):
    """A length given as a number becomes a symbol of the graph at its second value."""
    q, k, v = step(device)
    graph = compiled(lambda n, *args: attend(*args, cache_seqlens=n))
    (k_cache, v_cache, _), (mine_k, mine_v, _) = caches(device, "plain"), caches(device, "plain")
    with torch.no_grad():
        for n in (3, 4, 5):
            same([graph(n, q, mine_k, mine_v, k, v)], [attend(q, k_cache, v_cache, k, v, cache_seqlens=n)])
        with torch.compiler.set_stance("fail_on_recompile"):
            for n in range(6, 11):
                same([graph(n, q, mine_k, mine_v, k, v)], [attend(q, k_cache, v_cache, k, v, cache_seqlens=n)])
    same((mine_k, mine_v), (k_cache, v_cache))


def test_exported(device):
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            k_cache, v_cache, _ = caches(device, "plain")
            self.register_buffer("k_cache", k_cache)
            self.register_buffer("v_cache", v_cache)

        def forward(self, q, k, v, lengths):
            return attend(q, self.k_cache, self.v_cache, k, v, cache_seqlens=lengths, causal=True)

    inputs, lengths = step(device), table(device, 3, 9)
    k_cache, v_cache, more = caches(device, "plain")
    want = fa.flash_attn_with_kvcache(inputs[0], k_cache, v_cache, *inputs[1:], **more)
    with torch.no_grad():
        program = torch.export.export(Step(), (*inputs, lengths))
        for module in (program.module(), program.run_decompositions().module()):
            same([module(*inputs, lengths)], [want])
            same([module.k_cache, module.v_cache], [k_cache, v_cache])


def test_fake_tensors_and_meta(device):
    q, k, v = step(device)
    k_cache, v_cache, more = caches(device, "plain")
    want = attend(q, k_cache, v_cache, k, v, return_lse=True, **more)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = attend(*map(mode.from_tensor, (q, k_cache, v_cache, k, v)), return_lse=True, **more)
    meta = attend(*(x.to("meta") for x in (q, k_cache, v_cache, k, v)), return_lse=True, cache_seqlens=3)
    for got in (fake, meta):
        for x, y in zip(got, want, strict=True):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


@pytest.mark.filterwarnings("ignore:.*mutat")
def test_opcheck(device):
    q, k, v = step(device)
    k_cache, v_cache, _ = caches(device, "plain")
    numbers = {"bool": False, "int": 0, "float": 0.0}
    for name, new in (("kvcache_append", {"k": k, "v": v}), ("kvcache_attention", {})):
        operator = getattr(torch.ops.flash_attn_minimal, name).default
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": table(device, 3, 9), **new}
        given |= {"causal": True, "window_left": -1, "window_right": -1, "return_lse": True}
        arguments = [given.get(x.name, numbers.get(str(x.type))) for x in operator._schema.arguments]
        torch.library.opcheck(operator, tuple(arguments))


def test_flops(device):
    q, k, v = step(device, 3)
    k_cache, v_cache, _ = caches(device, "plain")
    row = 2 * BATCH * HEADS * 3 * (2 * DIM + 8)
    for keys, more in ((ROOM, {"cache_seqlens": table(device, 3, 9)}), (8, {"cache_seqlens": 5}), (ROOM, {})):
        with FlopCounterMode(display=False) as counter:
            attend(q, k_cache, v_cache, k, v, **more)
        assert counter.get_total_flops() == row * keys


def test_a_plain_call_is_the_core_s(device):
    q, k, v = step(device)
    (k_cache, v_cache, more), (mine_k, mine_v, _) = caches(device, "plain"), caches(device, "plain")
    out = torch.empty(BATCH, 1, HEADS, DIM + 8, device=device)
    want = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, return_softmax_lse=True, **more)
    got = attend(q, mine_k, mine_v, k, v, out=out, return_softmax_lse=True, **more)
    assert got[0] is out
    same([*got, mine_k, mine_v], [*want, k_cache, v_cache])


def test_refusals():
    q, k, v = step("cpu")
    k_cache, v_cache, more = caches("cpu", "plain")
    with pytest.raises(fa.Unsupported, match=r"q requires a gradient, .* torch.no_grad\(\)"):
        attend(q.requires_grad_(), k_cache, v_cache)
    q = q.detach()
    meta = [x.to("meta") for x in (q, k_cache, v_cache)]
    with pytest.raises(fa.Unsupported, match="out is given"):
        attend(*meta, out=q)
    with pytest.raises(fa.BadArgument, match="cache_seqlens is a list"):
        attend(*meta, cache_seqlens=[3, 9])
    with pytest.raises(fa.BadArgument, match=r"k_cache has shape \(32, 2, 16\)"):
        attend(meta[0], meta[1][0], meta[2])
    for arguments, named in (((*meta, meta[1]), {"k_cache": meta[1]}), (meta * 7, {}), (meta, {"kernels": "no"})):
        with pytest.raises(TypeError, match="k_cache|positional|kernels"):  # as a call of a Python function
            attend(*arguments, **named)
    with pytest.raises(fa.Unsupported, match="torch.func"):
        torch.vmap(lambda q: attend(q, k_cache, v_cache))(q[None])
    with pytest.raises(fa.BadArgument, match="cache_seqlens=40 and 1 new keys"), torch.no_grad():
        compiled(attend)(q, k_cache, v_cache, k, v, cache_seqlens=40)


@pytest.mark.parametrize("seqlen_new", [0, 1])
def test_refusals_while_a_call_is_traced(seqlen_new):
    """They name the argument, whatever stands in its place."""
    q, k, v = step("cpu")
    k_cache, v_cache, more = caches("cpu", "eight bits")
    new = {"k": k, "v": v} if seqlen_new else {}
    for name, wrong, text in (
        ("k_scale", more["k_scale"].numpy(), "k_scale is a ndarray"),
        ("v_scale", [1.0, 2.0], "v_scale is a list"),
        ("k_cache", k_cache.numpy(), "k_cache is a ndarray"),
        ("k_cache", k_cache.flatten(), r"k_cache has shape \(2048,\): expected 4 axes"),
        ("v_cache", v_cache[0], r"v_cache has shape \(32, 2, 24\): expected 4 axes"),
        ("q", q[0, 0, 0, 0], r"q has shape \(\): expected 4 axes"),
    ):
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **new, **more, name: wrong}
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(fa.BadArgument, match=text):
            attend(**given)
    torch._dynamo.reset()
    for name in ("k_scale", "v_scale"):
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **new, **more, name: more[name].numpy()}
        with pytest.raises(fa.BadArgument, match=f"{name} is a"), torch.no_grad():
            torch.compile(attend, backend="eager")(**given)
