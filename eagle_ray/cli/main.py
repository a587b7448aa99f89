"""The command line: demo, run, finish, repair, validate, submit, status, report, compare, export,
train, serve, bench, heads and doctor.

COMMANDS names the module of each command, which adds its flags and runs it. Only the module of the
command that is given is imported. Errors are reported as one message and an exit code.

Exit codes (``runs/job_errors.py`` has the table): 0 done (rows with errors included), 1 an unknown
error, 2 usage or configuration, 3 row errors with --fail-on-row-errors, 4 too many row errors, or
no row without one, 5 transient (storage, cluster, workers or a device failed for now; --keep-going
restarts), 6 the output belongs to another job or is damaged, or the input changed, 7 busy (another
live driver writes the output), 130 interrupted, resumable. ``doctor`` ends with 5 if it found a
problem.

    $ eagle-ray run -c configs/demo.yaml --set sampling.temperature=0.8

Below the address space that they need (``ulimit -v``), pyarrow, torch and Ray end the process with
a traceback or an abort in C++, or hang. So the limit is checked first.

    $ (ulimit -v 1000000; eagle-ray demo) eagle-ray: ulimit -v: this shell limits a process to 1.0
    GB of address space, and Ray needs 3.5 GB. Raise it ...
"""

from __future__ import annotations

import argparse
import difflib
import io
import re
import resource
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from eagle_ray import __version__
from eagle_ray.batch.driver.signals import ignore_until_exit, interruptible
from eagle_ray.core.start_log import (
    Stderr,
    Stdout,
    StdoutClosed,
    StdoutError,
    discard_stdout,
    open_streams,
)
from eagle_ray.runs.job_errors import (
    CONFIGURATION,
    DONE,
    EXPECTED_ERRORS,
    INTERRUPTED,
    PERMANENT,
    TRANSIENT,
    ClusterUnfit,
    outcome_by_code,
    outcome_of,
)

