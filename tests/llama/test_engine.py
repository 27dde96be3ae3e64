"""The engine: sequences join and leave a running batch, and each has the same tokens as alone."""

import dataclasses
import json

import numpy as np
import pytest
from conftest import NO_CUDA, cupy
from real_models import model_file

from flash_attn_lab.models.held import HeldEngine
from flash_attn_lab.models.standard import Host
from flash_attn_lab.models.synthetic import write_checkpoint
from flash_attn_minimal import BadArgument, FlashAttnError
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.engine import KEPT_STEPS, Engine
from flash_attn_minimal.llama.model import Llama
from flash_attn_minimal.llama.sampling import GREEDY, Sampler, Sampling
from flash_attn_minimal.llama.weights import load_checkpoint

CONFIG = Config(dim=48, hidden_dim=56, n_layers=3, n_heads=6, n_kv_heads=2, vocab_size=70, seq_len=40)
PAGE_SIZES = [None, 1, 16, 17]


def cuda(attention, dtype="float32"):
    from flash_attn_lab.models.standard import Cuda

    return Cuda(attention, dtype)


no_gpu = pytest.mark.skipif(bool(NO_CUDA) or cupy is None, reason=NO_CUDA or "CuPy is not installed")
DEVICES = [pytest.param(Host, id="cpu"), pytest.param(cuda, id="cuda", marks=no_gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["standard", "flash"])
def attention(request):
    return request.param


@pytest.fixture
def model(tmp_path, device, attention):
    write_checkpoint(tmp_path / "model.bin", CONFIG, seed=5)
    return Llama(load_checkpoint(tmp_path / "model.bin"), device(attention))


def poison(engine):
    """Fills with NaN every position that is not written yet, and every page that belongs to no sequence."""
    with engine.device.scope():
        for array in (*engine.cache.k, *engine.cache.v):
            array[...] = np.nan


def run(engine, jobs):
    """The new tokens of every job."""
    poison(engine)
    requests = [engine.add(*job) for job in jobs]
    engine.run()
    return [request.tokens for request in requests]


@pytest.mark.parametrize("name", ["stories260K.bin", "stories260K_v1.bin"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_golden_texts(device, attention, name, page_size, max_batch):
    """One after the other, and in a batch in which they join and leave."""
    if name.endswith("v1.bin") and (page_size, max_batch) != (None, 1):
        pytest.skip("the same weights")
    cases = json.loads(model_file("stories260K_greedy.json").read_text())["cases"]
    model = Llama(load_checkpoint(model_file(name)), device(attention))
    jobs = [(case["prompt_ids"], len(case["token_ids"]) - len(case["prompt_ids"])) for case in cases]
    texts = run(Engine(model, max_batch, page_size=page_size), jobs)
    assert [prompt + text for (prompt, _), text in zip(jobs, texts, strict=True)] == [c["token_ids"] for c in cases]


def random_jobs(seed, count):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, count)
    return [(rng.integers(0, 70, n).tolist(), int(rng.integers(1, 42 - n))) for n in lengths]


@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("max_batch", [2, 5])
def test_company_changes_nothing(model, page_size, max_batch):
    jobs = random_jobs(0, 12)
    alone = [run(Engine(model, 1), [job])[0] for job in jobs]
    assert [len(tokens) for tokens in alone] == [new for _, new in jobs]
    assert run(Engine(model, max_batch, page_size=page_size), jobs) == alone


def test_few_pages_make_sequences_wait(model):
    jobs = random_jobs(1, 10)
    alone = [run(Engine(model, 1), [job])[0] for job in jobs]
    engine = Engine(model, 4, page_size=4, num_pages=12)
    assert run(engine, jobs) == alone
    assert len(engine.cache.pool) == 12  # all are back


def test_sequences_join_between_steps(model):
    jobs = random_jobs(2, 6)
    alone = [run(Engine(model, 1), [job])[0] for job in jobs]
    engine, requests, arrived = Engine(model, 3, page_size=5), [], {}
    poison(engine)
    while len(requests) < len(jobs) or engine.busy:
        if len(requests) < len(jobs):
            requests.append(engine.add(*jobs[len(requests)]))
        for request, token in engine.step():
            arrived.setdefault(request.id, []).append(token)
    assert [request.tokens for request in requests] == [arrived[request.id] for request in requests] == alone


def test_a_stop_token_ends_a_text(model):
    [whole] = run(Engine(model, 1), [([3, 4, 5], 30)])
    stop = whole[7]
    at = whole.index(stop)
    engine = Engine(model, 2, page_size=4)
    poison(engine)
    stopped, other = engine.add([3, 4, 5], 30, stops=[stop]), engine.add([3, 4, 5], 30)
    third = engine.add([3, 4, 5], 12)
    engine.run()
    assert stopped.tokens == whole[:at] and stopped.finished == "stop"
    assert other.tokens == whole and other.finished == "length"
    assert third.tokens == whole[:12]
    assert len(engine.cache.pool) == 20


@pytest.mark.parametrize("page_size", [None, 4])
def test_a_cancelled_sequence_makes_room(model, page_size):
    job = ([3, 4, 5], 30)
    [whole] = run(Engine(model, 1), [job])
    engine = Engine(model, 2, page_size=page_size, ahead=1)  # so that tokens are seen while the next ones are computed
    poison(engine)
    running, other, waiting, last = (engine.add(*job) for _ in range(4))
    while len(running.tokens) < 6:
        engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    kept = list(running.tokens)
    while not last.tokens:  # it joins in the place of the first, while the second still runs
        engine.step()
    assert not other.finished
    engine.run()
    assert running.finished == waiting.finished == "cancelled"
    assert running.tokens == kept == whole[: len(kept)] and waiting.tokens == []
    assert other.tokens == last.tokens == whole
    engine.cancel(last)
    assert last.finished == "length"  # it had ended
    assert page_size is None or len(engine.cache.pool) == 20


@pytest.mark.parametrize("prompt_tokens, new", [(1, 40), (30, 11), (39, 2), (40, 1)])
@pytest.mark.parametrize("page_size", [None, 8])
def test_the_context_ends_the_text(model, prompt_tokens, new, page_size):
    engine = Engine(model, 1, page_size=page_size)
    poison(engine)
    request = engine.add([5] * prompt_tokens, 100)
    engine.run()
    assert len(request.tokens) == new and request.finished == "context"
    assert engine.timing.decode_steps == new - 1 and engine.timing.prompt_tokens == prompt_tokens


def test_engines_share_a_model(model):
    """A second engine with another context length does not affect the first."""
    job = ([3, 4, 5], 30)
    [alone] = run(Engine(model, 1), [job])
    first = Engine(model, 1)
    request = first.add(*job)
    while len(request.tokens) < 10:
        first.step()
    assert run(Engine(model, 2, context=12), [([3, 4, 5], 10)]) == [alone[:10]]
    first.run()
    assert request.tokens == alone


@pytest.mark.parametrize("batch, position", [(0, 1), (3, 1), (1, -1), (1, 40)])
def test_hold_refuses(model, batch, position):
    with pytest.raises(
        BadArgument, match=f"batch={batch}, position={position} cannot be held: max_batch=2, context=40"
    ):
        HeldEngine(model, 2).hold(batch, position)


def test_no_new_tokens(model):
    request = Engine(model, 1).add([5], 0)
    assert request.finished == "length" and request.tokens == []


@pytest.mark.parametrize("arguments, message", [
    (([], 1), "prompt has no tokens"),
    (([5] * 41, 1), "prompt has 41 tokens, more than the context of 40"),
    (([5, 70], 1), "prompt reaches from token 5 to 70, outside the vocabulary 0 .. 69"),
    (([-1, 5], 1), "prompt reaches from token -1 to 5, outside"),
    (([5], -1), "max_new=-1 is negative"),
    (([5], 2.5), "max_new=2.5 is not an integer"),
])  # fmt: skip
def test_add_refuses(tmp_path, arguments, message):
    write_checkpoint(tmp_path / "model.bin", CONFIG)
    engine = Engine(Llama(load_checkpoint(tmp_path / "model.bin"), Host("standard")), 1)
    with pytest.raises(BadArgument, match=message):
        engine.add(*arguments)
    assert not engine.busy


@pytest.mark.parametrize("arguments, message", [
    ({"context": 41}, "context=41 is outside 1 .. 40"),
    ({"context": 0}, "context=0 is outside"),
    ({"max_batch": 0}, "max_batch=0 is not positive"),
    ({"page_size": 0}, "page_size=0 is not positive"),
    ({"page_size": 4, "num_pages": -1}, "num_pages=-1 is not positive"),
    ({"num_pages": 4}, "num_pages=4 needs a page_size"),
])  # fmt: skip
def test_engine_refuses(tmp_path, arguments, message):
    write_checkpoint(tmp_path / "model.bin", CONFIG)
    model = Llama(load_checkpoint(tmp_path / "model.bin"), Host("standard"))
    with pytest.raises(BadArgument, match=message):
        Engine(model, **arguments)


def test_a_sequence_that_never_fits_is_refused(tmp_path):
    write_checkpoint(tmp_path / "model.bin", CONFIG)
    model = Llama(load_checkpoint(tmp_path / "model.bin"), Host("standard"))
    engine = Engine(model, 2, page_size=4, num_pages=3)
    with pytest.raises(BadArgument, match="a prompt of 6 tokens and 9 new ones need 4 pages of 4 .*num_pages=3"):
        engine.add([5] * 6, 9)
    assert len(run(engine, [([5] * 6, 7)])[0]) == 7


def test_damaged_weights_are_noticed(tmp_path, device):
    write_checkpoint(tmp_path / "model.bin", CONFIG)
    model = Llama(load_checkpoint(tmp_path / "model.bin"), device("standard"))
    with model.device.scope():
        model.rms_final = model.rms_final * np.float32(np.nan)
    engine = Engine(model, 1)
    request = engine.add([5], 3)
    with pytest.raises(FlashAttnError, match="logits hold a NaN"):
        engine.run()
    assert request.finished == "error" and request.tokens == []


# ---- failures of one sequence, and of a step ----


def sampled_jobs(seed, count, extra=()):
    """Jobs whose texts rarely share a token."""
    return [(p, new, Sampling(1.5, seed=n)) for n, (p, new) in enumerate([*random_jobs(seed, count), *extra])]


def fail_prompt(model, prompt, error):
    """Makes the model's passes over this prompt raise the error. Decode steps, which have one token in each row, are
    recognised without reading the tokens, because tokens of a step that is captured as a CUDA graph cannot be read."""
    assert len(prompt) > 1
    forward = model.forward

    def failing(rows, cache):
        if rows.tokens.shape == (1, len(prompt)) and rows.tokens.tolist() == [prompt]:
            raise error
        return forward(rows, cache)

    model.forward = failing


@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("max_batch", [1, 2, 5])
def test_a_nan_ends_its_own_text(tmp_path, device, attention, page_size, max_batch):
    """The embedding of a token that only one text draws becomes NaN."""
    write_checkpoint(tmp_path / "model.bin", CONFIG, tied=False, version=1, seed=5)
    model = Llama(load_checkpoint(tmp_path / "model.bin"), device(attention))
    jobs = sampled_jobs(4, 9)
    alone = [run(Engine(model, 1), [job])[0] for job in jobs]
    seen = [{*prompt, *tokens} for (prompt, _, _), tokens in zip(jobs, alone, strict=True)]
    number, at = next(
        (number, at)
        for number, tokens in enumerate(alone[:5])
        for at, token in enumerate(tokens[1:-2], 1)
        if sum(token in others for others in seen) == 1 and token not in tokens[:at] + jobs[number][0]
    )
    with model.device.scope():
        model.embedding = model.device.matrix(np.array(load_checkpoint(tmp_path / "model.bin")["token_embedding"]))
        model.embedding[alone[number][at]] = np.nan
    engine = Engine(model, max_batch, page_size=page_size)
    poison(engine)
    requests = [engine.add(*job) for job in jobs]
    while engine.busy:
        engine.step()
    failed = requests.pop(number)
    assert failed.finished == "error" and "logits hold a NaN" in str(failed.error)
    assert failed.tokens == alone.pop(number)[: at + 1]
    assert [request.tokens for request in requests] == alone
    assert all(request.finished == "length" and request.error is None for request in requests)
    assert page_size is None or len(engine.cache.pool) == engine.cache.scratch_page


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), RuntimeError("a kernel that refuses")], ids=["memory", "other"]
)
@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("max_batch", [1, 2])
def test_a_prompt_that_fails_ends_its_own_text(model, page_size, max_batch, error):
    jobs = sampled_jobs(4, 5, extra=[([60, 61, 62, 63], 9)])
    jobs.insert(2, jobs.pop())
    alone = [run(Engine(model, 1), [job])[0] for job in jobs]
    fail_prompt(model, jobs[2][0], error)
    engine = Engine(model, max_batch, page_size=page_size)
    poison(engine)
    requests = [engine.add(*job) for job in jobs]
    with pytest.raises(type(error), match=str(error)):  # after the other texts are done
        engine.run()
    assert [request.tokens for request in requests] == [*alone[:2], [], *alone[3:]]
    assert [request.finished for request in requests] == ["length"] * 2 + ["error"] + ["length"] * 3
    assert requests[2].error is error and not engine.busy
    assert page_size is None or len(engine.cache.pool) == engine.cache.scratch_page
    engine.run()  # the error was told


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("a launch failed"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["model", "wait"])
def test_a_step_that_fails_ends_those_that_run(model, where, error, monkeypatch):
    """Sequences that wait go on, because the failure may have depended on the size of the step."""
    jobs = sampled_jobs(5, 6)
    alone = [run(Engine(model, 1), [job])[0] for job in jobs]
    engine = Engine(model, 2, page_size=3)
    poison(engine)
    requests = [engine.add(*job) for job in jobs]
    while engine.timing.decode_steps < 3:
        engine.step()
    interrupts = 0
    with monkeypatch.context() as patch:

        def fails(*_):
            raise error

        if where == "model":
            patch.setattr(engine, "_body", fails)
            engine._steps.clear()
        else:
            patch.setattr(engine.device, "event", lambda: fails, raising=False)
        while not any(request.finished == "error" for request in requests):
            try:
                engine.step()
            except KeyboardInterrupt:
                interrupts += 1
    assert interrupts == (not isinstance(error, Exception))
    engine.run()
    for request, tokens in zip(requests, alone, strict=True):
        if request.finished == "error":
            assert request.error is error and request.tokens == tokens[: len(request.tokens)]
        else:
            assert request.finished == "length" and request.tokens == tokens
    assert {request.finished for request in requests} == {"length", "error"}
    assert len(engine.cache.pool) == engine.cache.scratch_page
    assert run(engine, jobs) == alone  # nothing is left of it


