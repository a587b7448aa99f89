"""Random kills over two shards of a job whose input grows meanwhile, and every id of it counted from outside.

A Ray cluster of several nodes with fake GPUs runs on this machine. Two drivers, `eagle-ray run
--shard 1/2` and `2/2`, answer tiny rows with a toy model of a few thousand parameters. Drivers,
engines, write tasks, progress actors and whole nodes are killed with SIGKILL; lines are appended
and files added, also while the drivers run; every driver that ended is started again with the same
command. At last `eagle-ray finish` is killed, and run to its end. A run of its own over the whole
input, without shards and without kills, says what every row should be. Exit code 1 where a check
fails.

    python -m tests.system.chaos_at_scale                 # 100,000 rows, 100 kills: half an hour on two cores
    python -m tests.system.chaos_at_scale --rows 3000 --kills 6
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from eagle_ray.batch.driver.signals import interruptible
from eagle_ray.runs.job_errors import DONE, INTERRUPTED, MISMATCH, TRANSIENT
from eagle_ray.runs.layout import JobShard
from tests.system.chaos import (
    MODEST,
    NAME,
    NODES,
    SAME,
    WORDS,
    Killer,
    Watcher,
    cluster,
    computed_again,
    named,
    same_rows,
    show,
    twice,
    victims,
)

NODE = MODEST | {"num_gpus": 2}  # fake ones, one for each engine
SHARDS = JobShard.all_of(2)
KILLS_A_GROWTH = 5
PAUSE_S = (0.0, 5.0)  # before a kill, once a file has appeared since the last one
PATIENCE_S = 45.0  # a kill does not wait longer for a file: starts are killed, too
VICTIMS = {
    "driver": 4,
    "actor": 3,
    "engine": 3,
    "write task": 3,
    "progress": 1,
    "node": 1,
}  # how often each is chosen
FINISH_KILLS = 3
FINISH_KILLED_AFTER_S = (0.5, 6.0)
MOST_STARTS_AT_THE_END = 5  # of a driver, when nothing is killed any more
LOOK_EVERY_S = 0.5
KEPT = ["request_id", "sample_index", "attempt", *SAME]
EXPECTED_CODES = {DONE.code, TRANSIENT.code, INTERRUPTED.code}
CHANGED = "changed while the job read it"  # an input that grows during a run ends it with MISMATCH
TOY = dict(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)


@dataclass
class GrowingInput:
    """A directory of JSONL and Parquet files, to which rows are added, and never more than total."""

    directory: Path
    total: int
    chance: random.Random
    num_rows: int = 0
    num_files: int = 0
    num_appends: int = 0

    def grow(self, count: int) -> None:
        """Add rows: to the end of a file of lines, in a new one, or in a new Parquet file."""
        rows = [row_of(i) for i in range(self.num_rows, min(self.total, self.num_rows + count))]
        if not rows:
            return
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        files = sorted(self.directory.glob("*.jsonl"))
        kind = self.chance.choice(["append", "append", "lines", "parquet"]) if files else "lines"
        if kind == "append":
            with self.chance.choice(files).open("a") as file:
                file.write(lines)
            self.num_appends += 1
        else:
            new = (
                self.directory
                / f"{self.num_files:03d}.{'parquet' if kind == 'parquet' else 'jsonl'}"
            )
            hidden = new.with_name(
                f".{new.name}"
            )  # a file appears whole; what an append adds need not
            pq.write_table(
                pa.Table.from_pylist(rows), hidden
            ) if kind == "parquet" else hidden.write_text(lines)
            hidden.rename(new)
            self.num_files += 1
        self.num_rows += len(rows)
        print(f"  input: {self.num_rows:,} rows in {self.num_files} files ({kind})", flush=True)

    @property
    def is_complete(self) -> bool:
        return self.num_rows == self.total


@dataclass
class ShardDriver:
    """One shard's command, its running driver, and how its drivers ended.

    Attributes:
        codes: of drivers that ended by themselves.
        asked: rows of the input when the driver was started.
        files: that its watcher had seen then.
        unexpected: ends that a user would not understand.
    """

    shard: JobShard
    command: list[str]
    log: Path
    watcher: Watcher
    codes: Counter = field(default_factory=Counter)
    starts: int = 0
    asked: int = 0
    files: int = 0
    process: subprocess.Popen | None = None
    unexpected: list[str] = field(default_factory=list)

    def start(self, num_rows: int) -> None:
        self.asked, self.files, self.starts = num_rows, len(self.watcher.seen), self.starts + 1
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def has_added_files(self) -> bool:
        return len(self.watcher.seen) > self.files

    def is_done(self, num_rows: int) -> bool:
        """Whether it has ended with 0, having read an input of num_rows."""
        return self.process is not None and self.process.poll() == 0 and self.asked == num_rows

    def close(self) -> None:
        """End the driver, if it runs, and the watcher, after a last look."""
        if self.is_running:
            self.process.kill()
        self.watcher.__exit__()
        self.watcher.look()

    def note_end(self) -> None:
        """Count the exit code of a driver that was not killed. A grown input is the only MISMATCH there should be."""
        code = self.process.poll() if self.process is not None else None
        if code is None or code < 0:
            return
        self.codes[code] += 1
        text = self.log.read_text()
        reason = next(
            (line for line in text.splitlines() if line.startswith("eagle-ray:")), text[-300:]
        )
        if code:
            print(f"  shard {self.shard} ended with {code}: {reason[:300]}", flush=True)
        has_grown = code == MISMATCH.code and CHANGED in reason
        if not (has_grown or code in EXPECTED_CODES) or "Traceback" in text:
            self.unexpected.append(f"shard {self.shard}, exit code {code}: {text[-3000:]}")


@dataclass
class ShardedChaos:
    """The drivers of both shards, the input, and what kills. weights: how often each victim is chosen."""

    killer: Killer
    drivers: list[ShardDriver]
    rows: GrowingInput
    kills: int
    weights: dict[str, int]

    def kill_all(self, deadline: float) -> None:
        """Kill until there were enough kills, or the deadline is over. Drivers that ended are started again.

        deadline: on the monotonic clock.
        """
        self.rows.grow(self.rows.total // (1 + self.kills // KILLS_A_GROWTH))
        num_grown = 0
        while self.num_kills < self.kills and time.monotonic() < deadline:
            if self.num_kills >= KILLS_A_GROWTH * (num_grown + 1) or self._are_done():
                if self.rows.is_complete and self._are_done():
                    return
                left = max(1, (self.kills - self.num_kills) // KILLS_A_GROWTH)
                self.rows.grow((self.rows.total - self.rows.num_rows) // left)
                num_grown += 1
            self._wait_for_a_file(deadline)
            time.sleep(self.killer.chance.uniform(*PAUSE_S))
            self._kill_one()

    @property
    def num_kills(self) -> int:
        return sum(self.killer.killed.values())

    def _are_done(self) -> bool:
        return all(driver.is_done(self.rows.num_rows) for driver in self.drivers)

    def _wait_for_a_file(self, deadline: float) -> None:
        """Start the drivers that ended, until one of them adds a file, both are done, or PATIENCE_S is over."""
        end = min(deadline, time.monotonic() + PATIENCE_S)
        before = self._num_files
        while self._num_files == before and time.monotonic() < end and not self._are_done():
            self._restart()
            time.sleep(LOOK_EVERY_S)

    @property
    def _num_files(self) -> int:
        return sum(len(driver.watcher.seen) for driver in self.drivers)

    def _restart(self) -> None:
        for driver in self.drivers:
            if not driver.is_running and not driver.is_done(self.rows.num_rows):
                driver.note_end()
                driver.start(self.rows.num_rows)

    def _kill_one(self) -> None:
        """A driver is killed once it has added a file, so that the job gets on."""
        ready = [driver for driver in self.drivers if driver.is_running and driver.has_added_files]
        victim = self.killer.choose(self.weights | ({} if ready else {"driver": 0}))
        if victim == "driver":
            self.killer.kill_driver(self.killer.chance.choice(ready).process)
        else:
            self.killer.kill(victim)

    def complete(self) -> bool:
        """Add the rows that are left, and start each driver until it ends with 0. Nothing is killed any more."""
        self.rows.grow(self.rows.total)
        before = [driver.starts for driver in self.drivers]
        while not self._are_done():
            if any(
                d.starts - n > MOST_STARTS_AT_THE_END
                for d, n in zip(self.drivers, before, strict=True)
            ):
                return False
            self._restart()
            time.sleep(1)
        for driver in self.drivers:
            driver.note_end()
        return True

    def finish(self, directory: Path) -> int:
        """Kill `eagle-ray finish` some times, and return its exit code when nothing kills it."""
        command, log = (
            [sys.executable, "-m", "eagle_ray.cli", "finish", str(directory / "out")],
            directory / "finish.log",
        )
        for _ in range(FINISH_KILLS):
            process = _start(command, log)
            time.sleep(self.killer.chance.uniform(*FINISH_KILLED_AFTER_S))
            if process.poll() is None:
                self.killer.kill_driver(process, "finish")
        return _start(command, log).wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--engines", type=int, default=2, help="of each shard (2)")
    parser.add_argument(
        "--keep-nodes",
        action="store_true",
        help="kill none: Ray gives a new one 30 s, too few if busy",
    )
    parser.add_argument(
        "--seconds", type=float, default=7200.0, help="no kill after so long (7200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the kills (0)")
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        failed = run(Path(directory), args, started)
    print(f"{time.monotonic() - started:.0f} s in all")
    return 1 if failed else 0


def run(directory: Path, args: argparse.Namespace, started: float) -> int:
    """Return how many checks failed."""
    chance = random.Random(args.seed)
    save_toy(directory / "toy")
    (directory / "in").mkdir()
    rows = GrowingInput(directory / "in", args.rows, chance)
    with cluster(NODE) as nodes:
        drivers = list(drivers_of(directory, nodes.address, args.engines))
        weights = VICTIMS | ({"node": 0} if args.keep_nodes else {})
        chaos = ShardedChaos(Killer(nodes, chance, NODE), drivers, rows, args.kills, weights)
        print(
            f"{args.rows:,} rows, {args.kills} kills, {len(SHARDS)} shards, {NODES} nodes; seed {args.seed}"
        )
        try:
            chaos.kill_all(started + args.seconds)
            is_complete = chaos.complete()
            code = chaos.finish(directory) if is_complete else None
            alone = command(directory, "alone", nodes.address, len(SHARDS) * args.engines)
            undisturbed = _start(alone, directory / "alone.log").wait() if code == 0 else None
        finally:
            for driver in drivers:
                driver.close()
    failed = report(chaos, directory, code, undisturbed)
    if failed:
        for path in sorted(directory.glob("*.log")):
            print(f"--- {path.name}\n{path.read_text()[-3000:]}")
    return failed


def report(chaos: ShardedChaos, directory: Path, code: int | None, undisturbed: int | None) -> int:
    """Print every check and return how many failed."""
    watchers = [driver.watcher for driver in chaos.drivers]
    attempts = [
        json.loads(run_file(directory, d.shard).read_text())["attempts"] for d in chaos.drivers
    ]
    again = [computed_again(w, tried, []) for w, tried in zip(watchers, attempts, strict=True)]
    unexpected = [text for driver in chaos.drivers for text in driver.unexpected]
    total = chaos.rows.total
    counts = ids_in(directory / "out", total) if code == 0 else (0, 0, 0)
    different = different_rows(directory) if undisturbed == 0 else None
    print(
        f"killed: {victims(chaos.killer.killed)} = {chaos.num_kills}; attempts: {[len(tried) for tried in attempts]}"
    )
    print(f"input: {chaos.rows.num_files} files, {chaos.rows.num_appends} appends")
    print(
        f"exit codes of drivers that were not killed: {sum((d.codes for d in chaos.drivers), Counter())}"
    )
    checks = {
        f"eagle-ray finish ended with 0 (it was {code}), and _SUCCESS is there": code == 0
        and success(directory),
        f"{total:,} ids, each once, none else, by DuckDB ({counts})": counts == (total, total, 0),
        f"the undisturbed run ended with 0 (it was {undisturbed})": undisturbed == 0,
        f"every row is the undisturbed run's ({different} are not)": different == 0,
        f"no half file among {sum(len(w.seen) for w in watchers)} as they appeared": not any(
            w.unreadable for w in watchers
        ),
        f"nothing committed was computed again ({sum(map(len, again))} rows were)": not any(again),
        f"rows that were computed twice ({sum(map(twice, watchers))}) are the same rows": all(
            map(same_rows, watchers)
        ),
        f"no driver ended for a reason that it did not say ({len(unexpected)} did)": not unexpected,
        f"no process is left of those that were started ({len(named(NAME))})": not named(NAME),
    }
    for text in unexpected[:3]:
        print(text)
    return show(checks)


def ids_in(output: Path, total: int) -> tuple[int, int, int]:
    """Return the rows, the different ids, and the rows that are not those of row_of(0) to row_of(total - 1)."""
    query = f"""select count(*), count(distinct request_id),
        count(*) filter (not (regexp_matches(request_id, '^p[0-9]+$') and try_cast(request_id[2:] as int) < {total}))
        from read_parquet('{output}/data/**/*.parquet', hive_partitioning = false)"""
    return duckdb.sql(query).fetchall()[0]


def different_rows(directory: Path) -> int:
    """Return the rows that are in only one of both outputs, or differ in what a row is."""
    differs = " or ".join(f"a.{name} is distinct from b.{name}" for name in SAME)
    query = f"""select count(*) from read_parquet('{directory}/out/data/**/*.parquet', hive_partitioning = false) a
        full join read_parquet('{directory}/alone/data/*.parquet') b using (request_id, sample_index) where {differs}"""
    return duckdb.sql(query).fetchall()[0][0]


def success(directory: Path) -> bool:
    return (directory / "out" / "_SUCCESS").exists()


def run_file(directory: Path, shard: JobShard) -> Path:
    return directory / "out" / "_shards" / shard.name / "_run.json"


def drivers_of(directory: Path, address: str, engines: int) -> Iterator[ShardDriver]:
    for shard in SHARDS:
        data = directory / "out" / "data" / f"shard-{shard.name}"
        watcher = Watcher(fs.LocalFileSystem(), str(data), KEPT, LOOK_EVERY_S).__enter__()
        own = [*command(directory, "out", address, engines), "--shard", str(shard)]
        yield ShardDriver(shard, own, directory / f"shard-{shard.index}.log", watcher)


def command(directory: Path, output: str, address: str, engines: int) -> list[str]:
    settings = {
        "name": NAME,
        "model.target": directory / "toy",
        "model.device": "cpu",
        "speculative.method": "none",
        "sampling.max_tokens": 4,
        "sampling.ignore_eos": "true",
        "sampling.temperature": 0.8,
        "execution.ray_address": address,
        "execution.gpus_per_actor": 1,
        "execution.actors": engines,
        "execution.slots": 64,
        "execution.rows_per_file": 500,
        "logging.progress_every_s": 2.0,
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    paths = ["-i", str(directory / "in"), "-o", str(directory / output)]
    return [sys.executable, "-m", "eagle_ray.cli", "run", *paths, *sets]


def row_of(number: int) -> dict:
    tokens = [3 + number % 60, 3 + number // 60 % 60, 3 + number // 3600 % 60]
    return {"id": f"p{number}", "prompt_token_ids": tokens, "topic": WORDS[number % 10]}


def save_toy(directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TOY, eos_token_id=2)).save_pretrained(directory)


def _start(arguments: list[str], log: Path) -> subprocess.Popen:
    with log.open("a") as file:
        return subprocess.Popen(arguments, stdout=file, stderr=file)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with interruptible():  # whatever ends it, the cluster that it started ends too
        sys.exit(main())
