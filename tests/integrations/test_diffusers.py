"""diffusers' models with our backend: a tiny Flux and two tiny video models with random weights, in float32, against
the backend `native`."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no attention backends")

from flash_attn_minimal.integrations import diffusers as adapter  # noqa: E402

NAME = adapter.register()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def native_after():
    """Restores the backend `native`, because set_attention_backend changes the default of the whole process."""
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


@pytest.fixture
def calls(monkeypatch):
    """The masks of the calls that reach the backend."""
    found = []
    member = dispatch.AttentionBackendName(NAME)

    def attention(*args, **kwargs):
        found.append(kwargs.get("attn_mask"))
        return adapter.attention(*args, **kwargs)

    monkeypatch.setitem(dispatch._AttentionBackendRegistry._backends, member, attention)
    return found


def close(got, expected, tolerance=2e-5):
    scale = float(expected.detach().abs().max())
    assert scale > 1e-6
    got, expected = (x.detach().float().cpu().numpy() for x in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * scale)


def same(model, inputs, calls):
    """Compares result and gradients of both backends."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # some begin at zero
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    theirs = model.to(DEVICE).eval()
    ours = copy.deepcopy(theirs)
    outputs, gradients = [], []
    for which, backend in ((ours, NAME), (theirs, "native")):
        which.set_attention_backend(backend)
        out = which(**inputs, return_dict=False)[0]
        (out * out.cos()).sum().backward()
        outputs.append(out)
        gradients.append({name: p.grad for name, p in which.named_parameters() if p.grad is not None})
    assert calls, "the model never asked the backend"
    close(*outputs)
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[1].items():
        if float(expected.abs().max()) > 1e-4:
            close(gradients[0][name], expected, tolerance=2e-4)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def test_flux(calls):
    sizes = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    sizes |= {"num_attention_heads": 2, "joint_attention_dim": 12, "pooled_projection_dim": 8}
    model = diffusers.FluxTransformer2DModel(**sizes, axes_dims_rope=(4, 4, 8))
    inputs = {"hidden_states": normal(2, 16, 4), "encoder_hidden_states": normal(2, 5, 12)}
    inputs |= {"pooled_projections": normal(2, 8), "timestep": torch.ones(2, device=DEVICE)}
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)).to(DEVICE)
    same(model, inputs | {"img_ids": places, "txt_ids": torch.zeros(5, 3, device=DEVICE)}, calls)


def test_wan(calls):
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 12}
    model = diffusers.WanTransformer3DModel(**sizes, freq_dim=16, ffn_dim=24, num_layers=2, rope_max_seq_len=16)
    inputs = {"hidden_states": normal(1, 4, 3, 4, 4), "encoder_hidden_states": normal(1, 6, 12)}
    same(model, inputs | {"timestep": torch.ones(1, device=DEVICE)}, calls)


def test_hunyuan_video(calls):
    """The text of HunyuanVideo is padded, so the model makes a mask of keys."""
    sizes = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1}
    sizes |= {"num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1, "text_embed_dim": 16}
    model = diffusers.HunyuanVideoTransformer3DModel(**sizes, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4))
    inputs = {"hidden_states": normal(2, 4, 2, 4, 4), "encoder_hidden_states": normal(2, 6, 16)}
    inputs |= {"encoder_attention_mask": (torch.arange(6) < torch.tensor([[6], [3]])).to(DEVICE)}
    inputs |= {"pooled_projections": normal(2, 8), "guidance": torch.ones(2, device=DEVICE)}
    same(model, inputs | {"timestep": torch.ones(2, dtype=torch.long, device=DEVICE)}, calls)
    assert any(mask is not None for mask in calls)


