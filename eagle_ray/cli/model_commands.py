"""The commands about models and this machine: train, serve, bench, heads and doctor.

torch, ray and transformers are imported only once the configuration is valid.
"""

from __future__ import annotations

import argparse

from eagle_ray.cli.arguments import (
    add_config_flags,
    add_file_flags,
    config_of_pair,
    parse_positive,
    without_none,
)
from eagle_ray.config import JobConfig, load_serve_config, load_train_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.start_log import configure_logging
from eagle_ray.methods.method import trained_methods
from eagle_ray.runs.job_errors import CONFIGURATION


def add_train(parser: argparse.ArgumentParser) -> None:
    add_file_flags(parser.add_argument, " such as configs/train_demo.yaml")
    parser.add_argument(
        "-i", "--input", metavar="IN", action="append", help="data.path: chats, texts or a run"
    )
    parser.add_argument("-o", "--output", metavar="HEAD", help="output.path: the head's directory")
    parser.add_argument("--target", metavar="MODEL", help="model.target")
    parser.add_argument("--method", choices=trained_methods(), help="head.method")
    parser.add_argument("--steps", type=parse_positive, metavar="N", help="training.steps")
    parser.add_argument(
        "--workers",
        type=parse_positive,
        metavar="N",
        help="training.workers: processes of Ray Train",
    )
    parser.add_argument(
        "--limit", type=parse_positive, metavar="N", help="data.limit: only the first N documents"
    )
    parser.add_argument(
        "--overwrite",
        dest="if_exists",
        action="store_const",
        const="overwrite",
        help="discard earlier checkpoints",
    )
    parser.set_defaults(command=_train, library="torch")


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
    config = load_train_config(args.config, sets=args.sets, overrides=without_none(flags))
    from eagle_ray.cli.train import train

    configure_logging(config.logging.level)
    print(train(config))
    return 0


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_file_flags(parser.add_argument, " such as configs/serve_demo.yaml")
    parser.add_argument("--host", help="serving.host (127.0.0.1)")
    parser.add_argument("--port", type=parse_positive, help="serving.port (8000)")
    parser.set_defaults(command=_serve, library="Ray")


def _serve(args: argparse.Namespace) -> int:
    flags = {"serving.host": args.host, "serving.port": args.port}
    config = load_serve_config(args.config, sets=args.sets, overrides=without_none(flags))
    from eagle_ray.cli.serve_endpoint import run_endpoint

    return run_endpoint(config)


def add_bench(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(required=True, metavar="cost")
    cost = benches.add_parser(
        "cost", help="what the parts of a step cost, for the budget of later runs"
    )
    add_config_flags(cost)
    cost.add_argument(
        "--threads",
        type=parse_positive,
        metavar="N",
        help="CPU threads, as a worker would have (all)",
    )
    cost.set_defaults(command=_bench_cost, library="torch")


def _bench_cost(args: argparse.Namespace) -> int:
    print(bench_costs(config_of_pair(args), args.threads))
    return 0


def bench_costs(config: JobConfig, threads: int | None) -> str:
    """Measure the step costs of a job's pair, store them for later runs, and show them.

    The costs hold for this number of CPU threads (None: torch's default). Raises ConfigError as
    build_engine_from_config does, and for a job without drafts.
    """
    import torch

    from eagle_ray.assembly.assemble import build_engine_from_config
    from eagle_ray.assembly.costs import cost_key
    from eagle_ray.assembly.draft_choice import with_chosen_draft
    from eagle_ray.assembly.engine_sizes import EngineArgs
    from eagle_ray.engine.calibrate import calibrate_costs
    from eagle_ray.planner.cost_cache import cache_path, keep_costs
    from eagle_ray.planner.cost_model import costs_text

    if threads is not None:
        torch.set_num_threads(threads)
    config = with_chosen_draft(config)
    speculative = config.speculative.model_copy(update={"budget": "uniform"})
    if speculative.merged_methods == "none":
        raise ConfigError(
            "speculative.method: none drafts nothing, so there are no costs to compare; leave it out"
        )
    pair = build_engine_from_config(
        config.model,
        speculative,
        EngineArgs(config.execution.slots, kv_tokens=config.execution.kv_tokens),
    )
    costs = calibrate_costs(pair.engine)
    parts = cost_key(pair.engine, speculative)
    keep_costs(parts, costs)
    return f"{costs_text(costs)}\n\nkept in {cache_path(parts)}"


def add_heads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        help="a hub id, a local directory or GGUF file, or a family such as Qwen3; none is all that are known",
    )
    parser.add_argument(
        "--check", metavar="DIR", help="a head's directory: what it is, and what of it is used"
    )
    parser.add_argument(
        "--target",
        dest="check_target",
        metavar="T",
        help="with --check: whether it fits model.target T",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(command=_heads, library="torch")


def _heads(args: argparse.Namespace) -> int:
    if args.check is None:
        if args.check_target is not None:
            raise ConfigError(
                "--target: goes with --check DIR. Give the target alone for its heads."
            )
        from eagle_ray.cli.list_heads import heads_json, heads_text

        print((heads_json if args.json else heads_text)(args.target))
        return 0
    if args.target is not None:
        raise ConfigError(f"TARGET: of no use with --check. Give --target {args.target}.")
    from pathlib import Path

    from eagle_ray.cli.check_head import check_head

    report = check_head(Path(args.check).expanduser(), args.check_target)
    print(report.as_json() if args.json else report.text())
    return CONFIGURATION.code if report.problem is not None else 0


def add_doctor(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser)
    parser.add_argument("--json", action="store_true", help="every finding, as JSON")
    parser.set_defaults(command=_doctor, library="torch")


def _doctor(args: argparse.Namespace) -> int:
    config = config_of_pair(args)
    from eagle_ray.doctor.run_checks import examine, findings_json, findings_text

    findings = list(examine(config))
    print((findings_json if args.json else findings_text)(findings))
    return 5 if any(finding.problem for finding in findings) else 0
