"""Random kills over a real job on several nodes, and every promise about its rows checked from outside.

A Ray cluster of several nodes with fake GPUs runs on this machine; the job is `eagle-ray run` with
the embedded pair. Drivers, engines, write tasks and whole nodes are killed with SIGKILL, seeded;
the same command is started until it is done. A watcher opens every file as it appears. Exit code 1
where a check fails.

    make chaos                                        # five minutes on two cores
    python -m tests.system.chaos --seconds 120 --seed 7
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from eagle_ray.batch.driver.ray_environment import LOCAL, prepare_ray_environment
from eagle_ray.batch.driver.signals import interruptible

NODES = 3  # with one fake GPU each; the head has none and holds the driver
MODEST = {
    "num_cpus": 1,
    "object_store_memory": 100 << 20,
    "node_ip_address": "127.0.0.1",
    "include_dashboard": False,
}
NODE = MODEST | {"num_gpus": 1}
SAMPLES = 2
KILLING = 0.5  # the share of the time in which things are killed
PAUSE_S = (2.0, 9.0)  # between two kills
NAME = f"chaos-{os.getpid()}"  # of the job, in the command lines of its driver and of the engines' processes
VICTIMS = {
    "driver": 3,
    "actor": 2,
    "engine": 2,
    "write task": 3,
    "progress": 1,
    "node": 2,
}  # how often each is chosen
TITLES = {
    "actor": "EngineActor",
    "engine": NAME,
    "write task": "Write",
    "progress": "ProgressActor",
}  # of processes
LOOK_EVERY_S = 0.1  # at the files
NODE_STARTS = 5
LOOK_FOR_S = 15.0  # write tasks live for a moment
WORDS = [
    "ship",
    "lamp",
    "river",
    "stone",
    "cloud",
    "garden",
    "letter",
    "window",
    "winter",
    "silver",
]
# What a row is. Times, the worker and what the drafts happened to do depend on the rest of the
# batch.
SAME = [
    "prompt",
    "text",
    "output_token_ids",
    "finish_reason",
    "status",
    "error_code",
    "completion_tokens",
]
SAME += [
    "prompt_tokens",
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "seed",
    "topic",
    "row_index",
    "source_file",
]


@dataclass
class Watcher:
    """Opens every data file as it appears, and keeps what it held.

    Attributes:
        columns: the columns that are kept; None: all.
        look_every_s: at the files.
        files: (mtime, table) of each, newest last.
    """

    where: fs.FileSystem
    data: str
    columns: list[str] | None = None
    look_every_s: float = LOOK_EVERY_S
    seen: set = field(default_factory=set)
    files: list = field(default_factory=list)
    unreadable: list = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watcher:
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(self.look_every_s):
            with suppress(OSError):  # a server that is too busy: the next look will tell
                self.look()

    def look(self) -> None:
        for info in self.where.get_file_info(fs.FileSelector(self.data, allow_not_found=True)):
            stamp = (info.path, info.size, info.mtime_ns)
            if info.base_name.endswith(".parquet") and stamp not in self.seen:
                self.seen.add(stamp)
                self._open(info)

    def _open(self, info: fs.FileInfo) -> None:
        try:
            table = pq.read_table(
                info.path, filesystem=self.where, partitioning=None, columns=self.columns
            )
            self.files.append((info.mtime_ns / 1e9, table))
        except FileNotFoundError:
            return  # rewritten or removed since it was listed
        except (OSError, pa.ArrowInvalid) as error:
            self.unreadable.append(f"{info.path}: {error}")


@dataclass
class Killer:
    """Kills processes of a cluster with SIGKILL, and counts them. node: what a new node is made with."""

    cluster: object
    chance: random.Random
    node: dict
    killed: Counter = field(default_factory=Counter)

    def choose(self, weights: dict[str, int]) -> str:
        return self.chance.choices(list(weights), list(weights.values()))[0]

    def kill(self, victim: str) -> None:
        """Kill a node, which is replaced, or a process of the cluster, should there be one within LOOK_FOR_S."""
        if victim == "node":
            self.cluster.remove_node(
                self.chance.choice(sorted(self.cluster.worker_nodes, key=raylet_of)), False
            )
            time.sleep(self.chance.uniform(0, 3))
            self._add_node()
        elif not self._kill_worker(TITLES[victim]):
            return
        self.count(victim)

    def kill_driver(self, driver: subprocess.Popen, name: str = "driver") -> None:
        driver.kill()
        driver.wait()
        self.count(name)

    def count(self, victim: str) -> None:
        self.killed[victim] += 1
        print(f"  killed: {victim}", flush=True)

    def _add_node(self) -> None:
        """Ray gives a node 30 s to start, which a busy machine may exceed."""
        for _ in range(NODE_STARTS - 1):
            with suppress(Exception):  # Ray's class for it
                self.cluster.add_node(**self.node)
                return
        self.cluster.add_node(**self.node)

    def _kill_worker(self, title: str) -> bool:
        raylets = {raylet_of(node) for node in self.cluster.list_all_nodes()}
        end = time.monotonic() + LOOK_FOR_S
        while time.monotonic() < end:
            if found := sorted(pid for pid, name in workers_of(raylets) if title in name):
                try:
                    os.kill(self.chance.choice(found), signal.SIGKILL)
                except ProcessLookupError:
                    continue
                return True
            time.sleep(0.005)
        return False


@dataclass
class Chaos:
    """The job's command and its driver, and what kills them."""

    killer: Killer
    command: list[str]
    log: Path
    driver: subprocess.Popen | None = None

    def start(self) -> None:
        with open(self.log, "a") as log:
            self.driver = subprocess.Popen(self.command, stdout=log, stderr=log)

    def kill_for(self, seconds: float, watcher: Watcher) -> None:
        """Until the time is over or the job is done. A driver is killed once it has added a file, and started again."""
        end, files = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            time.sleep(self.killer.chance.uniform(*PAUSE_S))
            if self.driver.poll() == 0:
                return
            if self.driver.poll() is not None:
                files = len(watcher.seen)
                self.start()
                continue
            victim = self.killer.choose(
                VICTIMS | ({"driver": 0} if len(watcher.seen) == files else {})
            )
            if victim == "driver":
                self.killer.kill_driver(self.driver)
            else:
                self.killer.kill(victim)

    def finish(self, seconds: float) -> int | None:
        """Nothing is killed any more: the same command, once more if need be. Its exit code; None: it took too long."""
        if self.driver.poll() not in (None, 0):
            self.start()
        try:
            return self.driver.wait(seconds)
        except subprocess.TimeoutExpired:
            self.driver.kill()
            return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="about how long all of it takes (300)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the kills (0)")
    parser.add_argument(
        "--rows", type=int, default=1500, help="prompts, each answered twice (1500)"
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="output to local files instead of an S3 server (moto's)",
    )
    args = parser.parse_args()
    started = time.monotonic()
    store = local_files if args.local else s3_server
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as directory,
        store(Path(directory)) as (where, output),
    ):
        prompts = write_prompts(Path(directory), args.rows)
        with cluster() as nodes, Watcher(where, f"{output.removeprefix('s3://')}/data") as watcher:
            killer = Killer(nodes, random.Random(args.seed), NODE)
            chaos = Chaos(killer, command(prompts, output, nodes), Path(directory) / "log")
            print(
                f"{args.rows} prompts, {SAMPLES} samples each, on {NODES} nodes into {output}; seed {args.seed}"
            )
            chaos.start()
            chaos.kill_for(args.seconds * KILLING, watcher)
            code = chaos.finish(2 * args.seconds)
            watcher.look()
            again = compute_again(where, watcher.data, chaos, args.seconds) if code == 0 else []
            watcher.look()
        attempts = json.loads(
            where.open_input_stream(f"{output.removeprefix('s3://')}/_run.json").read()
        )["attempts"]
        failed = report(chaos, code, watcher, where, args.rows, attempts, again)
        if failed:
            print(chaos.log.read_text()[-4000:])
    print(f"{time.monotonic() - started:.0f} s in all")
    return 1 if failed else 0


