"""The makers of masks by intervals, each against a dense mask that is written down by its definition."""

from __future__ import annotations

import numpy as np
import pytest

import flash_attn_minimal as fa
from flash_attn_lab import reference
from flash_attn_minimal import masks


def dense(mask) -> np.ndarray:
    """(batch, n, n): which keys a row sees, with causal."""
    indices = mask["startend_row_indices"]
    n = indices.shape[2]
    seen = reference.dense_from_intervals(indices, n, mask["causal"])[:, 0]
    return seen & np.tri(n, dtype=bool) if mask["causal"] else seen


def check(mask, seen) -> None:
    """The mask is the dense one, and so is a call with it."""
    np.testing.assert_array_equal(dense(mask), seen if seen.ndim == 3 else seen[None])
    assert mask["startend_row_indices"].dtype == np.int32
    rng = np.random.default_rng(0)
    n = seen.shape[-1]
    q, k, v = rng.standard_normal((3, 1 if seen.ndim == 2 else len(seen), n, 2, 8), np.float32)
    want = fa.flash_attn_func(q, k, v, mask=seen if seen.ndim == 2 else seen[:, None])
    np.testing.assert_allclose(fa.flash_attn_func(q, k, v, **mask), want, atol=1e-6)


def of(*names) -> np.ndarray:
    return np.concatenate([np.full(count, name) for name, count in names]) if names else np.zeros(0, int)


