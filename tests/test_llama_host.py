"""The host's decode step is recorded once and replayed; flash and standard attention compared in turns."""

import re

import numpy as np
import pytest

from flash_attn_lab.models import compare
from flash_attn_lab.models.compare import main
from flash_attn_lab.models.standard import Host, on
from flash_attn_lab.models.synthetic import RandomTensors
from flash_attn_minimal import BadArgument, FlashAttnError
from flash_attn_minimal.llama import host as host_module
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.engine import Engine
from flash_attn_minimal.llama.generate import main as generate
from flash_attn_minimal.llama.model import Llama
from flash_attn_minimal.llama.sampling import Sampling
from flash_attn_minimal.llama.weights import Checkpoint

CONFIG = Config(dim=48, hidden_dim=56, n_layers=3, n_heads=6, n_kv_heads=2, vocab_size=70, seq_len=60)
JOBS = [([3, 4, 5], 50, Sampling()), ([7], 40, Sampling(0.9, 5, 0.8, 3)), ([9] * 20, 30, Sampling(1.1, seed=4))]


def model(device, seed=5):
    return Llama(Checkpoint("random", "random", True, CONFIG, "float32", RandomTensors(CONFIG, seed=seed)), device)


def texts(engine, jobs=JOBS):
    requests = [engine.add(*job) for job in jobs]
    engine.run()
    return [request.tokens for request in requests]


class NotRecorded(Host):
    """A host on which Python makes every step call by call."""

    def once(self, body):
        return body


