"""Build the OpenAPI document: routes, request bodies, answers and errors.

>>> sorted(openapi("embedded:tiny", vocab_size=1024)["paths"])[0]
'/detokenize'
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema, TypedDictSchema, WithDefaultSchema

from eagle_ray import __version__
from eagle_ray.requests import answer_models
from eagle_ray.requests.embedding_bodies import EmbeddingsRequest
from eagle_ray.requests.messages import (
    CALLED_FUNCTION,
    CALLED_TOOL,
    KEYS_WITHOUT_TEXT,
    MESSAGE,
    TEXT_PART,
)
from eagle_ray.requests.openai_bodies import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    OpenBody,
    ResponsesRequest,
    TokenizeRequest,
)
from eagle_ray.requests.parameters import EMPTY_VALUES, STREAM_OPTIONS
from eagle_ray.requests.refused import is_no_op, refused_at
from eagle_ray.requests.score_bodies import RerankRequest, ScoreRequest
from eagle_ray.requests.values import Json, Kind, Object
from eagle_ray.serve.batches.batch_models import EXPIRES_AFTER, BatchBody
from eagle_ray.serve.batches.batch_routes import OPERATIONS, BatchOperation
from eagle_ray.serve.http.http_answers import json_body
from eagle_ray.text.structured import KEY_BY_VLLM_NAME

AT = "#/components/schemas/"
POSTS: dict[str, tuple[type[Body], type]] = {
    "/v1/chat/completions": (ChatRequest, answer_models.ChatCompletion),
    "/v1/completions": (CompletionRequest, answer_models.Completion),
    "/v1/responses": (ResponsesRequest, answer_models.ResponseBody),
    "/v1/embeddings": (EmbeddingsRequest, answer_models.Embeddings),
    "/v1/score": (ScoreRequest, answer_models.Scores),
    "/v1/rerank": (RerankRequest, answer_models.Ranking),
    "/tokenize": (TokenizeRequest, answer_models.Tokens),
    "/detokenize": (DetokenizeRequest, answer_models.Detokenized),
}
GETS = {
    "/v1/models": ("the model that is here", answer_models.Models),
    "/v1/models/{name}": ("the model by its name", answer_models.Model),
    "/tokenizer_info": (
        "the tokenizer's special tokens and chat template",
        answer_models.TokenizerInfo,
    ),
    "/health": ("whether a replica can answer", answer_models.Health),
    "/metrics": ("Prometheus metrics of all replicas", None),
    "/version": ("this server's version", answer_models.Version),
    "/openapi.json": ("this document", None),
}
STREAM_MODELS: dict[str, type] = {
    "/v1/chat/completions": answer_models.ChatChunk,
    "/v1/completions": answer_models.TextChunk,
    "/v1/responses": answer_models.ResponseEvent,
}
# Objects in bodies.
OBJECTS = (
    MESSAGE,
    CALLED_TOOL,
    CALLED_FUNCTION,
    TEXT_PART,
    STREAM_OPTIONS,
    EXPIRES_AFTER,
)
# Routes without a key: probes and scrapers have none.
OPEN = (
    "/health",
    "/metrics",
    "/version",
    "/openapi.json",
)
REFUSALS = {
    "400": "the request is wrong, or larger than an empty server could hold: param names the parameter",
    "401": "no known API key",
    "403": "a web page of another server sent it, or Host is not a name of this server, which has no API keys",
    "404": "no such model, file or batch, or this endpoint keeps no files",
    "408": "the body did not arrive in time",
    "409": "the file is in use, or the batch is over",
    "413": "the body is too large, or the files of the API key would be",
    "415": "the body is not application/json in UTF-8, or an upload no multipart form, or it is packed",
    "429": "the queue lacks room for the request's choices or tokens, or too many batches are open: try again after "
    "Retry-After",
    "500": "a fault of this server",
    "503": "no replica can answer: try again after Retry-After",
}
# Content is a text; an assistant's calls may have none.
MESSAGE_FORMS: list[Json] = [
    {
        "required": ["content"],
        "properties": {
            "content": {"type": ["string", "array"]},
            "tool_calls": {"type": ["array", "null"], "maxItems": 0},
        },
    },
    {
        "required": ["tool_calls"],
        "properties": {
            "role": {"const": "assistant"},
            "tool_calls": {"type": "array", "minItems": 1},
        },
    },
]
RETRY_AFTER = {
    "Retry-After": {"description": "seconds", "schema": {"type": "string", "pattern": "^[0-9]+$"}}
}


class AnswerSchemas(GenerateJsonSchema):
    """Schemas of answers. Defaults are left out, since an answer always has every value."""

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def typed_dict_schema(self, schema: TypedDictSchema) -> JsonSchemaValue:
        return _with_description(super().typed_dict_schema(schema), schema["cls"])

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        return _with_description(super().model_schema(schema), schema["cls"])


def _with_description(schema: JsonSchemaValue, answer: type) -> JsonSchemaValue:
    """Replace the docstring of a class of answers, which pydantic shows, by its description."""
    schema.pop("description", None)
    description = vars(answer).get(answer_models.DESCRIPTION)
    return schema if description is None else schema | {"description": description}


@cache
def openapi_body(model_name: str, vocab_size: int, has_keys: bool = False) -> bytes:
    """Return the document as JSON. It is built once, since that takes a third of a second and needs no key."""
    return json_body(openapi(model_name, vocab_size, has_keys))


def openapi(model_name: str, vocab_size: int, has_keys: bool = False) -> Json:
    """Return the OpenAPI document.

    Args:
        model_name: name of the target.
        vocab_size: number of the target's token ids.
        has_keys: whether /v1 and the tokenizer's routes need an API key.
    """
    schemas = _schemas()
    _add_limits(schemas, model_name, vocab_size)
    paths = {path: {"post": _post(path)} for path in POSTS} | {
        path: {"get": _get(path)} for path in GETS
    }
    for batch_operation in OPERATIONS:
        paths.setdefault(batch_operation.path, {})[batch_operation.method] = _batch_operation(
            batch_operation
        )
    if has_keys:
        for path in paths.keys() - set(OPEN):
            for operation in paths[path].values():
                operation["security"] = [{"key": []}]
    return {
        "openapi": "3.2.0",
        "info": {
            "title": "eagle_ray",
            "version": __version__,
            "description": "OpenAI's protocol over one model",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(path: str) -> Json:
    kind, answer = POSTS[path]
    content = _content(answer)
    if path in STREAM_MODELS:
        content["text/event-stream"] = _events(STREAM_MODELS[path])
    body = {"required": True, "content": _content(kind)}
    return _operation(kind.summary, content, REFUSALS) | {"requestBody": body}


def _events(chunk: type) -> Json:
    """Return the schema of a response to stream: true. Its last event is [DONE] or an error."""
    content = {
        "anyOf": [{"$ref": AT + chunk.__name__}, {"$ref": AT + answer_models.Refusal.__name__}]
    }
    payload = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    event = {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, payload]}},
    }
    return {"itemSchema": event}


def _get(path: str) -> Json:
    summary, answer = GETS[path]
    statuses = ["500", "503"] if path in OPEN else ["401", "403", "500", "503"]
    content = _content(answer) if answer else {"application/json": {"schema": {"type": "object"}}}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    has_name = "{name}" in path
    statuses += ["404"] * has_name
    operation = _operation(summary, content, {status: REFUSALS[status] for status in statuses})
    if has_name:
        name = {
            "name": "name",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
        operation["parameters"] = [name]
    return operation


def _batch_operation(route: BatchOperation) -> Json:
    bytes_alone = {"application/octet-stream": {"schema": {"type": "string"}}}
    content = _content(route.answer) if route.answer else bytes_alone
    statuses = sorted({*route.statuses, "401", "404", "500", "503"})
    operation = _operation(
        route.summary, content, {status: REFUSALS[status] for status in statuses}
    )
    if isinstance(route.body, dict):
        operation["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": route.body}},
        }
    elif route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body)}
    parameters: list[Json] = [
        {"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()
    ]
    if "{id}" in route.path:
        parameters.append(
            {
                "name": "id",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
        )
    return operation | ({"parameters": parameters} if parameters else {})


def _operation(summary: str, content: Json, refusals: dict[str, str]) -> Json:
    refused = {
        status: {"description": why, "content": _content(answer_models.Refusal)}
        | ({"headers": RETRY_AFTER} if status in ("429", "503") else {})
        for status, why in refusals.items()
    }
    return {
        "summary": summary,
        "responses": {"200": {"description": "the answer", "content": content}} | refused,
    }


def _content(shape: type) -> Json:
    return {"application/json": {"schema": {"$ref": AT + shape.__name__}}}


def _schemas() -> Json:
    answers = [answer for _, answer in [*POSTS.values(), *GETS.values()] if answer] + [
        *STREAM_MODELS.values(),
        *{operation.answer for operation in OPERATIONS if operation.answer},
        answer_models.Refusal,
    ]
    _, generated = TypeAdapter.json_schemas(
        [(kind, "serialization", TypeAdapter(kind)) for kind in answers],
        ref_template=AT + "{model}",
        schema_generator=AnswerSchemas,
    )
    schemas: Json = generated["$defs"]
    bodies: list[type[Body]] = [*(body for body, _ in POSTS.values()), BatchBody]
    for body in bodies:
        schemas[body.__name__] = _body_schema(body)
    return schemas | {one.name: _object_schema(one) for one in OBJECTS}


def _body_schema(body: type[Body]) -> Json:
    rows = body.rows().values()
    properties = {
        row.name: _property(
            row.name, row.kind_at(body.api), body.api in row.required, row.defaults.get(body.api)
        )
        for row in rows
    }
    required = [row.name for row in rows if body.api in row.required]
    return _named(body.__name__, body.summary, properties, required)


def _object_schema(one: Object) -> Json:
    properties = {
        name: _property(name, kind, name in one.required, one.defaults.get(name))
        for name, kind in one.keys.items()
    }
    return _named(one.name, one.about, properties, [*one.required]) | {
        "additionalProperties": one.is_open
    }


def _named(title: str, about: str, properties: Json, required: list[str]) -> Json:
    described = {"description": about} if about else {}
    needed = {"required": required} if required else {}
    return {"title": title, "type": "object", "properties": properties} | described | needed


def _property(name: str, kind: Kind, is_required: bool, default: Any) -> Json:
    schema = kind.schema()
    if not is_required and kind.nothings:
        schema = {"anyOf": [*_options(schema), {"enum": [*kind.nothings]}]}
    if not is_required and default is None:
        schema = {"anyOf": [*_options(schema), {"type": "null"}]}
    more: Json = {}
    if not is_required:
        more["default"] = default
    if kind.form:
        more["description"] = kind.form
    if not isinstance(kind, Object):
        more["title"] = name.replace("_", " ").title()
    return schema | more


def _options(schema: Json) -> list[Json]:
    """Return the schemas one of which a value must fit."""
    return list(schema["anyOf"]) if schema.keys() == {"anyOf"} else [schema]


def _add_limits(schemas: Json, model_name: str, vocab_size: int) -> None:
    """Add to the bodies' schemas: null for absence, refused parameters, and this model's limits."""
    for asking in (
        ChatRequest,
        CompletionRequest,
        ResponsesRequest,
        TokenizeRequest,
        EmbeddingsRequest,
    ):
        schemas[asking.__name__]["properties"] |= _no_op_schemas(asking)
    schemas["Message"]["anyOf"] = MESSAGE_FORMS
    requests = [kind.__name__ for kind, _ in POSTS.values()]
    requests.append(BatchBody.__name__)

    # A property that is null is not given, whatever its name.
    for kind in (*requests, "StreamOptions", "TextPart"):
        schemas[kind]["additionalProperties"] = {"type": "null"}
    for name, values in KEYS_WITHOUT_TEXT.items():
        schemas["Message"]["properties"][name] = {"enum": [*values, None]}
    for kind in ("ChatRequest", "CompletionRequest", "ResponsesRequest"):
        schemas[kind]["properties"]["structured_outputs"] = _structured_outputs(schemas[kind])
    for kind in (*requests, "Message", "StreamOptions"):
        model = schemas[kind]["properties"].get("model")
        if model is not None:
            model["enum"] = [model_name, None]
        _allow_nulls(schemas[kind])

    asking_ids = ("CompletionRequest", "DetokenizeRequest", "EmbeddingsRequest")
    for ids in _token_ids(*(schemas[name] for name in asking_ids)):
        ids["exclusiveMaximum"] = vocab_size


def _allow_nulls(schema: Json) -> None:
    """Let each property that is not required be null."""
    required = schema.get("required", [])
    properties = schema["properties"]
    for name, field in properties.items():
        is_nullable = {"type": "null"} in field.get("anyOf", [])
        if name not in required and not is_nullable:
            properties[name] = {"anyOf": [field, {"type": "null"}]}


def _no_op_schemas(body: type[OpenBody]) -> Json:
    """Return the schemas of the parameters that a body lacks. They allow only values without effect."""
    nulls = {"type": "object", "additionalProperties": {"type": "null"}}
    schemas: Json = {}
    for name, row in refused_at(body.api).items():
        candidates = (*row.no_op_at(body.api), *EMPTY_VALUES)
        values = [value for value in candidates if is_no_op(name, value, body.api)]
        if row.has_fix_at(body.api):
            if values:
                schemas[name] = {"const": values[0]}
        elif row.is_label:
            schemas[name] = {}
        elif {} in values:
            others = [value for value in values if value != {}]
            schemas[name] = {"anyOf": [{"enum": [None, *others]}, nulls]}
        else:
            schemas[name] = {"enum": [None, *values]}
    return {name: schema for name, schema in schemas.items() if name not in body.rows()}


def _structured_outputs(schema: Json) -> Json:
    """Return the schema of structured_outputs, vLLM's spelling of the output forms."""
    keys = {name: schema["properties"][own] for name, own in KEY_BY_VLLM_NAME.items()}
    nothing = {"enum": [None, False]}
    return {
        "type": "object",
        "properties": {name: {"anyOf": [key, nothing]} for name, key in keys.items()},
        "additionalProperties": nothing,
    }


def _token_ids(*schemas: Any) -> Iterator[Json]:
    """Yield the schemas of token ids, which are the integers in lists."""
    for schema in schemas:
        if isinstance(schema, dict):
            if schema.get("type") == "array" and schema.get("items", {}).get("type") == "integer":
                yield schema["items"]
            yield from _token_ids(*schema.values())
        elif isinstance(schema, list):
            yield from _token_ids(*schema)
