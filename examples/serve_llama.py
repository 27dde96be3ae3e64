"""A Llama server: OpenAI's /v1/completions on the engine of flash_attn_minimal.llama, streamed or whole.

    python examples/serve_llama.py                                  the small model of the package,
    http://127.0.0.1:8000 python examples/serve_llama.py Llama-3.2-1B/ --slots 16 --context 8192

    curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \
        -d '{"model": "stories", "prompt": "One day", "max_tokens": 60, "temperature": 0, "stream": true}'

    from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    print(client.completions.create(model="stories", prompt="One day", max_tokens=60).choices[0].text)

Needs `pip install fastapi uvicorn`. It runs on a GPU if CuPy finds one, else on the CPU. Up to --slots texts are
written at once; further texts wait in line and start when one has ended. A client that disconnects frees its slots.

A request with a text that fails ends with an error (in a stream: an event). Other requests go on. Bodies, prompts and
lists have size limits, so that no client delays the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import reprlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from flash_attn_minimal import BadArgument, FlashAttnError
from flash_attn_minimal.llama.engine import Engine
from flash_attn_minimal.llama.generate import open_device
from flash_attn_minimal.llama.model import Llama
from flash_attn_minimal.llama.sampling import Sampling
from flash_attn_minimal.llama.weights import DEFAULT_CHECKPOINT, find_tokenizer, load_checkpoint

try:
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, StreamingResponse
    from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise SystemExit(f"{error} (pip install fastapi uvicorn)") from None

MAX_BODY = 4 << 20  # bytes of a request
MAX_DRAIN = 64 << 20  # bytes of a refused body that are read, so that its client gets to read the refusal
MAX_ENTRIES = {"prompt": 256, "stop": 16, "logit_bias": 64}  # entries of a list or an object
MAX_TOKENS = 1 << 17  # of a prompt given as tokens
MAX_FIELDS = 64
SHORT_PROMPT = 1 << 14  # characters, encoded in a few milliseconds

Words = Annotated[str, Field(min_length=1)]
Zero = Annotated[float, Field(ge=0, le=0)]
Tokens = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1)]


short = reprlib.Repr()  # for values that a client sent
short.maxstring = short.maxother = 100


class Body(BaseModel):
    """Refuses unknown fields by name. A field that is null gets its default: clients send null for fields they do not
    set."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:
            raise ValueError(f"{len(body)} fields are more than {MAX_FIELDS}")
        return {name: value for name, value in body.items() if value is not None}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding of events, which this server never adds


class Completion(Body):
    """The fields of OpenAI's request that this server accepts. Those from `n` on stand for features that are not
    served, so they accept only the value that turns the feature off."""

    model: str
    prompt: str | Annotated[list[str], Field(min_length=1)] | Tokens | Annotated[list[Tokens], Field(min_length=1)] = ""
    max_tokens: int = Field(16, ge=0)
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Words | list[Words] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    frequency_penalty: Zero = 0.0
    presence_penalty: Zero = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}
    logprobs: None = None
    suffix: Literal[""] = ""

    @field_validator(*MAX_ENTRIES, mode="before")
    @classmethod
    def short(cls, value: Any, field: Any) -> Any:
        """Refuses a long list or object before its entries are checked."""
        most = MAX_ENTRIES[field.field_name]
        if field.field_name == "prompt" and isinstance(value, list):
            if value and isinstance(value[0], int):
                most = MAX_TOKENS
            count = sum(len(entry) for entry in value[: most + 1] if isinstance(entry, list))
            if count > MAX_TOKENS:
                raise ValueError(f"{count} tokens are more than {MAX_TOKENS}")
        if isinstance(value, (list, dict)) and len(value) > most:
            raise ValueError(f"{len(value)} entries are more than {most}")
        return value

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each a text, or tokens."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt  # type: ignore[list-item,return-value]


class Text:
    """The text of one sequence, as it grows."""

    def __init__(self, request: Any, tokenizer: Any, stops: list[str]):
        self.request, self.stops, self.held = request, stops, max(map(len, stops), default=1) - 1
        # The list of new tokens grows while it is read, so `pieces` is never asked for more than there are.
        self.pieces = tokenizer.stream(request.tokens, after=request.prompt)
        self.text, self.read, self.sent = "", 0, 0
        self.reason: str | None = None

    def due(self) -> bool:
        """Whether `news` has new tokens or an end to report."""
        return self.reason is None and bool(self.request.finished or self.read < len(self.request.tokens))

    def news(self) -> str:
        """The text that has come since the last call. Sets `reason` once the text has ended. The last characters are
        held back while they may be the beginning of a stop."""
        ended = self.request.finished  # set after the last token, so it is read before the tokens
        while self.read < len(self.request.tokens):
            self.text += next(self.pieces)
            self.read += 1
        if ended:
            self.text += "".join(self.pieces)
        found = [at for stop in self.stops if (at := self.text.find(stop, self.sent)) >= 0]
        if found:
            self.text, ended = self.text[: min(found)], "stop"
        self.reason = (ended if ended in ("stop", "error") else "length") if ended else None
        new = self.text[self.sent :] if ended else self.text[self.sent : max(self.sent, len(self.text) - self.held)]
        self.sent += len(new)
        return new


