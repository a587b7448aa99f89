"""The commands that make a run, or plan it: demo, run, finish, repair, validate, plan and submit.

torch, ray and transformers are imported only once the configuration is valid.
"""

from __future__ import annotations

import argparse
import signal

from eagle_ray.cli.arguments import add_bound_flags, add_config_flags, config_of, parse_positive
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.json_text import dump_json
from eagle_ray.core.start_log import configure_logging


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", metavar="DIR", default="runs/demo", help="output directory (runs/demo)"
    )
    parser.set_defaults(command=_demo, library="Ray")


def _demo(args: argparse.Namespace) -> int:
    from eagle_ray.cli.demo import run_demo
    from eagle_ray.storage.path import named_path

    return run_demo(named_path("-o", args.output))


def add_run(parser: argparse.ArgumentParser) -> None:
    _add_run_flags(parser)
    parser.set_defaults(command=_run, library="Ray")


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser)
    exists = parser.add_mutually_exclusive_group()
    exists.add_argument(
        "--resume",
        dest="if_exists",
        action="store_const",
        const="resume",
        help="go on from the output",
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
    add_bound_flags(parser)
    parser.add_argument(
        "--retry-errors", action="store_true", help="try the rows again that ended in errors"
    )
    parser.add_argument(
        "--fail-on-row-errors", action="store_true", help="exit 3 where rows ended in errors"
    )
    parser.add_argument(
        "--allow-empty",
        action="store_const",
        const=True,
        help="input.allow_empty: an input without rows is no error",
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
        help="exit 0 in place of 1, 2, 3, 4, 6 and 8, for what retries every other exit code, such as a RayJob; "
        "the output has _SUCCESS only if the run is done",
    )
    # The child of keep_going gets these.
    parser.add_argument("--ending", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.add_argument("--restarted", action="store_true", help=argparse.SUPPRESS)


def _run(args: argparse.Namespace) -> int:
    config = config_of(args)
    from eagle_ray.batch.driver.auto_restart import keep_going, write_ending
    from eagle_ray.batch.driver.job_run import run_to_end
    from eagle_ray.batch.driver.on_finish import tell
    from eagle_ray.core.child_process import end_with_parent

    if args.keep_going:
        configure_logging(config.logging.level)
        ending = keep_going(args.arguments, config)
    else:
        if args.parent is not None:
            # The command that restarts this one may end in any way.
            end_with_parent(args.parent, signal.SIGTERM)
        ending = run_to_end(config, args.retry_errors, args.fail_on_row_errors)
    if args.ending:
        write_ending(args.ending, ending)
    else:
        tell(config, ending)
    return ending.outcome.code


def add_finish(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the shards' output.path")
    parser.add_argument("-i", "--input", metavar="IN", help="input.path (the shards')")
    parser.add_argument(
        "--limit", type=parse_positive, metavar="N", help="input.limit (the shards')"
    )
    parser.add_argument(
        "--json", action="store_true", help="the counts of every shard and of the run, as JSON"
    )
    parser.set_defaults(command=_finish, library="pyarrow")


def _finish(args: argparse.Namespace) -> int:
    from eagle_ray.batch.driver.finish import finish_shards, finish_text
    from eagle_ray.storage.path import named_path

    configure_logging("info")
    summary = finish_shards(named_path("RUN", args.run), args.input, args.limit)
    print(dump_json(summary, indent=2) if args.json else finish_text(summary))
    return 0


def add_repair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="its output.path")
    add_config_flags(parser)
    parser.add_argument(
        "--shard", metavar="I/N", help="execution.shard: the shard whose record is lost"
    )
    parser.add_argument(
        "--trust-config",
        action="store_true",
        help="adopt rows with another configuration hash, as of an older release",
    )
    parser.set_defaults(command=_repair, library="pyarrow")


def _repair(args: argparse.Namespace) -> int:
    args.output = args.run
    config = config_of(args)
    from eagle_ray.batch.driver.repair import repair_output

    configure_logging(config.logging.level)
    print(repair_output(config, args.trust_config))
    return 0


def add_validate(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser)
    parser.add_argument("--allow-empty", action="store_const", const=True, help="input.allow_empty")
    add_bound_flags(parser)
    parser.add_argument(
        "--estimate",
        nargs="?",
        type=parse_positive,
        const=0,
        metavar="ROWS",
        help="decode ROWS rows here (two per slot, at least 32) and say how long the whole job takes and what it costs",
    )
    parser.set_defaults(command=_validate, library="torch")


def _validate(args: argparse.Namespace) -> int:
    config = config_of(args)
    if not config.engine.is_own:
        from eagle_ray.cli.validate_engine import validate_engine

        if args.estimate is not None:
            raise ConfigError(
                "--estimate: it decodes rows with our own engine, and engine.kind is "
                f"{config.engine.kind}. Leave it out"
            )
        print(validate_engine(config))
        return 0
    from eagle_ray.cli.validate import validate
    from eagle_ray.cli.validated_draft import draft_to_validate

    config, draft_line = draft_to_validate(config)
    print(validate(config, draft_line))
    if args.estimate is not None:
        from eagle_ray.cli.estimate import estimate_job, estimate_text, store_estimate

        configure_logging(config.logging.level)
        estimate = estimate_job(config, args.estimate or None)
        store_estimate(config, estimate)
        print(estimate_text(estimate))
        if config.execution.finish_by is not None or config.execution.max_dollars is not None:
            from eagle_ray.cli.worker_counts import counts_of

            print(counts_of(estimate, config))
    return 0


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser)
    add_bound_flags(parser)
    parser.add_argument(
        "--gpus",
        required=True,
        metavar="CARD:N,...",
        help="the clusters to choose from, such as h100:8,l40s:16",
    )
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="CARD=DOLLARS",
        help="dollars for an hour of one such GPU, such as h100=2.5",
    )
    parser.set_defaults(command=_plan, library="torch")


def _plan(args: argparse.Namespace) -> int:
    config = config_of(args)
    from eagle_ray.cli.plan_cards import parse_gpus, parse_prices, plan_text
    from eagle_ray.cli.validated_draft import draft_to_validate

    clusters = parse_gpus(args.gpus)
    prices = parse_prices(args.price, clusters)
    config, _ = draft_to_validate(config)
    print(plan_text(config, clusters, prices))
    return 0


def add_submit(parser: argparse.ArgumentParser) -> None:
    _add_run_flags(parser)
    parser.add_argument(
        "--address", metavar="URL", help="the cluster's dashboard (RAY_API_SERVER_ADDRESS)"
    )
    parser.add_argument(
        "--no-wait", dest="follow", action="store_false", help="return once it is submitted"
    )
    parser.set_defaults(command=_submit, library="torch")


def _submit(args: argparse.Namespace) -> int:
    config = config_of(args)
    from eagle_ray.batch.driver.ray_jobs import submit

    flags = {
        "--retry-errors": args.retry_errors,
        "--fail-on-row-errors": args.fail_on_row_errors,
        "--keep-going": args.keep_going,
    }
    return submit(
        config, args.address, [flag for flag, is_set in flags.items() if is_set], args.follow
    )