def test_what_always_fails_ends_all(model, monkeypatch):
    """A lost device ends all sequences, so that none waits forever."""
    engine = Engine(model, 2, page_size=3)
    requests = [engine.add([3, 4, 5], 5) for _ in range(5)]

    def fails(*_):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine.device, "advance", fails, raising=False)
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.run()
    assert [request.finished for request in requests] == ["error"] * 5 and not engine.busy
    monkeypatch.undo()
    requests = [engine.add([3, 4, 5], 5) for _ in range(3)]
    monkeypatch.setattr(engine.device, "scope", fails, raising=False)  # no single sequence is at fault, so all end
    assert engine.step() == [] and [request.finished for request in requests] == ["error"] * 3


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("seed", range(4))
def test_random_programs(tmp_path, device, attention, page_size, seed):
    """Sequences join, end, are cancelled and fail, and steps fail, in any order. Each text, as far as it goes, equals
    the text that it has alone, and in the end all pages are free."""
    large = dataclasses.replace(CONFIG, vocab_size=500)
    write_checkpoint(tmp_path / "model.bin", large, tied=False, version=1, seed=5)
    model = Llama(load_checkpoint(tmp_path / "model.bin"), device(attention))
    rng = np.random.default_rng(seed)
    rules = [{}, {"temperature": 0.9}, {"temperature": 1.5, "top_k": 9}, {"temperature": 2.0, "top_p": 0.7}]
    jobs = [(p, n, Sampling(**rules[rng.integers(4)], seed=i)) for i, (p, n) in enumerate(random_jobs(seed + 10, 24))]
    alone = [run(Engine(model, 1), [job])[0] for job in jobs]
    unused = (
        {*range(500)} - {token for (p, _, _), tokens in zip(jobs, alone, strict=True) for token in p + tokens}
    ).pop()
    bad = [[unused, *prompt[:20]] for prompt, _ in random_jobs(seed + 20, 4)]
    with model.device.scope():
        model.embedding = model.device.matrix(np.array(load_checkpoint(tmp_path / "model.bin")["token_embedding"]))
        model.embedding[unused] = np.nan
    engine = Engine(model, 3, page_size=page_size, num_pages=page_size and 20, ahead=[None, 1, 2, 8][seed % 4])
    poison(engine)
    body, prefill, fault = engine._body, engine._prefill, []

    def faulty(function):
        def call(*arguments):
            if fault and rng.integers(2):
                raise fault.pop()
            return function(*arguments)

        return call

    engine._body, engine._prefill = faulty(body), faulty(prefill)
    requests, hopeless, todo = {}, [], list(range(len(jobs)))
    while todo or engine.busy:
        choice = rng.integers(12)
        if todo and choice < 4:
            number = todo.pop()
            requests[number] = engine.add(*jobs[number])
        elif bad and choice == 4:
            hopeless.append(engine.add(bad.pop(), 8))
        elif requests and choice == 5:
            engine.cancel(list(requests.values())[rng.integers(len(requests))])
        elif choice == 6 and not fault:
            fault.append(MemoryError("for once"))
        engine.step()
        if page_size:
            held = [page for request in (*requests.values(), *hopeless) for page in request.pages]
            assert len(held) == len(set(held)) == 20 - len(engine.cache.pool)
    ends = []
    for number, request in requests.items():
        ends.append(request.finished)
        assert request.tokens == alone[number][: len(request.tokens)], number
        assert request.finished in ("cancelled", "error") or request.tokens == alone[number]
        assert (request.finished == "error") == (request.error is not None)
    assert "length" in ends and len(set(ends)) > 1
    assert all(request.finished == "error" and request.tokens == [] for request in hopeless)
    assert page_size is None or len(engine.cache.pool) == 20
    assert not any(engine._slots) and (engine._lengths == -1).all() and not engine._active.any()


