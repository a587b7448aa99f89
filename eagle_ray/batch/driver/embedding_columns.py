"""Output columns that a job's task or its engine adds, and the check of `prompt_name` for embeddings."""

from __future__ import annotations

from collections.abc import Container, Mapping

import pyarrow as pa

from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.columns import PROMPT_NAME
from eagle_ray.requests.row_schema import ENGINE_FIELDS


def made_fields(config: JobConfig) -> list[pa.Field]:
    """Return the output columns that the job's task or its engine adds to those of every job. Raises ConfigError.

    The width of an embedding is read from the target's files.
    """
    if not config.engine.is_own:
        return list(ENGINE_FIELDS)
    if config.task != "embed":
        return []
    from eagle_ray.assembly.embedders import check_embedder  # torch
    from eagle_ray.requests.embeddings import embedding_field

    files = check_embedder(config.model, config.embedding)
    return [embedding_field(config.embedding, files)]


def check_prompt_names(
    config: JobConfig, columns: Container[str], carried: Mapping[str, str]
) -> None:
    """Raise ConfigError if the input has a column prompt_name that would be ignored and not even carried.

    Args:
        columns: names of the input's columns.
        carried: output names of the carried columns.
    """
    if config.task == "embed" and PROMPT_NAME in columns and PROMPT_NAME not in carried:
        raise ConfigError(
            f"input.passthrough: must be all or name {PROMPT_NAME!r}, by which rows choose their prompts"
        )
