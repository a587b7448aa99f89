"""Check the flags of another engine's server against its own help, before it is started.

unknown_flags(["vllm", "serve"], "vllm", ["max-model-len", "tensor-paralel-size"])
# ["engine.serve_args: vllm serve has no --tensor-paralel-size. Did you mean --tensor-parallel-size?"]
"""

from __future__ import annotations

import difflib
import logging
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence

from eagle_ray.port.server_child import environment_of_server

log = logging.getLogger("eagle_ray")
HELP_S = 180.0  # seconds that a program has to print its help; vLLM imports torch before
HELP_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")
# Flag that lists all flags, by engine.kind; vLLM's --help lists groups alone.
HELP: Mapping[str, str] = {"vllm": "--help=all"}


def unknown_flags(command: Sequence[str], kind: str, flags: Iterable[str]) -> list[str]:
    """Return an error line for each flag that the program's help does not list; none if it prints no help.

    Args:
        command: program and its first arguments, without a model.
        kind: value of engine.kind.
        flags: names of flags without their dashes.
    """
    wanted = list(flags)
    known = _flags_of_help([*command, HELP.get(kind, "--help")]) if wanted else set()
    if not known:
        return []
    program = " ".join(command)
    return [
        f"engine.serve_args: {program} has no --{flag}{_suggestion(flag, known)}"
        for flag in wanted
        if flag not in known
    ]


def _flags_of_help(command: list[str]) -> set[str]:
    """Return the flags in a program's help; none if it cannot be read."""
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment_of_server(),
            timeout=HELP_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.info("flags of %s are not checked: %s", command[0], error)
        return set()
    return set(HELP_FLAG.findall(ended.stdout.decode("utf-8", "replace")))


def _suggestion(flag: str, known: set[str]) -> str:
    nearest = difflib.get_close_matches(flag, sorted(known), n=1)
    return f". Did you mean --{nearest[0]}?" if nearest else ". Correct it, or leave it out"