def report(
    chaos: Chaos,
    code: int,
    watcher: Watcher,
    where: fs.FileSystem,
    rows: int,
    attempts: list,
    again: list,
):
    """Print every check; returns how many failed."""
    found = (
        pq.read_table(watcher.data, filesystem=where, partitioning=None)
        if code == 0
        else pa.table({})
    )
    checks = {
        f"the last command ended with 0 (it was {code})": code == 0,
        f"every id {SAMPLES} times, none twice, none missing, by DuckDB": code == 0
        and counted(found) == (rows, 0),
        "_SUCCESS is there": where.get_file_info(
            f"{watcher.data.removesuffix('data')}_SUCCESS"
        ).is_file,
        f"no half file among {len(watcher.seen)} that were opened as they appeared": not watcher.unreadable,
        "nothing committed was computed again": not computed_again(watcher, attempts, again),
        f"rows that were computed twice ({twice(watcher)}) are the same rows": same_rows(watcher),
        f"no process is left of those that were started ({len(named(NAME))})": not named(NAME),
    }
    print(f"killed: {victims(chaos.killer.killed)}; {len(attempts)} attempts")
    return show(checks)


def victims(killed: Counter) -> str:
    return ", ".join(f"{count} x {victim}" for victim, count in killed.items()) or "nothing"


