"""curl against a server: python curl_client.py URL. The standard library alone; knows nothing of eagle_ray."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

JSON = ("-H", "Content-Type: application/json")


def curl(*arguments: str, given: bytes | None = None) -> tuple[int, str]:
    """Status and body."""
    command = ["curl", "-sS", "--max-time", "60", "-w", "\n%{http_code}", *arguments]
    said = subprocess.run(command, input=given, capture_output=True, check=True).stdout.decode()
    body, _, status = said.rpartition("\n")
    return int(status), body


def refused(answer: tuple[int, str], status: int, code: str) -> None:
    assert answer[0] == status, answer
    error: dict[str, Any] = json.loads(answer[1])["error"]
    assert error["code"] == code and error.keys() == {"message", "type", "param", "code"}, answer


def main(url: str) -> None:
    chat, text = f"{url}/v1/chat/completions", f"{url}/v1/completions"
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 16,
        }
    )
    status, said = curl(chat, *JSON, "-d", body)
    answer = json.loads(said)["choices"][0]["message"]["content"]
    assert status == 200 and answer
    status, said = curl("-N", chat, *JSON, "-d", json.dumps(json.loads(body) | {"stream": True}))
    events = said.strip().split("\n\n")
    assert status == 200 and events[-1] == "data: [DONE]"
    deltas = [
        json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-1]
    ]
    assert "".join(delta.get("content", "") for delta in deltas) == answer
    for path in (
        "/health",
        "/metrics",
        "/version",
        "/v1/models",
        "/tokenizer_info",
        "/openapi.json",
    ):
        assert curl(url + path)[0] == 200, path
    refused(curl(text, *JSON, "-d", "{"), 400, "bad_json")
    refused(curl(text, "-d", '{"prompt": "a"}'), 415, "bad_content_type")
    refused(curl(text), 405, "no_route")
    refused(curl(url + "/nowhere"), 404, "no_route")
    for megabytes in (10, 100):
        large = b'{"prompt": "' + b"a" * (megabytes << 20) + b'"}'
        refused(curl(text, *JSON, "--data-binary", "@-", given=large), 413, "body_too_large")
        refused(
            curl(
                text,
                *JSON,
                "-H",
                "Transfer-Encoding: chunked",
                "-T",
                "-",
                "-X",
                "POST",
                given=large,
            ),
            413,
            "body_too_large",
        )
    version = (
        subprocess.run(["curl", "--version"], capture_output=True, check=True)
        .stdout.decode()
        .split()[1]
    )
    print(f"curl {version}: chat, its stream, every GET, refusals, bodies of 10 and 100 MB")


if __name__ == "__main__":
    main(sys.argv[1])
