"""What the Ray pipeline costs around the engines: python -m jobs.bench.pipeline throughput | memory

    throughput   2,000 rows through the job (one worker) and through the engine alone, in turns;
                 start-up apart; how much of the job's time its engine stepped, and how many of its slots were busy;
                 --pair wide takes 256 rows of a pair of 107M parameters, whose steps are long as real models' are;
                 both engines compute with --threads, by default all but the one core that is left to Ray
    memory       the largest resident memory of each kind of process over jobs of 10 thousand to 1 million tiny rows,
                 answered by a model of a few thousand parameters

Tables on stdout. The job runs as a user runs it, in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_ray.assembly.assemble import build_engine_from_config
from eagle_ray.assembly.engine_sizes import EngineArgs
from eagle_ray.assembly.hub import download
from eagle_ray.batch.driver.input_plan import plan_input, requests_of
from eagle_ray.config import JobConfig, load_config
from eagle_ray.methods.eagle.checkpoint import load_head
from eagle_ray.methods.head_files import read_config, save_head
from eagle_ray.models.loader import load_causal_lm
from eagle_ray.requests.sequences import sequences_of
from jobs.bench.embedding_map import ModelShape
from jobs.bench.prompts import prompt_rows
from jobs.bench.widening import widen_pair

LOOK_EVERY_S = 0.5
PER_CATEGORY = 32  # different prompts, used again and again: some categories have not many more
ROWS = {"embedded": 2000, "wide": 256}
MAX_TOKENS = {"embedded": 64, "wide": 32}
WIDE = ModelShape(
    hidden_size=768,
    num_layers=12,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=2688,
    vocab_size=6144,
)
TOY = dict(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)
KINDS = {  # by the command line, which in Ray's processes is a title
    "engine": re.compile(r"batch\.worker\.(engine_process|spare_engine)"),
    "engine actor": re.compile(r"ray::.*EngineActor"),
    "driver": re.compile(r"eagle_ray\.cli run"),
    "other workers": re.compile(r"ray::"),
    "raylet": re.compile(r"/raylet "),
    "gcs": re.compile(r"gcs_server"),
}


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        args.measure(args, Path(directory))


def throughput(args: argparse.Namespace, directory: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # the job's most
    torch.set_num_threads(args.threads)
    prompts = itertools.cycle(prompt_rows(per_category=PER_CATEGORY, seed=7))
    num_rows = args.rows or ROWS[args.pair]
    rows = itertools.islice(prompts, num_rows)
    write_rows(
        directory / "in.jsonl",
        [{"id": f"r{i}", "messages": row["messages"]} for i, row in enumerate(rows)],
    )
    settings = {
        "input.path": str(directory / "in.jsonl"),
        "execution.ray_address": "local",
        "execution.actors": 1,
        "execution.slots": args.slots,
        "sampling.max_tokens": MAX_TOKENS[args.pair],
    }
    if args.pair == "wide":
        settings |= save_wide_pair(directory)
    alone, job, stepping, busy, wall = [], [], [], [], []
    for turn in range(args.rounds):
        config = config_of({**settings, "output.path": str(directory / f"out-{turn}")})
        alone.append(engine_alone(config))
        wall.append(run_job(config))
        work = json.loads((directory / f"out-{turn}" / "_summary.json").read_text())["last_work"]
        job.append(work["working_s"])
        stepping.append(work["engine_s"])
        busy.append(work["busy_slots"])
        print(
            f"alone {alone[-1]:.1f} s, job {job[-1]:.1f} s, {stepping[-1]:.1f} s of it in steps",
            file=sys.stderr,
        )
    about = f"{args.pair} pair, {num_rows} rows, {args.slots} slots, {args.threads} threads, {args.rounds} rounds"
    print(f"{about}, medians (lowest to highest)")
    columns = {
        "engine alone": spread(alone, ".1f"),
        "job, start-up apart": spread(job, ".1f"),
        "of it in steps": spread(stepping, ".1f"),
        "job over engine": spread([j / a for j, a in zip(job, alone, strict=True)], ".3f"),
        "steps over engine": spread([s / a for s, a in zip(stepping, alone, strict=True)], ".3f"),
        "busy slots": spread(busy, ".1%"),
        "command to prompt": spread(wall, ".1f"),
    }
    print(
        f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n| {' | '.join(columns.values())} |"
    )


def spread(numbers: list[float], digits: str) -> str:
    middle, *ends = (
        format(value, digits) for value in (statistics.median(numbers), min(numbers), max(numbers))
    )
    return f"{middle} ({' to '.join(ends)})"


def save_wide_pair(directory: Path) -> dict[str, str]:
    """The embedded pair at the shape of WIDE, as checkpoints on disk; the settings that name them."""
    small, published = download("embedded:tiny", "target"), download("embedded:tiny", "draft")
    target, draft = directory / "target", directory / "draft"
    model = load_causal_lm(small, torch.float32, "cpu")
    model, head = widen_pair(model, load_head(published, model.config), WIDE)
    shutil.copytree(small, target, ignore=shutil.ignore_patterns("*.safetensors"))  # its tokenizer
    model.save_pretrained(target)
    save_head(head, read_config(published) | head.config.to_dict(), draft)
    return {"model.target": str(target), "model.draft": str(draft)}


def engine_alone(config: JobConfig) -> float:
    """Seconds from the first row's prompt to the last one's end, all rows queued at once."""
    pair = build_engine_from_config(
        config.model,
        config.speculative,
        EngineArgs(config.execution.slots, kv_tokens=config.execution.kv_tokens),
    )
    sequences = [
        s
        for row in requests_of(plan_input(config))
        for s in sequences_of(row, config, pair.tokenizer)
    ]
    started = time.monotonic()
    for sequence in sequences:
        pair.engine.add(sequence)
    while pair.engine.has_work:
        pair.engine.step()
    return time.monotonic() - started


def memory(args: argparse.Namespace, directory: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TOY, eos_token_id=2)).save_pretrained(directory / "toy")
    table: dict[int, dict[str, float]] = {}
    for num_rows in args.rows:
        rows = ({"id": f"row-{i:09d}", "prompt_token_ids": [3 + i % 60]} for i in range(num_rows))
        write_rows(directory / "in.jsonl", rows)
        config = config_of(
            {
                "input.path": str(directory / "in.jsonl"),
                "output.path": str(directory / f"out-{num_rows}"),
                "model.target": str(directory / "toy"),
                "speculative.method": "none",
                "sampling.max_tokens": 2,
                "execution.ray_address": "local",
                "execution.actors": 1,
                "execution.slots": 64,
            }
        )
        table[num_rows] = peaks = defaultdict(float)
        seconds = run_job(config, peaks)
        print(f"{num_rows} rows in {seconds:.0f} s", file=sys.stderr, flush=True)
    print("| rows | " + " | ".join(KINDS) + " |\n|---" + "|---" * len(KINDS) + "|")
    for num_rows, peaks in table.items():
        print(f"| {num_rows:,} | " + " | ".join(f"{peaks[kind]:.0f} MB" for kind in KINDS) + " |")


def run_job(config: JobConfig, peaks: dict[str, float] | None = None) -> float:
    """The job by the command line; its seconds from command to prompt. peaks: filled with memory in MB, by kind."""
    given = Path(config.output.path).with_suffix(".json")  # JSON is YAML
    given.write_text(config.model_dump_json())
    started = time.monotonic()
    job = subprocess.Popen(
        [sys.executable, "-m", "eagle_ray.cli", "run", "-c", str(given)], stdout=subprocess.DEVNULL
    )
    while job.poll() is None:
        time.sleep(LOOK_EVERY_S)
        for kind, megabytes in memory_by_kind(job.pid) if peaks is not None else ():
            peaks[kind] = max(peaks[kind], megabytes)
    if job.returncode:
        raise SystemExit(f"the job ended with exit code {job.returncode}")
    return time.monotonic() - started


def memory_by_kind(root: int) -> Iterator[tuple[str, float]]:
    """Return the private memory, in MB, of the largest process of each kind below this one."""
    largest: dict[str, float] = defaultdict(float)
    parent = psutil.Process(root)
    for process in [parent, *parent.children(recursive=True)]:
        try:
            title, private = " ".join(process.cmdline()), process.memory_full_info().uss
        except psutil.Error:  # it has just ended
            continue
        kind = next((kind for kind, pattern in KINDS.items() if pattern.search(title)), None)
        if kind is not None:
            largest[kind] = max(largest[kind], private / 2**20)
    yield from largest.items()


def config_of(settings: dict[str, Any]) -> JobConfig:
    return load_config(None, env={}, overrides=settings)


def write_rows(path: Path, rows: Any) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("throughput")
    first.add_argument("--pair", choices=ROWS, default="embedded")
    first.add_argument(
        "--rows",
        type=int,
        help="; ".join(f"{num} of the {pair} pair" for pair, num in ROWS.items()),
    )
    first.add_argument("--slots", type=int, default=16)
    first.add_argument("--rounds", type=int, default=3)
    first.add_argument(
        "--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), help="of an engine"
    )
    first.set_defaults(measure=throughput)
    second = commands.add_parser("memory")
    second.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    second.set_defaults(measure=memory)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("EAGLE_RAY_CACHE", tempfile.mkdtemp())
    main()
