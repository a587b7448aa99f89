"""Choose the head of a job that `eagle-ray validate` checks, if model.draft is auto, as the job would."""

from __future__ import annotations

from eagle_ray.assembly.draft_choice import known_heads
from eagle_ray.assembly.hub import ModelUnavailable
from eagle_ray.batch.driver.job_draft import job_draft
from eagle_ray.config import JobConfig
from eagle_ray.config.models import with_draft


def draft_to_validate(config: JobConfig) -> tuple[JobConfig, str | None]:
    """Return the configuration with model.draft auto replaced by a name or null, and a line about the choice.

    The line is None if the configuration names a draft. If the target is not on this machine, the
    line names the heads that the catalogue has for it. Raises as choose_draft does.
    """
    try:
        return job_draft(config)
    except ModelUnavailable:
        known = known_heads(config.model.target)
        heads = ", ".join(known) if known else "none"
        line = f"model.draft auto: not looked for, as the target is not here. The catalogue has {heads}"
        return with_draft(config, None), line