def test_recorded_steps_are_bounded(model):
    """Clients choose the sampling rules. A recorded step for every rule would fill the memory."""
    jobs = [([3, 4, 5], 4, Sampling(0.5 + number / 100, seed=number)) for number in range(3 * KEPT_STEPS)]
    engine = Engine(model, 2, page_size=4)
    for job in jobs[:-6]:
        engine.add(*job)
        engine.run()
        assert len(engine._steps) <= KEPT_STEPS
    assert run(engine, jobs[-6:]) == [run(Engine(model, 1), [job])[0] for job in jobs[-6:]]
    assert len(engine._steps) == KEPT_STEPS
    first = next(iter(engine._steps))
    batch, longest, rules = first
    engine._steps[first] = engine._steps.pop(first)  # as a step does that is used
    engine.add(*jobs[0])
    engine.run()
    assert first in engine._steps


def test_the_same_rule_in_float32_is_one_step(model):
    engine = Engine(model, 1)
    for temperature in (0.7, float(np.float32(0.7)), 0.7 + 1e-12):
        engine.add([3, 4, 5], 5, Sampling(temperature, top_p=0.9))
        engine.run()
    assert len(engine._steps) == 1


def test_the_ring_s_row_stays_in_the_ring(model):
    """The device's counter wraps around together with the host's, however long the engine runs."""
    engine = Engine(model, 2)
    for _ in range(4):
        engine.add([3, 4, 5], 20)
        engine.run()
        with engine.device.scope():
            count = np.asarray(engine.count.get() if hasattr(engine.count, "get") else engine.count)
        assert engine._entries < engine._ring_rows and (count == engine._entries).all()


