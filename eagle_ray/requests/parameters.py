r"""The table of request parameters: one row per parameter, from which all other lists of them are derived.

A row is a `Parameter`: its name, the kind of its value, its default, the APIs that have it, and a
sentence of description. Derived from the rows are configuration keys, columns of a job's rows,
fields of HTTP bodies with their OpenAPI descriptions, error texts, and tables of the documentation.
To add a parameter, add a row here and the code that applies it.

Rows of sampling parameters have the names and defaults of `SamplingSettings`
(``core/sampling_settings.py``), which the engine reads. Python's callers make a `SamplingParams`,
which checks its values.

    >>> SAMPLING["top_p"].kind.form
    'a number above 0, at most 1 (off)'
    >>> SamplingParams(temperature=0.8, stop="\n").stop
    ['\n']
    >>> SamplingParams(frequency=1)
    Traceback (most recent call last):
    ...
    eagle_ray.core.errors.ConfigError: SamplingParams.frequency: unknown parameter. Did you mean
        frequency_penalty?

The names are OpenAI's, or else vLLM's. ``refused.py`` has the parameters of other systems.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, ParamSpec

from eagle_ray.core.errors import ConfigError
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.requests.messages import MESSAGES
from eagle_ray.requests.refused import fix_of, refused_at
from eagle_ray.requests.values import (
    CHATS,
    EMPTY_VALUES,
    EVERYWHERE,
    HTTP,
    LOGPROBS,
    AnyObject,
    Api,
    Boolean,
    Checked,
    Continuations,
    Either,
    Integer,
    JsonSchema,
    Kind,
    ListOf,
    LogitBias,
    Metadata,
    Number,
    Object,
    ResponseFormat,
    Text,
    Texts,
    TokenIds,
    WrongValue,
    describe_wrong,
    plain_value,
)
from eagle_ray.text.chat_options import (
    CHOICE_FORM,
    KWARGS_FORM,
    TOOLS_FORM,
    check_template_kwargs,
    check_tools,
)
from eagle_ray.text.structured import RESPONSE_FORMAT_FORM

# A token is chosen by logit / temperature + Gumbel noise in fp32. Noise reaches 23, where fp32 has
# steps of 2e-6, so that 100 keeps logits apart that differ by 2e-4. Far above it they round away
# and only noise is left.
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0  # bound of presence_penalty and frequency_penalty, either sign; OpenAI's
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # a factor of logits; 1 is off
MAX_DETOKENIZED = 1 << 17  # ids of a request of /detokenize: a third of a second
MAX_LOGIT_BIAS = 100.0  # either sign; OpenAI's bound
MAX_TOP_LOGPROBS = 20  # alternatives per token; OpenAI's bound
# Characters of a stop string: a stream looks for its beginning at each end of a text.
MAX_STOP_CHARS = 1024
MAX_STOPS, MAX_ITEMS = 64, 1024  # stop strings, and words, choices or token ids, of an HTTP request
MAX_SAMPLES = 1024  # samples of a row
MAX_CHOICES = 128  # samples of each prompt of an HTTP request
RESPONSE_TOOLS_FORM = (
    'a list of tools {"type": "function", "name", "description", "parameters", "strict"}'
)
RESPONSE_CHOICE_FORM = 'none, auto, required, or {"type": "function", "name": ...}'
_CAMEL_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Group(Enum):
    """The subject of a sampling parameter."""

    NOISE = "which token is chosen"
    LENGTH = "where an output ends, and how many there are"
    RETURNED = "what an answer tells besides its text"
    CONTROL = "adjustments of the logits by the tokens so far"
    TEXT = "how output ids become text"
    FORM = "what an output must be: at most one of them is set"
    CHAT = "what a chat template and the parsers of its answers read"


@dataclass(frozen=True)
class Parameter:
    """A row of the table: one parameter.

    Attributes:
        name: name of the parameter.
        kind: kind of a value, at the APIs that `kinds` lacks.
        default: value of a parameter that is absent or null. If `is_null_a_value`, null differs.
        about: description in a sentence.
        group: group of a sampling parameter; None for other parameters.
        apis: APIs that have the parameter.
        kinds: kinds of a value, by API, where they differ from `kind`.
        is_null_a_value: whether Python's None is a value other than the default.
        defaults: defaults of HTTP bodies, by API. An API that it lacks takes the server's setting.
        required: APIs whose bodies must have the parameter.
    """

    name: str
    kind: Kind
    default: Any = None
    about: str = ""
    group: Group | None = None
    apis: frozenset[Api] = EVERYWHERE
    kinds: Mapping[Api, Kind] = dataclasses.field(default_factory=dict)
    is_null_a_value: bool = False
    defaults: Mapping[Api, Any] = dataclasses.field(default_factory=dict)
    required: frozenset[Api] = frozenset()

    def kind_at(self, api: Api) -> Kind:
        return self.kinds.get(api, self.kind)

    def with_rule(self, rule: str) -> Parameter:
        """Return the row with a further rule in its form, for jobs and for Python."""
        null = "" if isinstance(self.kind, Boolean) else ", or null"
        kinds = {
            api: self.kind_at(api).with_form(f"{self.kind_at(api).form}{null}; {rule}")
            for api in (Api.JOB, Api.PYTHON)
        }
        return dataclasses.replace(self, kinds={**self.kinds, **kinds})


_DEFAULTS = SamplingSettings()


def sampling_parameter(
    name: str,
    kind: Kind,
    about: str,
    group: Group,
    http: Kind | None = None,
    python: Kind | None = None,
    apis: frozenset[Api] = EVERYWHERE,
    is_null_a_value: bool = False,
    kinds: Mapping[Api, Kind] = MappingProxyType({}),
    defaults: Mapping[Api, Any] = MappingProxyType({}),
) -> Parameter:
    """Return the row of a field of SamplingSettings, with that field's default.

    Args:
        name: name of the field.
        kind: kind of a value.
        about: description in a sentence.
        group: group of the parameter.
        http: kind of a value in HTTP bodies, if it differs.
        python: kind of a value in Python, if it differs.
        apis: APIs that have the parameter.
        is_null_a_value: whether Python's None is a value other than the default.
        kinds: kinds of a value, by API, where they differ further.
        defaults: defaults of HTTP bodies, by API.
    """
    other = {} if http is None else dict.fromkeys(HTTP, http)
    other |= {} if python is None else {Api.PYTHON: python}
    default = getattr(_DEFAULTS, name)
    return Parameter(
        name, kind, default, about, group, apis, {**other, **kinds}, is_null_a_value, defaults
    )


def _with_rule(*rows: Parameter) -> Mapping[str, Parameter]:
    """Return the rows by name. Rows of output forms get the rule that at most one of them may be set."""
    *names, last = [row.name for row in rows if row.group is Group.FORM]
    rule = f"at most one of {', '.join(names)} and {last} is set"
    return {row.name: row.with_rule(rule) if row.group is Group.FORM else row for row in rows}


_PENALTY = Number(
    -MAX_PENALTY,
    MAX_PENALTY,
    form=f"a number between -{MAX_PENALTY:g} and {MAX_PENALTY:g}, 0 is off",
)
# How vLLM's Python API asks for log-probabilities: also of this many of the likeliest tokens.
_COUNTED = Either(
    (Boolean(), Integer(0, MAX_TOP_LOGPROBS)), form="True, False, None or an integer, 0 or more"
)


SAMPLING: Mapping[str, Parameter] = _with_rule(
    sampling_parameter(
        "temperature",
        Number(0, MAX_TEMPERATURE, form=f"a number between 0 (greedy) and {MAX_TEMPERATURE:g}"),
        "Logits are divided by it; 0 is greedy.",
        Group.NOISE,
    ),
    sampling_parameter(
        "top_p",
        Number(0, 1, is_above=True, form="a number above 0, at most 1 (off)"),
        "Sample from the smallest set of the likeliest tokens whose probability reaches it.",
        Group.NOISE,
    ),
    sampling_parameter(
        "top_k",
        Integer(0, off=-1, form="an integer, 0 or -1 (off) or more"),
        "Sample from this many of the likeliest tokens.",
        Group.NOISE,
    ),
    sampling_parameter(
        "min_p",
        Number(0, 1, form="a number between 0 (off) and 1"),
        "Sample from tokens at least this many times as probable as the likeliest one.",
        Group.NOISE,
    ),
    sampling_parameter(
        "max_tokens",
        Integer(0, form="an integer, 1 or more, or 0 where something is scored"),
        "The most tokens of an output, the first one included. Null in Python: as many as the model's length leaves. "
        "0, with continuations, score_text, prompt_logprobs, or choice and logprobs, generates nothing.",
        Group.LENGTH,
        python=Integer(0, form="an integer, 1 or more, or 0 where something is scored, or None"),
        apis=EVERYWHERE - {Api.RESPONSES},
        is_null_a_value=True,
        kinds={
            Api.CHAT: Integer(1, form="an integer, 1 or more"),
            Api.COMPLETIONS: Integer(0, form="an integer, 1 or more, or 0 with echo"),
        },
    ),
    sampling_parameter(
        "stop",
        Texts(form="a list of strings, none of them empty"),
        "Texts that end an output and are not part of it.",
        Group.LENGTH,
        http=Texts(
            max_items=MAX_STOPS,
            max_chars=MAX_STOP_CHARS,
            form=f"a text or a list of at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARS} characters",
        ),
    ),
    sampling_parameter(
        "n",
        Integer(1, MAX_SAMPLES, form=f"a number of samples per row, 1 to {MAX_SAMPLES}"),
        "Samples of each prompt.",
        Group.LENGTH,
        http=Integer(1, MAX_CHOICES, form=f"a number of choices, 1 to {MAX_CHOICES}"),
        apis=EVERYWHERE - {Api.RESPONSES},
    ),
    sampling_parameter(
        "seed",
        Integer(-(2**63), max_integer=2**64 - 1, form="a 64-bit integer"),
        "Key of the noise. Null makes one from the run's seed, the row's id and the sample's index.",
        Group.NOISE,
    ),
    sampling_parameter(
        "ignore_eos",
        Boolean(),
        "Continue past the end-of-sequence token.",
        Group.LENGTH,
    ),
    sampling_parameter(
        "logprobs",
        Boolean(),
        "Return the log-probability of each output token.",
        Group.RETURNED,
        python=_COUNTED,
        apis=EVERYWHERE - {Api.RESPONSES},
        kinds={
            Api.COMPLETIONS: Integer(
                0, MAX_TOP_LOGPROBS, form=f"an integer, 0 to {MAX_TOP_LOGPROBS}", takes_false=True
            )
        },
        defaults={Api.CHAT: False},
    ),
    sampling_parameter(
        "top_logprobs",
        Integer(
            0, MAX_TOP_LOGPROBS, form=f"an integer, 0 (off) to {MAX_TOP_LOGPROBS}, with logprobs"
        ),
        "With logprobs, also return this many of the likeliest tokens at each position.",
        Group.RETURNED,
        apis=EVERYWHERE - {Api.COMPLETIONS},
        kinds={
            Api.CHAT: Integer(
                0, MAX_TOP_LOGPROBS, form=f"an integer, 0 to {MAX_TOP_LOGPROBS}, with logprobs"
            ),
            Api.RESPONSES: Integer(
                0,
                MAX_TOP_LOGPROBS,
                form=f"an integer, 0 to {MAX_TOP_LOGPROBS}, with include: [{LOGPROBS!r}]",
            ),
        },
    ),
    sampling_parameter(
        "prompt_logprobs",
        Boolean(form="true or false, with logprobs"),
        "With logprobs, also return the prompt's log-probabilities; then none of it comes from the prefix cache.",
        Group.RETURNED,
        python=_COUNTED,
        apis=frozenset({Api.JOB, Api.PYTHON}),
    ),
    sampling_parameter(
        "presence_penalty",
        _PENALTY,
        "Subtracted from the logit of each token that the output has so far.",
        Group.CONTROL,
    ),
    sampling_parameter(
        "frequency_penalty",
        _PENALTY,
        "Subtracted from a token's logit as often as the output has it.",
        Group.CONTROL,
    ),
    sampling_parameter(
        "repetition_penalty",
        Number(
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
            form=f"a number between {MIN_REPETITION_PENALTY:g} and {MAX_REPETITION_PENALTY:g}, 1 is off",
        ),
        "Divides positive logits of tokens in prompt or output, and multiplies negative ones.",
        Group.CONTROL,
    ),
    sampling_parameter(
        "logit_bias",
        LogitBias(
            MAX_LOGIT_BIAS,
            form=f"token ids with numbers between -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}",
        ),
        "What is added to the logits of tokens, by token id.",
        Group.CONTROL,
        http=LogitBias(
            MAX_LOGIT_BIAS,
            form=f"an object of token ids and numbers between -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}",
        ),
    ),
    sampling_parameter(
        "allowed_token_ids",
        TokenIds(min_items=1, form="a list of token ids, at least one, or null for all"),
        "The only tokens that an output may have.",
        Group.CONTROL,
        http=TokenIds(min_items=1, form="a list of token ids, at least one"),
    ),
    sampling_parameter(
        "bad_words",
        Texts(form="a list of words, none of them empty"),
        "Words that an output may not have, as the tokenizer writes them at the beginning of a text and after a space. "
        "Other spellings are not found.",
        Group.CONTROL,
        http=Texts(
            max_items=MAX_ITEMS,
            form=f"a text or a list of at most {MAX_ITEMS} texts, none of them empty",
        ),
    ),
    sampling_parameter(
        "min_tokens",
        Integer(0, form="an integer, 0 (off) to max_tokens"),
        "Output tokens before EOS, a stop token or a stop string can end the output.",
        Group.CONTROL,
        kinds={Api.RESPONSES: Integer(0, form="an integer, 0 (off) to max_output_tokens")},
    ),
    sampling_parameter(
        "thinking_budget",
        Integer(0, form="an integer, 0 (no reasoning) or more, or null for no limit"),
        "The most tokens of an answer's reasoning; then its closing marker is forced. Only with messages, and a target "
        "with a reasoning parser. Reasoning begins at once if the prompt opens it, or after an opening marker at the "
        "answer's beginning. A marker of several tokens is found as the tokenizer spells it alone and by white space.",
        Group.CONTROL,
        http=Integer(0, form="an integer, 0 (no reasoning) or more"),
        apis=EVERYWHERE - {Api.COMPLETIONS},
    ),
    sampling_parameter(
        "stop_token_ids",
        TokenIds(form="a list of token ids"),
        "Tokens that end an output and are not part of its text, with ignore_eos too.",
        Group.LENGTH,
        http=TokenIds(max_items=MAX_ITEMS, form=f"a list of at most {MAX_ITEMS} token ids"),
    ),
    sampling_parameter(
        "include_stop_str_in_output",
        Boolean(),
        "Whether the text keeps the stop string or stop token that ended it.",
        Group.TEXT,
    ),
    sampling_parameter(
        "stop_in_reasoning",
        Boolean(),
        "Whether stop strings and stop tokens end an output within its reasoning, too.",
        Group.TEXT,
    ),
    sampling_parameter(
        "skip_special_tokens",
        Boolean(),
        "Whether the text leaves special tokens out.",
        Group.TEXT,
    ),
    sampling_parameter(
        "json_schema",
        JsonSchema(form="a JSON schema, as an object or as JSON text"),
        "A JSON schema that an output must fit.",
        Group.FORM,
    ),
    sampling_parameter(
        "json_object",
        Boolean(),
        "Whether an output must be a JSON object.",
        Group.FORM,
    ),
    sampling_parameter(
        "regex",
        Text(form="a regular expression"),
        "A regular expression that an output must match.",
        Group.FORM,
    ),
    sampling_parameter(
        "choice",
        Texts(min_items=1, takes_one=False, form="a list of texts, none of them empty"),
        "Texts of which an output must be one.",
        Group.FORM,
        http=Texts(
            min_items=1,
            max_items=MAX_ITEMS,
            takes_one=False,
            form=f"a list of 1 to {MAX_ITEMS} texts, none of them empty",
        ),
    ),
    sampling_parameter(
        "grammar",
        Text(form="a grammar in Lark's syntax or GBNF"),
        "A grammar in llguidance's Lark syntax (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).",
        Group.FORM,
    ),
    sampling_parameter(
        "response_format",
        ResponseFormat(form=f"OpenAI's {RESPONSE_FORMAT_FORM}"),
        "OpenAI's spelling of json_object and json_schema.",
        Group.FORM,
        http=ResponseFormat(form=RESPONSE_FORMAT_FORM),
        apis=EVERYWHERE - {Api.RESPONSES},
    ),
    sampling_parameter(
        "continuations",
        Continuations(form="a list of texts or lists of token ids, at least one"),
        "Texts or token ids that may follow the prompt. The log-probability of each is returned, and nothing is "
        "generated.",
        Group.RETURNED,
        apis=frozenset({Api.JOB, Api.PYTHON}),
    ),
    sampling_parameter(
        "score_text",
        Boolean(),
        "Whether the prompt is a document whose own log-probability is returned, and nothing is generated.",
        Group.RETURNED,
        apis=frozenset({Api.JOB, Api.PYTHON}),
    ),
    sampling_parameter(
        "score_stride",
        Integer(1, form="an integer, 1 or more"),
        "Tokens by which a window moves over a document longer than the model's length, at most that length. Null: "
        "half of it.",
        Group.RETURNED,
        apis=frozenset({Api.JOB, Api.PYTHON}),
    ),
)


def _checked_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that Python's caller set. Raises ConfigError that lists every wrong one."""
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for name, row in SAMPLING.items():
        value, kind = plain_value(given.get(name)), row.kind_at(Api.PYTHON)
        try:
            if not kind.is_nothing(value):
                values[name] = kind.check(value)
            elif name in given and row.is_null_a_value:
                values[name] = None
        except WrongValue as error:
            shown = describe_wrong(name, given[name], error)
            wrong.append(f"SamplingParams.{name}: must be {error.form}, got {shown}")
    if (both := two_forms(values)) is not None:
        wrong.append(f"SamplingParams: {both[0]} and {both[1]} {TWO_FORMS}")
    wrong += [
        f"SamplingParams.{name}: unknown parameter. {_hint(name)}"
        for name in given
        if name not in SAMPLING
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return values


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name, SAMPLING, 1)
    other = f"Did you mean {near[0]}?" if near else f"Parameters: {', '.join(SAMPLING)}"
    return python_hint(name) or other


