"""validate: what a job would do, looked at without Ray and without loading a model.

The rows, the tokenizer and the checks are the job's own, so that what passes here is what the job will see. Of a model
that is not on this machine, while the hub does not answer, everything else is checked and the report says what was not.

    print(validate(load_config("configs/demo.yaml")))      # input    96 rows in 1 file ...

The grammars of all rows are compiled, each once, within a time limit. A grammar is known by the columns that say what
an output must be. Those of tools are compiled with the first rows only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from eagle_ray.assembly.engine_sizes import ModelLimits
from eagle_ray.assembly.hub import check_models, cpu_model_len, load_tokenizer, model_limits, unavailable_models
from eagle_ray.assembly.load_models import check_device, runs_on_gpu
from eagle_ray.batch.driver.input_plan import InputPlan, requests_of, row_settings_line
from eagle_ray.batch.driver.job_plan import plan_for_validation
from eagle_ray.batch.driver.ray_environment import LOCAL, resolve_address, temporary_directory
from eagle_ray.batch.driver.start_checks import preview_output
from eagle_ray.batch.reader.input_columns import CarriedColumn
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError, RequestError, shortened, without_values
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.sequence import check_length, check_token_ids
from eagle_ray.methods.method import reads_draft
from eagle_ray.requests.parameters import FORMS, ROW_PARAMETERS, SamplingParams, merged_values
from eagle_ray.requests.request import Request
from eagle_ray.requests.sequences import sequences_of
from eagle_ray.runs.job_errors import JobError, OutputDamaged
from eagle_ray.runs.layout import output_of, wrap_os_errors
from eagle_ray.sampling.grammar import GrammarCompiler, GrammarSpec
from eagle_ray.text.tokenizer import Tokenizer

FIRST_ROWS = 100
UNSEEN = {
    "target": "prompts, their lengths, the chat template and whether the head fits were not looked at",
    "draft": "whether it fits the target was not looked at",
}
CHECK_TIMEOUT_S = 60.0  # of all grammars together; one may take as long as it may in the job
MAX_SHOWN = 20  # grammars that do not compile


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """What was found of the target. text: None where it has no tokenizer; grammars: None without one.

    max_model_len: as far as the KV cache of a CPU worker holds it; how much a GPU holds is known only there.
    """

    text: Tokenizer | None
    limits: ModelLimits
    max_model_len: int
    grammars: GrammarCompiler | None


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A row and the ids its prompt became, or why it will be an error row, with the error's code."""

    request_id: str
    prompt_ids: list[int]
    error: str | None
    code: str | None = None


def validate(config: JobConfig) -> str:
    """Return a report. Raises ConfigError if the job could not run or if every row is bad, and OutputDamaged."""
    plan = plan_for_validation(config).input
    if resolve_address(config.execution.ray_address) == LOCAL:
        temporary_directory()
        check_device(config.model)
    unseen = unavailable_models(config.model, config.speculative)
    if not unseen:
        check_models(config.model, config.speculative)  # here: a validation starts no Ray
    seen = None if "target" in unseen else _seen(config)
    rows = [_checked(row, config, seen) for row in islice(requests_of(plan), FIRST_ROWS)]
    good = [row for row in rows if row.error is None]
    grammars = _grammars(plan, config, seen)
    first = _first_prompt(good, seen, config.output.store_prompt)
    sections = [_input(plan), _rows(rows, len(good)), *grammars, first, _model(config), _output(plan, config)]
    if rows and not good:
        raise ConfigError("no row can be answered\n" + _rows(rows, 0))
    return "\n".join([*sections, *(f"unseen   {error}: {UNSEEN[part]}" for part, error in unseen.items())])


def _seen(config: JobConfig) -> CheckedTarget:
    text, limits = load_tokenizer(config.model), model_limits(config.model)
    grammars = None if text is None else GrammarCompiler(text.to_json, limits.vocab_size, text.eos_ids)
    max_model_len = limits.max_model_len if runs_on_gpu(config) else cpu_model_len(config)
    return CheckedTarget(text, limits, max_model_len, grammars)