def test_a_text_after_a_step_was_held(model):
    """hold advances the device's state. The next sequence still has its tokens where the host looks for them."""
    job = ([3, 4, 5], 12, Sampling(1.5, seed=3))
    [alone] = run(Engine(model, 1), [job])
    engine = HeldEngine(model, 2, page_size=4)
    held = engine.hold(2, 7)
    for _ in range(3):
        held()
    assert run(engine, [job]) == [alone]
    held()
    other = engine.hold(1, 20)
    for step, expected in ((held, [7, 7]), (other, [20, -1]), (held, [7, 7])):  # although another was held, or ran
        step()
        with engine.device.scope():
            lengths = np.asarray(engine.lengths.get() if hasattr(engine.lengths, "get") else engine.lengths)
        assert lengths.tolist() == expected
    assert run(engine, [job]) == [alone]
    engine.add(*job)
    with pytest.raises(BadArgument, match="batch=2, position=7 cannot be held while sequences run"):
        held()


# ---- sampling ----


def test_sampled_texts_do_not_depend_on_the_batch(model):
    jobs = [(prompt, new, Sampling(1.2, seed=number)) for number, (prompt, new) in enumerate(random_jobs(3, 7))]
    alone = [run(Engine(model, 1), [job])[0] for job in jobs]
    assert run(Engine(model, 3, page_size=6), jobs) == alone
    other = [(prompt, new, Sampling(1.2, seed=99)) for prompt, new, _ in jobs]
    assert run(Engine(model, 3), other) != alone


