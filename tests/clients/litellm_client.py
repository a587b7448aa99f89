"""litellm against a server: python litellm_client.py URL. Knows nothing of eagle_ray."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import urllib.request

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices

import litellm

litellm.suppress_debug_info = True
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def main(url: str) -> None:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    here = {
        "api_base": f"{url}/v1",
        "api_key": "none",
        "max_tokens": 16,
        "timeout": 60,
        "num_retries": 0,
    }
    chat = litellm.completion(model=f"hosted_vllm/{model}", messages=FRANCE, **here)
    assert chat.choices[0].message.content and chat.usage.completion_tokens <= 16
    chunks = litellm.completion(model=f"openai/{model}", messages=FRANCE, stream=True, **here)
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks) == chat.choices[0].message.content
    )
    text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="Once", **here)
    pieces = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="Once", stream=True, **here
    )
    assert "".join(piece.choices[0].text or "" for piece in pieces) == text.choices[0].text
    try:
        litellm.completion(model="openai/gpt", messages=FRANCE, **here)
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("an unknown model was answered")
    try:
        litellm.completion(model=f"openai/{model}", messages=FRANCE, frequency_penalty=9, **here)
    except litellm.BadRequestError as error:
        assert "frequency_penalty" in str(error)
    else:
        raise AssertionError("frequency_penalty was ignored")
    print(
        f"litellm {importlib.metadata.version('litellm')}: chat, text completion, both as streams, errors by their kind"
    )


if __name__ == "__main__":
    main(sys.argv[1])
