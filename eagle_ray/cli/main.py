"""The command line: demo, run, finish, repair, validate, submit, status, report, compare, export, train, serve, bench
and doctor.

Parses arguments, builds the configuration, calls a command's module, and reports errors as one message and an exit
code. torch, ray and transformers are imported only once the configuration is valid.

Exit codes (``runs/job_errors.py`` has the table): 0 done (rows with errors included), 1 an unknown error, 2 usage
or configuration, 3 row errors with --fail-on-row-errors, 4 too many row errors, or no row without one, 5 transient
(storage, cluster, workers or a device failed for now; --keep-going restarts), 6 the output belongs to another job or
is damaged, or the input changed, 7 busy (another live driver writes the output), 130 interrupted, resumable.
``doctor`` ends with 5 if it found a problem.

    $ eagle-ray run -c configs/demo.yaml --set sampling.temperature=0.8
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Sequence

from eagle_ray import __version__
from eagle_ray.batch.driver.signals import ignore_until_exit, interruptible
from eagle_ray.cli.address_space_limit import check_address_space, out_of_memory_words
from eagle_ray.config import JobConfig, load_config, load_serve_config, load_train_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.start_log import Stdout, StdoutError, discard_stdout
from eagle_ray.requests.parameters import MAX_TEMPERATURE
from eagle_ray.runs.job_errors import (
    CONFIGURATION,
    EXPECTED_ERRORS,
    INTERRUPTED,
    PERMANENT,
    TRANSIENT,
    outcome_by_code,
    outcome_of,
)

COMMANDS = (
    "demo | run | finish | repair | validate | submit | status | report | compare | export | train | serve | bench | "
    "doctor"
)
METHODS_FLAGS = ("config", "sets", "input", "limit", "per_task", "methods", "temperatures", "batch", "threads")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Wrong usage raises SystemExit(2), as argparse does.

    argv: None for this process's own, which ends with the command.
    """
    _print_anything()
    args = _parse(argv)
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = Stdout.over(sys.stdout)
    args.arguments = list(sys.argv[1:] if argv is None else argv)[1:]  # without the command
    try:
        code = _exit_code_of(args)
        return _code_for_supervisor(code) if getattr(args, "exit_zero_if_permanent", False) else code
    finally:
        if argv is None:
            ignore_until_exit()
            _end_ray()


