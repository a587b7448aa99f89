"""HttpRequest: one request to an endpoint for a row, with the function that reads its response.

http_request = sample_request(request, config, target.dialect, index=0)
http_request.url("http://127.0.0.1:8000/v1")     # "http://127.0.0.1:8000/v1/chat/completions"
answered = http_request.read(200, content, headers, time.time())
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from eagle_ray.config import JobConfig
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.port.dialects import Body, body_of
from eagle_ray.port.endpoint_answers import Answered, Failed, read_answer
from eagle_ray.port.http_rows import check_form
from eagle_ray.requests.request import Request
from eagle_ray.requests.request_seeds import seed_of

# Returns what a response says, by its status, content, headers and the Unix time. Raises Failed.
ReadAnswer = Callable[[int, bytes, Mapping[str, str], float], Answered]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request to an endpoint.

    Attributes:
        row_id: id of the row that it belongs to.
        path: path behind the endpoint's base URL.
        is_native: whether the path follows the base URL without its /v1.
        content: body in bytes.
        key: digest of the row, the sample and the body.
    """

    row_id: str
    path: str
    body: Body
    content: bytes
    key: str
    read: ReadAnswer
    is_native: bool = False

    @classmethod
    def of(
        cls,
        request: Request,
        index: int,
        path: str,
        body: Body,
        read: ReadAnswer,
        is_native: bool = False,
    ) -> HttpRequest:
        """Return the request for sample `index` of a row."""
        content = dump_json(body, ensure_ascii=False).encode()
        key = _key_of(request, index, path, content)
        return cls(str(request.id), path, body, content, key, read, is_native)

    def url(self, base: str) -> str:
        """Return the full URL for an endpoint's base URL."""
        root = base.removesuffix("/v1") if self.is_native else base
        return f"{root}{self.path}"


def sample_request(request: Request, config: JobConfig, dialect: str, index: int) -> HttpRequest:
    """Return the request for one sample. Raises RequestError for parameters that the dialect lacks."""
    seed = seed_of(request, config.seed, index)
    path, body = body_of(request, config, dialect, seed)
    read = partial(_read_sample, request.sampling_params(config))
    return HttpRequest.of(request, index, path, body, read)


def _read_sample(
    sampling: SamplingSettings, status: int, content: bytes, headers: Mapping[str, str], now: float
) -> Answered:
    answered = read_answer(status, content, headers, now)
    try:
        check_form(sampling, answered.columns)
    except Failed as failed:
        failed.usage = answered.usage
        failed.columns = answered.columns
        raise
    return answered


def _key_of(request: Request, index: int, path: str, content: bytes) -> str:
    parts = (str(request.id), str(index), str(request.turn_index), path)
    digest = hashlib.blake2b("\x1f".join(parts).encode() + b"\x1e" + content, digest_size=16)
    return digest.hexdigest()
