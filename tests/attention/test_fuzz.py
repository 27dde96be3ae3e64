"""Random calls out of everything the contract allows. FLASH_ATTN_TEST_SEED=n repeats a run; the failing case prints
itself."""

import os

import pytest
from accuracy import Case
from conftest import SEED

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

EXAMPLES = int(os.environ.get("FLASH_ATTN_TEST_EXAMPLES", "40"))
lengths = st.one_of(
    st.integers(0, 10), st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129, 200]), st.integers(0, 260)
)
headdims = st.one_of(st.sampled_from([1, 8, 33, 40, 64, 72, 80, 96, 128, 192, 256]), st.integers(1, 130))
flags = st.booleans()
broadcasts = st.none() | st.lists(flags, max_size=3).map(tuple)


@st.composite
def cases(draw):
    nheads_k = draw(st.integers(1, 3))
    options = {
        "headdim": draw(headdims),
        "headdim_v": draw(st.none() | headdims),
        "nheads": nheads_k * draw(st.sampled_from([1, 2, 3, 5, 8])),
        "nheads_k": nheads_k,
        "dtype": draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        "softmax_scale": draw(st.none() | st.floats(-2, 2, width=32)),
        "causal": draw(flags),
        "top_left": draw(flags),
        "window_size": draw(st.just((-1, -1)) | st.tuples(st.integers(-1, 300), st.integers(-1, 300))),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])),
        "alibi": draw(st.sampled_from([0, 0, 1, 2])),
        "bias": draw(broadcasts),
        "bias_float32": draw(flags),
        "mask": draw(broadcasts),
        "mask_rate": draw(st.sampled_from([0.0, 0.1, 0.5, 0.9])),
        "sinks": draw(flags),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.1, 0.9])),
        "spread": draw(st.sampled_from([1.0, 1.0, 30.0])),
        "seed": draw(st.integers(0, 2**16)),
    }
    if draw(flags):
        return Case(draw(lengths), draw(lengths), batch=draw(st.integers(0, 3)), **options)
    pairs = draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4))
    cu_q, cu_k = [0], [0]
    for seqlen_q, seqlen_k in pairs:
        cu_q.append(cu_q[-1] + seqlen_q)
        cu_k.append(cu_k[-1] + seqlen_k)
    extra = draw(st.integers(0, 2))
    longest = [max(pair[i] for pair in pairs) + extra for i in (0, 1)]
    return Case(*longest, cu_seqlens_q=tuple(cu_q), cu_seqlens_k=tuple(cu_k), **options)


def test_random_calls(kernel):
    @seed(SEED)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases())
    def run(case):
        kernel.check(case)

    try:
        run()
    except AssertionError as error:
        raise AssertionError(f"FLASH_ATTN_TEST_SEED={SEED}: {error}") from error
