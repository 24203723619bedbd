"""A service with an engine: it summarises texts over HTTP, and streams each summary while it is generated.

    python examples/async_service.py
    curl -N localhost:9000/summary -d "A long text ..."

Calls that arrive together run in the same iterations of one engine.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from orca_jax import AsyncLLM, SamplingParams
from orca_jax.values.errors import RequestError

PARAMS = SamplingParams(max_tokens=64, temperature=0.0, stop=("\n\n",))


def create_service(**settings: Any) -> Starlette:
    """Make the application. The engine starts and ends with it; `settings` are those of `AsyncLLM`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncLLM(**settings) as app.state.llm:
            yield

    return Starlette(routes=[Route("/summary", summarise, methods=["POST"])], lifespan=lifespan)


async def summarise(request: Request) -> Response:
    """Stream the summary of the text in the body."""
    llm: AsyncLLM = request.app.state.llm
    text = (await request.body()).decode()
    outputs = llm.generate(f"{text}\n\nIn short:", PARAMS)
    try:
        first = await anext(outputs)  # refused before the answer begins
    except RequestError as error:
        return PlainTextResponse(f"{error.message}\n", status_code=400)

    async def pieces() -> AsyncIterator[str]:
        yield first.outputs[0].text
        shown = len(first.outputs[0].text)
        async for output in outputs:
            yield output.outputs[0].text[shown:]
            shown = len(output.outputs[0].text)

    return StreamingResponse(pieces(), media_type="text/plain")


if __name__ == "__main__":
    uvicorn.run(create_service(model="demo"), port=9000)
