"""The commands that read runs: status, report, compare and export."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from eagle_ray.cli.arguments import (
    add_set_flag,
    config_of_pair,
    last_input,
    parse_names,
    parse_positive,
    parse_temperatures,
    without_none,
)
from eagle_ray.cli.main import check_address_space
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.start_log import configure_logging

STDOUT = "-"  # name of standard output as a file
ONLY_METHODS = ("config", "per_task", "methods", "temperatures", "batch", "threads")
METHODS_FLAGS = (*ONLY_METHODS, "sets", "input", "limit")


def add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="its output.path")
    parser.add_argument("--json", action="store_true", help="everything that is known, as JSON")
    parser.set_defaults(command=_status, library="pyarrow")


def _status(args: argparse.Namespace) -> int:
    from eagle_ray.batch.driver.status import (
        sharded_status_json,
        sharded_status_text,
        status_json,
        status_of,
        status_text,
    )
    from eagle_ray.runs.layout import read_shard_plan
    from eagle_ray.storage.path import named_path

    run = named_path("RUN", args.run)
    if read_shard_plan(run):
        print((sharded_status_json if args.json else sharded_status_text)(run))
    else:
        print((status_json if args.json else status_text)(status_of(run)))
    return 0


def add_publish(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="its output.path, of a run that is done or goes on"
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="PLACE",
        help="hf://datasets/OWNER/NAME[/FOLDER], delta:TABLE for a directory or s3:// address, or "
        "iceberg:[CATALOG/]NAMESPACE.TABLE",
    )
    parser.add_argument(
        "--public", action="store_true", help="a dataset of the hub that is made is public"
    )
    parser.set_defaults(command=_publish, library="pyarrow")


def _publish(args: argparse.Namespace) -> int:
    from eagle_ray.batch.driver.status import state_of
    from eagle_ray.publishing.destinations import destination_of
    from eagle_ray.publishing.publisher import Publisher
    from eagle_ray.storage.path import named_path

    configure_logging("info")
    destination = destination_of(args.to, private=not args.public)
    run = named_path("RUN", args.run)
    state_of(run)  # names what is wrong with it
    there = Publisher(run, destination).publish()
    state = "all of them" if there.is_complete else "the run goes on"
    print(f"{there.num_rows:,} rows in {args.to} ({state}), commit {there.number}")
    return 0


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the output directory of a run")
    parser.add_argument(
        "--json", action="store_true", help="every number, to stdout; writes nothing"
    )
    parser.add_argument(
        "--score",
        metavar="COLUMN",
        help="the column with a sample's score: true or false, a number, or such a text",
    )
    parser.add_argument(
        "--scores",
        metavar="FROM",
        help="scores from a run that judged this one, or from a file with request_id",
    )
    parser.add_argument(
        "--pass-at", type=float, metavar="X", help="the least score that passes, for pass@k"
    )
    parser.add_argument(
        "--answer", metavar="REGEX", help="the part of a text that the majority vote compares"
    )
    parser.set_defaults(command=_report, library="pyarrow")


def _report(args: argparse.Namespace) -> int:
    from eagle_ray.batch.driver.status import state_of
    from eagle_ray.cli.report_run import review, review_json
    from eagle_ray.cli.run_scores import run_scores
    from eagle_ray.storage.path import named_path

    run = named_path("RUN", args.run)
    state_of(run)  # names what is wrong with it
    scores = run_scores(run, args.score, args.scores, args.pass_at, args.answer)
    print((review_json if args.json else review)(run, scores))
    return 0


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", help="the output directories of two runs, or none"
    )
    parser.add_argument("--json", action="store_true", help="every number, to stdout")
    methods = parser.add_argument_group("methods", "compared on prompts, in this process")
    methods.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        action="append",
        help="a YAML file: model, speculative, sampling, input; several compare their pairs",
    )
    add_set_flag(methods.add_argument)
    methods.add_argument(
        "-i", "--input", metavar="IN", action="append", help="input.path (embedded:prompts)"
    )
    methods.add_argument(
        "--limit", type=int, metavar="N", help="input.limit: only the first N rows"
    )
    methods.add_argument(
        "--per-task", type=parse_positive, metavar="N", help="at most N rows of each category"
    )
    methods.add_argument(
        "--methods",
        type=parse_names,
        metavar="A,B",
        help="eagle2, ours, ...; medusa=DIR has its own draft",
    )
    methods.add_argument(
        "--temperatures", type=parse_temperatures, metavar="T,T", help="of sampling (0,1)"
    )
    methods.add_argument(
        "--batch", type=parse_positive, metavar="N", help="sequences at a time (1)"
    )
    methods.add_argument(
        "--threads", type=parse_positive, metavar="N", help="CPU threads (torch's own)"
    )
    engines = parser.add_argument_group("engines", "compared by a job of each")
    engines.add_argument(
        "--engines",
        type=parse_names,
        metavar="A.yaml,B.yaml",
        help="the configurations of jobs with other sections engine or model; with -o, -i, --limit and --set",
    )
    engines.add_argument(
        "-o", "--output", metavar="OUT", help="the directory of the outputs, one for each engine"
    )
    parser.set_defaults(command=_compare, library="pyarrow")


def _compare(args: argparse.Namespace) -> int:
    of_methods = [name for name in METHODS_FLAGS if getattr(args, name)]
    if args.engines:
        return _compare_engines(args)
    if args.output is not None:
        raise ConfigError("-o: where the outputs of --engines go. Give --engines, or leave it out")
    if not args.runs:
        return _compare_methods(args)
    if len(args.runs) != 2 or of_methods:
        raise ConfigError(
            "compare: give two runs and nothing of methods, or no run to compare methods on prompts"
        )
    from eagle_ray.cli.report_run import comparison, comparison_json
    from eagle_ray.storage.path import named_path

    print(
        (comparison_json if args.json else comparison)(
            *(named_path("RUN", run) for run in args.runs)
        )
    )
    return 0


def _compare_engines(args: argparse.Namespace) -> int:
    """Run a job of each engine and print their table. A job that fails ends the command as `run` would end."""
    wrong = [f"--{name.replace('_', '-')}" for name in ONLY_METHODS if getattr(args, name)]
    if args.runs or wrong:
        others = ", ".join(wrong or ["RUN"])
        raise ConfigError(f"--engines: {others} is of no use with it. Leave it out")
    if args.output is None:
        raise ConfigError("-o: required with --engines: the directory of their outputs")
    if len(args.engines) < 2:
        raise ConfigError("--engines: names one configuration. Give two or more")
    check_address_space("Ray")
    from eagle_ray.cli.compare_engines import engine_jobs, run_engines
    from eagle_ray.report.engine_comparison import engines_table

    flags = {"input.path": last_input(args.input), "input.limit": args.limit}
    jobs = engine_jobs(args.engines, args.output, args.sets, without_none(flags))
    configure_logging(next(iter(jobs.values())).logging.level)
    numbers = run_engines(jobs)
    print(dump_json({"engines": numbers}, indent=2) if args.json else engines_table(numbers))
    return 0


def _compare_methods(args: argparse.Namespace) -> int:
    check_address_space("torch")
    files = args.config or [None]
    configs = [config_of_pair(argparse.Namespace(**{**vars(args), "config": f})) for f in files]
    if len(configs) > 1:
        return _compare_pairs(args, configs)
    config = configs[0]
    from eagle_ray.cli.compare_methods import evaluate, use_threads
    from eagle_ray.report.evaluation_text import evaluation_text

    configure_logging(config.logging.level)
    use_threads(args.threads)
    numbers = evaluate(
        config, args.methods, args.temperatures or [0.0, 1.0], args.batch or 1, args.per_task
    )
    print(dump_json(numbers, indent=2) if args.json else evaluation_text(numbers))
    return 0


def _compare_pairs(args: argparse.Namespace, configs: Sequence[JobConfig]) -> int:
    if args.methods:
        raise ConfigError(
            "--methods: of no use with several -c, each of which is compared. Give one."
        )
    from eagle_ray.cli.compare_methods import use_threads
    from eagle_ray.cli.compare_pairs import evaluate_pairs, pairs_text

    configure_logging(configs[0].logging.level)
    use_threads(args.threads)
    temperatures = args.temperatures or [0.0, 1.0]
    numbers = evaluate_pairs(configs, temperatures, args.batch or 1, args.per_task)
    print(dump_json(numbers, indent=2) if args.json else pairs_text(numbers))
    return 0


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the output directory of a run")
    parser.add_argument("--to", required=True, choices=["openai-batch", "csv"], help="the format")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to; - and no FILE are stdout")
    parser.add_argument(
        "--partial", action="store_true", help="what is there of a run that is not finished, too"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace FILE where it is there already"
    )
    parser.set_defaults(command=_export, library="pyarrow")


def _export(args: argparse.Namespace) -> int:
    from eagle_ray.cli.export_run import export
    from eagle_ray.storage.path import named_path

    file = None if args.output == STDOUT else args.output
    if message := export(named_path("RUN", args.run), args.to, file, args.partial, args.overwrite):
        print(message)
    return 0
