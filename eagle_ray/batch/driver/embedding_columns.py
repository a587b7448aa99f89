"""The columns that a job's task or its engine makes, and the one that names the prompt of an embedded row."""

from __future__ import annotations

from collections.abc import Container, Mapping

import pyarrow as pa

from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.columns import PROMPT_NAME
from eagle_ray.requests.row_schema import ENGINE_FIELDS


def made_fields(config: JobConfig) -> list[pa.Field]:
    """Return the columns that the task or the engine of a job makes, besides those of every job. Raises ConfigError.

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
    """Raise ConfigError for an input whose column prompt_name would not be read, since nothing carries it.

    Args:
        columns: names of the input's columns.
        carried: names in the output of the carried ones.
    """
    if config.task == "embed" and PROMPT_NAME in columns and PROMPT_NAME not in carried:
        raise ConfigError(
            f"input.passthrough: must be all or name {PROMPT_NAME!r}, by which rows choose their prompts"
        )