def test_each_sequence_is_sampled_in_its_own_way(model):
    ways = [Sampling(), Sampling(0.8, seed=1), Sampling(1.5, top_k=5, seed=2), Sampling(2.0, top_p=0.5, seed=3)]
    jobs = [([7, 8, 9], 25, ways[number % 4]) for number in range(9)]
    alone = [run(Engine(model, 1), [job])[0] for job in jobs]
    assert run(Engine(model, 4), jobs) == alone
    assert len({tuple(tokens) for tokens in alone}) == 4
    [top_1] = run(Engine(model, 1), [([7, 8, 9], 25, Sampling(1.5, top_k=1, seed=5))])
    assert top_1 == alone[0]


@pytest.mark.parametrize("rows", [np.float32([[1, 3, 2, 3], [0, 0, 0, 0], [-np.inf, -1, -np.inf, -2]])])
def test_greedy_takes_the_first_largest(device, rows):
    place = device("standard")
    sampler, xp = Sampler(place, 3), place.xp
    tokens, steps = xp.zeros((3, 1), np.int32), xp.zeros(3, np.int32)
    with place.scope():
        sampler.draw(place.vector(rows), tokens, steps, sampler.synchronise([0, 1, 2]))
        place.synchronize()
    assert np.asarray(tokens.get() if hasattr(tokens, "get") else tokens).ravel().tolist() == [1, 0, 1]