def _grammars(plan: InputPlan, config: JobConfig, seen: CheckedTarget | None) -> list[str]:
    """Return the lines of the grammars of all rows; none if there are none or no tokenizer to compile them for."""
    named = {name for name in FORMS if getattr(config.sampling, name)} | (plan.row_settings & {*FORMS})
    if seen is None or seen.grammars is None or not named:
        return []
    return check_grammars(requests_of(plan.without_carried), config, seen.grammars).lines()


def _checked(request: Request, config: JobConfig, seen: CheckedTarget | None) -> CheckedRow:
    try:
        if seen is None:
            without_text = replace(request, prompt_token_ids=[0], sampling={**request.sampling, "stop": []})
            sequences_of(without_text, config, None, n=1)  # only a tokenizer can check a text
            return CheckedRow(str(request.id), [], None)
        [sequence] = sequences_of(request, config, seen.text, n=1)
        check_length(sequence, seen.max_model_len, seen.limits.vocab_size)
        check_token_ids(sequence, seen.limits.vocab_size)
        if sequence.grammar_spec is not None and seen.grammars is not None:
            seen.grammars.start(sequence.grammar_spec)
    except RequestError as error:
        shown = error
        if request.error is None and not config.output.store_prompt:
            shown = without_values(error, ROW_PARAMETERS)
        return CheckedRow(str(request.id), [], f"{request.error_text(shown)} [{error.code}]", error.code)
    return CheckedRow(str(request.id), sequence.prompt_ids, None)


def _input(plan: InputPlan) -> str:
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
    return first if len(plan.files) == 1 else f"{len(plan.files)} files, {first} to {plan.files[-1].path}"


def _rows(rows: list[CheckedRow], num_good: int) -> str:
    bad = [f"         {row.error}" for row in rows if row.error is not None]
    verdict = f"the first {len(rows)} looked at: {num_good} good, {len(bad)} would become error rows"
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
    shown = f"token ids {row.prompt_ids}" if seen.text is None else seen.text.decode_with_special(row.prompt_ids)
    lines = "\n".join(f"         | {line}" for line in shown.split("\n"))
    name = shortened(repr(row.request_id))
    return f"prompt   the first, {name}, {len(row.prompt_ids)} tokens, as the model will see it:\n{lines}"


def _model(config: JobConfig) -> str:
    method, drafts = config.speculative.merged_methods, config.model.drafts
    draft = f"head {config.model.draft_name}" if reads_draft(method, drafts) else "no draft head"
    return f"model    {config.model.target}, {draft}, method {config.method_name}"


def _output(plan: InputPlan, config: JobConfig) -> str:
    """Check whether the output is writable, and report what a run would find there. Leaves no file."""
    output = output_of(config)
    with wrap_os_errors(output):
        output.check_writable()
    try:
        return f"output   {output} can be written; {preview_output(plan, config)}"
    except OutputDamaged:  # the outcome is that of every other command
        raise
    except JobError as error:  # of another program, job or input
        raise ConfigError(f"output.path: {error}") from None


@dataclass
class BadGrammar:
    """A grammar that does not compile. first: the location of the first row that has it. num_rows: that have it."""

    first: str
    field: str
    error: str
    num_rows: int = 1

    def __str__(self) -> str:
        others = "" if self.num_rows == 1 else f" ({self.num_rows} rows have it)"
        return f"{self.first}: {self.field}: {self.error}{others}"


@dataclass
class GrammarCheck:
    """What was found.

    Attributes:
        num_rows: rows with a grammar.
        num_compiled: distinct grammars that were tried.
        num_skipped: rows whose grammar was not tried, for time was up.
        bad: by the grammar's digest.
    """

    num_rows: int = 0
    num_compiled: int = 0
    num_skipped: int = 0
    bad: dict[bytes, BadGrammar] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the lines of the report; none without grammars."""
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
            lines.append(f"         those of {self.num_skipped} rows were not compiled {limit}: the job will")
        return lines


def check_grammars(requests: Iterable[Request], config: JobConfig, compiler: GrammarCompiler) -> GrammarCheck:
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
        if (spec := GrammarSpec.of(SamplingParams.of_checked(values))) is None:  # {"type": "text"}
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