@pytest.mark.parametrize("attention", ["flash", "standard"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("page_size", [None, 7])
@pytest.mark.parametrize("narrow_rows", [16, 0])
def test_a_replayed_step_is_the_step(monkeypatch, attention, dtypes, page_size, narrow_rows):
    """Equal bit for bit, while sequences with different rules join and leave, with products of the library and of
    BLAS."""
    monkeypatch.setattr(host_module, "NARROW_ROWS", narrow_rows)
    recorded, plain = (model(kind(attention, *dtypes)) for kind in (Host, NotRecorded))
    engines = [Engine(each, 3, page_size=page_size) for each in (recorded, plain)]
    assert texts(engines[0]) == texts(engines[1])
    for ours, theirs in zip(engines[0].cache.k, engines[1].cache.k, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_step_of_a_kind_is_made_by_python_twice(monkeypatch):
    """The first time without a recording, the second time to record it; from then on the step is replayed."""
    calls, forward = [], Llama.forward
    monkeypatch.setattr(Llama, "forward", lambda *arguments: calls.append(1) or forward(*arguments))
    engine = Engine(model(Host()), 1)
    texts(engine, [([3], 50)])
    texts(engine, [([4], 50)])
    assert len(calls) == 2 + 2  # two prompts, two steps


@pytest.mark.parametrize("variable, value", [("FLASH_ATTN_NUM_THREADS", "16"), ("FLASH_ATTN_KERNEL", "cpu_portable")])
def test_the_environment_may_change_behind_a_recording(monkeypatch, variable, value):
    """The environment may then ask for more threads or another kernel, which need more workspace than the recording
    has."""
    monkeypatch.setenv("FLASH_ATTN_NUM_THREADS", "1")
    llama = model(Host())
    [whole] = texts(Engine(llama, 1), [([3, 4], 50)])
    engine = Engine(llama, 1)
    request = engine.add([3, 4], 50)
    while len(request.tokens) < 20:
        engine.step()
    monkeypatch.setenv(variable, value)
    engine.run()
    assert request.tokens == whole


def test_an_error_of_a_replay_reaches_the_caller(monkeypatch):
    engine = Engine(model(Host()), 1)
    engine.add([3], 50)
    for _ in range(5):
        engine.step()
    monkeypatch.setenv("FLASH_ATTN_KERNEL", "no_such_kernel")
    with pytest.raises(
        BadArgument, match=r"^calls\[1\] \(fa_kvcache_attention\): FLASH_ATTN_KERNEL=no_such_kernel is not"
    ):
        engine.run()


# ---- in turns ----


def engines(**options):
    flash = model(Host("flash"), **options)
    return {"flash": Engine(flash, 2), "standard": Engine(on(flash, Host("standard")), 2)}


def test_both_write_the_same_and_are_timed_in_turns(monkeypatch):
    order, piece = [], compare._piece
    both = engines()
    names = {id(engine): name for name, engine in both.items()}
    monkeypatch.setattr(compare, "_piece", lambda engine: order.append(names[id(engine)]) or piece(engine))
    found = compare.in_turns(both, [([3], 50), ([4], 50)], seconds=0)
    assert [request.tokens for request in found.requests] == texts(Engine(model(Host()), 2), [([3], 50), ([4], 50)])
    # 49 steps are 4 pieces; the first and the last do not count, and neither does the first round.
    assert found.pieces == 2 * compare.LEAST_ROUNDS and len(order) == 8 * (compare.LEAST_ROUNDS + 1)
    assert order[:8] == ["flash", "standard", "standard", "flash"] * 2
    assert set(found.steps_per_second) == {"flash", "standard"} and min(found.steps_per_second.values()) > 0
    assert found.ratio > 0


def test_the_ratio_is_that_of_pieces_side_by_side(monkeypatch):
    """If the machine is ten times as slow for a while, the medians change, but not the ratio."""
    both = engines()
    speeds, piece = iter(np.repeat([1.0, 10.0, 1.0, 10.0], 12)), compare._piece

    def timed(engine):
        piece(engine)
        return next(speeds) * (3 if engine is both["flash"] else 2)

    monkeypatch.setattr(compare, "_piece", timed)
    assert compare.in_turns(both, [([3], 50)], seconds=0).ratio == 1.5


def test_texts_that_differ_are_an_error():
    both = {"flash": engines()["flash"], "standard": engines(seed=6)["standard"]}
    with pytest.raises(FlashAttnError, match="texts of flash and standard attention differ from new token 0 on"):
        compare.in_turns(both, [([3], 50)], seconds=0)


def test_too_little_to_compare():
    with pytest.raises(BadArgument, match="the text has 2 pieces of 16 steps: too few to compare, which takes 3"):
        compare.in_turns(engines(), [([3], 20)], seconds=0)


def test_the_command_compares(capsys, monkeypatch):
    in_turns = compare.in_turns
    monkeypatch.setattr(compare, "in_turns", lambda *a: in_turns(*a, seconds=0.1))
    assert main(["--device", "cpu", "--steps", "80", "--prompt", "One day"]) == 0
    out, err = capsys.readouterr()
    assert generate(["--device", "cpu", "--steps", "80", "--prompt", "One day"]) == 0
    assert capsys.readouterr().out == out
    assert "run      flash and standard attention, cpu, " in err and "limit" not in err  # a step stays in the cache
    speeds = [float(re.search(rf"^{name} +([\d.]+) steps/s$", err, re.M)[1]) for name in ("flash", "standard")]
    assert min(speeds) > 0
    assert re.search(
        r"^ratio    flash is \d+\.\d\d times as fast \(medians of \d+ pieces of 16 steps each, in turns", err, re.M
    )
    assert main(["--device", "cpu", "--steps", "20"]) == 2
    assert "too few to compare" in capsys.readouterr().err


@pytest.mark.parametrize("measured", [1.0, 1e9, 1e15])
def test_the_limit_is_one(monkeypatch, measured):
    """If steps read faster than the pass that is timed for comparison, they count as the fastest read (100 %), not as
    120 %."""
    asked = []
    monkeypatch.setattr(Host, "read_bandwidth", lambda self, nbytes: asked.append(nbytes) or measured)
    engine = Engine(model(Host()), 1)
    texts(engine, [([3], 50)])
    assert compare.limit(engine, 1000.0) is None, "a step that reads so little reads a cache"
    monkeypatch.setattr(compare, "CACHED", 0)
    found = re.search(
        r"limit +([\d.]+) MiB read per step at ([\d.]+) GB/s .* allow ([\d.]+) steps/s: ([\d.]+) % reached",
        compare.limit(engine, 1000.0),
    )
    size, bandwidth, allowed, share = map(float, found.groups())
    assert asked == [pytest.approx(2**20 * size, rel=0.5)] and share <= 100 and allowed >= 1000
    if measured == 1.0:
        assert share == 100 and allowed == 1000
    if measured == 1e15:
        assert bandwidth == 1e6 and share < 1


def test_reading_is_timed_on_as_much_as_a_step_reads():
    for nbytes in (0, 1, 5_000, 1 << 20, 1 << 40):  # not with a tebibyte of memory
        assert 1e6 < Host().read_bandwidth(nbytes) < 1e14
