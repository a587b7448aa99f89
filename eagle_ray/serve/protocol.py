"""What clients send: OpenAI's chat and text completions, as models that refuse what they cannot do.

A field's description completes the sentence "must be ...". A parameter that is not built is refused by name unless its
value asks for nothing; it is never ignored. null always means absent. Does not know tokens, engines or HTTP.

    >>> parse(CompletionRequest, b'{"prompt": "Hi", "echo": true}').echo
    True
"""

from __future__ import annotations

import json
import reprlib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle_ray.serve.errors import ApiError, unsupported

MOST_TOPS = 20
MOST_SEQUENCES = 1024
SAYS_NOTHING = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)  # of the tokens
OFF: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "suffix": "",
    "use_beam_search": False,
    "add_special_tokens": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "min_tokens": 0,
    "add_generation_prompt": True,
}  # what is not built, and the value with which it changes nothing


def _utf8(text: str) -> str:
    """Half a surrogate pair, which JSON can spell, is no text."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_utf8)]
Stop = Annotated[str, Field(min_length=1), AfterValidator(_utf8)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class Body(BaseModel):
    """Types are taken as they stand: "3" is not 3."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    """What else a message carries goes to the chat template, as in jobs."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart]

    def plain(self) -> dict[str, Any]:
        """Its content as one text."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content, **(self.model_extra or {})}


class StreamOptions(Body):
    """include_steps is ours: see serve/steps.py."""

    include_usage: bool = False
    include_steps: bool = Field(
        default=False,
        description="whether each choice of a chunk has `steps`, how its tokens came: a list of {step, "
        "num_draft_tokens, num_accepted_draft_tokens, tokens: [{id, text, depth}]}. Step 0 is the prompt's pass; depth "
        "is an accepted draft's place in its draft, 1 or more, or 0 for a token that the target picked itself. Texts "
        "together are the chunk's; what cannot be told yet (half a character or stop string) a later token tells",
    )
    continuous_usage_stats: Literal[False] = False


class Request(Body):
    """What both kinds of completions share. None: the server's own setting, or off."""

    model_config = ConfigDict(extra="allow")
    model: str | None = Field(default=None, description="the name of a model as in /v1/models")
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(default=None, description="an integer, 1 or more")
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="a number, 0 (greedy) or more"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="a number above 0, at most 1 (off)"
    )
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        default=None, description="an integer, 0 or -1 (off) or more"
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="a number between 0 (off) and 1"
    )
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(default=None, description="a number of choices, 1 to 128")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(default=None, description="a 64-bit integer")
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = Field(
        default=None, description="a text or a list of at most 64 texts, none of them empty"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] = Field(
        default=[], description="a list of token ids"
    )
    ignore_eos: bool | None = Field(default=None, description="true or false")
    stream: bool = Field(default=False, description="true or false")
    stream_options: StreamOptions | None = Field(
        default=None, description="{include_usage: true or false, include_steps: true or false}, with stream"
    )
    return_token_ids: bool = Field(default=False, description="true or false")

    @property
    def tops(self) -> int | None:
        """How many alternatives are wanted beside each token's log-probability; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> list[str] | None:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def check(self) -> None:
        """What single fields do not show. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only with stream: true", "stream_options", "bad_value")
        for name, value in (self.model_extra or {}).items():
            if name not in SAYS_NOTHING and (name not in OFF or value != OFF[name]):
                raise unsupported(name, f"{reprlib.repr(value)} asks for what this server does not do; leave it out")


class ChatRequest(Request):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)] = Field(
        description="a list of messages {role, content}, with content a text or a list of text parts"
    )
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="an integer, 1 or more"
    )
    logprobs: bool = Field(default=False, description="true or false")
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOPS)] | None = Field(
        default=None, description=f"an integer, 0 to {MOST_TOPS}, with logprobs"
    )

    @property
    def tops(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs: true", "top_logprobs", "bad_value")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ApiError(
                400,
                "max_tokens and max_completion_tokens differ: give one of them",
                "max_completion_tokens",
                "bad_value",
            )


class CompletionRequest(Request):
    """POST /v1/completions. max_tokens 0, with echo: nothing but the prompt."""

    prompt: (
        Text | Annotated[list[Text], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
    ) = Field(description="a text, a list of texts, a list of token ids or a list of such lists, none of them empty")
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="an integer, 1 or more, or 0 with echo"
    )
    echo: bool = Field(default=False, description="true or false")
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOPS)] | None = Field(
        default=None, description=f"an integer, 0 to {MOST_TOPS}"
    )
    best_of: int | None = Field(default=None, description="n, or absent")

    @property
    def tops(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt of the request."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: must be 1 or more, or 0 with echo: true", "max_tokens", "bad_value")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "every choice is returned; leave it out, or set it to n")
        if len(self.prompts) * (self.n or 1) > MOST_SEQUENCES:
            raise ApiError(
                400,
                f"prompt: {len(self.prompts)} prompts with n {self.n or 1} make more than {MOST_SEQUENCES} choices: "
                "send several requests",
                "prompt",
                "too_many_choices",
            )


class TokenizeRequest(Body):
    """POST /tokenize: one of prompt and messages."""

    model: str | None = Field(default=None, description="the name of a model as in /v1/models")
    prompt: Text | None = Field(default=None, description="a text")
    messages: Annotated[list[Message], Field(min_length=1)] | None = Field(
        default=None, description="a list of messages {role, content}"
    )
    add_special_tokens: bool = Field(default=True, description="true or false")
    add_generation_prompt: Literal[True] = Field(default=True, description="true")

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give exactly one of prompt and messages", "prompt", "prompt_missing")


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = Field(default=None, description="the name of a model as in /v1/models")
    tokens: list[TokenId] = Field(description="a list of token ids")

    def check(self) -> None:
        """Each field speaks for itself."""


AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """The request in a body. Raises ApiError naming the parameter."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {reprlib.repr(str(error))}", code="bad_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, got {reprlib.repr(data)}", code="bad_json")
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(kind, error) from None
    request.check()
    return request


def _refusal(kind: type[BaseModel], error: ValidationError) -> ApiError:
    """The first thing that is wrong, by its parameter."""
    detail = error.errors(include_url=False, include_context=False)[0]
    name, *inner = detail["loc"] or ("body",)
    if name not in kind.model_fields:
        return unsupported(str(name), "leave it out")
    allowed = kind.model_fields[name].description
    if detail["type"] == "missing" and not inner:
        return ApiError(400, f"{name}: missing; it must be {allowed}", str(name), "missing")
    where = "".join(f"[{part}]" if isinstance(part, int) else "" for part in inner[:1])
    got = reprlib.repr(detail["input"])
    return ApiError(400, f"{name}{where}: must be {allowed}, got {got}", f"{name}{where}", "bad_value")
