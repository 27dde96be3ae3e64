"""activate: this library as the flash backend of scaled_dot_product_attention, and models that stay as they are."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import subprocess
import sys
import threading
import warnings

import pytest
from conftest import ROOT

torch = pytest.importorskip("torch", reason="it is a backend of PyTorch's")

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from flash_attn_minimal.errors import Unsupported  # noqa: E402
from flash_attn_minimal.torch import _backend, activate  # noqa: E402

if not hasattr(torch.library, "get_kernel"):
    pytest.skip("this PyTorch has no torch.library.get_kernel", allow_module_level=True)

attention = F.scaled_dot_product_attention
BATCH, HEADS, ROWS, KEYS, DIM = 2, 4, 9, 13, 16


@pytest.fixture(autouse=True)
def _nothing_stays():
    if torch.cuda.is_available():
        torch.cuda.init()  # the order of backends changes when CUDA starts
    yield
    assert _backend._current() is None and not _backend._installed
    _backend._said.clear()


@pytest.fixture
def calls(monkeypatch):
    """The names of the operators that this library answers, as they are called."""
    seen = []

    def counted(name, run):
        def call(*args, **kwargs):
            result = run(*args, **kwargs)
            seen.append(name)
            return result

        return call

    for key, operators in _backend._OPERATORS.items():
        counting = {name: counted(name, run) for name, run in operators.items()}
        monkeypatch.setitem(_backend._OPERATORS, key, counting)
    return seen


FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BOTH = [FORWARD, f"{FORWARD}_backward"]


def normal(*shape, dtype=torch.float32, grad=True):
    generator = torch.Generator().manual_seed(sum(shape) + 7 * len(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def qkv(dtype=torch.float32, heads_k=HEADS, keys=KEYS):
    shapes = (BATCH, HEADS, ROWS, DIM), (BATCH, heads_k, keys, DIM), (BATCH, heads_k, keys, DIM)
    q, k, v = (normal(*shape, dtype=dtype, grad=False) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v + 1)]


def results(inputs, **options):
    """out and the gradients of the inputs."""
    out = attention(*inputs, **options)
    weights = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


def check(inputs, tolerance=2e-5, **options):
    want = results(inputs, **options)
    with activate():
        got = results(inputs, **options)
    for x, y in zip(got, want, strict=True):
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, atol=tolerance, rtol=tolerance)


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool": {"attn_mask": torch.ones(ROWS, KEYS, dtype=torch.bool).tril(3)},
    "float": {"attn_mask": normal(BATCH, HEADS, ROWS, KEYS, grad=False)},
    "heads": {"attn_mask": normal(1, HEADS, ROWS, KEYS, grad=False)},
    "keys": {"attn_mask": normal(BATCH, 1, 1, KEYS, grad=False)},
    "one column": {"attn_mask": normal(BATCH, 1, ROWS, 1, grad=False)},
    "every second number": {"attn_mask": normal(ROWS, 2 * KEYS, grad=False)[:, ::2]},
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_out_and_gradients(calls, options):
    check(qkv(), **options)
    assert calls == BOTH


@pytest.mark.parametrize("heads_k", [2, 1])
def test_grouped_heads(calls, heads_k):
    check(qkv(heads_k=heads_k), is_causal=True, enable_gqa=True)
    assert calls == BOTH


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(calls, dtype):
    inputs = qkv(dtype)
    exact = results([x.detach().double().requires_grad_() for x in inputs], is_causal=True)
    plain = results(inputs, is_causal=True)
    with activate():
        got = results(inputs, is_causal=True)
    assert calls == BOTH
    for x, y, z in zip(got, plain, exact, strict=True):
        assert x.dtype == dtype
        assert (x.double() - z).abs().max() <= 2 * (y.double() - z).abs().max() + 1e-3


def test_memory_in_other_orders(calls):
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv())
    check([q, k, v])
    check([q, k[:, :, ::2], v[:, :, ::2]])
    assert calls == 2 * BOTH


def test_a_row_that_sees_nothing_is_zero(calls):
    mask = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(-1)
    with activate():
        out, *gradients = results(qkv(), attn_mask=mask)
    assert calls == BOTH and not out[:, :, 0].any()
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("ours", ["forward", "backward"])
def test_a_block_around_one_of_the_passes(calls, ours):
    inputs, mask = qkv(), torch.ones(ROWS, KEYS, dtype=torch.bool).tril(-1)  # row 0 sees nothing
    weights = normal(BATCH, HEADS, ROWS, DIM, grad=False)
    want = torch.autograd.grad(attention(*inputs, attn_mask=mask), inputs, weights)
    with activate() if ours == "forward" else contextlib.nullcontext():
        out = attention(*inputs, attn_mask=mask)
    with activate() if ours == "backward" else contextlib.nullcontext():
        got = torch.autograd.grad(out, inputs, weights)
    assert calls == [BOTH[ours == "backward"]]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


def test_autocast(calls):
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        want = attention(q, k, v, is_causal=True)
        with activate():
            got = attention(q, k, v, is_causal=True)
    assert calls == [FORWARD] and got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)


def test_vmap_and_functional_gradients(calls):
    q, k, v = (x.detach() for x in qkv())

    def loss(q, k, v):
        return attention(q, k, v, is_causal=True).square().sum()

    want = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    batched = torch.vmap(attention)(*(torch.stack([x, 2 * x]) for x in (q, k, v)))
    with activate():
        got = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
        same = torch.vmap(attention)(*(torch.stack([x, 2 * x]) for x in (q, k, v)))
    assert calls == [*BOTH, FORWARD, FORWARD]  # PyTorch goes through the entries of vmap one by one
    torch.testing.assert_close(same, batched, atol=2e-5, rtol=2e-5)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


def test_checkpointing(calls):
    inputs = qkv()
    want = results(inputs)
    with activate():
        out = torch.utils.checkpoint.checkpoint(attention, *inputs, use_reentrant=False)
        weights = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
        got = torch.autograd.grad((out * weights).sum(), inputs)
    assert calls == [FORWARD, *BOTH]
    for x, y in zip(got, want[1:], strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


# ---- compiled code ----


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("rows", [ROWS, 1])
def test_compiled_code_calls_what_is_active(calls, backend, rows):
    q, k, v = qkv()
    q = q[:, :, :rows].detach().requires_grad_()

    def step(q, k, v):
        return torch.sin(attention(2 * q, k, v, attn_mask=torch.zeros(rows, KEYS)))

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    want = step(q, k, v)
    gradients = torch.autograd.grad(want.sum(), (q, k, v))
    with activate():
        got = compiled(q, k, v)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), (q, k, v)), gradients, atol=2e-5, rtol=2e-5)
    assert calls == BOTH
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(compiled(q, k, v), want, atol=2e-5, rtol=2e-5)  # the same code, PyTorch's own again
    assert calls == BOTH


def test_a_call_that_torch_compile_leaves_to_python(calls):
    """It cannot compile the block, so it compiles the Python functions that the block's calls lead to."""
    lock = threading.Lock()

    def step(q, k, v):
        with lock:
            return attention(2 * q, k, v)

    q, k, v = qkv()
    want = step(q, k, v)
    with activate(), warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.compile(step, backend="eager")(q, k, v)
    assert calls == [FORWARD]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


