"""The table of parameters is the one place that lists them."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

from eagle_ray.api.python_arguments import prompt_requests
from eagle_ray.config import load_config
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.requests.batch_lines import parse_batch_line
from eagle_ray.requests.openai_bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    OpenBody,
    ResponsesRequest,
)
from eagle_ray.requests.parameters import BODY, CHAT, SAMPLING, Api, SamplingParams
from eagle_ray.requests.refused import REFUSED, fix_of

PACKAGE = Path(__file__).parents[2] / "eagle_ray"
TABLES = ("requests/parameters.py", "requests/refused.py")
DATA = {
    "prompt",
    "messages",
    "input",
    "text",
    "request_id",
}  # names of columns and keys of answers, too
NAMES = {*SAMPLING, *CHAT, *BODY, *REFUSED} - DATA
OTHER_LISTS = {
    "api/llm.py": "the arguments of LLM.chat",
    "api/python_arguments.py": "a job's spelling of what Python asks",
    "core/sequence.py": "parameters that name tokens",
    "port/dialects.py": "other engines' spelling of each parameter, held to the table by a test",
    "port/prompt_scores.py": "other engines' spelling of a prompt's log-probabilities",
    "requests/request_rows.py": "columns of an output row",
    "requests/response_answers.py": "keys of a response",
    "requests/row_schema.py": "columns that runs of earlier versions lack",
    "text/structured.py": "vLLM's names",
    "core/grammar_spec.py": "kinds of grammars",
    "sampling/grammar.py": "limits of each kind of grammar",
    "serve/generation_request.py": "keys of a response",
    "text/chat_options.py": "arguments of transformers that are no values of a template",
}


def names_in_lists(path: Path) -> set[str]:
    """Return the names of parameters in each list, tuple, set and dictionary of a module that has three or more."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        names = {item.value for item in items if isinstance(item, ast.Constant)} & NAMES
        found |= names if len(names) > 2 else set()
    return found


def test_fields_and_rows_of_sampling_are_the_same():
    defaults = dataclasses.asdict(SamplingSettings())
    assert [(row.name, row.default) for row in SAMPLING.values()] == [*defaults.items()]
    assert inspect.signature(SamplingParams).parameters.keys() == defaults.keys()


def test_no_other_module_lists_parameters():
    found = {str(path.relative_to(PACKAGE)): names_in_lists(path) for path in PACKAGE.rglob("*.py")}
    lists = {path: names for path, names in found.items() if names and path not in TABLES}
    assert not {path: names for path, names in lists.items() if path not in OTHER_LISTS}
    assert not OTHER_LISTS.keys() - lists.keys(), "these have none any more"


@pytest.mark.parametrize(
    "row", [*SAMPLING.values(), *CHAT.values(), *BODY.values()], ids=lambda row: row.name
)
def test_parameter_has_a_description_and_a_form_in_every_api(row):
    assert row.about.endswith(".") and row.apis
    assert row.defaults.keys() | row.required <= {*row.apis}
    assert all(row.kind_at(api).form for api in row.apis)


def test_a_refused_parameter_is_not_one_of_its_doors():
    """A row of REFUSED that is also a parameter here is refused at the APIs that do not have it."""
    rows = {**SAMPLING, **CHAT, **BODY}
    assert not [
        name for name, row in REFUSED.items() if name in rows and row.apis <= rows[name].apis
    ]
    assert not [
        name for name, row in REFUSED.items() if row.use is not None and row.use not in rows
    ]


def test_what_to_do_about_a_parameter_is_what_its_door_has():
    assert (fix_of("max_new_tokens", Api.CHAT), fix_of("random_seed", Api.RESPONSES)) == (
        "use max_tokens",
        "use seed",
    )
    assert fix_of("max_new_tokens", Api.RESPONSES) == "give max_output_tokens"
    assert fix_of("x", Api.CHAT) == "leave it out"


