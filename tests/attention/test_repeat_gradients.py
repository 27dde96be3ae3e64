"""Repeated calls that PyTorch records (_core/repeats.py, autograd.py): they give the same bits, graphs and refusals as
the first call, whatever PyTorch does in between."""

import gc
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from test_torch_modes import Seen  # noqa: E402
from torch_cases import DEVICES, OPTIONS, QUIET, close, compiled, options_of, qkv, standard  # noqa: E402

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal import _arrays  # noqa: E402
from flash_attn_minimal._arrays import torch as torch_door  # noqa: E402
from flash_attn_minimal._core import repeats  # noqa: E402
from flash_attn_minimal._core.forward import repeats as forward_repeats  # noqa: E402
from flash_attn_minimal.backward import _repeats as backward_repeats  # noqa: E402

pytestmark = QUIET


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh():
    forget()


def forget():
    forward_repeats.clear()
    backward_repeats.clear()


@pytest.fixture(params=["guards", "descriptions"])
def guarded(request, monkeypatch):
    """Runs a test with PyTorch's TensorGuards, and as in a PyTorch without them."""
    if request.param == "descriptions":
        monkeypatch.setattr(torch_door, "_guards_hold", lambda torch: False)


@pytest.fixture
def shortcuts(monkeypatch):
    """The names of the calls that took the shortcut."""
    taken, make = [], repeats.Repeats._repeat

    def counting(table, *about):
        repeat = make(table, *about)

        def counted(*arguments):
            results = repeat(*arguments)
            taken.extend([table.name] * (results is not None))
            return results

        return counted

    monkeypatch.setattr(repeats.Repeats, "_repeat", counting)
    return taken


BOTH = ["attention_forward", "attention_backward"]


def inputs_of(device, seed=0):
    torch.manual_seed(seed)
    return [torch.randn_like(x).requires_grad_() for x in qkv(device)]