def _end_ray() -> None:
    """End or leave the cluster, if Ray was imported. Ray itself would first wait for log lines that we do not show."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def _exit_code_of(args: argparse.Namespace) -> int:
    """Run the command, print its error and return the exit code."""
    try:
        if warning := check_address_space(args.library):
            print(f"eagle-ray: {warning}", file=sys.stderr)
        with interruptible():
            code = args.command(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return _end_quietly()
    except StdoutError as error:
        discard_stdout()
        print(f"eagle-ray: stdout cannot be written: {error.strerror}. Make room, or redirect it.", file=sys.stderr)
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
    print(f"eagle-ray: exit 0 in place of {code} ({outcome.name}): no attempt would change it", file=sys.stderr)
    return 0


def _print_anything() -> None:
    """Print characters that the terminal's encoding lacks as escapes; completions may be in any script.

    Output to a closed stream (``>&-``) is discarded.
    """
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _end_quietly() -> int:
    """End as SIGPIPE would, because stdout was closed, as after ``| head``. The last flush is discarded."""
    discard_stdout()
    return 128 + signal.SIGPIPE


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args, others = parser.parse_known_args(argv)
    if others:
        hint = "; an input is given as -i IN" if "input" in args else ""
        parser.error(f"unrecognized arguments: {' '.join(others)}{hint}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eagle-ray", description="Batch inference on Ray with EAGLE-2.")
    parser.add_argument("--version", action="version", version=f"eagle-ray {__version__}")
    commands = parser.add_subparsers(required=True, metavar=COMMANDS)

    demo = commands.add_parser("demo", help="the embedded pair on bundled prompts: CPU, no network")
    demo.add_argument("-o", "--output", metavar="DIR", default="runs/demo", help="output directory (runs/demo)")
    demo.set_defaults(command=_demo, library="Ray")

    run = commands.add_parser("run", help="generate completions for every row of the input")
    _add_run_flags(run)
    run.set_defaults(command=_run, library="Ray")

    finish = commands.add_parser("finish", help="complete an output that shards have written (run --shard i/n)")
    finish.add_argument("run", metavar="RUN", help="the shards' output.path")
    finish.add_argument("-i", "--input", metavar="IN", help="input.path (the shards')")
    finish.add_argument("--limit", type=_positive, metavar="N", help="input.limit (the shards')")
    finish.add_argument("--json", action="store_true", help="the counts of every shard and of the run, as JSON")
    finish.set_defaults(command=_finish, library="pyarrow")

    repair = commands.add_parser("repair", help="adopt the rows of an output whose record is lost or damaged")
    repair.add_argument("run", metavar="RUN", help="its output.path")
    _add_config_flags(repair)
    repair.add_argument("--shard", metavar="I/N", help="execution.shard: the shard whose record is lost")
    repair.add_argument(
        "--trust-config", action="store_true", help="adopt rows with another configuration hash, as of an older release"
    )
    repair.set_defaults(command=_repair, library="pyarrow", if_exists=None)

    validate = commands.add_parser("validate", help="check configuration, rows, prompt and storage without Ray")
    _add_config_flags(validate)
    validate.add_argument("--allow-empty", action="store_const", const=True, help="input.allow_empty")
    validate.add_argument(
        "--estimate",
        nargs="?",
        type=_positive,
        const=0,
        metavar="ROWS",
        help="decode ROWS rows here (two per slot, at least 32) and say how long the whole job takes and what it costs",
    )
    validate.set_defaults(command=_validate, library="torch", if_exists=None)

    submit = commands.add_parser("submit", help="run as a job of a Ray cluster and follow its log")
    _add_run_flags(submit)
    submit.add_argument("--address", metavar="URL", help="the cluster's dashboard (RAY_API_SERVER_ADDRESS)")
    submit.add_argument("--no-wait", dest="follow", action="store_false", help="return once it is submitted")
    submit.set_defaults(command=_submit, library="torch")

    status = commands.add_parser("status", help="where a run stands, from its output directory")
    status.add_argument("run", metavar="RUN", help="its output.path")
    status.add_argument("--json", action="store_true", help="everything that is known, as JSON")
    status.set_defaults(command=_status, library="pyarrow")

    report = commands.add_parser("report", help="a run's numbers, finished or not, and its report.html")
    report.add_argument("run", metavar="RUN", help="the output directory of a run")
    report.add_argument("--json", action="store_true", help="every number, to stdout; writes nothing")
    report.add_argument(
        "--score", metavar="COLUMN", help="the column with a sample's score: true or false, a number, or such a text"
    )
    report.add_argument(
        "--scores",
        metavar="FROM",
        help="scores from a run that judged this one, or from a file with request_id",
    )
    report.add_argument("--pass-at", type=float, metavar="X", help="the least score that passes, for pass@k")
    report.add_argument("--answer", metavar="REGEX", help="the part of a text that the majority vote compares")
    report.set_defaults(command=_report, library="pyarrow")

    compare = commands.add_parser("compare", help="two runs side by side; without runs, methods on one's own prompts")
    compare.add_argument("runs", metavar="RUN", nargs="*", help="the output directories of two runs, or none")
    compare.add_argument("--json", action="store_true", help="every number, to stdout")
    _add_methods_flags(compare)
    compare.set_defaults(command=_compare, library="pyarrow", output=None, if_exists=None)

    export = commands.add_parser("export", help="a run's rows as OpenAI batch output lines or CSV")
    export.add_argument("run", metavar="RUN", help="the output directory of a run")
    export.add_argument("--to", required=True, choices=["openai-batch", "csv"], help="the format")
    export.add_argument("-o", "--output", metavar="FILE", help="where to (stdout)")
    export.add_argument("--partial", action="store_true", help="what is there of a run that is not finished, too")
    export.add_argument("--overwrite", action="store_true", help="replace FILE where it is there already")
    export.set_defaults(command=_export, library="pyarrow")

    train = commands.add_parser("train", help="train a draft head for a target, on chats or on its own answers")
    _add_train_flags(train)
    train.set_defaults(command=_train, library="torch")

    serve = commands.add_parser("serve", help="answer HTTP requests in OpenAI's protocol, until interrupted")
    serve.add_argument("-c", "--config", metavar="FILE", help="a YAML file such as configs/serve_demo.yaml")
    serve.add_argument("--set", dest="sets", action="append", default=[], metavar="A.B=C", help="override one key")
    serve.add_argument("--host", help="serving.host (127.0.0.1)")
    serve.add_argument("--port", type=_positive, help="serving.port (8000)")
    serve.set_defaults(command=_serve, library="Ray")

    bench = commands.add_parser("bench", help="measure this machine")
    benches = bench.add_subparsers(required=True, metavar="cost")
    cost = benches.add_parser("cost", help="what the parts of a step cost, for the budget of later runs")
    _add_config_flags(cost)
    cost.add_argument("--threads", type=_positive, metavar="N", help="CPU threads, as a worker would have (all)")
    cost.set_defaults(command=_bench_cost, library="torch", if_exists=None)

    doctor = commands.add_parser("doctor", help="what this machine has, whether a pair fits, and what to do about it")
    _add_config_flags(doctor)
    doctor.add_argument("--json", action="store_true", help="every finding, as JSON")
    doctor.set_defaults(command=_doctor, library="torch", if_exists=None)
    return parser


def _add_config_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", help="a YAML file such as configs/example.yaml")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="A.B=C", help="override one key")
    parser.add_argument("-i", "--input", metavar="IN", action="append", help="input.path")
    parser.add_argument("-o", "--output", metavar="OUT", help="output.path")
    parser.add_argument("--limit", type=int, metavar="N", help="input.limit: only the first N rows")


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    _add_config_flags(parser)
    exists = parser.add_mutually_exclusive_group()
    exists.add_argument(
        "--resume", dest="if_exists", action="store_const", const="resume", help="go on from the output"
    )
    exists.add_argument(
        "--overwrite",
        dest="if_exists",
        action="store_const",
        const="overwrite",
        help="delete the output and start again",
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="execution.shard: a part of the rows, such as 2/3; slurm: the array task's",
    )
    parser.add_argument("--retry-errors", action="store_true", help="try the rows again that ended in errors")
    parser.add_argument("--fail-on-row-errors", action="store_true", help="exit 3 where rows ended in errors")
    parser.add_argument(
        "--allow-empty", action="store_const", const=True, help="input.allow_empty: an input without rows is no error"
    )
    parser.add_argument(
        "--keep-going",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="restart the run while it ends with exit 5 (execution.restarts: how often, and after which wait)",
    )
    parser.add_argument(
        "--exit-zero-if-permanent",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="exit 0 in place of 1, 2, 3, 4 and 6, for what retries every other exit code, such as a RayJob; "
        "the output has _SUCCESS only if the run is done",
    )
    parser.add_argument("--ending", metavar="FILE", help=argparse.SUPPRESS)  # for keep_going's child
    parser.add_argument("--parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.add_argument("--restarted", action="store_true", help=argparse.SUPPRESS)


def _add_train_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", help="a YAML file such as configs/train_demo.yaml")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="A.B=C", help="override one key")
    parser.add_argument("-i", "--input", metavar="IN", action="append", help="data.path: chats, texts or a run")
    parser.add_argument("-o", "--output", metavar="HEAD", help="output.path: the head's directory")
    parser.add_argument("--target", metavar="MODEL", help="model.target")
    parser.add_argument("--method", choices=["eagle2", "eagle3", "medusa", "hydra", "dflash"], help="head.method")
    parser.add_argument("--steps", type=_positive, metavar="N", help="training.steps")
    parser.add_argument("--workers", type=_positive, metavar="N", help="training.workers: processes of Ray Train")
    parser.add_argument("--limit", type=_positive, metavar="N", help="data.limit: only the first N documents")
    parser.add_argument(
        "--overwrite", dest="if_exists", action="store_const", const="overwrite", help="discard earlier checkpoints"
    )


def _add_methods_flags(parser: argparse.ArgumentParser) -> None:
    methods = parser.add_argument_group("methods", "compared on prompts, in this process")
    methods.add_argument("-c", "--config", metavar="FILE", help="a YAML file: model, speculative, sampling, input")
    methods.add_argument("--set", dest="sets", action="append", default=[], metavar="A.B=C", help="override one key")
    methods.add_argument("-i", "--input", metavar="IN", action="append", help="input.path (embedded:prompts)")
    methods.add_argument("--limit", type=int, metavar="N", help="input.limit: only the first N rows")
    methods.add_argument("--per-task", type=_positive, metavar="N", help="at most N rows of each category")
    methods.add_argument(
        "--methods", type=_names, metavar="A,B", help="eagle2, ours, ...; medusa=DIR has its own draft"
    )
    methods.add_argument("--temperatures", type=_temperatures, metavar="T,T", help="of sampling (0,1)")
    methods.add_argument("--batch", type=_positive, metavar="N", help="sequences at a time (1)")
    methods.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (torch's own)")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _temperatures(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= MAX_TEMPERATURE for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 0 to {MAX_TEMPERATURE:g}, such as 0,1")
    return list(dict.fromkeys(values))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def _config_of(args: argparse.Namespace) -> JobConfig:
    flags = {
        "input.path": _last_input(args.input),
        "input.limit": args.limit,
        "output.path": args.output,
        "output.if_exists": "resume" if getattr(args, "restarted", False) else args.if_exists,
        "input.allow_empty": getattr(args, "allow_empty", None),
        "execution.shard": getattr(args, "shard", None),
    }
    given = {key: value for key, value in flags.items() if value is not None}
    return load_config(args.config, sets=args.sets, overrides=given)


def _last_input(inputs: list[str] | None) -> str | None:
    """Return the last -i, and warn about the ones before it, which it replaces."""
    if inputs and len(inputs) > 1:
        others = ", ".join(inputs[:-1])
        print(
            f"eagle-ray: -i {inputs[-1]} replaces -i {others}. To read them all: --set 'input.path=[{others}, ...]'",
            file=sys.stderr,
        )
    return inputs[-1] if inputs else None


def _demo(args: argparse.Namespace) -> int:
    from eagle_ray.cli.demo import run_demo
    from eagle_ray.cli.report_run import parse_run_path

    return run_demo(parse_run_path(args.output))


def _run(args: argparse.Namespace) -> int:
    config = _config_of(args)
    from eagle_ray.batch.driver.auto_restart import end_with_command, keep_going, write_ending
    from eagle_ray.batch.driver.on_finish import tell
    from eagle_ray.batch.driver.run import run_to_end
    from eagle_ray.core.start_log import configure_logging

    if args.keep_going:
        configure_logging(config.logging.level)
        ending = keep_going(args.arguments, config)
    else:
        if args.parent is not None:
            end_with_command(args.parent)
        ending = run_to_end(config, args.retry_errors, args.fail_on_row_errors)
    if args.ending:
        write_ending(args.ending, ending)
    else:
        tell(config, ending)
    return ending.outcome.code


def _finish(args: argparse.Namespace) -> int:
    from eagle_ray.batch.driver.finish import finish_shards, finish_text
    from eagle_ray.cli.report_run import parse_run_path
    from eagle_ray.core.start_log import configure_logging

    configure_logging("info")
    summary = finish_shards(parse_run_path(args.run), args.input, args.limit)
    print(json.dumps(summary, indent=2) if args.json else finish_text(summary))
    return 0


def _repair(args: argparse.Namespace) -> int:
    args.output = args.run
    config = _config_of(args)
    from eagle_ray.batch.driver.repair import repair_output
    from eagle_ray.core.start_log import configure_logging

    configure_logging(config.logging.level)
    print(repair_output(config, args.trust_config))
    return 0


def _validate(args: argparse.Namespace) -> int:
    config = _config_of(args)
    from eagle_ray.cli.validate import validate

    print(validate(config))
    if args.estimate is not None:
        from eagle_ray.cli.estimate import estimate_job, estimate_text, store_estimate
        from eagle_ray.core.start_log import configure_logging

        configure_logging(config.logging.level)
        estimate = estimate_job(config, args.estimate or None)
        store_estimate(config, estimate)
        print(estimate_text(estimate))
    return 0


def _submit(args: argparse.Namespace) -> int:
    config = _config_of(args)
    from eagle_ray.batch.driver.ray_jobs import submit

    asked = {
        "--retry-errors": args.retry_errors,
        "--fail-on-row-errors": args.fail_on_row_errors,
        "--keep-going": args.keep_going,
    }
    flags = [flag for flag, is_set in asked.items() if is_set]
    return submit(config, args.address, flags, args.follow)


def _status(args: argparse.Namespace) -> int:
    from eagle_ray.batch.driver.status import (
        sharded_status_json,
        sharded_status_text,
        status_json,
        status_of,
        status_text,
    )
    from eagle_ray.cli.report_run import parse_run_path
    from eagle_ray.runs.layout import read_shard_plan

    run = parse_run_path(args.run)
    if read_shard_plan(run):
        print((sharded_status_json if args.json else sharded_status_text)(run))
    else:
        print((status_json if args.json else status_text)(status_of(run)))
    return 0


def _report(args: argparse.Namespace) -> int:
    from eagle_ray.cli.report_run import parse_run_path, record_of, review, review_json
    from eagle_ray.cli.report_scores import scores_of

    run = parse_run_path(args.run)
    record_of(run)  # names what is wrong with it
    scores = scores_of(run, args.score, args.scores, args.pass_at, args.answer)
    print((review_json if args.json else review)(run, scores))
    return 0


def _compare(args: argparse.Namespace) -> int:
    for_methods = [name for name in METHODS_FLAGS if getattr(args, name)]
    if not args.runs:
        return _compare_methods(args)
    if len(args.runs) != 2 or for_methods:
        raise ConfigError("compare: give two runs and nothing of methods, or no run to compare methods on prompts")
    from eagle_ray.cli.report_run import comparison, comparison_json, parse_run_path

    print((comparison_json if args.json else comparison)(*map(parse_run_path, args.runs)))
    return 0


def _compare_methods(args: argparse.Namespace) -> int:
    check_address_space("torch")
    config = _config_of_pair(args)
    from eagle_ray.cli.compare_methods import evaluate, use_threads
    from eagle_ray.core.start_log import configure_logging
    from eagle_ray.report.methods_table import evaluation_text

    configure_logging(config.logging.level)
    use_threads(args.threads)
    numbers = evaluate(config, args.methods, args.temperatures or [0.0, 1.0], args.batch or 1, args.per_task)
    print(json.dumps(numbers, indent=2) if args.json else evaluation_text(numbers))
    return 0


def _export(args: argparse.Namespace) -> int:
    from eagle_ray.cli.export import export
    from eagle_ray.cli.report_run import parse_run_path

    if said := export(parse_run_path(args.run), args.to, args.output, args.partial, args.overwrite):
        print(said)
    return 0


def _train(args: argparse.Namespace) -> int:
    flags = {
        "data.path": args.input[0] if args.input and len(args.input) == 1 else args.input,
        "data.limit": args.limit,
        "output.path": args.output,
        "output.if_exists": args.if_exists,
        "model.target": args.target,
        "head.method": args.method,
        "training.steps": args.steps,
        "training.workers": args.workers,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    config = load_train_config(args.config, sets=args.sets, overrides=given)
    from eagle_ray.cli.train import train
    from eagle_ray.core.start_log import configure_logging

    configure_logging(config.logging.level)
    print(train(config))
    return 0


def _serve(args: argparse.Namespace) -> int:
    flags = {"serving.host": args.host, "serving.port": args.port}
    given = {key: value for key, value in flags.items() if value is not None}
    config = load_serve_config(args.config, sets=args.sets, overrides=given)
    from eagle_ray.cli.serve_endpoint import run_endpoint

    return run_endpoint(config)


def _config_of_pair(args: argparse.Namespace) -> JobConfig:
    """Return a configuration for checking a pair without a job."""
    if args.config is None:
        args.input, args.output = args.input or ["embedded:prompts"], args.output or "runs/run"
    return _config_of(args)


def _bench_cost(args: argparse.Namespace) -> int:
    config = _config_of_pair(args)
    from eagle_ray.cli.bench_costs import bench_costs

    print(bench_costs(config, args.threads))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    config = _config_of_pair(args)
    from eagle_ray.doctor.run_checks import examine, findings_json, findings_text

    findings = list(examine(config))
    print((findings_json if args.json else findings_text)(findings))
    return 5 if any(finding.problem for finding in findings) else 0
