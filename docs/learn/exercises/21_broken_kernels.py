"""Exercise 21. Which input shows it? The eight kernels of broken.py have one mistake each, and pass the tests that one
writes first.

Write, for each, a function that returns the arguments of a call whose result is wrong. The judge makes the call,
compares with the definition, and then makes the same call of the repaired kernel, which must be right. Start anywhere:
the judge looks at all answers.

    python docs/learn/exercises/21_broken_kernels.py
"""

import functools
from pathlib import Path

import broken
import numpy as np
from judging import Wrong, load, main, require

TO_WRITE = (
    "row_maximum", "two_stages", "visible_pairs", "fp8_sum",
    "persistent_block", "element", "decode_steps", "two_halves",
)  # fmt: skip


def row_maximum():
    """What is in shared memory when the warps do not walk in step?"""
    raise NotImplementedError("row_maximum() -> scores, order")


def two_stages():
    """Who may write into a stage, and from when?"""
    raise NotImplementedError("two_stages() -> scores, values, order")


def visible_pairs():
    """Where does a tile begin to need a comparison?"""
    raise NotImplementedError("visible_pairs() -> seqlen_q, seqlen_k")


def fp8_sum():
    """When does a small loss in each step not cancel?"""
    raise NotImplementedError("fp8_sum() -> p, v")


def persistent_block():
    """What does the second item find?"""
    raise NotImplementedError("persistent_block() -> (items,)")


def element():
    """Which product is too large for its type?"""
    raise NotImplementedError("element() -> shape, index")


def decode_steps():
    """What does a call find that the call before has left?"""
    raise NotImplementedError("decode_steps() -> (lengths,)")


def two_halves():
    """Which row has nothing to merge?"""
    raise NotImplementedError("two_halves() -> seqlen_q, seqlen_k, cut, causal")


# ---- the judge: the definitions, and the limits of an input ----


def mix(scores, values, order):
    p = np.exp(np.asarray(scores, float) - np.max(scores))
    return (p * values).sum() / p.sum()


def pairs(seqlen_q, seqlen_k):
    i, j = np.indices((seqlen_q, seqlen_k))
    return j <= i + seqlen_k - seqlen_q


def rows_lse(seqlen_q, seqlen_k, cut, causal):
    seen = pairs(seqlen_q, seqlen_k).sum(1) if causal else np.full(seqlen_q, seqlen_k)
    with np.errstate(divide="ignore"):
        return np.log(seen)


DEFINED = {
    "row_maximum": lambda scores, order: np.repeat(np.max(scores, axis=1)[:, None], 4, axis=1).astype(float),
    "two_stages": mix,
    "visible_pairs": pairs,
    "fp8_sum": lambda p, v: np.dot(p, v),
    "persistent_block": lambda items: [(item, tile) for item, tiles in enumerate(items) for tile in range(tiles)],
    "element": lambda shape, index: int(np.ravel_multi_index(index, shape)),
    "decode_steps": lambda lengths: np.log(lengths),
    "two_halves": rows_lse,
}
LIMITS = {
    "row_maximum": lambda scores, order: np.ndim(scores) == 2 and np.shape(scores)[1] % 4 == 0
    and np.size(scores) <= 4096 and {*order} <= {0, 1, 2, 3},
    "two_stages": lambda scores, values, order: np.shape(scores) == np.shape(values) and np.ndim(scores) == 2
    and len(scores) <= 64 and {*order} <= {"producer", "consumer"},
    "visible_pairs": lambda seqlen_q, seqlen_k: 1 <= min(seqlen_q, seqlen_k) and max(seqlen_q, seqlen_k) <= 1024,
    "fp8_sum": lambda p, v: np.shape(p) == np.shape(v) and np.ndim(p) == 1 and len(p) <= 16384 and np.min(p) >= 0,
    "persistent_block": lambda items: all(1 <= tiles <= 64 for tiles in items) and len(items) <= 64,
    "element": lambda shape, index: 2 * int(np.prod(shape, dtype=object)) <= 64 << 30
    and all(0 <= i < n for i, n in zip(index, shape, strict=True)),
    "decode_steps": lambda lengths: all(1 <= length <= 1 << 20 for length in lengths) and len(lengths) <= 64,
    "two_halves": lambda seqlen_q, seqlen_k, cut, causal: 1 <= min(seqlen_q, seqlen_k)
    and max(seqlen_q, seqlen_k) <= 1024 and 0 <= cut <= seqlen_k,
}  # fmt: skip


@functools.cache
def repaired():
    """The module broken.py with all eight repairs of our solution."""
    path = Path(broken.__file__)
    text = path.read_text()
    for old, new in load(path.parents[1] / "solutions/21_broken_kernels.py").REPAIRS.values():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    names = {"__name__": "repaired"}
    exec(compile(text, "repaired", "exec"), names)
    return names


def fault(name, kernel, arguments):
    """How the result of a call differs from the definition, or an empty text."""
    want = DEFINED[name](*arguments)
    try:
        got = kernel(*arguments)
    except broken.Hang as error:
        return str(error)
    if name == "persistent_block":
        at = next((n for n, (x, y) in enumerate(zip(got, want, strict=True)) if x != y), None)
        return "" if at is None else f"read {got[at]} in the place of {want[at]}"
    off = 0.01 * float(np.abs(np.multiply(*arguments)).sum()) if name == "fp8_sum" else 1e-9
    got, want = np.asarray(got, float), np.asarray(want, float)
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(got - want) <= off) | (got == want))
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong.ndim else ()
    return f"{list(at) if at else 'result'}: got {got[at]:.6g}, expected {want[at]:.6g}"


def judge(**answers):
    right, found, missing = repaired(), [], []
    for name, answer in answers.items():
        try:
            arguments = answer()
            require(isinstance(arguments, tuple), f"{name}: the answer is {arguments!r}, expected a tuple of arguments")
            require(bool(LIMITS[name](*arguments)), f"{name}: the kernel does not promise anything for this input")
            shown = fault(name, getattr(broken, name), arguments)
            require(shown != "", f"{name}: the broken kernel is right there")
            other = fault(name, right[name], arguments)
            require(other == "", f"{name}: the repaired kernel is wrong there too: {other}")
            found.append(name)
        except (NotImplementedError, Wrong) as error:
            missing.append(error)
    if missing:
        first = next((error for error in missing if isinstance(error, Wrong)), missing[0])
        raise type(first)(f"{first} ({len(found)} of {len(answers)} found{': ' * bool(found)}{', '.join(found)})")


if __name__ == "__main__":
    main(globals())
