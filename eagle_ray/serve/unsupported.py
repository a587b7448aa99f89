"""Parameters that are not built: each is refused by name unless its value asks for nothing; none is ever ignored.

>>> refuse_unbuilt({"user": "me", "length_penalty": 1})
>>> refuse_unbuilt({"length_penalty": 0.5})
Traceback (most recent call last):
...
eagle_ray.serve.http_errors.ApiError: length_penalty is not supported: 0.5 asks for what this server does not do; ...
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from eagle_ray.serve.http_errors import unsupported

SAYS_NOTHING = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)  # of the tokens
OFF: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "use_beam_search": (False,),
    "add_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
}  # what is not built, and the values with which it changes nothing
NO_TEXT: dict[str, tuple[Any, ...]] = {"function_call": (), "audio": ()}  # the same of a message
NO_TOOLS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "chat_template_kwargs": ({},),
}  # of a text completion, which has no chat template
INSTEAD = {
    "structured_outputs": "give one of json, json_object, regex, choice and grammar, or json_schema in place of it",
    "guided_json": "use json_schema",
    "guided_regex": "use regex",
    "guided_choice": "use choice",
    "guided_grammar": "use grammar",
}  # of vLLM's parameters


def refuse_unbuilt(extra: Mapping[str, Any]) -> None:
    """Raise ApiError for parameters that are not supported. extra: the request's other parameters."""
    others = {name: value for name, value in extra.items() if name not in SAYS_NOTHING}
    refuse_values(others, NO_TOOLS | OFF, INSTEAD)


def refuse_values(
    values: Mapping[str, Any], off: Mapping[str, tuple[Any, ...]], instead: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise ApiError for the first parameter that is not off.

    Args:
        off: parameters, each with the values that ask for nothing. Other parameters have none.
        instead: what to do, by parameter; else to leave it out.
    """
    for name, value in values.items():
        if not _is_off(value, off.get(name, ())):
            fix = instead.get(name, "leave it out")
            raise unsupported(name, f"{reprlib.repr(value)} asks for what this server does not do; {fix}")


def refuse_in_message(extra: Mapping[str, Any], where: str) -> None:
    """Raise ApiError for message keys other than role and content. where: the message's place in the request."""
    for name, values in NO_TEXT.items():
        if name in extra and not _is_off(extra[name], values):
            raise unsupported(f"{where}.{name}", "this server reads and writes text alone; leave it out")


def _is_off(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether it is one of the values, with JSON's types: false is not 0."""
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in values)
