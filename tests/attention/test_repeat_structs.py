"""A repeated call passes to the library the same bytes as the long way. The arrays pretend to be on a GPU, in a
framework that is made up here, and a stand-in for the library records its arguments."""

import ctypes as ct
import struct

import pytest

import flash_attn_minimal as fa
from flash_attn_minimal import _arrays, errors, kvcache
from flash_attn_minimal._arrays.door import Door, View
from flash_attn_minimal._core import forward, library, prepared, recordings, repeats, structs
from flash_attn_minimal._core import launch as _launch

WORKSPACE, STREAM = 256, 0x5EED


class Fake:
    """An array with a unique address, on cuda:1."""

    made = 0

    def __init__(self, *shape, dtype="float16"):
        Fake.made += 1
        self.shape, self.dtype, self.address = shape, dtype, Fake.made << 32


class FakeDoor(Door):
    name = "Fake"
    plain = Fake
    address = staticmethod(lambda array: array.address)

    def view(self, array, name):
        strides, step = [], 1
        for size in reversed(array.shape):
            strides.insert(0, step)
            step *= size
        return View(array, self, array.address, array.shape, tuple(strides), array.dtype, structs.CUDA, 1, True)

    def describe(self, arrays, gradients=False):
        return tuple(x and (x.shape, x.dtype) for x in arrays)

    def maker(self, like, result, fill=None):
        return lambda array: Fake(*result.shape, dtype=result.dtype)

    def empty(self, like, shape, dtype):
        return self.view(Fake(*shape, dtype=dtype), "out")

    def stream(self, views):
        return STREAM

    def current_stream(self, index):
        assert index == 1
        return STREAM


class Handed(list):
    """The calls of the library, and the sizes of workspace that it asks for: the last one counts."""


def filled(call, values):
    """The image of a call with its holes filled, in memory of its own."""
    memory = ct.create_string_buffer(ct.string_at(call.image, call.image_bytes), call.image_bytes)
    for hole in (structs.Hole * call.hole_count).from_address(call.holes):
        value = ct.addressof(memory) - 1 - hole.value if hole.value < 0 else numbers(values)[hole.value]
        memory[hole.byte : hole.byte + hole.bytes] = (value % 256**hole.bytes).to_bytes(hole.bytes, "little")
    alive.append(memory)
    return memory


def numbers(values):
    return struct.unpack(f"={len(values) // 8}Q", values)


alive = []  # the images of the calls, whose strings the tests read


@pytest.fixture
def handed(monkeypatch):
    """The calls of the library as (function, bytes of the structs, stream). They need workspace."""
    calls, sizes = Handed(), [WORKSPACE]
    calls.sizes = sizes

    def run(lib, name, args, stream, views):
        attention = args.attention.contents if name == "kvcache_attention" else args
        if attention.workspace_bytes < sizes[-1]:
            raise errors.WorkspaceTooSmall("more")
        calls.append((name, bytes(attention), bytes(args) if attention is not args else b"", stream))

    def launch(address, values, stream):
        call = structs.Call.from_address(address)
        name, memory = structs.OPERATIONS[call.operation - 1], filled(call, values)
        if name == "kvcache_attention":
            args = structs.KVCacheArgs.from_buffer(memory)
            calls.append((name, bytes(args.attention.contents), bytes(args), stream))
        else:
            calls.append((name, bytes(structs.AttentionArgs.from_buffer(memory)), b"", stream))
        return library.OK

    def planned(self, values, kind=structs.AttentionPlan):
        return structs.AttentionPlan(workspace_bytes=sizes[-1])

    def query(args, plan):
        plan.workspace_bytes = sizes[-1]
        return library.OK

    class Library:
        fa_attention_query = fa_kvcache_query = staticmethod(query)

    monkeypatch.setattr(recordings, "run", run)
    monkeypatch.setattr(repeats, "runner", lambda: launch)
    monkeypatch.setattr(prepared.Prepared, "plan", planned)
    monkeypatch.setattr(_launch, "load", Library)
    tables = forward.repeats, kvcache._repeats
    for table in tables:
        table.clear()
    monkeypatch.setitem(_arrays._doors, Fake, FakeDoor())
    yield calls
    for table in tables:
        table.clear()


def addresses(kind, data):
    """(fields that hold an address, with their values; the remaining bytes)."""
    args = kind.from_buffer_copy(data)
    found = {name: getattr(args, name) for name, of in kind._fields_ if of in (ct.c_void_p, ct.c_char_p)}
    for name in found:
        setattr(args, name, None)
    if kind is structs.KVCacheArgs:
        args.attention = None
    return found, bytes(args)