Fields = ParamSpec("Fields")


def _with_signature_of(
    other: Callable[Fields, None],
) -> Callable[[Callable[..., None]], Callable[Fields, None]]:
    """Return a decorator that gives a method another method's signature, for editors and type checkers."""
    return functools.partial(functools.update_wrapper, wrapped=other, assigned=())


class SamplingParams(SamplingSettings):
    """Sampling parameters of one request in Python. Raises ConfigError that lists every unknown or wrong one.

    Decoding is greedy unless a temperature is set. None is a parameter's default. Numbers may be
    NumPy's or torch's. Lists may be tuples, sets or arrays.

    Parameters apply to the logits in this order: allowed_token_ids, bad_words, min_tokens and
    thinking_budget, logit_bias, repetition_penalty, frequency_penalty and presence_penalty, then as
    in transformers temperature, top_k, top_p, min_p. EAGLE's reference implementation applies top_p
    before top_k. Log-probabilities are computed from the target's logits before any of these.
    """

    @_with_signature_of(SamplingSettings.__init__)
    def __init__(self, **given: Any):
        values = _checked_values(given)
        super().__init__(**values)
        if faults := faults_of_scored(self, values):
            raise ConfigError("\n".join(f"SamplingParams.{fault}" for fault in faults))
        self.__dict__["names_given"] = tuple(values)

    def given(self) -> dict[str, Any]:
        """Return the values that the caller set, including those that equal the default."""
        return {name: getattr(self, name) for name in self.__dict__["names_given"]}


