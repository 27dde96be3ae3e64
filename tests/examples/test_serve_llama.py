"""The Llama server of examples/, asked by OpenAI's own client: the texts are the engine's, whatever the company."""

import asyncio
import re
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT

from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.engine import Engine
from flash_attn_minimal.llama.generate import open_device
from flash_attn_minimal.llama.model import Llama
from flash_attn_minimal.llama.synthetic import write_checkpoint, write_tokenizer
from flash_attn_minimal.llama.weights import find_tokenizer, load_checkpoint

openai = pytest.importorskip("openai")
for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package)

# A context so long that no test sees its end: only a client that goes away frees the slot of such a text.
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
    """The address of a server that runs as a user's would."""
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
    """(prompt, new tokens) -> the greedy text and how many tokens it has, from an engine that writes nothing else."""
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
    """Every slot is taken by a text without an end, and more wait in line; then all their clients leave."""
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
    ({"best_of": 4}, "best_of=4: Extra inputs are not permitted"),
])  # fmt: skip
def test_bad_requests_are_refused_by_name(client, asked, message):
    with pytest.raises(openai.APIStatusError, match=message) as refused:
        client.completions.create(**{"model": "tiny", "prompt": "One day", "stream": True, **asked})
    assert refused.value.status_code == (404 if "model" in asked else 400)
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("path, body, message", [
    ("/v1/completions", b'{"model": ', "the body is not JSON: Expecting value at character"),
    ("/v1/completions", b"{}", "model: Field required"),
    ("/v1/chat/completions", b"{}", "POST /v1/chat/completions: Not Found"),
])  # fmt: skip
def test_what_no_client_sends_is_refused_too(server, path, body, message):
    request = urllib.request.Request(server + path, body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=120)
    assert message in refused.value.read().decode()


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("arguments, message", [
    (["nowhere.bin"], "nowhere.bin"),
    (["--slots", "0"], "max_batch=0 is not positive"),
])  # fmt: skip
def test_a_server_that_cannot_start_says_why(arguments, message, tmp_path):
    command = [sys.executable, ROOT / "examples/serve_llama.py", "--device", "cpu", *arguments]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1]
