"""Check another engine before a job starts, without a request that costs money.

target = check_engine(config, row_settings=["top_k"])
target.dialect       # "vllm"
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.port.dialects import SPELLINGS, can_say, refusal_of, unsaid_settings
from eagle_ray.port.endpoint import look_at, read_key
from eagle_ray.port.http_target import Target
from eagle_ray.port.prices import price_of
from eagle_ray.port.server_child import command_of_server
from eagle_ray.port.server_flags import unknown_flags

SCORED = ("continuations", "score_text")  # parameters by which a row is scored


def check_engine(config: JobConfig, row_settings: Iterable[str] = ()) -> Target | None:
    """Check a job's endpoint and return it; None if workers start the server. Raises ConfigError.

    Args:
        row_settings: names of request parameters that are columns of the input.
    """
    engine = config.engine
    target = None
    faults: list[str] = []
    dialect: str = engine.kind
    if engine.is_child:
        command = command_of_server(engine)
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"engine.command: there is no program {command[0]!r}. Install it, or give its path"
            )
        faults = unknown_flags(command, engine.kind, engine.serve_args)
    else:
        key = read_key(engine)
        facts = look_at(engine, key)
        dialect = facts.dialect
        urls = tuple(engine.base_url or ())
        target = Target(urls, dialect, key, facts.version, price_of(engine), facts.max_model_len)
    columns = [name for name in sorted(row_settings) if name in SPELLINGS]
    faults += unsaid_settings(config, dialect)
    faults += [
        f"column {refusal_of(name, dialect)}" for name in columns if not can_say(name, dialect)
    ]
    if not faults and not engine.has_tokenizer:
        faults += _without_tokenizer(config, columns)
    if faults:
        raise ConfigError("\n".join(faults))
    return target


def _without_tokenizer(config: JobConfig, columns: list[str]) -> list[str]:
    """Return why what is scored needs engine.tokenizer; nothing if no row is scored."""
    settings = [f"sampling.{name}" for name in SCORED if getattr(config.sampling, name)]
    settings += [f"column {name}" for name in columns if name in SCORED]
    if not settings:
        return []
    return [
        f"engine.tokenizer: required by {', '.join(settings)}, whose prompts are sent as token ids. Give a directory "
        "or a repository that has the tokenizer of engine.model"
    ]