def found_in_every_api(name, value):
    """Return what each API makes of a parameter: None if it is not given, or the error."""
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Hi", name: value},
    }
    readers = {
        "row": lambda: prompt_requests([{"prompt": "Hi", name: value}])[0],
        "Python": lambda: SamplingParams(**{name: value}).given(),
        "line": lambda: parse_batch_line(line),
        "HTTP": lambda: CompletionRequest.read({"prompt": "Hi", name: value}).values,
    }
    for api, read in readers.items():
        try:
            found = read()
        except (RequestError, ConfigError) as error:
            yield api, error
            continue
        if api == "row":
            yield api, found.error or found.sampling.get(name)
        else:
            wrong = found.get("prompt") if isinstance(found.get("prompt"), RequestError) else None
            yield api, wrong or found.get(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "") for name in ("regex", "grammar", "stop", "bad_words", "json_schema")),
        ("response_format", {}),
    ],
)
def test_an_empty_value_asks_for_nothing_at_every_door(name, value):
    assert [found for _, found in found_in_every_api(name, value)] == [None] * 4
    config = load_config(
        None, env={}, overrides={"input.path": "a", "output.path": "b", f"sampling.{name}": value}
    )
    assert getattr(config.sampling, name) == SAMPLING[name].default


def test_a_body_declares_what_the_table_has_at_its_api():
    with pytest.raises(TypeError, match=r"fields differ from the table: \['top_q'\]"):

        class UnknownField(DetokenizeRequest):
            top_q: int | None = None

    with pytest.raises(TypeError, match=r"fields differ from the table: \['tokens'\]"):

        class MissingField(OpenBody):
            api = Api.DETOKENIZE
            model: str | None = None

    with pytest.raises(TypeError, match=r"fields differ from the table: \['stream'\]"):

        class OtherDefault(CompletionRequest):
            stream: bool = True


@pytest.mark.parametrize("name", ["choice", "allowed_token_ids"])
def test_empty_list_that_allows_nothing_is_refused_in_every_api(name):
    assert all(
        isinstance(found, Exception) and name in str(found)
        for _, found in found_in_every_api(name, [])
    )


def test_empty_tool_choice_and_false_logprobs_set_nothing():
    hi = [{"role": "user", "content": "Hi"}]
    for empty in ("", [], {}):
        assert "tool_choice" not in ChatRequest.read({"messages": hi, "tool_choice": empty}).values
        assert (
            "tool_choice" not in ResponsesRequest.read({"input": "Hi", "tool_choice": empty}).values
        )
    assert CompletionRequest.read({"prompt": "Hi", "logprobs": False}).tops is None
    assert not ResponsesRequest.read({"input": "Hi", "logprobs": False}).chat().logprobs
    with pytest.raises(RequestError, match="give include"):
        ResponsesRequest.read({"input": "Hi", "logprobs": True})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("guided_json", "Use json_schema."),
        ("topP", "Did you mean top_p?"),
        ("max_completion_tokens", "Use max_tokens."),
        ("add_special_tokens", "Leave it out."),
    ],
)
def test_unknown_parameter_has_the_same_hint_in_python_and_rows(name, hint):
    wrong = {name: {"a": 1}}
    for ask in (
        lambda: SamplingParams(**wrong),
        lambda: prompt_requests([{"prompt": "Hi", **wrong}]),
    ):
        with pytest.raises(ConfigError) as error:
            ask()
        assert name in str(error.value) and str(error.value).endswith(hint)


def test_invalid_json_text_names_form_and_reason_in_every_api():
    for _, found in found_in_every_api("json_schema", "{'a'"):
        assert "must be a JSON schema, as an object or as JSON text" in str(found)
        assert "(Expecting property name enclosed in double quotes" in str(found)


def test_default_applies_only_to_apis_that_have_the_parameter():
    defaults = {"thinking_budget": 5, "temperature": 0.5}
    chat = ChatRequest.read({"messages": [{"role": "user", "content": "Hi"}]})
    completion = CompletionRequest.read({"prompt": "Hi"})
    assert [body.sampling_params(defaults).thinking_budget for body in (chat, completion)] == [
        5,
        None,
    ]
    assert completion.sampling_params(defaults).temperature == 0.5