_CHAT_APIS = frozenset({Api.JOB}) | CHATS
_OBJECT: Mapping[str, Any] = {"type": "object"}
_TEXT = Text(form="a text", can_be_empty=True)
# What a request with messages says to its chat template.
CHAT: Mapping[str, Parameter] = {
    row.name: row
    for row in (
        Parameter(
            "tools",
            Checked(check_tools, {"type": "array", "items": _OBJECT}, form=TOOLS_FORM),
            [],
            "Functions that the answer may call, as in OpenAI's API.",
            Group.CHAT,
            _CHAT_APIS,
            {
                Api.CHAT: ListOf(AnyObject(), form=TOOLS_FORM),
                Api.RESPONSES: ListOf(AnyObject(), form=RESPONSE_TOOLS_FORM),
            },
        ),
        Parameter(
            "tool_choice",
            Checked(form=CHOICE_FORM, json={"anyOf": [{"type": "string"}, _OBJECT]}),
            "auto",
            "None leaves the tools out of the prompt; required and a named tool force a call.",
            Group.CHAT,
            _CHAT_APIS,
            {
                Api.CHAT: Either((_TEXT, AnyObject()), EMPTY_VALUES, form=CHOICE_FORM),
                Api.RESPONSES: Either(
                    (_TEXT, AnyObject()), EMPTY_VALUES, form=RESPONSE_CHOICE_FORM
                ),
            },
        ),
        Parameter(
            "parallel_tool_calls",
            Boolean(),
            True,
            "With false, only the first call of an answer is kept.",
            Group.CHAT,
            _CHAT_APIS,
        ),
        Parameter(
            "chat_template_kwargs",
            Checked(check_template_kwargs, dict(_OBJECT), form=KWARGS_FORM),
            {},
            "Further values for the chat template. A row's or a request's names are added to the configuration's.",
            Group.CHAT,
            _CHAT_APIS,
            dict.fromkeys(CHATS, AnyObject(form=KWARGS_FORM)),
        ),
    )
}