def show(checks: dict[str, bool]) -> int:
    """Print a line for each check and return how many failed."""
    for words, kept in checks.items():
        print(f"  {'ok    ' if kept else 'FAILED'} {words}")
    return sum(not kept for kept in checks.values())


def counted(found: pa.Table) -> tuple[int, int]:
    """Ids with exactly SAMPLES different samples, and ids with any other number of rows."""
    query = "select count(*) filter (good), count(*) filter (not good) from (select request_id, "
    query += f"count(*) = {SAMPLES} and count(distinct sample_index) = {SAMPLES} as good from found group by 1)"
    return duckdb.connect().register("found", found).execute(query).fetchone()


def computed_again(watcher: Watcher, attempts: list, removed: list) -> list[str]:
    """Rows of a later attempt that stood in an earlier one's file before it began, but for those we took away."""
    began = {attempt["attempt"]: seconds(attempt["started_at"]) for attempt in attempts}
    committed: dict[str, tuple[int, float]] = {}
    wrong = []
    for written_at, table in sorted(watcher.files, key=lambda file: file[0]):
        for key, attempt in zip(keys(table), table["attempt"].to_pylist(), strict=True):
            before = committed.setdefault(key, (attempt, written_at))
            if before[0] < attempt and before[1] < began[attempt] and key not in set(removed):
                wrong.append(key)
    return wrong


def same_rows(watcher: Watcher) -> bool:
    """Whether all sights of a row agree in SAME."""
    first: dict[str, dict] = {}
    for _, table in watcher.files:
        for key, row in zip(keys(table), table.select(SAME).to_pylist(), strict=True):
            if first.setdefault(key, row) != row:
                print(f"  {key}: {first[key]} is not {row}")
                return False
    return True


def twice(watcher: Watcher) -> int:
    """Rows that were seen from two attempts."""
    made = {
        (key, a)
        for _, t in watcher.files
        for key, a in zip(keys(t), t["attempt"].to_pylist(), strict=True)
    }
    return sum(count > 1 for count in Counter(key for key, _ in made).values())


def compute_again(where: fs.FileSystem, data: str, chaos: Chaos, seconds: float) -> list[str]:
    """Remove two files and run the command again; return the rows that it has to make again."""
    files = sorted(
        info.path
        for info in where.get_file_info(fs.FileSelector(data))
        if info.path.endswith(".parquet")
    )
    lost = [
        key
        for path in files[:2]
        for key in keys(pq.read_table(path, filesystem=where, partitioning=None))
    ]
    for path in files[:2]:
        where.delete_file(path)
    chaos.start()
    chaos.finish(2 * seconds)
    return lost