class Writer:
    """Runs the engine on its own thread, which does one job at a time: a step, or a request that came between steps."""

    def __init__(self, checkpoint: str, device: str, slots: int, context: int | None, pages: int | None):
        opened = load_checkpoint(checkpoint)
        self.name = Path(checkpoint).name if Path(checkpoint).is_dir() else Path(checkpoint).stem
        self.tokenizer = find_tokenizer(opened)
        model = Llama(opened, open_device(device, stored=opened.dtype))
        self.engine = Engine(model, slots, context, page_size=16, num_pages=pages)
        self.thread = ThreadPoolExecutor(1)
        # Encoding a long prompt delays neither the steps, nor the event loop, nor short prompts.
        self.encoders = {"short": ThreadPoolExecutor(1), "long": ThreadPoolExecutor(1)}
        # Each token stands for at most `longest` characters, so a longer prompt does not fit.
        self.most_characters = self.engine.context * self.tokenizer.longest
        self.waiting: dict[asyncio.Future, Callable[[], bool]] = {}  # future -> whether its wait is over
        self.driver: asyncio.Task | None = None

    def ask(self, function, *arguments) -> asyncio.Future:
        return asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    async def encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if len(prompt) > self.most_characters:
            what = f"prompt={prompt[:20]!r}... has {len(prompt)} characters, more than {self.most_characters}"
            raise BadArgument(
                f"{what}: a context of {self.engine.context} tokens, each of at most {self.tokenizer.longest}"
            )
        encoder = self.encoders["short" if len(prompt) <= SHORT_PROMPT else "long"]
        return await asyncio.get_running_loop().run_in_executor(encoder, self.tokenizer.encode, prompt)

    async def wait(self, over: Callable[[], bool]) -> None:
        """Waits until over(), which is checked after each step of the engine. All waiters share the steps, and the
        engine rests when nobody waits. A step wakes only those whose wait is over, not the thousands that may be in
        line."""
        if over():
            return
        there = asyncio.get_running_loop().create_future()
        self.waiting[there] = over
        if self.driver is None or self.driver.done():
            self.driver = asyncio.ensure_future(self.drive())
        try:
            await there
        finally:
            del self.waiting[there]

    async def drive(self) -> None:
        try:
            while self.waiting:
                await self.ask(self.engine.step)
                for there, over in self.waiting.items():
                    if not there.done() and over():
                        there.set_result(None)
                await asyncio.sleep(0)  # the woken take their new text, and wait again
        except Exception as error:
            for there in self.waiting:
                if not there.done():
                    there.set_exception(FlashAttnError(described(error)))

    async def write(
        self, jobs: list[tuple], stops: list[str], gone: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[Any, None]:
        """Yields first the list of requests, once the engine has taken all jobs; then (number, new text, reason of the
        end or None). Raises if one of the texts fails, and ends the other texts of these jobs. Ends early once gone()
        is true, even in line."""
        requests: list[Any] = []

        def add() -> None:
            for job in jobs:
                requests.append(self.engine.add(*job))

        def cancel() -> None:
            for request in requests:
                self.engine.cancel(request)

        try:
            await self.ask(add)
            yield requests
            texts = [Text(request, self.tokenizer, stops) for request in requests]
            while not all(text.reason for text in texts):
                await self.wait(lambda: gone() or any(text.due() for text in texts))
                if gone():
                    return
                for number, text in enumerate(texts):
                    if text.reason is not None:
                        continue
                    try:
                        new = text.news()
                    except Exception as error:  # from the tokenizer
                        raise FlashAttnError(f"text {number}: {described(error)}") from error
                    failed = text.reason == "error"
                    if text.reason:
                        self.thread.submit(self.engine.cancel, text.request)  # the engine knows no client stops
                    if new or (text.reason and not failed):
                        yield number, new, None if failed else text.reason
                    if failed:
                        raise FlashAttnError(f"text {number}: {described(text.request.error)}")
        finally:
            self.thread.submit(cancel)  # runs after `add`, even if nobody waited for `add` any more


def described(error: BaseException) -> str:
    name = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    return str(error) if isinstance(error, FlashAttnError) else f"{name}: {error}".removesuffix(": ")


def refusal(status: int, message: str, param: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status)


@contextlib.asynccontextmanager
async def leaving(http: Request) -> AsyncGenerator[Callable[[], bool], None]:
    """Gives a function that says whether the client has disconnected. The body has been read, so the next message is
    the disconnect."""

    async def wait() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    waiting = asyncio.ensure_future(wait())
    try:
        yield waiting.done
    finally:
        waiting.cancel()


class Limited:
    """Wraps an application so that no body above MAX_BODY reaches it."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        messages, size, more = [], 0, True
        while more and size <= MAX_DRAIN:
            messages.append(await receive())
            size += len(messages[-1].get("body", b""))
            more = messages[-1].get("more_body", False)
            if size > MAX_BODY:
                messages.clear()
        if size > MAX_BODY:
            refused = refusal(413, f"the body has more than {MAX_BODY} bytes")
            return await refused(scope, receive, send)
        waiting = iter(messages)

        async def received() -> Any:
            message = next(waiting, None)
            return await receive() if message is None else message

        await self.app(scope, received, send)


def make_app(writer: Writer) -> FastAPI:
    app = FastAPI(title="flash-attn-minimal")

    @app.exception_handler(RequestValidationError)
    async def bad_request(_, error):
        errors = error.errors()  # for a field with several types: preferably the error of the type that was given
        first = next((one for one in errors if not one["type"].endswith("_type")), errors[0])
        if first["type"] == "json_invalid":
            return refusal(400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][1]}")
        name = str(first["loc"][min(1, len(first["loc"]) - 1)])[:100]  # "body", then the field
        given = "" if first["type"] == "missing" else f"={short.repr(first['input'])}"
        return refusal(400, f"{name}{given}: {first['msg'].removeprefix('Value error, ')}", name)

    @app.exception_handler(FlashAttnError)
    async def bad_argument(_, error):
        return refusal(400 if isinstance(error, ValueError) else 500, str(error))

    @app.exception_handler(HTTPException)
    async def not_found(http, error):
        return refusal(error.status_code, f"{http.method} {http.url.path}: {error.detail}")

    @app.exception_handler(Exception)
    async def failed(_, error):
        return refusal(500, described(error))

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": writer.name, "object": "model", "created": 0, "owned_by": "you"}]}

    @app.post("/v1/completions")
    async def completions(asked: Completion, http: Request):
        if asked.model != writer.name:
            raise HTTPException(404, f"model={short.repr(asked.model)} is not served, only {writer.name!r}")
        seed, stops = asked.seed, writer.tokenizer.stops
        seed = random.getrandbits(32) if seed is None else seed
        jobs = []
        for number, prompt in enumerate(asked.prompts):
            sampling = Sampling(asked.temperature, 0, asked.top_p, seed + number)
            jobs.append((await writer.encode(prompt), asked.max_tokens, sampling, stops))
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        head["model"] = writer.name

        def choice(number: int, text: str, reason: str | None) -> dict:
            return {"index": number, "text": text, "logprobs": None, "finish_reason": reason}

        def usage(requests: list) -> dict:
            read, written = sum(len(r.prompt) for r in requests), sum(len(r.tokens) for r in requests)
            return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

        async def events(news, requests):
            async with contextlib.aclosing(news):
                try:
                    async for one in news:
                        yield f"data: {json.dumps({**head, 'choices': [choice(*one)]})}\n\n"
                    if asked.stream_options.include_usage:
                        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage(requests)})}\n\n"
                    yield "data: [DONE]\n\n"
                except Exception as error:
                    yield f"data: {bytes(refusal(500, described(error)).body).decode()}\n\n"

        if asked.stream:
            news = writer.write(jobs, stop)
            requests = await anext(news)  # raises a refusal here, before the response begins
            return StreamingResponse(events(news, requests), media_type="text/event-stream")
        texts, reasons = [""] * len(jobs), [None] * len(jobs)
        async with leaving(http) as gone, contextlib.aclosing(writer.write(jobs, stop, gone)) as news:
            requests = await anext(news)
            async for number, text, reason in news:
                texts[number], reasons[number] = texts[number] + text, reason
        if not all(reasons):
            return Response(status_code=499)  # nobody reads it
        return {**head, "choices": list(map(choice, range(len(jobs)), texts, reasons)), "usage": usage(requests)}

    app.add_middleware(Limited)
    return app


def whole(least: int, most: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return parsed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkpoint", nargs="?", default=str(DEFAULT_CHECKPOINT), help="llama2.c file or a folder")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--slots", type=whole(1, 4096), default=8, help="texts that are written at once (default 8)")
    parser.add_argument("--context", type=whole(1, 1 << 24), help="tokens of a text at most (default: the model's)")
    parser.add_argument(
        "--pages", type=whole(1, 1 << 24), help="pages of 16 tokens that all texts share (default: enough)"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=whole(0, 65535), default=8000, help="0: any free one")
    args = parser.parse_args()
    try:
        writer = Writer(args.checkpoint, args.device, args.slots, args.context, args.pages)
    except FlashAttnError as error:
        parser.error(str(error))
    uvicorn.run(make_app(writer), host=args.host, port=args.port, timeout_graceful_shutdown=2)


if __name__ == "__main__":
    main()
