"""validate: check a job and show what it would do, without Ray and without loading a model.

Rows, tokenizer and checks are the job's own, so a row that passes here passes in the job. If a
model is not on this machine and the hub does not answer, everything else is checked, and the report
lists what was not.

    print(validate(load_config("configs/demo.yaml")))      # input    96 rows in 1 file ...

The grammars of all rows are compiled, each once, within a time limit. Rows with equal values in the
columns of structured output share a grammar. Tools' grammars are compiled for the first rows only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from eagle_ray.assembly.hub import (
    check_models,
    unavailable_models,
)
from eagle_ray.assembly.load_models import check_device
from eagle_ray.batch.driver.input_plan import InputPlan, requests_of, row_settings_line
from eagle_ray.batch.driver.job_plan import plan_for_validation
from eagle_ray.batch.driver.ray_environment import LOCAL, resolve_address, temporary_directory
from eagle_ray.batch.driver.start_checks import preview_output
from eagle_ray.batch.reader.carried_columns import CarriedColumn
from eagle_ray.cli.checked_rows import CheckedRow, CheckedTarget, checked_row, seen_target
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError, RequestError, shortened
from eagle_ray.core.grammar_spec import GrammarSpec
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.sampling_settings import SamplingSettings
from eagle_ray.methods.method import reads_draft
from eagle_ray.requests.parameters import FORMS, merged_values
from eagle_ray.requests.request import Request
from eagle_ray.runs.job_errors import JobError, OutputDamaged
from eagle_ray.runs.layout import output_of, wrap_os_errors
from eagle_ray.sampling.grammar import GrammarCompiler

FIRST_ROWS = 100
UNSEEN = {
    "target": "prompts, their lengths, the chat template and whether the head fits were not looked at",
    "draft": "whether it fits the target was not looked at",
}
# Seconds for all grammars together; one may take as long as it may in the job.
CHECK_TIMEOUT_S = 60.0
MAX_SHOWN = 20  # grammars that do not compile


def validate(config: JobConfig, draft_line: str | None = None) -> str:
    """Check a job and return a report. Raises ConfigError if it could not run or if every row is
    bad, and OutputDamaged."""
    plan = plan_for_validation(config).input
    if resolve_address(config.execution.ray_address) == LOCAL:
        temporary_directory()
        check_device(config.model)
    unseen = unavailable_models(config.model, config.speculative)
    if not unseen:
        check_models(config.model, config.speculative)  # here: a validation starts no Ray
    seen = None if "target" in unseen else seen_target(config)
    rows = [checked_row(row, config, seen) for row in islice(requests_of(plan), FIRST_ROWS)]
    good = [row for row in rows if row.error is None]
    grammars = _grammars(plan, config, seen)
    first = _first_prompt(good, seen, config.output.store_prompt)
    sections = [
        input_section(plan),
        _rows(rows, len(good)),
        *grammars,
        first,
        _model(config),
        *([] if draft_line is None else [f"draft    {draft_line}"]),
        output_section(plan, config),
    ]
    if rows and not good:
        raise ConfigError("no row can be answered\n" + _rows(rows, 0))
    return "\n".join(
        [*sections, *(f"unseen   {error}: {UNSEEN[part]}" for part, error in unseen.items())]
    )


def _grammars(plan: InputPlan, config: JobConfig, seen: CheckedTarget | None) -> list[str]:
    """Return the report's lines about the rows' grammars; none without grammars or without a tokenizer."""
    named = {name for name in FORMS if getattr(config.sampling, name)} | (
        plan.row_settings & {*FORMS}
    )
    if seen is None or seen.grammars is None or not named:
        return []
    return check_grammars(requests_of(plan.without_carried), config, seen.grammars).lines()


def input_section(plan: InputPlan) -> str:
    """Return the lines about the input's files and carried columns."""
    carried = ", ".join(_carried(column) for column in plan.reader.carried_columns) or "nothing"
    formats = ", ".join(sorted({file.format for file in plan.files}))
    settings = row_settings_line(plan)
    lines = [f"input    {plan.num_rows} rows in {_files(plan)} ({formats})", f"carried  {carried}"]
    return "\n".join(lines if settings is None else [*lines, f"settings {settings}"])


def _carried(column: CarriedColumn) -> str:
    renamed = "" if column.source == column.name else f"{column.source} as "
    return f"{renamed}{column.name} {column.field.type}"


def _files(plan: InputPlan) -> str:
    first = plan.files[0].path
    return (
        first
        if len(plan.files) == 1
        else f"{len(plan.files)} files, {first} to {plan.files[-1].path}"
    )


def _rows(rows: list[CheckedRow], num_good: int) -> str:
    bad = [f"         {row.error}" for row in rows if row.error is not None]
    verdict = (
        f"the first {len(rows)} looked at: {num_good} good, {len(bad)} would become error rows"
    )
    num_long = sum(row.code == "prompt_too_long" for row in rows)
    too_long = f"; {num_long} do not fit into model.max_model_len" if num_long else ""
    return "\n".join([f"rows     {verdict}{too_long}", *bad])


