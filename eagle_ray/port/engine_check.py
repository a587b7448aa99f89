"""Checks of another engine before a job starts: nothing that is paid for is sent.

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


def check_engine(config: JobConfig, row_settings: Iterable[str] = ()) -> Target | None:
    """Return the endpoint that a job's requests go to; None if workers start it. Raises ConfigError.

    Args:
        row_settings: names of parameters that are columns of the input.
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
        target = Target(urls, dialect, key, facts.version, price_of(engine))
    faults += unsaid_settings(config, dialect)
    faults += [
        f"column {refusal_of(name, dialect)}"
        for name in sorted(row_settings)
        if name in SPELLINGS and not can_say(name, dialect)
    ]
    if faults:
        raise ConfigError("\n".join(faults))
    return target
