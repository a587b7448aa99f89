"""The OpenAPI document: which routes there are, what they take and how they refuse.

>>> sorted(openapi()["paths"])[0]
'/detokenize'
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from eagle_ray import __version__
from eagle_ray.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

POSTS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
GETS = {
    "/v1/models": "the model that is here",
    "/tokenizer_info": "the tokenizer's special tokens and chat template",
    "/health": "whether a replica can answer",
    "/metrics": "Prometheus metrics of all replicas",
    "/version": "this server's version",
}
REFUSALS = {"400": "the request is wrong", "401": "no API key", "404": "no such model", "413": "the body is too large"}
BUSY = {"429": "the queue is full", "503": "no replica can answer"}


def openapi() -> dict[str, Any]:
    _, schemas = models_json_schema(
        [(model, "validation") for model in POSTS.values()], ref_template="#/components/schemas/{model}"
    )
    paths = {path: {"post": _post(model)} for path, model in POSTS.items()}
    paths |= {path: {"get": _operation(summary, {"401": REFUSALS["401"], **BUSY})} for path, summary in GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "eagle_ray", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {}) | {"Error": ERROR}},
    }


def _post(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return _operation(model.__doc__ or "", REFUSALS | BUSY) | {"requestBody": body}


def _operation(summary: str, refusals: dict[str, str]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refused = {status: {"description": why, "content": error} for status, why in refusals.items()}
    return {"summary": summary, "responses": {"200": {"description": "the answer"}} | refused}


_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}