def _first_prompt(good: Iterable[CheckedRow], seen: CheckedTarget | None, is_shown: bool) -> str:
    row = next(iter(good), None)
    if row is None:
        return "prompt   there is no row"
    if seen is None:
        return f"prompt   the first, {shortened(repr(row.request_id))}, not looked at: it takes the target's tokenizer"
    if not is_shown:
        name = shortened(repr(row.request_id))
        return f"prompt   the first, {name}, {len(row.prompt_ids)} tokens, not shown, as output.store_prompt is false"
    shown = (
        f"token ids {row.prompt_ids}"
        if seen.text is None
        else seen.text.decode_with_special(row.prompt_ids)
    )
    lines = "\n".join(f"         | {line}" for line in shown.split("\n"))
    name = shortened(repr(row.request_id))
    return f"prompt   the first, {name}, {len(row.prompt_ids)} tokens, as the model will see it:\n{lines}"


def _model(config: JobConfig) -> str:
    method = config.speculative.merged_methods
    drafts = config.model.drafts
    draft = f"head {config.model.draft_name}" if reads_draft(method, drafts) else "no draft head"
    return f"model    {config.model.target}, {draft}, method {config.method_name}"


def output_section(plan: InputPlan, config: JobConfig) -> str:
    """Check that the output is writable, and return the lines on what a run would find in it. Leaves no file behind."""
    output = output_of(config)
    with wrap_os_errors(output):
        output.check_writable()
    try:
        return f"output   {output} can be written; {preview_output(plan, config)}"
    except OutputDamaged:  # the outcome is that of every other command
        raise
    except JobError as error:  # the output is another program's, job's or input's
        raise ConfigError(f"output.path: {error}") from None


@dataclass
class BadGrammar:
    """A grammar that does not compile.

    Attributes:
        first: location of the first row that has it.
        num_rows: number of rows that have it.
    """

    first: str
    field: str
    error: str
    num_rows: int = 1

    def __str__(self) -> str:
        others = "" if self.num_rows == 1 else f" ({self.num_rows} rows have it)"
        return f"{self.first}: {self.field}: {self.error}{others}"


@dataclass
class GrammarCheck:
    """The result of compiling the rows' grammars.

    Attributes:
        num_rows: rows with a grammar.
        num_compiled: distinct grammars that were tried.
        num_skipped: rows whose grammar was not tried because time was up.
        bad: grammars that do not compile, by their digest.
    """

    num_rows: int = 0
    num_compiled: int = 0
    num_skipped: int = 0
    bad: dict[bytes, BadGrammar] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the lines of the report; empty without grammars."""
        if not self.num_rows:
            return []
        verdict = f"{len(self.bad)} do not compile" if self.bad else "all compile"
        lines = [f"grammars {self.num_compiled} in {self.num_rows} rows, {verdict}"]
        shown = list(self.bad.values())[:MAX_SHOWN]
        lines += [f"         {bad}" for bad in shown]
        if len(self.bad) > len(shown):
            lines.append(f"         and {len(self.bad) - len(shown)} others")
        if self.num_skipped:
            limit = f"within {CHECK_TIMEOUT_S:g} s"
            lines.append(
                f"         those of {self.num_skipped} rows were not compiled {limit}: the job will"
            )
        return lines


def check_grammars(
    requests: Iterable[Request], config: JobConfig, compiler: GrammarCompiler
) -> GrammarCheck:
    """Compile every grammar that the job or its rows name, each once. Bad rows are left out."""
    check = GrammarCheck()
    tried: set[bytes] = set()
    defaults = config.sampling.model_dump(include=set(FORMS))
    deadline = time.monotonic() + CHECK_TIMEOUT_S
    for request in requests:
        own = {name: request.sampling[name] for name in FORMS if request.sampling.get(name)}
        if request.error is not None or not (own or any(defaults.values())):
            continue
        values = merged_values(defaults, {name: request.sampling.get(name) for name in FORMS})
        spec = GrammarSpec.of(SamplingSettings(**values))
        if spec is None:  # {"type": "text"}
            continue
        check.num_rows += 1
        key = hashlib.blake2b(dump_json(values, sort_keys=True).encode(), digest_size=16).digest()
        if key in tried:
            if key in check.bad:
                check.bad[key].num_rows += 1
        elif time.monotonic() > deadline:
            check.num_skipped += 1
        else:
            tried.add(key)
            check.num_compiled += 1
            try:
                compiler.start(spec)
            except RequestError as error:
                check.bad[key] = BadGrammar(request.location, _field_of(own, defaults), str(error))
    return check


def _field_of(own: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return the column or the key that holds the grammar."""
    if own:
        return f"column {next(iter(own))!r}"
    return "sampling." + next(name for name in FORMS if defaults[name])
