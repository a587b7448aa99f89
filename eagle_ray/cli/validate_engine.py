"""validate a job whose rows another engine answers: show what a run would send and refuse, and send one real row.

print(validate_engine(config))      # input    96 rows in 1 file ...
"""

from __future__ import annotations

from itertools import islice

from eagle_ray.batch.driver.input_plan import requests_of
from eagle_ray.batch.driver.job_plan import plan_for_validation
from eagle_ray.cli.validate import FIRST_ROWS, input_section, output_section
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError, RequestError
from eagle_ray.port.engine_check import check_engine
from eagle_ray.port.http_target import Target
from eagle_ray.port.preflight import first_request, preflight
from eagle_ray.requests.request import Request


def validate_engine(config: JobConfig) -> str:
    """Check a job and return a report. Raises ConfigError if it could not run or if every row is
    bad, and OutputDamaged.

    The first good row is sent as the job would send it.
    """
    plan = plan_for_validation(config).input
    target = check_engine(config, plan.row_settings)
    dialect = config.engine.kind if target is None else target.dialect
    first = list(islice(requests_of(plan), FIRST_ROWS))
    checked = target or Target((), dialect)  # a child's, which does not run yet
    errors = {request.id: _error(request, config, checked) for request in first}
    good = [request for request in first if errors[request.id] is None]
    bad = [f"         {error}" for error in errors.values() if error is not None]
    rows = f"rows     the first {len(first)} looked at: {len(good)} good, {len(bad)} would become error rows"
    rows = "\n".join([rows, *bad])
    if first and not good:
        raise ConfigError(f"no row can be answered\n{rows}")
    sections = [input_section(plan), rows, _engine(config, dialect)]
    if target is not None and good:
        sections += preflight(good[0], config, target)
    return "\n".join([*sections, output_section(plan, config)])


def _error(request: Request, config: JobConfig, target: Target) -> str | None:
    """Return why a row cannot be sent."""
    try:
        request.check()
        first_request(request, config, target)
    except RequestError as error:
        return f"{request.error_text(error)} [{error.code}]"
    return None


def _engine(config: JobConfig, dialect: str) -> str:
    engine = config.engine
    where = "a child of each worker" if engine.base_url is None else ", ".join(engine.base_url)
    return f"engine   {engine.kind}, {engine.model} at {where}, dialect {dialect}"