# ---- what is active ----


def test_the_registry_of_pytorch(calls):
    registry = torch.nn.attention
    if not hasattr(registry, "restore_flash_attention_impl"):
        pytest.skip("this PyTorch has no registry of flash backends")
    assert "flash_attn_minimal" in registry.list_flash_attention_impls()
    registry.activate_flash_attention_impl("flash_attn_minimal")
    try:
        assert registry.current_flash_attention_impl() == "flash_attn_minimal"
        attention(*qkv())
    finally:
        registry.restore_flash_attention_impl()
    attention(*qkv())
    assert calls == [FORWARD] and registry.current_flash_attention_impl() is None


def test_nested_blocks(calls):
    with activate():
        attention(*qkv())
        with activate():
            attention(*qkv())
        attention(*qkv())
        assert len(_backend._installed) == 1
    attention(*qkv())
    assert calls == 3 * [FORWARD]


def test_flash_comes_first_while_the_library_is_active():
    """On GPUs for which PyTorch prefers cuDNN no call would reach this library. Blocks inside bring the order back."""
    if not hasattr(torch._C, "_set_sdp_priority_order"):
        pytest.skip("this PyTorch has no order of backends")
    order, own = torch._C._get_sdp_priority_order, torch._C._get_sdp_priority_order()
    backends = torch.nn.attention.SDPBackend
    flash, cudnn = int(backends.FLASH_ATTENTION), int(backends.CUDNN_ATTENTION)
    prefers_cudnn = [cudnn, *(backend for backend in own if backend != cudnn)]
    torch._C._set_sdp_priority_order(prefers_cudnn)
    try:
        with activate():
            assert order()[:2] == [flash, cudnn] and sorted(order()) == sorted(own)
            with activate():
                pass
            assert order()[0] == flash
        assert order() == prefers_cudnn
        with activate():
            torch._C._set_sdp_priority_order(own)  # the caller's wish, which stays
        assert order() == own
    finally:
        torch._C._set_sdp_priority_order(own)