@pytest.mark.parametrize("mask", ["none", "causal", "keys", "added keys", "pairs", "added pairs", "every head"])
def test_arguments_mean_what_they_mean_to_native(mask):
    q, k, v = normal(2, 5, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 12)
    sees = torch.rand(2, 4, 5, 7, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.7
    sees[..., 0] = True
    masks = {"none": None, "causal": None, "keys": sees[:, 0, 0], "pairs": sees[0, 0], "every head": sees}
    masks |= {"added keys": normal(2, 7), "added pairs": normal(5, 7)}
    options = {"attn_mask": masks[mask], "is_causal": mask == "causal", "scale": 0.3, "enable_gqa": True}
    got, expected = (dispatch.dispatch_attention_fn(q, k, v, **options, backend=x) for x in (NAME, "native"))
    close(got, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_are_no_mask(dtype):
    """In an integer mask 1 may mean "attend" or "add 1". `native` refuses integers, too; as booleans they hide
    padding."""
    q, k = normal(2, 5, 2, 8), normal(2, 7, 2, 8)
    tokens = (torch.arange(7) < torch.tensor([[7], [4]])).to(DEVICE, dtype)
    with pytest.raises(ValueError, match=f"attn_mask is {dtype}: expected bool or floating point"):
        dispatch.dispatch_attention_fn(q, k, k, attn_mask=tokens, backend=NAME)
    with pytest.raises(RuntimeError, match="attn_mask dtype"):
        dispatch.dispatch_attention_fn(q, k, k, attn_mask=tokens, backend="native")
    got = dispatch.dispatch_attention_fn(q, k, k, attn_mask=tokens.bool(), backend=NAME)
    close(got[1], adapter.attention(q[1:], k[1:, :4], k[1:, :4])[0])


def test_a_float32_mask_beside_halves_keeps_its_numbers():
    """A bias of -1e30 is not -inf: if all keys of a row have it, it hides nothing. float16 has no such number."""
    q, k = normal(1, 3, 2, 8).half(), normal(1, 5, 2, 8).half()
    mask = torch.full((1, 5), -1e30, device=DEVICE)
    close(adapter.attention(q, k, k, attn_mask=mask), k.float().mean(1, keepdim=True).expand(1, 3, 2, 8), 2e-3)


def test_autocast_is_that_of_native():
    """Rotary embeddings and norms leave q and k in float32 beside a bfloat16 v."""
    q, k, v = normal(1, 5, 2, 16), normal(1, 6, 2, 16), normal(1, 6, 2, 16)
    mask = torch.zeros(5, 6, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        for value in (v, v.bfloat16()):
            got, expected = (
                dispatch.dispatch_attention_fn(q, k, value, attn_mask=mask, backend=x) for x in (NAME, "native")
            )
            assert got.dtype == expected.dtype == torch.bfloat16
            close(got, expected, tolerance=2e-2)


def test_lse_and_dropout():
    q, k, v = normal(1, 5, 2, 8), normal(1, 6, 2, 8), normal(1, 6, 2, 8)
    _, lse = adapter.attention(q, k, v, return_lse=True)
    close(lse, torch.logsumexp(torch.einsum("bihd,bjhd->bihj", q, k) * 8**-0.5, -1))
    torch.manual_seed(5)
    dropped = [adapter.attention(q, k, v, dropout_p=0.5) for _ in range(2)]
    torch.manual_seed(5)
    assert torch.equal(adapter.attention(q, k, v, dropout_p=0.5), dropped[0]) and not torch.equal(*dropped)


def test_names():
    assert adapter.register() == NAME
    names = dispatch.AttentionBackendName
    assert names(NAME) is names[NAME.upper()] and names(NAME).value == NAME and names(NAME) in list(names)
    assert [x for x in names if x.value == NAME] == [names(NAME)]
    with dispatch.attention_backend(NAME):
        assert dispatch._AttentionBackendRegistry.get_active_backend()[0] is names(NAME)


def test_refusals():
    q, k = normal(1, 5, 4, 8), normal(1, 5, 2, 8)
    with pytest.raises(ValueError, match="query has 4 heads and key 2: that needs enable_gqa"):
        adapter.attention(q, k, k)
    for text, given in {
        "query is ndarray": (q.cpu().numpy(), k, k),
        r"key is \(4, 2, 8\): expected \(batch": (q, k[0, :4], k),
        r"value is \(\): expected": (q, q, q[0, 0, 0, 0]),
        "attn_mask is a ndarray": (q, q, q, q.cpu().numpy()),
    }.items():
        with pytest.raises(ValueError, match=text):
            adapter.attention(*given)
    with pytest.raises(NotImplementedError, match="context parallelism"):
        adapter.attention(q, q, q, _parallel_config=object())
