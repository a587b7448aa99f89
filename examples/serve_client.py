"""Stream an answer from `eagle-ray serve` with OpenAI's client, and print what it cost.

eagle-ray serve -c configs/serve_demo.yaml
python examples/serve_client.py "What is the capital of France?"
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

URL = "http://127.0.0.1:8000/v1"


def stream(client: OpenAI, question: str) -> Iterator[ChatCompletionChunk]:
    """Yield the chunks of an answer; the last one has the usage."""
    [model] = client.models.list()  # an endpoint serves one model
    yield from client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": question}],
        max_tokens=128,
        stream=True,
        stream_options={"include_usage": True},
    )


def main(question: str, url: str = URL) -> None:
    key = os.environ.get("OPENAI_API_KEY", "none")  # any text, unless the endpoint was given keys
    with OpenAI(base_url=url, api_key=key) as client:
        for chunk in stream(client, question):
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None:
                print(f"\n[{chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main(*sys.argv[1:])
