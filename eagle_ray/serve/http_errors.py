"""Refusals in OpenAI's form: ``{"error": {message, type, param, code}}`` and the status that goes with it.

>>> ApiError(404, "there is no model 'x'", param="model", code="model_not_found").body()["error"]["code"]
'model_not_found'
"""

from __future__ import annotations

from typing import Any

from eagle_ray.core.errors import EngineError, RequestError

RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 1000  # characters of a message
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
PARAMS = {
    "prompt_empty": "prompt",
    "prompt_too_long": "prompt",
    "bad_token_id": "prompt",
    "no_tokenizer": "prompt",
    "no_chat_template": "messages",
    "bad_messages": "messages",
    "kv_space": "max_tokens",
    "grammar_conflict": "min_tokens",
}  # of a RequestError's code: the parameter that brings it about


class ApiError(Exception):
    """One request is answered with this status.

    param: the parameter at fault. code: a short stable name. retry_after_s: of 429 and 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self._retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        param = None if self.param is None else _shortened(self.param)
        return {"error": {"message": _shortened(str(self)), "type": kind, "param": param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(self._retry_after_s)} if self.status in (429, 503) else {}


def api_error(error: Exception) -> ApiError:
    """Return the error for a client: its own mistakes in full, ours without internals."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError) and error.code == "grammar_queue_full":
        return ApiError(429, str(error), code=error.code)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), _param_of(error), error.code)
    if isinstance(error, EngineError):
        return ApiError(503, "this replica's engine has ended; ask again, another one answers", code="engine_dead")
    return ApiError(500, f"internal error ({type(error).__name__}); the server's log has more", code="internal_error")


def _param_of(error: RequestError) -> str | None:
    """Return the parameter at fault. The message about one that does not fit the target begins with its name."""
    if error.param is not None:
        return error.param
    if error.code in ("invalid_sampling", "invalid_chat", "bad_grammar", "unsupported_parameter"):
        return str(error).split()[0].rstrip(":")
    return PARAMS.get(error.code)


def unsupported(param: str, fix: str) -> ApiError:
    return ApiError(400, f"{param} is not supported: {fix}", param, "unsupported_parameter")


def _shortened(text: str) -> str:
    """Return a client's text fit to be sent back: shortened, and without half surrogate pairs."""
    short = text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}..."
    return short.encode("utf-8", "backslashreplace").decode("utf-8")
