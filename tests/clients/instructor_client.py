"""instructor against a server: python instructor_client.py URL. Each mode returns a pydantic object.

The server's chat template must read tools. Knows nothing of eagle_ray.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import instructor
import openai
from pydantic import BaseModel
from weather import ASK, MAX_TOKENS, Weather

HERE: Any = {"api_key": "none", "max_retries": 0, "timeout": 120}
MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")


class Note(BaseModel):
    """A form that every JSON object fits: mode JSON asks for an object, and tells its form in the prompt alone."""

    text: Any = None


def check_modes(client: openai.OpenAI, settings: Any) -> None:
    for name in MODES:
        asking = instructor.from_openai(client, mode=instructor.Mode[name])
        found, raw = asking.chat.completions.create_with_completion(
            response_model=Weather, **settings
        )
        assert isinstance(found, Weather) and raw.usage.completion_tokens > 0, name
    asking = instructor.from_openai(client, mode=instructor.Mode.JSON)
    assert isinstance(asking.chat.completions.create(response_model=Note, **settings), Note)


def check_streams(client: openai.OpenAI, settings: Any) -> None:
    """An object that grows while it is streamed."""
    for name in ("TOOLS", "JSON_SCHEMA"):
        asking = instructor.from_openai(client, mode=instructor.Mode[name])
        parts = list(asking.chat.completions.create_partial(response_model=Weather, **settings))
        assert len(parts) > 2, (name, parts)
        Weather.model_validate(parts[-1].model_dump(), strict=True)


async def check_async(client: openai.AsyncOpenAI, settings: Any) -> None:
    asking = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    found = await asyncio.gather(
        *(
            asking.chat.completions.create(response_model=Weather, seed=i, **settings)
            for i in range(4)
        )
    )
    assert all(isinstance(one, Weather) for one in found)


def main(url: str) -> None:
    base = f"{url}/v1"
    with openai.OpenAI(base_url=base, **HERE) as client:
        settings = {
            "model": client.models.list().data[0].id,
            "messages": ASK,
            "max_tokens": MAX_TOKENS,
        }
        settings |= {"max_retries": 0}
        check_modes(client, settings)
        check_streams(client, settings)

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=base, **HERE) as client:
            await check_async(client, settings)

    asyncio.run(run())
    print(
        f"instructor {instructor.__version__}: {', '.join(MODES)} and JSON, partial objects as streams, async"
    )


if __name__ == "__main__":
    main(sys.argv[1])