@pytest.mark.parametrize("row", [[0, np.nan, 1, 0], [-np.inf] * 4])
def test_no_token_from_logits_without_a_largest(row):
    tokens = np.zeros((2, 1), np.int32)
    logits = np.float32([row, [0, 1, 0, 0]])
    Sampler(Host("standard"), 2).draw(logits, tokens, np.zeros(2, np.int32), (GREEDY,))
    assert tokens.ravel().tolist() == [-1, 1]


@pytest.mark.parametrize("arguments, message", [
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": float("inf")}, "temperature=inf"),
    ({"temperature": 1e39}, r"temperature=1e\+39 is beyond the numbers of a float32"),
    ({"temperature": "hot"}, "temperature='hot' is not a number"),
    ({"top_k": -1}, "top_k=-1 is negative"),
    ({"top_k": 1 << 31}, "top_k=2147483648 is not below 2^31"),
    ({"top_k": 1.5}, "top_k=1.5 is not an integer"),
    ({"top_p": 1e-46}, "top_p=1e-46 is 0 as a float32"),
    ({"top_p": 0.0}, "top_p=0.0 is outside 0 < top_p <= 1"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"top_p": float("nan")}, "top_p=nan"),
    ({"seed": 0.5}, "seed=0.5 is not an integer"),
    ({"seed": -1}, "seed=-1 is negative"),
    ({"seed": 1 << 63}, "seed=9223372036854775808 is not below"),
])  # fmt: skip
def test_sampling_refuses(arguments, message):
    with pytest.raises(BadArgument, match=message.replace("^", r"\^")):
        Sampling(**arguments)


@pytest.mark.parametrize("temperature", [1e-46, 1e-38, 1e-30, 1.0, 3.4e38, float(np.finfo(np.float32).max)])
@pytest.mark.parametrize("top_p", [1.4e-45, 1e-30, 0.5, 1 - 1e-9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, (1 << 31) - 1])
def test_what_sampling_takes_a_step_takes(device, temperature, top_k, top_p):
    """A step is shared by sequences, so arguments that the library would refuse must be refused before."""
    place = device("flash")
    sampler, xp = Sampler(place, 2), place.xp
    sampler.set(1, Sampling(temperature, top_k, top_p))
    with place.scope():
        tokens, steps = xp.zeros((2, 1), np.int32), xp.zeros(2, np.int32)  # on the stream that draws
        sampler.draw(place.vector(np.float32([[0, 9], [9, 0]])), tokens, steps, sampler.synchronise([0, 1]))
        place.synchronize()
    assert np.asarray(tokens.get() if hasattr(tokens, "get") else tokens)[0] == 1