LENGTHS = [[], [1], [5], [3, 0, 4, 1], [130, 7, 200], [0, 2, 0]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_documents(lengths):
    own = of(*enumerate(lengths))
    same = own[:, None] == own
    check(masks.documents(lengths), same & np.tri(len(own), dtype=bool))
    check(masks.documents(lengths, causal=False), same)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_prefix_lm(lengths):
    prefixes = [length * 2 // 3 for length in lengths]
    own, at = of(*enumerate(lengths)), np.concatenate([np.arange(n) for n in lengths] or [np.zeros(0, int)])
    prefix = np.repeat(prefixes, lengths) if lengths else at
    causal_or_prefix = (at[:, None] >= at) | (at < prefix)
    check(masks.prefix_lm(prefixes, lengths), (own[:, None] == own) & causal_or_prefix)


PROMPTS = [([4], [[2, 3]]), ([0], [[3, 1]]), ([5], [[]]), ([3, 130], [[1, 0, 2], [60, 80, 1]]), ([], [])]


@pytest.mark.parametrize("prompts,answers", PROMPTS, ids=str)
def test_shared_prompt(prompts, answers):
    group, answer, position = [], [], []
    for i, (prompt, rest) in enumerate(zip(prompts, answers, strict=True)):
        for j, (length, start) in enumerate([(prompt, 0), *((x, prompt) for x in rest)]):
            group += [i] * length
            answer += [j] * length  # 0 is the prompt
            position += range(start, start + length)
    group, answer = np.array(group, int), np.array(answer, int)
    seen = (group[:, None] == group) & ((answer == 0) | (answer[:, None] == answer)) & np.tri(len(group), dtype=bool)
    check(masks.shared_prompt(prompts, answers), seen)
    np.testing.assert_array_equal(masks.shared_prompt_positions(prompts, answers), position)


TREES = [
    ([], []),
    ([3], [-1]),
    ([2, 1, 1, 1], [-1, 0, 1, 0]),
    ([2, 3, 1, 0, 4, 2], [-1, 0, 0, 2, 3, -1]),
    ([100, 30, 50, 70], [-1, 0, 1, 0]),
]


@pytest.mark.parametrize("lengths,parents", TREES, ids=str)
def test_tree(lengths, parents):
    above = []
    for i, parent in enumerate(parents):
        above.append({i} | (above[parent] if parent >= 0 else set()))
    turn = of(*enumerate(lengths))
    seen = np.array([[j in above[i] for j in turn] for i in turn], bool).reshape(len(turn), len(turn))
    check(masks.tree(lengths, parents), seen & np.tri(len(turn), dtype=bool))


def test_a_tree_in_another_order_is_refused():
    with pytest.raises(fa.BadArgument, match=r"parents\[3\]=1 is not among turns \[0, 2\], which turn 2 goes on from"):
        masks.tree([1, 1, 1, 1], [-1, 0, 0, 1])


@pytest.mark.parametrize("n,left,right", [(0, 1, 0), (1, 0, 0), (40, 3, 0), (40, 0, 2), (300, 100, 50), (20, 50, 50)])
def test_window(n, left, right):
    i, j = np.arange(n)[:, None], np.arange(n)
    check(masks.window(n, left, right), (j >= i - left) & (j <= i + right))


@pytest.mark.parametrize(
    "n,first,left,right", [(1, 1, 0, 0), (40, 4, 3, 0), (40, 4, 3, 5), (300, 70, 90, 40), (20, 20, 1, 1), (30, 0, 2, 2)]
)
def test_global_and_window(n, first, left, right):
    i, j = np.arange(n)[:, None], np.arange(n)
    seen = (j < first) | ((j >= i - left) & (j <= i + right))
    seen = seen & (j <= i) if right == 0 else seen | (i < first)
    check(masks.global_and_window(n, first, left, right), seen)


@pytest.mark.parametrize("n,block", [(0, 3), (7, 3), (200, 64), (5, 1), (5, 9)])
def test_blocks(n, block):
    at = np.arange(n) // block
    check(masks.block_causal(n, block), at[:, None] >= at)
    noisy = np.concatenate([np.ones(n, bool), np.zeros(n, bool)])
    at = np.concatenate([at, at])
    seen = np.where(
        noisy, noisy[:, None] & (at[:, None] == at), np.where(noisy[:, None], at[:, None] > at, at[:, None] >= at)
    )
    check(masks.block_diffusion(n, block), seen)


@pytest.mark.parametrize("parts", [
    [masks.documents([2, 3]), masks.documents([4])],
    [masks.documents([2, 3], causal=False), masks.documents([1, 6], causal=False)],
    [masks.block_diffusion(4, 2), masks.block_diffusion(6, 3)],
], ids=["causal", "full", "four"])  # fmt: skip
def test_stack(parts):
    longest = max(x["startend_row_indices"].shape[2] for x in parts)
    seen = np.zeros((len(parts), longest, longest), bool)
    got = dense(masks.stack(parts))
    for b, (to, part) in enumerate(zip(seen, parts, strict=True)):
        n = part["startend_row_indices"].shape[2]
        to[:n, :n] = dense(part)[0]
        np.testing.assert_array_equal(got[b, :n, :n], to[:n, :n])
        assert not got[b][:, n:].any(), "padding"
    with pytest.raises(fa.BadArgument, match="different causal and numbers"):
        masks.stack([masks.documents([2]), masks.documents([2], causal=False)])


def test_stack_of_batches_and_heads():
    """A batch counts with all its entries; numbers of one head are repeated for the others."""
    parts = [masks.documents(lengths) for lengths in ([2, 3], [4], [1, 1, 1])]
    nested = masks.stack([masks.stack(parts[:2]), parts[2]])
    np.testing.assert_array_equal(nested["startend_row_indices"], masks.stack(parts)["startend_row_indices"])
    own = {"causal": True, "startend_row_indices": np.arange(8, dtype=np.int32).reshape(1, 2, 4, 1)}
    got = masks.stack([own, parts[0]])["startend_row_indices"]
    np.testing.assert_array_equal(got[0, :, :, 0], [[0, 1, 2, 3, 0], [4, 5, 6, 7, 0]])
    np.testing.assert_array_equal(got[1, :, :, 0], [[2, 2, 5, 5, 5]] * 2)
    three = {"causal": True, "startend_row_indices": np.zeros((1, 3, 4, 1), np.int32)}
    with pytest.raises(fa.BadArgument, match="masks have numbers of 2 and of 3 heads"):
        masks.stack([own, three])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stack_of_tensors(device):
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA")
    like = torch.zeros(1, device=device)
    got = masks.stack([masks.documents([2], like=like), masks.documents([3], like=like)], like=like)
    assert got["startend_row_indices"].device == like.device
    assert got["startend_row_indices"][..., 0].tolist() == [[[2, 2, 0]], [[3, 3, 3]]]


def test_like_a_subclass_of_tensor():
    torch = pytest.importorskip("torch")

    class Own(torch.Tensor):
        pass

    like = torch.zeros(1, 5, 1, 8).as_subclass(Own)
    mask = masks.documents([2, 3], like=like)
    assert isinstance(mask["startend_row_indices"], torch.Tensor)
    assert fa.flash_attn_func(like, like, like, **mask).shape == like.shape


@pytest.mark.parametrize("framework", ["torch", "jax", "numpy"])
def test_like(framework):
    pytest.importorskip(framework)
    if framework == "torch":
        import torch

        like = torch.zeros(1, 5, 1, 8)
        assert isinstance(masks.documents([2, 3], like=like)["startend_row_indices"], torch.Tensor)
    elif framework == "jax":
        import jax

        like = jax.numpy.zeros((1, 5, 1, 8))
        assert isinstance(masks.documents([2, 3], like=like)["startend_row_indices"], jax.Array)
    else:
        like = np.zeros((1, 5, 1, 8), np.float32)
    out = fa.flash_attn_func(like, like, like, **masks.documents([2, 3], like=like))
    assert type(out) is type(like)


@pytest.mark.parametrize("call,text", [
    (lambda: masks.documents([2, -1]), r"lengths\[1\]=-1 is outside 0"),
    (lambda: masks.documents(5), "lengths=5 is no sequence of integers"),
    (lambda: masks.documents([2], causal=2), "causal=2 is neither True nor False"),
    (lambda: masks.prefix_lm([3], [2]), r"prefixes\[0\]=3 is above lengths\[0\]=2"),
    (lambda: masks.prefix_lm([3], [2, 1]), "prefixes has 1 entries, but lengths has 2"),
    (lambda: masks.shared_prompt([3], []), "answers has 0 entries, but prompts has 1"),
    (lambda: masks.shared_prompt([3], [[1.5]]), r"answers\[0\]\[0\]=1.5 is not an integer"),
    (lambda: masks.documents([2], like=[1.0]), r"like=\[1.0\] is a list: expected an array of NumPy"),
    (lambda: masks.stack([]), "masks is empty"),
    (lambda: masks.stack(masks.documents([2])), r"masks\[0\]='causal' is no mask"),
    (lambda: masks.stack([np.zeros((1, 1, 3, 1), np.int32)]), r"masks\[0\]=array"),
    (lambda: masks.tree([1, 1], [-1]), "parents has 1 entries, but lengths has 2"),
    (lambda: masks.tree([1, 1], [-1, 1]), r"parents\[1\]=1 is outside -1 .. 0"),
    (lambda: masks.window(5, -1), "left=-1 is outside 0"),
    (lambda: masks.global_and_window(5, 6, 1), "first=6 is outside 0 .. 5"),
    (lambda: masks.block_causal(5, 0), "block=0 is outside 1"),
    (lambda: masks.stack([]), "masks is empty"),
])  # fmt: skip
def test_bad_arguments(call, text):
    with pytest.raises(fa.BadArgument, match=text):
        call()
