"""Command line flags that several commands share, and the configuration that results from them.

A command adds them to its parser, and reads the configuration from what was parsed:

    add_config_flags(parser)
    config_of(parser.parse_args(["-c", "job.yaml", "--limit", "5"])).input.limit      # 5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from eagle_ray.config import JobConfig, load_config
from eagle_ray.config.records import flatten_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.requests.parameters import MAX_TEMPERATURE


def add_file_flags(add_argument: Callable[..., Any], description: str) -> None:
    """Add the flags -c and --set to a parser.

    Args:
        add_argument: method add_argument of a parser or a group.
        description: description of the YAML file.
    """
    add_argument("-c", "--config", metavar="FILE", help=f"a YAML file{description}")
    add_set_flag(add_argument)


def add_set_flag(add_argument: Callable[..., Any]) -> None:
    """Add the flag --set to a parser."""
    add_argument(
        "--set", dest="sets", action="append", default=[], metavar="A.B=C", help="override one key"
    )


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a job's configuration."""
    add_file_flags(parser.add_argument, " such as configs/example.yaml")
    parser.add_argument("-i", "--input", metavar="IN", action="append", help="input.path")
    parser.add_argument("-o", "--output", metavar="OUT", help="output.path")
    parser.add_argument("--limit", type=int, metavar="N", help="input.limit: only the first N rows")


def add_bound_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run's deadline and budget."""
    parser.add_argument(
        "--finish-by",
        metavar="WHEN",
        help="execution.finish_by: 06:00, 4h, or a date and time with its zone",
    )
    parser.add_argument(
        "--max-dollars",
        type=float,
        metavar="X",
        help="execution.max_dollars: what the run may cost (execution.price_per_hour)",
    )


def config_of(args: argparse.Namespace, defaults: Mapping[str, str] | None = None) -> JobConfig:
    """Return the configuration of a job. Raises ConfigError.

    Args:
        defaults: values of keys that neither the file nor a flag names.
    """
    flags = {
        "input.path": last_input(args.input),
        "input.limit": args.limit,
        "output.path": args.output,
        "output.if_exists": "resume"
        if getattr(args, "restarted", False)
        else getattr(args, "if_exists", None),
        "input.allow_empty": getattr(args, "allow_empty", None),
        "execution.shard": getattr(args, "shard", None),
        "execution.finish_by": getattr(args, "finish_by", None),
        "execution.max_dollars": getattr(args, "max_dollars", None),
    }
    return load_config(
        args.config, sets=args.sets, overrides=without_none(flags), defaults=defaults
    )


def config_of_pair(args: argparse.Namespace) -> JobConfig:
    """Return a configuration with only target and draft, to check them without a job. Raises ConfigError."""
    config = config_of(args, {"input.path": "embedded:prompts", "output.path": "runs/run"})
    if not config.engine.is_own:
        raise ConfigError(
            f"engine.kind: {config.engine.kind}, and this command is for our own engine. Leave it out"
        )
    return config


def check_comparable(
    jobs: Mapping[str, JobConfig],
    flag: str,
    why: str,
    sections: Iterable[str],
    ignored: Container[str] = (),
) -> None:
    """Raise ConfigError naming the first key in which a configuration differs from the first one.

    Args:
        jobs: configurations by name.
        flag: flag that named them.
        why: reason why the sections must be equal.
        ignored: dotted keys that may differ.
    """
    values = {
        name: flatten_config(config.model_dump(mode="json", include=set(sections)))
        for name, config in jobs.items()
    }
    first, *others = jobs
    for name in others:
        for key in sorted(values[first].keys() | values[name].keys()):
            a = values[first].get(key)
            b = values[name].get(key)
            if key not in ignored and a != b:
                raise ConfigError(
                    f"{flag}: {first} and {name} have {key} {a!r} and {b!r}, and {why}. "
                    f"Set it for all: --set {key}=..."
                )


def without_none(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that were given, without those that are None."""
    return {key: value for key, value in flags.items() if value is not None}


def last_input(inputs: list[str] | None) -> str | None:
    """Return the value of the last -i, and warn that it replaces earlier ones."""
    if inputs and len(inputs) > 1:
        others = ", ".join(inputs[:-1])
        print(
            f"eagle-ray: -i {inputs[-1]} replaces -i {others}. To read them all: --set 'input.path=[{others}, ...]'",
            file=sys.stderr,
        )
    return inputs[-1] if inputs else None


def parse_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def parse_temperatures(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= MAX_TEMPERATURE for value in values):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of numbers from 0 to {MAX_TEMPERATURE:g}, such as 0,1"
        )
    return list(dict.fromkeys(values))


def parse_positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)
