"""Write the tables of configuration keys and output columns from the code: python -m jobs.reference_tables

    configs/KEYS.md              every key of a job, of an endpoint and of training, its default and its allowed values
    configs/PARAMETERS.md        every parameter of a request, its values and where it may stand; those that are refused
    configs/FAMILIES.md          every family of models, and what this engine does with it
    eagle_ray/batch/COLUMNS.md   every column of the output files, and its type
    eagle_ray/methods/FEATURES.md   each feature with each way to draft (jobs/feature_matrix.py)
    configs/example.yaml         the keys of `sampling`; the rest of the file is written by hand

tests/test_reference_tables.py fails if a file differs from the code.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from eagle_ray.config import JobConfig, TrainConfig
from eagle_ray.config.engine_section import DIALECTS
from eagle_ray.config.job import SamplingConfig
from eagle_ray.config.load import section_model
from eagle_ray.config.serve import ServeConfig
from eagle_ray.families import FAMILIES, WRAPPERS, Family, Wrapper
from eagle_ray.gguf.architectures import ARCHITECTURES
from eagle_ray.port.dialects import SPELLINGS, can_say
from eagle_ray.requests.parameters import BODY, CHAT, SAMPLING, Api, Parameter
from eagle_ray.requests.refused import REFUSED, Refused
from eagle_ray.requests.row_schema import ENGINE_FIELDS, output_schema
from jobs.feature_matrix import matrix_page

ROOT = Path(__file__).resolve().parents[1]
APIS = {
    Api.JOB: "job, row",
    Api.PYTHON: "SamplingParams",
    Api.CHAT: "chat",
    Api.COMPLETIONS: "completions",
    Api.RESPONSES: "responses",
}  # and what heads their columns; batch files have those of their lines' urls
EXAMPLE = ROOT / "configs" / "example.yaml"
EXAMPLE_COLUMN = 33  # of comments
EXAMPLE_CHARS = 120  # of a line
MADE = "Made by `python -m jobs.reference_tables` from the code."


def main() -> None:
    for path, text in tables().items():
        path.write_text(text)
        print(path.relative_to(ROOT))


def tables() -> dict[Path, str]:
    """Return the text of each file."""
    return {
        ROOT / "configs" / "KEYS.md": keys_page(),
        ROOT / "configs" / "PARAMETERS.md": parameters_page(),
        ROOT / "configs" / "FAMILIES.md": families_page(),
        ROOT / "eagle_ray" / "batch" / "COLUMNS.md": columns_page(),
        ROOT / "eagle_ray" / "methods" / "FEATURES.md": matrix_page(),
        EXAMPLE: with_sampling_keys(EXAMPLE.read_text()),
    }


def keys_page() -> str:
    parts = ["# Configuration keys", MADE]
    pages = (
        ("A job (`eagle-ray run`)", JobConfig),
        ("An endpoint (`eagle-ray serve`)", ServeConfig),
        ("Training of a head (`eagle-ray train`)", TrainConfig),
    )
    for title, model in pages:
        parts.append(
            f"## {title}\n\n| key | default | value |\n|---|---|---|\n" + "\n".join(key_rows(model))
        )
    return "\n\n".join(parts) + "\n"


def key_rows(model: type[BaseModel], section: str = "") -> Iterator[str]:
    """Yield a table row for each key of a section and of the sections within it."""
    for name, field in model.model_fields.items():
        key = f"{section}.{name}" if section else name
        part = section_model(field.annotation)
        if part is not None:
            yield from key_rows(part, key)
        else:
            yield f"| `{key}` | {default_text(field)} | {escaped(field.description or '')} |"


def parameters_page() -> str:
    heads = "".join(f" {head} |" for head in APIS.values())
    lines = [
        "# What a request may say",
        f"{MADE} One row for each parameter: where it may stand (a dot), its value in a job or else where it first may "
        "stand, its default there, and what it does.",
        f"| parameter |{heads} value | default | |\n|---|{'---|' * len(APIS)}---|---|---|\n"
        + "\n".join(
            parameter_row(row)
            for row in {**SAMPLING, **CHAT, **BODY}.values()
            if row.apis & APIS.keys()
        ),
        "## What other engines are sent",
        "A dot: the dialect can say it, in its own spelling. Any other parameter with a value is refused before "
        "anything is sent (docs/engines.md).",
        f"| parameter |{''.join(f' {name} |' for name in DIALECTS)}\n|---|{'---|' * len(DIALECTS)}\n"
        + "\n".join(map(dialect_row, SPELLINGS)),
        "## Parameters of other systems",
        "They are refused by name, unless their value asks for nothing: null, an empty one, or one of these.",
        "| parameter | asks for nothing | otherwise |\n|---|---|---|\n"
        + "\n".join(map(refused_row, REFUSED.values())),
    ]
    return "\n\n".join(lines) + "\n"


def parameter_row(row: Parameter) -> str:
    api = next(api for api in APIS if api in row.apis)
    places = "".join(" · |" if api in row.apis else " |" for api in APIS)
    default = "" if row.default is None else f"`{escaped(json.dumps(row.default))}`"
    return f"| `{row.name}` |{places} {escaped(row.kind_at(api).form)} | {default} | {escaped(row.about)} |"


def dialect_row(name: str) -> str:
    places = "".join(" · |" if can_say(name, dialect) else " |" for dialect in DIALECTS)
    return f"| `{name}` |{places}"


def refused_row(row: Refused) -> str:
    values = ", ".join(f"`{escaped(json.dumps(value))}`" for value in row.no_op)
    fix = "ignored: it is a label" if row.is_label else f"use `{row.use}`" if row.use else row.fix
    return f"| `{row.name}` | {values} | {escaped(fix)} |"


def default_text(field: FieldInfo) -> str:
    default: Any = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "(required)"
    if isinstance(default, BaseModel):
        default = default.model_dump(mode="json")
    return f"`{escaped(json.dumps(default))}`"


def columns_page() -> str:
    rows = [
        f"| `{field.name}` | `{field.type}` | {'yes' if field.nullable else 'no'} |"
        for field in output_schema([])
    ]
    head = "| column | Arrow type | null |\n|---|---|---|\n"
    text = (
        "README.md of this directory says what they mean. Every other input column follows with its type. One that is "
        "named like a column below, or like a field of a request (see REQUEST in requests/row_schema.py), gets the "
        "prefix `input_`."
    )
    own = f"# Output columns\n\n{MADE} {text}\n\n{head}" + "\n".join(rows) + "\n"
    others = [f"| `{field.name}` | `{field.type}` | yes |" for field in ENGINE_FIELDS]
    more = "Jobs of another engine (`engine.kind`) have these, too; docs/engines.md says what they mean."
    return f"{own}\n{more}\n\n{head}" + "\n".join(others) + "\n"


def families_page() -> str:
    head = "| model_type | class | layers | quantised | ranks | CUDA graphs | GGUF |\n|---|---|---|---|---|---|---|\n"
    text = (
        "One row for each `model_type`. Packed draft trees equal transformers' own forward for all of them. Layers are "
        "run by the engine's own forward, or by transformers for the reason that stands there. Quantised: layers of "
        "AWQ, GPTQ, compressed-tensors and FP8 checkpoints stay as they are stored. Ranks: "
        "`execution.tensor_parallel` divides it. CUDA graphs: passes are captured; *tried*: a pass that torch cannot "
        "capture runs eagerly. GGUF: `general.architecture` of files that are read. What is not done is refused "
        "by its name before weights are read."
    )
    longrope = (
        "A target of LongRoPE (Phi-3, Phi-4-mini, PhiMoE: `rope_scaling` of `longrope` or `su`) has short factors for "
        "sequences of up to `original_max_position_embeddings` and long ones for longer sequences. transformers "
        "changes the rotation of a whole sequence when it becomes longer, and computes its cache again. Here, as in "
        "vLLM, one list turns all positions of all sequences: the long one if `model.max_model_len` is more than the "
        "original length, else the short one; without `model.max_model_len` a sequence has the original length at "
        "most. The log says which. So sequences past the original length have transformers' logits with a larger "
        "`model.max_model_len`, and shorter ones have them without. PhiMoE's long sequences differ from transformers, "
        "which turns them by the short factors."
    )
    dynamic = "With `rope_scaling` `dynamic`, a sequence has at most the positions before its scaling sets in."
    wrappers = "| model_type | class | text half | computed as |\n|---|---|---|---|\n"
    about = (
        "Of these models of more than text, the text half is loaded alone: tensors of other parts are not read, and a "
        "row with an image is an error row that says so."
    )
    return (
        f"# Families of models\n\n{MADE} {text}\n\n{head}"
        + "\n".join(map(family_row, FAMILIES.values()))
        + f"\n\n## Long contexts\n\n{longrope}\n\n{dynamic}\n"
        + f"\n## Text halves\n\n{about}\n\n{wrappers}"
        + "\n".join(row for wrapper in WRAPPERS.values() for row in wrapper_rows(wrapper))
        + "\n"
    )


def _quantised(family: Family) -> str:
    """Return whether layers of quantised checkpoints stay as they are stored, and why not."""
    if family.keeps_fp8_experts:
        return f"in FP8 alone: else {family.why_dense}"
    return f"no: {family.why_dense}" if family.why_dense else "yes"


def family_row(family: Family) -> str:
    files = [
        f"`{architecture}`"
        for architecture, record in ARCHITECTURES.items()
        if family.model_type in record.model_types
    ]
    is_captured = family.layer is not None and bool(family.layer.gate_up)
    cells = [
        f"`{family.model_type}`",
        family.causal_lm,
        "own" if family.layer is not None else f"transformers: {family.why_transformers}",
        _quantised(family),
        "yes" if family.is_divided else f"no: {family.why_whole}" if family.why_whole else "no",
        "yes" if is_captured else "tried",
        ", ".join(files),
    ]
    return f"| {' | '.join(cells)} |"


def wrapper_rows(wrapper: Wrapper) -> Iterator[str]:
    for text, family in wrapper.text_families.items():
        yield f"| `{wrapper.model_type}` | {wrapper.class_name} | `{text}` | `{family}` |"


def with_sampling_keys(example: str) -> str:
    """Return the example with a line for each key of `sampling`, after the comments that begin the section."""
    before, mark, rest = example.partition("\nsampling:")
    section, end, after = rest.partition("\n\n")
    head, *lines = section.splitlines()
    comments = list(itertools.takewhile(lambda line: line.lstrip().startswith("#"), lines))
    return before + mark + "\n".join([head, *comments, *sampling_lines()]) + end + after


def sampling_lines() -> Iterator[str]:
    width = EXAMPLE_CHARS - EXAMPLE_COLUMN - len("# ")
    for name, field in SamplingConfig.model_fields.items():
        key = f"  {name}: {json.dumps(field.get_default(call_default_factory=True))}"
        about = textwrap.wrap(SAMPLING[name].about, width, break_on_hyphens=False)
        for i, line in enumerate(about):
            yield f"{'' if i else key:<{EXAMPLE_COLUMN - 1}} # {line}"


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
