"""GrammarSpec: the grammar that an output must follow, as the parameters of sampling ask for it.

>>> GrammarSpec.of(SamplingSettings(choice=["yes", "no"]))
GrammarSpec(kind='choice', source='["yes", "no"]', after=None, param=None)
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from eagle_ray.core.json_text import dump_json
from eagle_ray.core.sampling_settings import SamplingSettings

GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The grammar that an output must follow.

    Attributes:
        kind: one of GRAMMAR_KINDS.
        source: a JSON schema, a regular expression, a JSON list of strings (choice), or a grammar
            in Lark's syntax or GBNF; "" for json_object.
        after: token after whose first occurrence the grammar begins, such as a model's end of
            thinking. Text before it is free, but the output cannot end there. None applies the
            grammar to the whole output.
        param: name of the request's parameter that the source was made from, if it is not `kind`.
    """

    kind: str
    source: str = ""
    after: int | None = None
    param: str | None = None

    @classmethod
    def of(cls, sampling: SamplingSettings) -> GrammarSpec | None:
        """Return the grammar that the sampling parameters request, or None."""
        response_format = json.loads(sampling.response_format) if sampling.response_format else {}
        kind = response_format.get("type")
        if kind == "json_schema":
            schema = response_format[kind]["schema"]
            return cls(kind, dump_json(schema, ensure_ascii=False))
        if kind == "json_object" or sampling.json_object:
            return cls("json_object")
        if sampling.choice:
            return cls("choice", dump_json(list(sampling.choice), ensure_ascii=False))
        if sampling.json_schema:
            return cls("json_schema", sampling.json_schema)
        if sampling.regex:
            return cls("regex", sampling.regex)
        if sampling.grammar:
            return cls("grammar", sampling.grammar)
        return None

    @property
    def name(self) -> str:
        """Return the name of the request's parameter, for errors."""
        return self.param or self.kind
