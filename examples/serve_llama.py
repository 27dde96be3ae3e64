"""A Llama server: OpenAI's /v1/completions on the engine of flash_attn_minimal.llama, streamed or whole.

    python examples/serve_llama.py                                  the small model of the package, http://127.0.0.1:8000
    python examples/serve_llama.py Llama-3.2-1B/ --slots 16 --context 8192

    curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \
        -d '{"model": "stories", "prompt": "One day", "max_tokens": 60, "temperature": 0, "stream": true}'

    from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    print(client.completions.create(model="stories", prompt="One day", max_tokens=60).choices[0].text)

Needs `pip install flash-attn-minimal[serve]`. It runs on a GPU where CuPy finds one, else on the CPU. Up to --slots
texts are written at once; more wait in line and join where one has ended. A client that goes away frees its slots.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
import uuid
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from flash_attn_minimal import FlashAttnError
from flash_attn_minimal.llama.engine import Engine
from flash_attn_minimal.llama.generate import open_device
from flash_attn_minimal.llama.model import Llama
from flash_attn_minimal.llama.sampling import Sampling
from flash_attn_minimal.llama.weights import DEFAULT_CHECKPOINT, find_tokenizer, load_checkpoint

Words = Annotated[str, Field(min_length=1)]


class Completion(BaseModel):
    """What is understood of OpenAI's request. Another field is refused by its name."""

    model_config = ConfigDict(extra="forbid")
    model: str
    prompt: str | Annotated[list[str], Field(min_length=1)] = ""
    max_tokens: int = Field(16, ge=0)
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Words | list[Words] = []
    stream: bool = False
    n: Literal[1] = 1
    user: str | None = None


class Text:
    """The text of one sequence, as it grows."""

    def __init__(self, request: Any, tokenizer: Any, stops: list[str]):
        self.request, self.stops, self.held = request, stops, max(map(len, stops), default=1) - 1
        # The list of new tokens grows while it is read, so `pieces` is never asked for more than there are.
        self.pieces = tokenizer.stream(request.tokens, after=request.prompt)
        self.text, self.read, self.sent = "", 0, 0
        self.reason: str | None = None

    def news(self) -> str:
        """What has come since the last call; `reason` says whether and why it was the last. The last characters wait
        while they may be the beginning of a stop."""
        ended = self.request.finished  # is set behind the last token, so it is read before the tokens
        while self.read < len(self.request.tokens):
            self.text += next(self.pieces)
            self.read += 1
        if ended:
            self.text += "".join(self.pieces)
        found = [at for stop in self.stops if (at := self.text.find(stop)) >= 0]
        if found:
            self.text, ended = self.text[: min(found)], "stop"
        self.reason = ("stop" if ended == "stop" else "length") if ended else None
        new = self.text[self.sent :] if ended else self.text[self.sent : max(self.sent, len(self.text) - self.held)]
        self.sent += len(new)
        return new


class Writer:
    """The engine lives on a thread of its own, which does one thing after another: a step, or what came between."""

    def __init__(self, checkpoint: str, device: str, slots: int, context: int | None, pages: int | None):
        opened = load_checkpoint(checkpoint)
        self.name = Path(checkpoint).name if Path(checkpoint).is_dir() else Path(checkpoint).stem
        self.tokenizer = find_tokenizer(opened)
        model = Llama(opened, open_device(device, stored=opened.dtype))
        self.engine = Engine(model, slots, context, page_size=16, num_pages=pages)
        self.thread = ThreadPoolExecutor(1)
        self.stepping: asyncio.Future | None = None

    def ask(self, function, *arguments) -> asyncio.Future:
        return asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    async def step(self) -> None:
        """Waits until the engine has made a step: all who wait share it, and the engine rests when nobody waits."""
        if self.stepping is None or self.stepping.done():
            self.stepping = self.ask(self.engine.step)
        await asyncio.shield(self.stepping)

    async def write(self, jobs: list[tuple], stops: list[str]) -> AsyncGenerator[Any, None]:
        """First the requests, once the engine has taken all; then (number, new text, reason of the end or None)."""
        requests = []
        try:
            for job in jobs:
                requests.append(await self.ask(self.engine.add, *job))
            yield requests
            texts = [Text(request, self.tokenizer, stops) for request in requests]
            while not all(text.reason for text in texts):
                await self.step()
                for number, text in enumerate(texts):
                    if text.reason is None and ((new := text.news()) or text.reason):
                        if text.reason:
                            self.thread.submit(self.engine.cancel, text.request)  # a stop of the client's
                        yield number, new, text.reason
        finally:
            for request in requests:
                self.thread.submit(self.engine.cancel, request)