def names_in(*groups: Group) -> tuple[str, ...]:
    """Return the names of the sampling parameters in these groups, in the table's order."""
    return tuple(name for name, row in SAMPLING.items() if row.group in groups)


FORMS = names_in(Group.FORM)  # forms that an output must have: at most one is set


def faults_of_scored(params: SamplingSettings, given: Mapping[str, Any]) -> list[str]:
    """Return an error line for each value that has no effect on a request that is only scored.

    Args:
        params: parameters in force.
        given: values that the request sets. A value that equals the default is no fault.
    """
    if not params.is_scored:
        return []
    read = set(names_in(Group.RETURNED))
    if params.continuations is not None:
        what = "continuations"
    elif params.score_text:
        what = "score_text"
    else:
        what = "max_tokens 0"
        read.add("choice")
    if not params.wants_prompt_logprobs:
        read.discard("top_logprobs")
    if not params.wants_prompt_logprobs and "choice" not in read:
        read.discard("logprobs")
    return [
        f"{name}: it has no effect with {what}, as nothing is generated. Leave it out"
        for name, row in SAMPLING.items()
        if name in given and name not in read and not _asks_nothing(row, given[name])
    ]


def _asks_nothing(row: Parameter, value: Any) -> bool:
    """Return whether a value is the default, or max_tokens 0, which a scored request may set."""
    is_no_output = row.name == "max_tokens" and value == 0
    return value is None or value == row.default or is_no_output


