"""The Llama server of examples/, used through OpenAI's client: texts equal those of the engine, whatever other requests
run at the same time."""

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import ROOT

from flash_attn_lab.models.synthetic import write_checkpoint, write_tokenizer
from flash_attn_minimal import BadArgument, FlashAttnError
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.engine import Engine
from flash_attn_minimal.llama.generate import open_device
from flash_attn_minimal.llama.model import Llama
from flash_attn_minimal.llama.sampling import Sampling
from flash_attn_minimal.llama.weights import find_tokenizer, load_checkpoint

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")  # which openai brings
for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package)

# A context so long that no test reaches its end: only a client that disconnects frees the slot of such a text.
ENDLESS = 1 << 18
CONFIG = Config(dim=32, hidden_dim=48, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=1024, seq_len=ENDLESS)
SLOTS = 2
PROMPTS = ["One day", "", "the sea", "Why?", "a b c d e f g h", "Grün, ja"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder / "tiny.bin", CONFIG, version=1, tied=False, seed=7)
    write_tokenizer(folder / "tok1024.bin", 1024)
    return str(folder / "tiny.bin")


@pytest.fixture(scope="module")
def server(checkpoint):
    """The address of a server that is started as a user would start it."""
    command = [sys.executable, ROOT / "examples/serve_llama.py", checkpoint, "--slots", str(SLOTS), "--port", "0"]
    process = subprocess.Popen([*command, "--device", "cpu"], stderr=subprocess.PIPE, text=True)
    said = ""
    for line in process.stderr:
        said += line
        if found := re.search(r"running on (http://[\d.:]+)", line):
            break
    else:
        pytest.fail(f"the server ended: {said}")
    with ThreadPoolExecutor(1) as reader:  # a full pipe would stop the server
        reader.submit(process.stderr.read)
        try:
            yield found[1]
            process.terminate()
            process.wait(timeout=60)
        finally:
            process.kill()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def alone(checkpoint):
    """A function of (prompt, new tokens) that returns the greedy text and its number of tokens, from an engine that
    writes nothing else."""
    opened = load_checkpoint(checkpoint)
    model, tokenizer = Llama(opened, open_device("cpu")), find_tokenizer(opened)

    def write(prompt, new):
        engine = Engine(model, 1, context=256)
        request = engine.add(tokenizer.encode(prompt), new, stops=tokenizer.stops)
        engine.run()
        before = tokenizer.decode(request.prompt)
        whole = tokenizer.decode(request.prompt + request.tokens)
        assert whole.startswith(before)
        return whole.removeprefix(before), len(request.tokens)

    return write


def test_a_text_is_the_engine_s(client, alone):
    text, count = alone("One day", 40)
    done = client.completions.create(model="tiny", prompt="One day", max_tokens=40, temperature=0)
    assert done.choices[0].text == text and len(set(text)) > 20
    assert done.choices[0].finish_reason == "length" and done.model == "tiny"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (done.usage.total_tokens - count, count)


def test_a_stream_has_the_same_text_in_pieces(client, alone):
    events = list(client.completions.create(model="tiny", prompt="the sea", max_tokens=40, temperature=0, stream=True))
    assert "".join(event.choices[0].text for event in events) == alone("the sea", 40)[0]
    assert len(events) > 20 and len({event.id for event in events}) == 1
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]


def test_prompts_may_be_tokens(client, checkpoint, alone):
    encode = find_tokenizer(load_checkpoint(checkpoint)).encode
    prompts = [encode(prompt) for prompt in PROMPTS]
    asked = {"model": "tiny", "max_tokens": 20, "temperature": 0}
    expected = [alone(prompt, 20)[0] for prompt in PROMPTS]
    assert client.completions.create(**asked, prompt=prompts[0]).choices[0].text == expected[0]
    assert [choice.text for choice in client.completions.create(**asked, prompt=prompts).choices] == expected