def test_nothing_stays_of_an_activation_that_fails(monkeypatch):
    def broken(self):
        raise RuntimeError("no more")

    monkeypatch.setattr(_backend._Handle, "put_flash_first", broken)
    with pytest.raises(RuntimeError, match="no more"):
        activate()
    assert not _backend._installed


def test_blocks_that_end_in_the_order_of_their_begin(calls):
    """As those of two threads may: the library stays active until the last block ends, and not longer."""
    first, second = activate(), activate()
    with first:
        second.__enter__()
    attention(*qkv())
    assert calls == [FORWARD]
    second.__exit__(None, None, None)
    assert _backend._current() is None and not _backend._installed


def test_a_block_inside_another_backend_s():
    registry = torch.nn.attention
    if not hasattr(registry, "register_flash_attention_impl"):
        pytest.skip("this PyTorch has no registry of flash backends")

    class Handle:
        def remove(self):
            pass

    registry.register_flash_attention_impl("another", register_fn=Handle)
    registry.activate_flash_attention_impl("another")
    try:
        second = activate()
        with activate():
            second.__exit__(None, None, None)
            assert _backend._current() == _backend.NAME
        assert _backend._current() == "another" and not _backend._installed
    finally:
        registry.restore_flash_attention_impl()


def test_a_block_cannot_begin_again():
    block = activate()
    with block:
        pass
    with pytest.raises(RuntimeError, match="this block of activate has ended"), block:
        pass