def merged_values(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults, overridden by a request's values. A value of None overrides nothing.

    If the request sets an output form, the default's output form is dropped.

    Args:
        defaults: parameters of the job or server by name.
        own: parameters of the request by name.
    """
    own = {name: value for name, value in own.items() if value is not None}
    merged = dict(defaults)
    if any(own.get(name) for name in FORMS):
        merged |= {name: None for name in FORMS if name in merged}
    return merged | own


TWO_FORMS = "both say what the output must be: give one"


def two_forms(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first two output forms that are both set, in the table's order; None if at most one is set."""
    given = [name for name in FORMS if values.get(name)]
    return (given[0], given[1]) if len(given) > 1 else None


def body_parameter(
    name: str, kind: Kind, about: str, apis: frozenset[Api], default: Any = None, **rest: Any
) -> Parameter:
    """Return the row of a parameter that only HTTP bodies have."""
    return Parameter(
        name, kind, default, about, apis=apis, defaults=dict.fromkeys(apis, default), **rest
    )


_LENGTH = Integer(1, form="an integer, 1 or more")
_AT_CHAT, _AT_TEXT, _AT_RESPONSES = (
    frozenset({api}) for api in (Api.CHAT, Api.COMPLETIONS, Api.RESPONSES)
)
_AT_TOKENIZE, _AT_DETOKENIZE = frozenset({Api.TOKENIZE}), frozenset({Api.DETOKENIZE})
_PROMPT = Either(
    (
        _TEXT,
        ListOf(_TEXT, min_items=1),
        TokenIds(min_items=1),
        ListOf(TokenIds(min_items=1), min_items=1),
    ),
    form="a text, a list of texts, a list of token ids or a list of such lists, none of them empty",
)
METADATA = Metadata(
    16, 64, 512, form="an object of at most 16 texts: keys of 64, values of 512 characters"
)
STREAM_OPTIONS = Object(
    "StreamOptions",
    {
        "include_usage": Boolean(form=""),
        "include_steps": Boolean(
            form="whether each choice of a chunk has `steps`, how its tokens came: a list of {step, num_draft_tokens, "
            "num_accepted_draft_tokens, tokens: [{id, text, depth}]}. Step 0 is the prompt's pass; depth is an "
            "accepted draft's place in its draft, 1 or more, or 0 for a token that the target picked itself. Texts "
            "together are the chunk's; what cannot be told yet (half a character or stop string) a later token tells"
        ),
        "continuous_usage_stats": Boolean(form="", is_off=True),
        "include_obfuscation": Boolean(form="", is_off=True),
    },
    defaults=dict.fromkeys(
        ("include_usage", "include_steps", "continuous_usage_stats", "include_obfuscation"), False
    ),
    about="include_steps is this server's own.",
    form="{include_usage: true or false, include_steps: true or false}, with stream",
)

BODY: Mapping[str, Parameter] = {
    row.name: row
    for row in (
        body_parameter(
            "model",
            Text(form="the name of a model as in /v1/models", can_be_empty=True),
            "The model that is asked; there is one.",
            HTTP | _AT_TOKENIZE | _AT_DETOKENIZE,
        ),
        body_parameter("stream", Boolean(), "Send the answer as events, as it grows.", HTTP, False),
        body_parameter(
            "stream_options", STREAM_OPTIONS, "What the events tell besides the text.", HTTP
        ),
        body_parameter(
            "return_token_ids",
            Boolean(),
            "Return the ids of prompt and output.",
            HTTP - _AT_RESPONSES,
            False,
        ),
        body_parameter(
            "metadata", METADATA, "Labels of the request; a response repeats them.", HTTP
        ),
        body_parameter(
            "messages",
            MESSAGES.with_form(f"{MESSAGES.form}, with content a text or a list of text parts"),
            "The conversation that is answered.",
            _AT_CHAT | _AT_TOKENIZE,
            required=_AT_CHAT,
            kinds={Api.TOKENIZE: MESSAGES},
        ),
        body_parameter("max_completion_tokens", _LENGTH, "Another name of max_tokens.", _AT_CHAT),
        body_parameter(
            "prompt",
            _PROMPT,
            "The texts or token ids that are continued.",
            _AT_TEXT | _AT_TOKENIZE,
            required=_AT_TEXT,
            kinds={Api.TOKENIZE: _TEXT},
        ),
        body_parameter("echo", Boolean(), "Return the prompt before the output.", _AT_TEXT, False),
        body_parameter(
            "best_of", Integer(None, form="n, or absent"), "n: every choice is returned.", _AT_TEXT
        ),
        body_parameter(
            "input",
            Either(
                (_TEXT, ListOf(AnyObject())),
                form="a text or a list of items: messages, function_call, function_call_output and reasoning",
            ),
            "The conversation that is answered.",
            _AT_RESPONSES,
            required=_AT_RESPONSES,
        ),
        body_parameter(
            "instructions",
            _TEXT.with_form("a text: the first message, of role system"),
            "A system message before the input.",
            _AT_RESPONSES,
        ),
        body_parameter(
            "max_output_tokens", _LENGTH, "The response's name of max_tokens.", _AT_RESPONSES
        ),
        body_parameter(
            "text",
            AnyObject(form="{format: {type: text, json_object or json_schema}}"),
            "The response's response_format.",
            _AT_RESPONSES,
        ),
        body_parameter(
            "include",
            ListOf(Text(can_be_empty=True, known=LOGPROBS), form=f"[] or [{LOGPROBS!r}]"),
            "Whether the output's log-probabilities are returned.",
            _AT_RESPONSES,
        ),
        body_parameter("reasoning", AnyObject(form="{}", is_empty=True), "Nothing.", _AT_RESPONSES),
        body_parameter(
            "add_special_tokens", Boolean(), "Null: of a prompt, not of messages.", _AT_TOKENIZE
        ),
        body_parameter(
            "add_generation_prompt",
            Boolean(),
            "End the messages with the beginning of an answer.",
            _AT_TOKENIZE,
            True,
        ),
        body_parameter(
            "continue_final_message",
            Boolean(form="true or false, with messages"),
            "Leave the last message open.",
            _AT_TOKENIZE,
            False,
        ),
        body_parameter(
            "return_token_strs", Boolean(), "Return the tokens' texts, too.", _AT_TOKENIZE, False
        ),
        body_parameter(
            "tokens",
            TokenIds(
                max_items=MAX_DETOKENIZED, form=f"a list of at most {MAX_DETOKENIZED} token ids"
            ),
            "The ids that are written as text.",
            _AT_DETOKENIZE,
            required=_AT_DETOKENIZE,
        ),
    )
}
# Keys of bodies that only a server handles.
NOT_OF_JOBS = (
    "stream",
    "stream_options",
    "return_token_ids",
    "echo",
    "best_of",
)


@functools.cache
def rows_at(api: Api) -> Mapping[str, Parameter]:
    """Return the rows of the parameters that an API has, by name."""
    rows = {**SAMPLING, **CHAT, **BODY}
    return {name: row for name, row in rows.items() if api in row.apis}


ROW_PARAMETERS = frozenset(rows_at(Api.JOB))


def match_unsupported(column: Any) -> str | None:
    """Return the unsupported parameter that a column's name spells; None for any other name.

    Other spellings count, also those of supported parameters: topP, TOP_P and "top-p" are not read
    as top_p. A single capitalised word, such as Temperature, is likely to be data and does not
    count. A name that is not a text, as in a dictionary of Python or a map of Parquet, does not
    count.
    """
    if not isinstance(column, str):
        return None
    name = _CAMEL_BOUNDARY.sub("_", column.strip()).lower().replace("-", "_")
    if name in ROW_PARAMETERS:
        is_misspelt = name != column and ("_" in name or name == column.strip())
        return name if is_misspelt else None
    return name if name in refused_at(Api.JOB) else None


def python_hint(name: str) -> str | None:
    """Return advice for a misspelled or foreign parameter name; None for any other name."""
    parameter = match_unsupported(name)
    if parameter is None:
        return None
    if parameter in ROW_PARAMETERS:
        return f"Did you mean {parameter}?"
    fix = fix_of(parameter, Api.PYTHON)
    return f"{fix[0].upper()}{fix[1:]}."