def refusal(status: int, message: str, param: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status)


def make_app(writer: Writer) -> FastAPI:
    app = FastAPI(title="flash-attn-minimal")

    @app.exception_handler(RequestValidationError)
    async def bad_request(_, error):
        errors = error.errors()  # of a field with several types: of the type that was given, if there is one
        first = next((one for one in errors if not one["type"].endswith("_type")), errors[0])
        if first["type"] == "json_invalid":
            return refusal(400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][1]}")
        name = str(first["loc"][-1] if len(first["loc"]) < 3 else first["loc"][1])
        given = "" if first["type"] == "missing" else f"={first['input']!r:.100}"
        return refusal(400, f"{name}{given}: {first['msg']}", name)

    @app.exception_handler(FlashAttnError)
    async def bad_argument(_, error):
        return refusal(400 if isinstance(error, ValueError) else 500, str(error))

    @app.exception_handler(HTTPException)
    async def not_found(http, error):
        return refusal(error.status_code, f"{http.method} {http.url.path}: {error.detail}")

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": writer.name, "object": "model", "created": 0, "owned_by": "you"}]}

    @app.post("/v1/completions")
    async def completions(asked: Completion, http: Request):
        if asked.model != writer.name:
            raise HTTPException(404, f"model={asked.model!r} is not served, only {writer.name!r}")
        seed, encode, stops = asked.seed, writer.tokenizer.encode, writer.tokenizer.stops
        seed = random.getrandbits(32) if seed is None else seed
        jobs = []
        for number, prompt in enumerate([asked.prompt] if isinstance(asked.prompt, str) else asked.prompt):
            sampling = Sampling(asked.temperature, 0, asked.top_p, seed + number)
            jobs.append((encode(prompt), asked.max_tokens, sampling, stops))
        news = writer.write(jobs, [asked.stop] if isinstance(asked.stop, str) else asked.stop)
        requests = await anext(news)  # a refusal comes here, while there is no answer yet
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        head["model"] = writer.name

        def choice(number: int, text: str, reason: str | None) -> dict:
            return {"index": number, "text": text, "logprobs": None, "finish_reason": reason}

        async def events():
            try:
                async for one in news:
                    yield f"data: {json.dumps({**head, 'choices': [choice(*one)]})}\n\n"
                yield "data: [DONE]\n\n"
            except FlashAttnError as error:
                yield f"data: {bytes(refusal(500, str(error)).body).decode()}\n\n"

        if asked.stream:
            return StreamingResponse(events(), media_type="text/event-stream")
        texts, reasons = [""] * len(jobs), [""] * len(jobs)
        async with contextlib.aclosing(news):
            async for number, text, reason in news:
                texts[number], reasons[number] = texts[number] + text, reason
                if await http.is_disconnected():
                    return Response(status_code=499)
        read, written = sum(len(r.prompt) for r in requests), sum(len(r.tokens) for r in requests)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return {**head, "choices": list(map(choice, range(len(jobs)), texts, reasons)), "usage": usage}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkpoint", nargs="?", default=str(DEFAULT_CHECKPOINT), help="llama2.c file or a folder")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--slots", type=int, default=8, help="texts that are written at once (default 8)")
    parser.add_argument("--context", type=int, help="tokens of a text at most (default: the model's)")
    parser.add_argument("--pages", type=int, help="pages of 16 tokens that all texts share (default: enough for all)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    args = parser.parse_args()
    try:
        writer = Writer(args.checkpoint, args.device, args.slots, args.context, args.pages)
    except FlashAttnError as error:
        parser.error(str(error))
    uvicorn.run(make_app(writer), host=args.host, port=args.port, timeout_graceful_shutdown=2)


if __name__ == "__main__":
    main()
