"""A repeated call passes to the library the same bytes as the long way. The arrays pretend to be on a GPU, in a
framework that is made up here, and a stand-in for the library records its arguments."""

import ctypes as ct

import pytest

import flash_attn_minimal as fa
from flash_attn_minimal import _arrays, errors, kvcache
from flash_attn_minimal._core import forward, library, recordings, repeats, structs
from flash_attn_minimal._door import Door, View

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


@pytest.fixture
def handed(monkeypatch):
    """The calls of the library as (function, bytes of the structs, stream). They need workspace."""
    calls = []

    def run(lib, name, args, stream, views):
        attention = args.attention.contents if name == "kvcache_attention" else args
        if attention.workspace_bytes < WORKSPACE:
            raise errors.WorkspaceTooSmall("more")
        calls.append((name, bytes(attention), bytes(args) if attention is not args else b"", stream))

    def packed(name, bytes_of_it):
        def launch(args, stream):
            if bytes_of_it:
                calls.append((name, args, b"", stream))
            else:
                call = structs.KVCacheArgs.from_address(args)
                calls.append((name, bytes(call.attention.contents), bytes(call), stream))
            return library.OK

        return launch

    def query(args, plan):
        plan.workspace_bytes = WORKSPACE
        return library.OK

    class Library:
        fa_attention_query = fa_kvcache_query = staticmethod(query)

    monkeypatch.setattr(recordings, "run", run)
    monkeypatch.setattr(repeats, "load_packed", packed)
    tables = forward.repeats, kvcache._repeats
    for module, table in zip((forward, kvcache), tables, strict=True):
        monkeypatch.setattr(module, "load", Library)
        table.clear()
    monkeypatch.setitem(_arrays._doors, Fake, FakeDoor())
    yield calls
    for table in tables:
        table.clear()


def addresses(struct, data):
    """(fields that hold an address, with their values; the remaining bytes)."""
    filled = struct.from_buffer_copy(data)
    found = {name: getattr(filled, name) for name, kind in struct._fields_ if kind in (ct.c_void_p, ct.c_char_p)}
    for name in found:
        setattr(filled, name, None)
    if struct is structs.KVCacheArgs:
        filled.attention = None
    return found, bytes(filled)


def same(handed, arrays):
    """Compares the last two calls, the long way and the shortcut. They are equal except for addresses, which belong to
    the given arrays."""
    (_, *long, long_stream), (_, *short, short_stream) = handed[-2:]
    assert long_stream == short_stream == STREAM
    places = {}
    for struct, before, after in zip((structs.AttentionArgs, structs.KVCacheArgs), long, short, strict=False):
        if before or after:
            (old, old_rest), (new, new_rest) = addresses(struct, before), addresses(struct, after)
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