def step(inputs, options, through_lse=False, attend=fa.flash_attn_func):
    """out, and the gradients of all inputs that require one."""
    out, lse = attend(*inputs, return_lse=True, **options) if through_lse else (attend(*inputs, **options), None)
    loss = (out * out.detach().sin()).sum() + (0 if lse is None else lse.sin().sum())
    wanting = [x for x in (*inputs, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    return [out.detach(), *torch.autograd.grad(loss, wanting)]


def equal(got, want):
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("through_lse", [False, True])
def test_same_bits(device, name, through_lse, shortcuts, guarded):
    options = dict(options_of(device)[name])
    for array in ("bias", "sinks"):
        if array in options:
            options[array] = torch.nn.Parameter(options[array])
    options["deterministic"] = True
    for seed in range(3):
        step(inputs_of(device, seed), options, through_lse)
    forget()
    want = step(inputs_of(device, 9), options, through_lse)
    shortcuts.clear()
    for seed in (0, 1, 2, 9):
        got = step(inputs_of(device, seed), options, through_lse)
    assert shortcuts == BOTH * 3
    equal(got, want)
    exact = step(inputs_of(device, 9), {k: v for k, v in options.items() if k != "deterministic"}, True, of_standard)
    if through_lse:
        for x, y in zip(got, exact, strict=True):
            close(x, y, 1e-3)


def test_dropout_takes_another_seed_in_each_step(device, shortcuts, guarded):
    """The gradients of a step that repeats another one use the step's own seed, on the shortcut and past it."""

    def options(seed):
        return {"dropout_p": 0.25, "dropout_seed": seed, "dropout_offset": seed // 2, "deterministic": True}

    seeds, want = (2**63, 2, 3, 2**64 - 1, 5), {}
    for seed in seeds:
        forget()
        want[seed] = step(inputs_of(device), options(seed), True)
    assert len({each[1].sum().item() for each in want.values()}) == len(seeds)
    forget()
    for _ in range(3):
        step(inputs_of(device), options(1), True)
    shortcuts.clear()
    for seed in seeds:
        equal(step(inputs_of(device), options(seed), True), want[seed])
    assert shortcuts == BOTH * len(seeds)
    # The forward pass of several steps before the backward pass of the first.
    inputs = inputs_of(device)
    outs = [fa.flash_attn_func(*inputs, return_lse=True, **options(seed)) for seed in seeds]
    backward_repeats.clear()  # so that the backward pass takes the long way
    for seed, (out, lse) in zip(seeds, outs, strict=True):
        loss = (out * out.detach().sin()).sum() + lse.sin().sum()
        equal([out.detach(), *torch.autograd.grad(loss, inputs)], want[seed])


def of_standard(*inputs, return_lse, **options):
    return standard(*inputs, **options)


def warm(device, **options):
    for seed in range(3):
        step(inputs_of(device, seed), options)
    assert any(forward_repeats.known.values()) and any(backward_repeats.known.values())


def test_gradients_wanted_and_not_in_turn(device, guarded):
    """The same tensors with and without a required gradient, in every way to say so."""
    inputs = inputs_of(device)
    want = step(inputs, {})
    for _ in range(4):
        equal(step(inputs, {}), want)
        with torch.no_grad():
            out = fa.flash_attn_func(*inputs)
        assert not out.requires_grad and out.grad_fn is None
        with torch.inference_mode():
            out = fa.flash_attn_func(*inputs)
        assert out.is_inference()
        inputs[0].requires_grad_(False)
        assert fa.flash_attn_func(*inputs).requires_grad
        detached = fa.flash_attn_func(*[x.detach() for x in inputs])
        assert not detached.requires_grad
        inputs[0].requires_grad_()
        equal([detached], want[:1])
        with torch.autocast(device):
            equal(step(inputs, {}), want)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_some_gradients(device, wanted):
    inputs = inputs_of(device)
    every = step(inputs, {})
    for i, x in enumerate(inputs):
        x.requires_grad_(i in wanted)
    for _ in range(4):
        equal(step(inputs, {})[1:], [every[1 + i] for i in wanted])


def test_gradient_of_one_option_alone(device):
    options = options_of(device)["all"]
    inputs = [x.detach() for x in inputs_of(device)]
    found = {}
    for name in ("bias", "sinks"):
        mine = {**options, name: options[name].clone().requires_grad_()}
        found[name] = [step(inputs, mine)[1] for _ in range(4)]
        assert found[name][0].shape == options[name].shape
        equal(found[name][1:], found[name][:1] * 3)
    exact = {
        **options,
        "bias": options["bias"].clone().requires_grad_(),
        "sinks": options["sinks"].clone().requires_grad_(),
    }
    want = step(inputs, exact, True, lambda *a, return_lse, **o: (standard(*a, **o)[0], torch.zeros(())))
    close(found["bias"][0], want[1], 1e-3)
    close(found["sinks"][0], want[2], 1e-3)


def test_strides_of_the_gradient(device, shortcuts):
    """An expanded, transposed or strided gradient is read with its strides."""
    inputs = inputs_of(device)
    out = fa.flash_attn_func(*inputs)
    kinds = [
        torch.randn_like(out),
        torch.ones((), device=device).expand(out.shape),
        torch.randn_like(out.transpose(1, 2).contiguous()).transpose(1, 2),
        torch.randn(*out.shape[:-1], 2 * out.shape[-1], device=device)[..., ::2],
        torch.randn(*out.shape[:-1], 2 * out.shape[-1], device=device)[..., : out.shape[-1]],
    ]
    want = [torch.autograd.grad(out, inputs, dout.clone(memory_format=torch.contiguous_format), True) for dout in kinds]
    for _ in range(3):
        for dout, gradients in zip(kinds, want, strict=True):
            equal(torch.autograd.grad(fa.flash_attn_func(*inputs), inputs, dout), gradients)
    assert shortcuts.count("attention_backward") >= 4


def test_other_dtypes_and_layouts_after_it(device):
    warm(device)
    for change in (
        lambda x: x.to(torch.bfloat16),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
        lambda x: x[:1],
        lambda x: torch.nn.Parameter(x),
    ):
        inputs = [change(x.detach()).requires_grad_() for x in inputs_of(device)]
        runs = [step(inputs, {"deterministic": True}) for _ in range(4)]
        assert runs[0][0].dtype == inputs[0].dtype
        for run in runs[1:]:
            equal(run, runs[0])


def test_refusals_are_as_before(device):
    options = options_of(device)["alibi"]
    warm(device, **options)
    inputs = inputs_of(device)
    slopes = options["alibi_slopes"].clone().requires_grad_()
    for _ in range(3):
        with pytest.raises(fa.Unsupported, match="alibi_slopes requires a gradient"):
            fa.flash_attn_func(*inputs, alibi_slopes=slopes)
        with pytest.raises(fa.Unsupported, match="out is given, but the call records a gradient"):
            fa.flash_attn_func(*inputs, out=torch.empty_like(inputs[0]))
        with pytest.raises(fa.BadArgument, match="causal=1.0 is neither True nor False"):
            fa.flash_attn_func(*inputs, causal=1.0)
        (dq,) = torch.autograd.grad(fa.flash_attn_func(*inputs).square().sum(), inputs[:1], create_graph=True)
        with pytest.raises(fa.Unsupported, match="double backward"):
            dq.sum().backward()
        with torch.autograd.forward_ad.dual_level(), pytest.raises(fa.Unsupported, match="q has a tangent"):
            fa.flash_attn_func(torch.autograd.forward_ad.make_dual(inputs[0], inputs[0]), *inputs[1:])


def test_a_change_in_place_is_noticed(device):
    """A change of tensors that the graph holds is noticed before the backward pass; between calls tensors may
    change."""
    warm(device)
    inputs = inputs_of(device)
    for array in (0, 2):
        out = fa.flash_attn_func(*inputs)
        with torch.no_grad():
            inputs[array].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    out = fa.flash_attn_func(*inputs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.mul_(2).sum().backward()
    got = step(inputs, {})
    forget()
    equal(got, step(inputs, {}))


def test_whatever_else_pytorch_does(device):
    """Modes, transforms, traces, hooks and checkpoints after remembered calls still take their own way."""
    warm(device)
    inputs = inputs_of(device)
    want = step(inputs, {})
    with Seen() as mode:
        equal(step(inputs, {}), want)
    assert sum("flash_attn_minimal.attention" in name for name in mode.names) == 2
    out = fa.flash_attn_func(*inputs)
    with Seen() as mode:
        torch.autograd.grad((out * out.detach().sin()).sum(), inputs)
    assert any("attention_backward" in name for name in mode.names)
    with torch.device(device):
        equal(step(inputs, {}), want)

    def loss(*inputs):
        out = fa.flash_attn_func(*inputs)
        return (out * out.detach().sin()).sum()

    equal(torch.func.grad(loss, (0, 1, 2))(*[x.detach() for x in inputs]), want[1:])
    equal([x[0] for x in torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*[x.detach()[None] for x in inputs])], want[1:])
    equal(
        [torch.func.grad(lambda x: x * loss(*inputs).detach())(torch.ones((), device=device))], [loss(*inputs).detach()]
    )
    equal(torch.autograd.grad(compiled(loss, inputs)(*inputs), inputs), want[1:])
    for reentrant in (False, True):
        again = [x.detach().clone().requires_grad_() for x in inputs]
        torch.utils.checkpoint.checkpoint(loss, *again, use_reentrant=reentrant).backward()
        equal([x.grad for x in again], want[1:])
    left = []
    torch.func.grad(lambda x: left.append(x * 1) or x.sum())(inputs[0].detach())
    for _ in range(3):
        equal(step([left[0].detach(), *inputs[1:]], {})[1:], want[2:])
        equal(torch.autograd.grad(loss(left[0], *inputs[1:]), inputs[1:]), want[2:])
    with torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True):
        kept = loss(*inputs)
    equal(torch.autograd.grad(kept, inputs), want[1:])
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.to(torch.float64), lambda x: x.to(torch.float32)):
        kept = loss(*inputs)
    equal(torch.autograd.grad(kept, inputs), want[1:])


def test_nothing_is_kept(device):
    warm(device, return_lse=False)
    inputs = inputs_of(device)
    out, lse = fa.flash_attn_func(*inputs, return_lse=True)
    out.sum().backward()
    gone = [weakref.ref(x) for x in (*inputs, out, lse)]
    del inputs, out, lse
    gc.collect()
    assert not any(ref() is not None for ref in gone)


def test_threads_of_different_wishes(device):
    """Threads at the same time, with different shapes, options and required gradients."""
    cases = []
    for i in range(6):
        inputs = [x.detach()[:, : 5 + i].clone().requires_grad_(i % 3 != 0) for x in inputs_of(device, i)]
        cases.append((inputs, {"causal": bool(i % 2), "deterministic": True}))

    def run(inputs, options):
        if inputs[0].requires_grad:
            return step(inputs, options)
        return [fa.flash_attn_func(*inputs, **options)]

    want, wrong = [run(*case) for case in cases], []

    def work(case, expected):
        try:
            for _ in range(40):
                equal(run(*case), expected)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, want, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_guards_are_there(device, shortcuts):
    """This PyTorch has TensorGuards, and they are used: no description of the arrays is made. Only a tensor that is
    given twice is an exception."""
    assert torch_door._guards_hold(torch)
    inputs = inputs_of(device)
    for arrays in (inputs, [inputs[0], inputs[1], inputs[1]]):
        for _ in range(4):
            step(arrays, {})
    door, asked = _arrays._doors[torch.Tensor], []
    with pytest.MonkeyPatch.context() as patch:
        real = door.describe
        patch.setattr(door, "describe", lambda *about: asked.append(about) or real(*about))
        shortcuts.clear()
        step([inputs[0], inputs[1], inputs[1]], {})
        step([inputs[0], inputs[1], inputs[1]], {})
        assert shortcuts == BOTH * 2
        forget()
        for _ in range(3):
            step(inputs, {})
        asked.clear()
        step(inputs, {})
    assert shortcuts == BOTH * 4 and not asked