def test_health(server):
    with urllib.request.urlopen(f"{server}/health", timeout=60) as answer:
        assert (answer.status, json.load(answer)) == (200, {"status": "ok"})


def test_several_prompts_make_several_choices(client, alone):
    asked = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 20, "temperature": 0}
    expected = [alone(prompt, 20)[0] for prompt in PROMPTS]
    assert [choice.text for choice in client.completions.create(**asked).choices] == expected
    texts = [""] * len(PROMPTS)
    for event in client.completions.create(**asked, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == expected


def test_company_changes_nothing(server, alone):
    """More clients at once than slots, every second one streaming, with texts of unequal length."""
    jobs = [(prompt, 10 + 9 * number) for number, prompt in enumerate(2 * PROMPTS)]

    async def ask(client, number, prompt, new):
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": new, "temperature": 0}
        if number % 2:
            return (await client.completions.create(**asked)).choices[0].text
        return "".join([event.choices[0].text async for event in await client.completions.create(**asked, stream=True)])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(ask(client, number, *job) for number, job in enumerate(jobs)))

    assert asyncio.run(ask_all()) == [alone(*job)[0] for job in jobs]


def test_a_seed_draws_the_same_text_again(client):
    def text(**given):
        asked = {"model": "tiny", "prompt": "One day", "max_tokens": 30, **given}
        return client.completions.create(**asked).choices[0].text

    assert text(seed=7) == text(seed=7) != text(seed=8)
    assert text(seed=7, top_p=1e-9) == text(temperature=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_is_where_the_text_ends(client, alone, stream):
    whole = alone("One day", 40)[0]
    stop = whole[20:24]
    asked = {"model": "tiny", "prompt": "One day", "max_tokens": 40, "temperature": 0, "stop": ["\x00", stop]}
    done = client.completions.create(**asked, stream=stream)
    choices = [event.choices[0] for event in done] if stream else done.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_clients_that_go_away_free_their_slots(client, alone):
    """Endless texts take every slot, and more wait in line. Then all their clients disconnect."""
    endless = {"model": "tiny", "prompt": "One day", "max_tokens": ENDLESS - 100, "temperature": 0}
    for _ in range(2):
        streams = [client.completions.create(**endless, stream=True) for _ in range(SLOTS)]
        assert all(next(iter(stream)).choices[0].text for stream in streams)
        waiting = client.completions.create(**endless, stream=True)
        with pytest.raises(openai.APITimeoutError):  # the slots are full; and this client, too, goes away
            client.with_options(timeout=0.5).completions.create(**endless)
        for stream in [*streams, waiting]:
            stream.close()
        done = client.completions.create(model="tiny", prompt="the sea", max_tokens=20, temperature=0)
        assert done.choices[0].text == alone("the sea", 20)[0]


@pytest.mark.parametrize("asked, message", [
    ({"model": "gpt"}, "model='gpt' is not served, only 'tiny'"),
    ({"temperature": -1}, "temperature=-1.0 is not a finite number >= 0"),
    ({"top_p": 0}, "top_p=0.0 is outside 0 < top_p <= 1"),
    ({"max_tokens": -3}, "max_tokens=-3: Input should be greater than or equal to 0"),
    ({"max_tokens": "many"}, "max_tokens='many': Input should be a valid integer"),
    ({"prompt": []}, r"prompt=\[\]: List should have at least 1 item"),
    ({"prompt": "x" * 2 * ENDLESS}, f"prompt has {2 * ENDLESS + 2} tokens, more than the context of {ENDLESS}"),
    ({"stop": ""}, "stop='': String should have at least 1 character"),
    ({"n": 2}, "n=2: Input should be 1"),
    ({"best_of": 4}, "best_of=4: Input should be 1"),
    ({"logprobs": 3}, "logprobs=3: Input should be None"),
    ({"presence_penalty": 0.5}, "presence_penalty=0.5: Input should be less than or equal to 0"),
    ({"extra_body": {"best": 4}}, "best=4: Extra inputs are not permitted"),
    ({"temperature": 1e39}, r"temperature=1e\+39 is beyond the numbers of a float32"),
    ({"top_p": 1e-46}, "top_p=1e-46 is 0 as a float32"),
    ({"prompt": ["x"] * 20_000}, "prompt=.*: 20000 entries are more than 256"),
    ({"prompt": [1] * 200_000}, "prompt=.*: 200000 entries are more than 131072"),
    ({"prompt": [[1] * 70_000] * 2}, "prompt=.*: 140000 tokens are more than 131072"),
    ({"prompt": [[1]] * 257}, "prompt=.*: 257 entries are more than 256"),
    ({"prompt": [[1], []]}, r"prompt=\[\]: List should have at least 1 item"),
    ({"prompt": [1, -1]}, "prompt=-1: Input should be greater than or equal to 0"),
    ({"prompt": [1, 10**6]}, "prompt reaches from token 1 to 1000000, outside the vocabulary"),
    ({"prompt": [1, "x"]}, r"prompt=.*: Input should be a valid"),
    ({"prompt": [1.5]}, r"prompt=.*: Input should be a valid"),
    ({"stop": ["x"] * 17}, "stop=.*: 17 entries are more than 16"),
    ({"extra_body": {str(n): n for n in range(70)}}, "7[0-9] fields are more than 64"),
    ({"logit_bias": {"7": 1}}, "logit_bias={'7': 1}: Dictionary should have at most 0 items"),
    ({"logit_bias": {str(n): "x" for n in range(200_000)}}, "logit_bias={.*: 200000 entries are more than 64"),
    ({"extra_body": {"k" * 1_000_000: 1}}, r"^.{,60}k{100}=1: Extra inputs are not permitted"),
    ({"model": "m" * 1_000_000}, r"model='m+\.\.\.m+' is not served"),
    ({"prompt": "x" * 12 * ENDLESS}, rf"prompt='xx.*has {12 * ENDLESS} characters, more than \d+: a context"),
])  # fmt: skip
def test_bad_requests_are_refused_by_name(client, asked, message):
    with pytest.raises(openai.APIStatusError, match=message) as refused:
        client.completions.create(**{"model": "tiny", "prompt": "One day", "stream": True, **asked})
    assert refused.value.status_code == (404 if "model" in asked else 400)
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("path, body, message", [
    ("/v1/completions", b'{"model": ', "the body is not JSON: Expecting value at character"),
    ("/v1/completions", b"{}", "model: Field required"),
    ("/v1/completions", b'{"model": null}', "model: Field required"),
    ("/v1/completions", b"[" * 100_000, "400"),
    ("/v1/completions", b"[1]", "body=[1]: Input should be a valid dictionary"),
    ("/v1/completions", b'{"model": "\\ud800", "\\ud801": 1}', "Input should be a valid string"),
    ("/v1/completions", b'{"model": "tiny", "prompt": "' + b"x" * (5 << 20), "the body has more than 4194304 bytes"),
    ("/v1/chat/completions", b"{}", "POST /v1/chat/completions: Not Found"),
])  # fmt: skip
def test_what_no_client_sends_is_refused_too(server, path, body, message):
    request = urllib.request.Request(server + path, body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=120)
    assert message in f"{refused.value.code} {refused.value.read().decode()}"
    assert refused.value.code == (413 if len(body) > 4 << 20 else 404 if "chat" in path else 400)


# Optional fields of /v1/completions in OpenAI's reference, with the values by which clients ask for nothing.
OPTIONAL = {
    "best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": {}, "logprobs": None, "max_tokens": 16, "n": 1,
    "presence_penalty": 0.0, "prompt": "", "seed": 3, "stop": [], "stream": False, "stream_options": {}, "suffix": "",
    "temperature": 1, "top_p": 1, "user": "me",
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONAL)
def test_null_is_the_default(client, name):
    def text(**given):
        asked = {"model": "tiny", "prompt": "One day", "seed": 3, "max_tokens": 12, **given}
        return client.completions.create(model="tiny", prompt=asked["prompt"], extra_body=asked).choices[0].text

    left_out = {"prompt": ""} if name == "prompt" else {}
    if name == "seed":
        assert text(seed=None, temperature=0) == text(temperature=0)
        return
    if name == "max_tokens":
        assert text(max_tokens=None) == text(max_tokens=16)
        return
    assert text(**{name: None}) == text(**left_out) == text(**{name: OPTIONAL[name]})


def test_usage_at_the_end_of_a_stream(client, alone):
    asked = {"model": "tiny", "prompt": ["the sea", "One day"], "max_tokens": 12, "temperature": 0, "stream": True}
    *events, last = client.completions.create(**asked, stream_options={"include_usage": True})
    assert all(event.usage is None for event in events) and last.choices == []
    assert last.usage.completion_tokens == sum(alone(prompt, 12)[1] for prompt in asked["prompt"])


# ---- inside the server's process ----


@pytest.fixture(scope="module")
def serve():
    spec = importlib.util.spec_from_file_location("serve_llama", ROOT / "examples/serve_llama.py")
    sys.modules["serve_llama"] = module = importlib.util.module_from_spec(spec)  # where FastAPI looks up annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def writer(serve, checkpoint):
    writer = serve.Writer(checkpoint, "cpu", SLOTS, 256, None)
    yield writer
    writer.thread.shutdown()
    assert not any(writer.engine._slots) and len(writer.engine.cache.pool) == writer.engine.cache.scratch_page


def visit(serve, writer, ask):
    """Runs ask(client) with a client that is connected to the writer's application without a network."""

    async def run():
        transport = httpx.ASGITransport(serve.make_app(writer))
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:
            return await ask(client)

    return asyncio.run(asyncio.wait_for(run(), 120))


def fail(writer, prompt, error):
    """Makes the pass over this prompt raise the error."""
    ids, forward = writer.tokenizer.encode(prompt), writer.engine.model.forward

    def failing(rows, cache):
        if rows.tokens.tolist() == [ids]:
            raise error
        return forward(rows, cache)

    writer.engine.model.forward = failing


@pytest.mark.parametrize("error, message", [
    (MemoryError(), "text 0: out of memory"), (RuntimeError("a launch"), "text 0: RuntimeError: a launch"),
])  # fmt: skip
def test_a_text_that_fails_ends_alone(serve, writer, alone, error, message):
    fail(writer, "Why?", error)
    asked = {"model": "tiny", "max_tokens": 20, "temperature": 0}

    async def ask(client):
        post = lambda prompt, **more: client.post("/v1/completions", json={**asked, "prompt": prompt, **more})  # noqa: E731
        bad = [post("Why?"), post("Why?", stream=True), post(["Why?", "One day"])]
        return await asyncio.gather(*bad, post("the sea"), post("One day"), post("the sea", stream=True))

    whole, streamed, several, *good = visit(serve, writer, ask)
    for answer in (whole, several):
        assert answer.status_code == 500
        assert answer.json()["error"] == {"message": message, "type": "server_error", "param": None, "code": None}
    assert streamed.text == f"data: {whole.text}\n\n"  # one event, then the end
    assert [answer.json()["choices"][0]["text"] for answer in good[:2]] == [
        alone(p, 20)[0] for p in ("the sea", "One day")
    ]
    events = [json.loads(line[6:]) for line in good[2].text.split("\n\n")[:-2]]
    assert "".join(event["choices"][0]["text"] for event in events) == alone("the sea", 20)[0]
    assert good[2].text.endswith("data: [DONE]\n\n")


def test_a_step_that_fails_is_told_to_all_and_the_server_goes_on(serve, writer, alone):
    body = writer.engine._body

    def failing(*arguments):
        writer.engine._body = body
        raise MemoryError

    writer.engine._body = failing
    asked = {"model": "tiny", "max_tokens": 20, "temperature": 0, "prompt": "the sea"}

    async def ask(client):
        post = lambda **more: client.post("/v1/completions", json={**asked, **more})  # noqa: E731
        first = await asyncio.gather(post(), post(stream=True))
        return [*first, await post()]

    whole, streamed, after = visit(serve, writer, ask)
    assert (whole.status_code, whole.json()["error"]["message"]) == (500, "text 0: out of memory")
    *pieces, last, end = streamed.text.split("\n\n")
    assert json.loads(last[6:])["error"]["message"] == "text 0: out of memory" and len(pieces) < 3 and not end
    assert after.json()["choices"][0]["text"] == alone("the sea", 20)[0]


def test_a_text_that_cannot_be_decoded_ends_alone(serve, writer, alone):
    stream = writer.tokenizer.stream

    def failing(tokens, after=()):
        yield from stream(tokens, after)
        raise BadArgument("no such token")

    prompt = writer.tokenizer.encode("Why?")
    writer.tokenizer.stream = lambda tokens, after=(): (failing if after == prompt else stream)(tokens, after)
    asked = {"model": "tiny", "max_tokens": 20, "temperature": 0}

    async def ask(client):
        prompts = ("Why?", "the sea")
        return await asyncio.gather(*(client.post("/v1/completions", json={**asked, "prompt": p}) for p in prompts))

    bad, good = visit(serve, writer, ask)
    assert (bad.status_code, bad.json()["error"]["message"]) == (500, "text 0: no such token")
    assert good.json()["choices"][0]["text"] == alone("the sea", 20)[0]


def test_a_nan_ends_one_stream(serve, writer):
    """The other client is slow meanwhile, and finds its whole text later."""
    model, first = writer.engine.model, [writer.tokenizer.encode(prompt) for prompt in ("Why?", "the sea")]
    model.embedding = np.array(model.embedding)  # no tied weights here: only what reads this token is NaN
    jobs = [[(ids, 10, Sampling(1.5, seed=number), frozenset())] for number, ids in enumerate(first)]
    engine = Engine(model, 1, context=256)
    alone = [engine.add(*job[0]) for job in jobs]
    engine.run()
    token = alone[0].tokens[4]
    assert token not in alone[1].tokens + first[1] + first[0] + alone[0].tokens[:4]
    model.embedding[token] = np.nan

    async def run():
        bad, good = (writer.write(job, []) for job in jobs)
        for news in (bad, good, bad, good):
            await anext(news)
        with pytest.raises(FlashAttnError, match="text 0: the model's logits hold a NaN"):
            async for _ in bad:
                pass
        assert not writer.engine.busy or writer.engine._running()[0].id == 1
        rest = [one async for one in good]
        assert rest[-1][2] == "length"

    asyncio.run(asyncio.wait_for(run(), 60))
    assert len(alone[0].tokens) == 10


def test_a_client_that_goes_away_while_its_text_is_added(serve, writer):
    """The engine still takes the client's requests, and ends them."""
    started, go_on, add = threading.Event(), threading.Event(), writer.engine.add

    def slow(*job):
        started.set()
        go_on.wait(60)
        return add(*job)

    writer.engine.add = slow

    async def run():
        job = (writer.tokenizer.encode("Why?"), 100, Sampling(), frozenset())
        asked = asyncio.ensure_future(anext(writer.write([job, job], [])))
        await asyncio.to_thread(started.wait, 60)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        go_on.set()
        return await writer.ask(lambda: writer.engine.busy)

    assert asyncio.run(asyncio.wait_for(run(), 60)) is False


def test_those_in_line_are_left_alone(serve, writer, alone, monkeypatch):
    """Steps do not wake requests that wait in line, so their number does not slow the texts that are being written."""
    looks, news = [], serve.Text.news
    monkeypatch.setattr(serve.Text, "news", lambda text: looks.append(text) or news(text))
    asked = {"model": "tiny", "prompt": "the sea", "max_tokens": 8, "temperature": 0}

    async def ask(client):
        return await asyncio.gather(*(client.post("/v1/completions", json=asked) for _ in range(20 * SLOTS)))

    text = alone("the sea", 8)[0]
    assert [answer.json()["choices"][0]["text"] for answer in visit(serve, writer, ask)] == 20 * SLOTS * [text]
    assert len(looks) <= 20 * SLOTS * 9  # each of its tokens, and its end


@pytest.mark.parametrize("where", ["encode", "step"])
def test_an_error_of_the_server_s_own_is_told_as_one(serve, writer, alone, where):
    owner = writer.tokenizer if where == "encode" else writer.engine
    whole = getattr(owner, where)

    def failing(*given):
        raise RuntimeError("damaged")

    setattr(owner, where, failing)
    asked = {"model": "tiny", "prompt": "the sea", "max_tokens": 8, "temperature": 0}

    async def ask():
        transport = httpx.ASGITransport(serve.make_app(writer), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:
            bad = await asyncio.gather(*(client.post("/v1/completions", json=asked) for _ in range(3)))
            setattr(owner, where, whole)
            return bad, await client.post("/v1/completions", json=asked)

    bad, good = asyncio.run(asyncio.wait_for(ask(), 60))
    for answer in bad:
        message = {"message": "RuntimeError: damaged", "type": "server_error", "param": None, "code": None}
        assert (answer.status_code, answer.json()["error"]) == (500, message)
    assert good.json()["choices"][0]["text"] == alone("the sea", 8)[0]


def test_a_client_that_leaves_the_line_gets_no_slot(serve, writer):
    job = (writer.tokenizer.encode("Why?"), 100, Sampling(), frozenset())
    left = []

    def gone():
        return bool(left)

    async def run():
        running = [writer.write([job], []) for _ in range(SLOTS)]
        for text in 2 * running:
            await anext(text)
        waiting = writer.write([job], [], gone)
        [request] = await anext(waiting)
        left.append("the line")
        with pytest.raises(StopAsyncIteration):
            await anext(waiting)
        await writer.ask(lambda: None)  # what was submitted before is done
        assert request.finished == "cancelled" and request.tokens == [] and not writer.engine._waiting
        for text in running:
            await text.aclose()
        await writer.ask(lambda: None)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_long_prompts_hold_nobody_up(serve, writer, alone, monkeypatch):
    """Long prompts are encoded in another thread, which here takes as long as all other clients need."""
    done, encode = threading.Event(), writer.tokenizer.encode

    def slow(text):
        assert not text.startswith("long") or done.wait(60)
        return encode(text)

    writer.tokenizer.encode = slow
    monkeypatch.setattr(serve, "SHORT_PROMPT", 8)
    asked = {"model": "tiny", "max_tokens": 20, "temperature": 0}

    async def ask(client):
        post = lambda: client.post("/v1/completions", json={**asked, "prompt": "long prompt"})  # noqa: E731
        long = [asyncio.ensure_future(post()) for _ in range(4)]
        await asyncio.sleep(0.05)
        assert (await client.get("/v1/models")).status_code == 200
        short = await client.post("/v1/completions", json={**asked, "prompt": "the sea"})
        assert not any(one.done() for one in long)
        done.set()
        return {(await one).status_code for one in long}, short.json()["choices"][0]["text"]

    assert visit(serve, writer, ask) == ({200}, alone("the sea", 20)[0])


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("arguments, message", [
    (["nowhere.bin"], "nowhere.bin"),
    (["--slots", "0"], "--slots: '0' is not a whole number from 1"),
    (["--port", "99999"], "--port: '99999' is not a whole number from 0 to 65535"),
])  # fmt: skip
def test_a_server_that_cannot_start_says_why(arguments, message, tmp_path):
    command = [sys.executable, ROOT / "examples/serve_llama.py", "--device", "cpu", *arguments]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1]