def test_blocks_begin_and_end_while_threads_call():
    """In a process of its own: a call of a kernel that a block's end has freed would kill it."""
    code = """
import threading, time, torch
from flash_attn_minimal.torch import _backend, activate

attention, q = torch.nn.functional.scaled_dot_product_attention, torch.ones(1, 2, 3, 8)
end = time.monotonic() + 4


def call():
    while time.monotonic() < end:
        attention(q, q, q)


def block():
    while time.monotonic() < end:
        with activate():
            assert _backend._current() == _backend.NAME
            attention(q, q, q)


threads = [threading.Thread(target=run) for run in (call, call, call, block, block)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert _backend._current() is None and not _backend._installed
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_a_block_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), activate():
        raise ZeroDivisionError


def test_without_a_block(calls):
    activate()
    attention(*qkv())
    _backend._restore()
    attention(*qkv())
    assert calls == [FORWARD]


def test_a_pytorch_without_a_registry(calls, monkeypatch):
    for name in ("activate", "restore", "current"):
        monkeypatch.delattr(torch.nn.attention, f"{name}_flash_attention_impl", raising=False)
    with activate():
        attention(*qkv())
        with activate():
            attention(*qkv())
        attention(*qkv())
    attention(*qkv())
    assert calls == 3 * [FORWARD]


def test_a_pytorch_without_its_own_kernels_at_hand(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(Unsupported, match="has no torch.library.get_kernel, which activate needs"):
        _backend._install()


def test_every_thread(calls):
    with activate():
        threads = [threading.Thread(target=lambda: attention(*qkv())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert calls == 4 * [FORWARD]


def test_the_choice_of_a_backend_stays_with_pytorch(calls):
    with activate():
        with sdpa_kernel(SDPBackend.MATH):
            attention(*qkv())
        assert calls == []
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attention(*qkv())
        assert calls == [FORWARD]


# ---- what PyTorch answers ----


def test_a_fallback_says_once_why(calls):
    inputs = [x.detach().double().requires_grad_() for x in qkv()]
    want = results(inputs)
    with activate(), pytest.warns(UserWarning) as warned:
        first, second = results(inputs), results(inputs)
    assert calls == []
    texts = [str(w.message) for w in warned if "PyTorch's own attention" in str(w.message)]
    assert len(texts) == 2  # one of each pass
    for text, name in zip(texts, BOTH, strict=True):
        assert text.startswith(f"PyTorch's own attention answers aten::{name}: ") and "float64" in text
    for x, y, z in zip(first, second, want, strict=True):
        assert torch.equal(x, y) and torch.equal(y, z)


def test_calls_that_pytorch_sends_elsewhere(calls):
    """Dropout, masks with gradients, other widths of values, three axes: not its flash backend, so not ours."""
    q, k, v = qkv()
    with activate(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for inputs, options in (
            ((q, k, v), {"dropout_p": 0.5}),
            ((q, k, v), {"attn_mask": normal(ROWS, KEYS)}),
            ((q, k, normal(BATCH, HEADS, KEYS, DIM + 8)), {}),
            ((q[0], k[0], v[0]), {}),
        ):
            assert attention(*inputs, **options).isfinite().all()
    assert calls == []


# ---- the operators of a GPU, called here on the CPU: what PyTorch's own descriptions of them promise ----


def described(name, *args, **kwargs):
    """The results of an operator on tensors without memory."""
    args = [x.detach().to("meta") if isinstance(x, torch.Tensor) else x for x in args]
    return getattr(torch.ops.aten, name)(*args, **kwargs)


def check_description(got, want):
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        if isinstance(y, torch.Tensor):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        else:
            assert x == y


@pytest.mark.parametrize("order", ["heads", "rows"])
@torch.no_grad()
def test_dense_operators_of_a_gpu(order):
    q, k, v = (x.detach().half() for x in qkv(keys=ROWS))
    if order == "rows":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    name = "_scaled_dot_product_flash_attention"
    got = _backend._cuda_forward(q, k, v, 0.0, True, scale=0.3)
    check_description(got, described(name, q, k, v, 0.0, True, scale=0.3))
    with torch.enable_grad():
        inputs = [x.float().requires_grad_() for x in (q, k, v)]
        want = attention(*inputs, is_causal=True, scale=0.3)
        dout = normal(*want.shape, grad=False)
        gradients = torch.autograd.grad(want, inputs, dout)
    torch.testing.assert_close(got[0].float(), want.detach(), atol=5e-3, rtol=5e-3)
    rest = (*got[2:6], 0.0, True, *got[6:8])
    arrays = (dout.half(), q, k, v, *got[:2])
    grads = _backend._cuda_backward(*arrays, *rest, scale=0.3)
    nothing = torch.empty(0)
    check_description(grads, described(f"{name}_backward", *arrays, nothing, nothing, *rest[2:], scale=0.3))
    for x, y in zip(grads, gradients, strict=True):
        torch.testing.assert_close(x.float(), y, atol=2e-2, rtol=2e-2)


@torch.no_grad()
def test_packed_operators_of_a_gpu():
    lengths = torch.tensor([0, 4, 11], dtype=torch.int32)
    q, k, v, dout = (normal(11, HEADS, DIM, grad=False).half() * scale for scale in (1, 2, 3, 4))
    options = {"scale": 0.3, "window_size_left": 2, "window_size_right": -1}
    rest = (lengths, lengths, 7, 7, 0.0, True)
    got = _backend._attend(q, k, v, *rest, False, **options)
    check_description(got, described("_flash_attention_forward", q, k, v, *rest, False, **options))
    arrays = (dout, q, k, v, *got[:2], *rest, *got[2:4])
    grads = _backend._attend_backward(*arrays, **options)
    check_description(grads, described("_flash_attention_backward", *arrays, **options))
    with torch.enable_grad():
        for a, b in ((0, 4), (4, 11)):
            inputs = [x[a:b].float().transpose(0, 1).requires_grad_() for x in (q, k, v)]
            near = torch.ones(b - a, b - a, dtype=torch.bool).tril().triu(-2)
            want = attention(*inputs, attn_mask=near, scale=0.3)
            exact = torch.autograd.grad(want, inputs, dout[a:b].float().transpose(0, 1))
            torch.testing.assert_close(got[0][a:b].float(), want.detach().transpose(0, 1), atol=1e-2, rtol=1e-2)
            for x, y in zip(grads, exact, strict=True):
                torch.testing.assert_close(x[a:b].float(), y.transpose(0, 1), atol=6e-2, rtol=2e-2)


def test_what_the_operators_of_a_gpu_refuse():
    q, k, v = (x.detach().half() for x in qkv(keys=ROWS))
    with pytest.raises(Unsupported, match="dropout_p=0.1"):
        _backend._cuda_forward(q, k, v, 0.1)
    with pytest.raises(Unsupported, match="return_debug_mask"):
        _backend._cuda_forward(q, k, v, 0.0, False, True)
    with pytest.raises(Unsupported, match="only one of cum_seq_q"):
        _backend._attend(q, k, v, torch.zeros(2, dtype=torch.int32), None, 1, 1, 0.0, False, False)


# ---- models ----


def served(run, calls):
    """Results without and with the library; whatever `run` gives must be the same."""
    want = run()
    assert calls == []
    with activate():
        got = run()
    assert calls
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


def trained(model, forward):
    """The output of a model and the gradients of its weights."""
    model.zero_grad()
    out = forward()
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_models_of_transformers_that_generate(calls, kind):
    transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, num_key_value_heads=2, vocab_size=50)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="sdpa").eval()
    ids, mask = torch.arange(14).view(2, 7) % 50, torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0  # padding
    served(lambda: trained(model, lambda: model(ids, attention_mask=mask).logits), calls)
    del calls[:]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    served(lambda: model.generate(ids, attention_mask=mask, **options), calls)


def test_an_encoder_of_transformers(calls):
    transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, vocab_size=50, attention_probs_dropout_prob=0.0)
    model = transformers.BertModel._from_config(config, attn_implementation="sdpa").eval()
    ids, mask = torch.arange(14).view(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    served(lambda: trained(model, lambda: model(ids, attention_mask=mask).last_hidden_state), calls)


def test_a_model_of_diffusers(calls):
    diffusers = pytest.importorskip("diffusers", reason="the diffusers package is not installed")
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 12}
    model = diffusers.WanTransformer3DModel(**sizes, freq_dim=16, ffn_dim=24, num_layers=2, rope_max_seq_len=16)
    video, text = torch.randn(1, 4, 3, 4, 4), torch.randn(1, 6, 12)
    arguments = {"hidden_states": video, "timestep": torch.ones(1), "encoder_hidden_states": text}
    served(lambda: trained(model, lambda: model(**arguments).sample), calls)


def _timm():
    """timm. PyPI's torchvision, which it imports, has its operators for PyTorch with CUDA only; no model here calls
    them, so without them it gets their names."""
    if importlib.util.find_spec("timm") is None or importlib.util.find_spec("torchvision") is None:
        pytest.skip("timm or torchvision is not installed")
    for _ in range(20):
        try:
            return importlib.import_module("timm")
        except RuntimeError as error:
            missing = re.search(r"operator (torchvision::\w+) does not exist", str(error))
            if missing is None:
                raise
            torch.library.define(missing[1], "(Tensor x) -> Tensor")
            for name in [name for name in sys.modules if name.partition(".")[0] in ("timm", "torchvision")]:
                del sys.modules[name]
    raise AssertionError("torchvision lacks more than 20 operators")


def test_a_model_of_timm(calls):
    timm = _timm()
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
    images = torch.randn(2, 3, 32, 32)
    served(lambda: trained(model, lambda: model(images)), calls)


def test_layers_of_pytorch(calls):
    torch.manual_seed(0)
    model = torch.nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    x, memory = torch.randn(2, 7, 32), torch.randn(2, 9, 32)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(7)
    served(lambda: trained(model, lambda: model(x, memory, tgt_mask=causal, tgt_is_causal=True)), calls)


def test_the_example():
    command = [sys.executable, ROOT / "examples/torch_backend.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("and the same with ours\n")