def same(handed, arrays):
    """Compares the last two calls, the long way and the shortcut. They are equal except for addresses, which belong to
    the given arrays."""
    (_, *long, long_stream), (_, *short, short_stream) = handed[-2:]
    assert long_stream == short_stream == STREAM
    places = {}
    for kind, before, after in zip((structs.AttentionArgs, structs.KVCacheArgs), long, short, strict=False):
        if before or after:
            (old, old_rest), (new, new_rest) = addresses(kind, before), addresses(kind, after)
            assert old_rest == new_rest
            assert {name for name, place in old.items() if place} == {name for name, place in new.items() if place}
            places |= new
    for name, array in arrays.items():
        assert places[name] == array.address, name
    return places


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_forward(handed, given, return_lse):
    options = {"causal": True, "softmax_scale": 0.3, "window_size": (5, 0), "softcap": 2.0, "return_lse": return_lse}
    for turn in range(4):
        q, k, v = Fake(2, 5, 4, 8), Fake(2, 7, 2, 8), Fake(2, 7, 2, 16)
        out = Fake(2, 5, 4, 16) if given else None
        results = fa.flash_attn_func(q, k, v, out=out, **options)
        assert len(handed) == turn + 1
        out, lse = results if return_lse else (results, None)
        arrays = {"q_data": q, "k_data": k, "v_data": v, "out_data": out} | ({"lse": lse} if return_lse else {})
        if turn > 1:  # the third call on takes the shortcut
            assert any(forward.repeats.known.values())
            assert same(handed, arrays)["workspace"]


@pytest.mark.parametrize("lengths", ["array", "integer", "none"])
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_kvcache(handed, lengths, appends, paged):
    for turn in range(4):
        cache = (6, 16, 2, 8)
        q, k_cache, v_cache = Fake(3, 1, 4, 8), Fake(*cache), Fake(*cache)
        arrays = {"q_data": q, "k_data": k_cache, "v_data": v_cache}
        options = {"alibi_slopes": Fake(4, dtype="float32"), "sinks": Fake(4, dtype="float32"), "kernel": "minimal"}
        arrays |= {"alibi_slopes": options["alibi_slopes"], "sinks": options["sinks"]}
        if paged:
            arrays["block_table"] = options["block_table"] = Fake(3, 2, dtype="int32")
        else:
            arrays["cache_batch_idx"] = options["cache_batch_idx"] = Fake(3, dtype="int32")
        if appends:
            options |= {"k": Fake(3, 1, 2, 8), "v": Fake(3, 1, 2, 8)}
            options |= {"rotary_cos": Fake(40, 4, dtype="float32"), "rotary_sin": Fake(40, 4, dtype="float32")}
            arrays |= {"k_new_data": options["k"], "v_new_data": options["v"]}
            arrays |= {name: options[name] for name in ("rotary_cos", "rotary_sin")}
        if lengths == "array":
            arrays["cache_seqlens"] = options["cache_seqlens"] = Fake(3, dtype="int32")
        elif lengths == "integer":
            options["cache_seqlens"] = 9
        out, lse = fa.flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=True, **options)
        assert len(handed) == turn + 1
        if turn > 1:
            assert any(kvcache._repeats.known.values())
            places = same(handed, arrays | {"out_data": out, "lse": lse})
            assert places["workspace"] and places["kernel"] == b"minimal"


def test_keys_follow_the_length(handed):
    q, cache, new = Fake(1, 1, 4, 8), Fake(1, 64, 2, 8), Fake(1, 1, 2, 8)
    for length in (3, 4, 5, 60):
        fa.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=length)
        assert structs.AttentionArgs.from_buffer_copy(handed[-1][1]).seqlen_k == length + 1
    assert any(kvcache._repeats.known.values())
    with pytest.raises(fa.BadArgument, match="cache_seqlens=64 and 1 new keys are more than the 64 keys"):
        fa.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=64)


def test_the_workspace_has_the_size_of_this_very_call(handed):
    """The size follows from addresses and the environment, too, so a call gets what its own plan says: neither less
    nor more than that."""
    sizes = [256, 256, 256, 4096, 4096, 512, 512, 512]
    for size in sizes:
        handed.sizes.append(size)
        fa.flash_attn_func(Fake(2, 5, 4, 8), Fake(2, 7, 2, 8), Fake(2, 7, 2, 8))
    told = [structs.AttentionArgs.from_buffer_copy(data).workspace_bytes for _, data, *_ in handed]
    assert told == sizes and any(forward.repeats.known.values())