def keys(table: pa.Table) -> list[str]:
    pairs = zip(table["request_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
    return [f"{id}/{sample}" for id, sample in pairs]


def seconds(utc: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(utc).timestamp()


def write_prompts(directory: Path, rows: int) -> Path:
    """Prompts of the toy world's words, every one different."""
    table = pa.table(
        {
            "id": [f"p{i}" for i in range(rows)],
            "prompt": [f"{WORDS[i % 10]} {WORDS[i // 10 % 10]} {i}" for i in range(rows)],
            "topic": [WORDS[i % 10] for i in range(rows)],
        }
    )
    pq.write_table(table, directory / "prompts.parquet", row_group_size=100)
    return directory / "prompts.parquet"


def command(prompts: Path, output: str, nodes: object) -> list[str]:
    settings = {
        "name": NAME,
        "execution.ray_address": nodes.address,
        "execution.gpus_per_actor": 1,  # fake ones: they spread the engines over the nodes
        "execution.rows_per_file": 40,
        "model.device": "cpu",
        "model.max_model_len": 128,
        "speculative.max_nodes": 8,
        "speculative.max_depth": 3,
        "speculative.top_k": 4,
        "speculative.budget": "uniform",
        "sampling.max_tokens": 16,
        "sampling.ignore_eos": "true",
        "sampling.temperature": 0.8,
        "sampling.n": SAMPLES,
        "logging.progress_every_s": 2.0,
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "eagle_ray.cli", "run", "-i", str(prompts), "-o", output, *sets]


@contextmanager
def cluster(node: dict = NODE, num_nodes: int = NODES) -> Iterator:
    """A head and further nodes on loopback; what was started is ended. node: what a node is made with."""
    prepare_ray_environment(LOCAL)
    os.environ.setdefault("RAY_worker_niceness", "0")  # else engines starve on a busy machine
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    nodes = Cluster(
        initialize_head=True, head_node_args=MODEST | {"dashboard_agent_listen_port": 0}
    )
    try:
        for _ in range(num_nodes):
            nodes.add_node(**node)
        yield nodes
    finally:
        nodes.shutdown()


@contextmanager
def local_files(directory: Path) -> Iterator[tuple[fs.FileSystem, str]]:
    """Eyes to look at the output from outside, and where it goes."""
    yield fs.LocalFileSystem(), str(directory / "out")


@contextmanager
def s3_server(directory: Path) -> Iterator[tuple[fs.FileSystem, str]]:
    """The same in a bucket of moto's HTTP server on loopback; the environment tells the job where that is."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "chaos", "AWS_SECRET_ACCESS_KEY": "chaos"}
    eyes = fs.S3FileSystem(
        access_key="chaos",
        secret_key="chaos",
        region="us-east-1",
        endpoint_override=f"{host}:{port}",
        scheme="http",
        allow_bucket_creation=True,
    )
    eyes.create_dir("chaos")
    try:
        yield eyes, "s3://chaos/out"
    finally:
        server.stop()


def workers_of(raylets: set[int]) -> Iterator[tuple[int, str]]:
    """Ray's worker processes and what those have started, with their titles."""
    for raylet in raylets:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(raylet).children(recursive=True):
                with suppress(psutil.Error):  # gone meanwhile
                    yield process.pid, " ".join(process.cmdline())


def named(title: str) -> list[int]:
    """Processes with this in their command line."""
    return [
        found.pid
        for found in psutil.process_iter(["cmdline"])
        if title in " ".join(found.info["cmdline"] or ())
    ]


def raylet_of(node: object) -> int:
    return node.all_processes["raylet"][0].process.pid


if __name__ == "__main__":
    with interruptible():  # whatever ends it, the cluster that it started ends too
        sys.exit(main())
