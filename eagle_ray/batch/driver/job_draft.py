"""Choose the head of a job whose model.draft is auto: the recorded one, or the best one for a new output.

A resumed job, and every shard, uses the head in the run's record, so that all rows of an output
have one head. A finished job needs no models, so no head is chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from eagle_ray.config import JobConfig
from eagle_ray.config.models import with_draft
from eagle_ray.methods.method import AUTO
from eagle_ray.runs.job_errors import JobError
from eagle_ray.runs.layout import output_of, read_shard_plan, root_of
from eagle_ray.runs.run import Run

log = logging.getLogger("eagle_ray")


def with_job_draft(config: JobConfig) -> JobConfig:
    """Return the configuration with model.draft auto replaced by a name or null, and log it. Raises
    as choose_draft does."""
    config, line = job_draft(config)
    if line is not None:
        log.info("%s", line)
    return config


def job_draft(config: JobConfig) -> tuple[JobConfig, str | None]:
    """Return the configuration with model.draft auto replaced by a name or null, and a line that says why.

    The line is None if the configuration already names a draft. Raises as draft_choice.choose_draft
    does.
    """
    if config.model.draft != AUTO:
        return config, None
    recorded = _recorded_model(config)
    if recorded is not None and recorded.get("target") == config.model.target:
        draft = recorded["draft"]
        line = f"model.draft auto: {draft or 'no head'} (what the output was begun with)"
        return with_draft(config, draft), line

    from eagle_ray.assembly.draft_choice import choose_draft  # torch, seconds

    choice = choose_draft(config.model, config.speculative)
    return with_draft(config, choice.draft), choice.line


def _recorded_model(config: JobConfig) -> Mapping[str, Any] | None:
    """Return the key `model` of the configuration on record, or None if there is none that can be read."""
    if config.output.if_exists == "overwrite":
        return None
    output = output_of(config)
    with suppress(OSError, JobError):  # opening the run names what is wrong
        if (manifest := Run.inspect(output).manifest) is not None:
            return manifest["config"]["model"]
        if (plan := read_shard_plan(root_of(output))) is not None:
            return plan["config"]["model"]
    return None