CLUSTER = "eagle_ray.batch.driver.cluster"  # imports Ray
COMMANDS = {  # command: (its module, which has a function add_COMMAND, and what it does)
    "demo": ("job_commands", "the embedded pair on bundled prompts: CPU, no network"),
    "run": ("job_commands", "generate completions for every row of the input"),
    "finish": ("job_commands", "complete an output that shards have written (run --shard i/n)"),
    "repair": ("job_commands", "adopt the rows of an output whose record is lost or damaged"),
    "validate": ("job_commands", "check configuration, rows, prompt and storage without Ray"),
    "plan": ("job_commands", "which of several clusters would do in time, and what it costs there"),
    "submit": ("job_commands", "run as a job of a Ray cluster and follow its log"),
    "status": ("output_commands", "where a run stands, from its output directory"),
    "report": ("output_commands", "a run's numbers, finished or not, and its report.html"),
    "compare": (
        "output_commands",
        "two runs side by side; without runs, methods on one's own prompts",
    ),
    "export": ("output_commands", "a run's rows as OpenAI batch output lines or CSV"),
    "publish": (
        "output_commands",
        "publish a run's finished files to a dataset of the hub, a Delta or an Iceberg table",
    ),
    "train": ("model_commands", "train a draft head for a target, on chats or on its own answers"),
    "serve": ("model_commands", "answer HTTP requests in OpenAI's protocol, until interrupted"),
    "bench": ("model_commands", "measure this machine"),
    "heads": ("model_commands", "the published draft heads of a target, and a check of a head"),
    "doctor": (
        "model_commands",
        "what this machine has, whether a pair fits, and what to do about it",
    ),
}
# Least address space with which a command ended well, measured on 2 cores with the embedded pair:
# `run` ended well with 3.58 GB and not with 3.07 GB, `compare` of methods with 3.07 GB and not with
# 2.56 GB, `report` with 0.51 GB, not 0.31.
NEEDED_GB = {"Ray": 3.5, "torch": 3.0, "pyarrow": 0.5}
AMPLE = 2.0  # times what is needed: larger models and machines with more cores take more than was measured
GB = 10**9
RAISE_LIMIT = "Raise it (ulimit -v unlimited), or start the command where no such limit is set"
LIMITED_MEMORY = re.compile(
    r"failed to map segment|can't start new thread|can(no|')t allocate memory|bad_alloc",
    re.IGNORECASE,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Wrong usage raises SystemExit(2), as argparse does.

    Args:
        argv: None for this process's own, which ends with the command.
    """
    _print_anything(is_own_process=argv is None)
    args = _parse(argv)
    args.arguments = list(sys.argv[1:] if argv is None else argv)[1:]  # without the command
    code = None
    try:
        code = _exit_code_of(args)
        return (
            _code_for_supervisor(code) if getattr(args, "exit_zero_if_permanent", False) else code
        )
    finally:
        if argv is None:
            ignore_until_exit()
            _end_ray(keeps_logs=code != DONE.code)


def _end_ray(keeps_logs: bool) -> None:
    """End or leave the cluster, if Ray was imported. Ray itself would first wait for log lines that we do not show.

    The logs of a cluster of our own are kept if the command has failed.
    """
    if CLUSTER in sys.modules:
        sys.modules[CLUSTER].end_ray(keeps_logs)
    elif "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def _exit_code_of(args: argparse.Namespace) -> int:
    """Run the command, print its error and return the exit code."""
    try:
        if warning := check_address_space(args.library):
            print(f"eagle-ray: {warning}", file=sys.stderr)
        with interruptible():
            code = args.command(args)
        sys.stdout.flush()
        has_lost_reader = code == DONE.code and getattr(sys.stdout, "has_lost_reader", False)
        return _end_quietly() if has_lost_reader else code
    except StdoutClosed:
        return _end_quietly()
    except StdoutError as error:
        discard_stdout()
        print(
            f"eagle-ray: stdout cannot be written: {error.strerror}. Make room, or redirect it.",
            file=sys.stderr,
        )
        return CONFIGURATION.code
    except EXPECTED_ERRORS as error:
        outcome = outcome_of(error)
        print(f"eagle-ray: {'interrupted' if outcome is INTERRUPTED else error}", file=sys.stderr)
        return outcome.code
    except Exception as error:
        if not (words := out_of_memory_words(error)):
            raise
        print(f"eagle-ray: {words}", file=sys.stderr)
        return TRANSIENT.code


def _code_for_supervisor(code: int) -> int:
    """Return 0 in place of an exit code that another attempt would end with again."""
    outcome = outcome_by_code(code)
    if outcome not in PERMANENT:
        return code
    print(
        f"eagle-ray: exit 0 in place of {code} ({outcome.name}): no attempt would change it",
        file=sys.stderr,
    )
    return 0


def _print_anything(is_own_process: bool) -> None:
    """Print characters that the terminal's encoding lacks as escapes, since completions may be in any script.

    Output to a closed stream (``>&-``) is discarded, and so is the log once nothing reads it.
    """
    open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
        if is_own_process:
            sys.stdout = Stdout.over(sys.stdout)
    if is_own_process and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = Stderr.over(sys.stderr)


def _end_quietly() -> int:
    """End as SIGPIPE would, because stdout was closed, as after ``| head``. The last flush is discarded."""
    discard_stdout()
    return 128 + signal.SIGPIPE


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    words = sys.argv[1:] if argv is None else argv
    command = next((word for word in words if not word.startswith("-")), None)
    parser = _parser(command)
    if command is not None and command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        parser.error(f"there is no command {command}{f'; did you mean {near[0]}?' if near else ''}")
    args, others = parser.parse_known_args(argv)
    if others:
        hint = "; an input is given as -i IN" if "input" in args else ""
        parser.error(f"unrecognized arguments: {' '.join(others)}{hint}")
    return args


def _parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the flags of this one."""
    parser = argparse.ArgumentParser(
        prog="eagle-ray", description="Batch inference on Ray with EAGLE-2."
    )
    parser.add_argument("--version", action="version", version=f"eagle-ray {__version__}")
    commands = parser.add_subparsers(required=True, metavar=" | ".join(COMMANDS))
    for name, (module, description) in COMMANDS.items():
        its_parser = commands.add_parser(name, help=description)
        if name == command:
            getattr(import_module(f"eagle_ray.cli.{module}"), f"add_{name}")(its_parser)
    return parser


def check_address_space(library: str) -> str:
    """Check the shell's limit on address space. Return a warning if it may be too small for the library, else "".

    Raises ClusterUnfit if the limit is below what the library needs.
    """
    limit = _limit_gb()
    needed = NEEDED_GB[library]
    if limit is None or limit >= AMPLE * needed:
        return ""
    problem = f"ulimit -v: this shell limits a process to {limit:.1f} GB of address space, and {library} needs"
    if limit < needed:
        raise ClusterUnfit(f"{problem} {needed} GB. {RAISE_LIMIT}.")
    return f"{problem} {needed} GB or more. If memory runs out: {RAISE_LIMIT[0].lower()}{RAISE_LIMIT[1:]}."


def out_of_memory_words(error: Exception) -> str:
    """Return one line for an error that reports exhausted memory, or "" for other errors."""
    reason = str(error).strip().partition("\n")[0]
    if not isinstance(error, MemoryError) and not LIMITED_MEMORY.search(reason):
        return ""
    limit = _limit_gb()
    problem = f"out of memory ({reason or type(error).__name__})"
    if limit is None:
        return f"{problem}. Free memory on this machine, or use a larger one."
    return f"{problem}: this shell limits a process to {limit:.1f} GB of address space (ulimit -v). {RAISE_LIMIT}."


def _limit_gb() -> float | None:
    """Return the soft limit in GB, or None."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit / GB
