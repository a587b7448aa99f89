"""A job by the real command line that is killed with SIGKILL in its middle, resumed, and whose rows are checked.

    files = JobFiles(Path("job"))
    files.write(rows, num_sampled=100, settings=SMOLLM2)
    files.answer_on_cpu(cache)                                    # the sampled rows, greedy: cpu.jsonl
    job = KilledJob(files, out, findings, {"model.dtype": "bfloat16"})
    job.run(budget)

The directory has rows.jsonl (what the job reads), sample.jsonl (some of them), cpu.jsonl (their
answers by a CPU in fp32) and settings.json (target, drafts, lengths).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.bench.gpu.findings import ROOT, Findings
from jobs.bench.gpu.isolated_runs import TimeBudget

Row = dict[str, Any]
Process = tuple[int, str]  # its PID and when it started, since PIDs are reused
SMOLLM2 = {"model.target": "embedded:smollm2", "model.draft": "embedded:smollm2/eagle2"}
COMMON = {
    "name": "third-light",
    "execution.ray_address": "local",
    "logging.progress_every_s": 1.0,
    "report.html": "false",
    "sampling.temperature": 0.0,
}
ON_CPU = {
    "model.device": "cpu",
    "model.dtype": "float32",
    "speculative.max_nodes": 12,
    "speculative.max_depth": 4,
    "speculative.top_k": 4,
}
CPU_TOKENS = 64  # of an answer that the CPU makes
LOOK_EVERY_S = 0.05
GONE_WITHIN_S = 15.0  # processes of a killed driver
CHECKS_S = 15.0  # of a call, kept for the checks of its rows
TREE_EVERY_S = 1.0  # the driver's processes are listed
TITLE_CHARACTERS = 100
SUMMARIES = "summaries.jsonl"
EXAMPLES = 3  # rows that a finding names
PHASES = {
    "ray_s": "getting Ray ready",
    "loading_s": "loading embedded:",
    "costs_s": "measuring the cost",
    "ready_s": "ready after",
}  # seconds from the command's start to the log line that begins like this
TIMES = ("started_at", "finished_at")


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The directory of a job's inputs and of what its outputs are compared with."""

    directory: Path

    @property
    def rows(self) -> Path:
        return self.directory / "rows.jsonl"

    @property
    def sample(self) -> Path:
        return self.directory / "sample.jsonl"

    @property
    def cpu_answers(self) -> Path:
        return self.directory / "cpu.jsonl"

    @property
    def settings(self) -> Row:
        return json.loads((self.directory / "settings.json").read_text())

    def write(self, rows: list[Row], num_sampled: int, settings: Row) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_jsonl(self.rows, rows)
        write_jsonl(self.sample, rows[:: max(len(rows) // num_sampled, 1)][:num_sampled])
        (self.directory / "settings.json").write_text(json.dumps(settings))

    def answer_on_cpu(self, work: Path, tokens: int = CPU_TOKENS) -> None:
        """Let a job on this machine's CPU answer the sampled rows in fp32, and keep the token ids."""
        settings = (
            self.settings | ON_CPU | {"sampling.max_tokens": tokens, "output.if_exists": "resume"}
        )
        output = work / "cpu_run"
        subprocess.run(run_command(self.sample, output, settings), cwd=ROOT, check=True)
        answers = read_rows(output, ["request_id", "output_token_ids"]).to_pylist()
        write_jsonl(
            self.cpu_answers,
            [{"id": row["request_id"], "ids": row["output_token_ids"]} for row in answers],
        )


def write_jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read_jsonl(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_command(rows: Path, output: Path, settings: Row) -> list[str]:
    words = [
        word for key, value in (COMMON | settings).items() for word in ("--set", f"{key}={value}")
    ]
    return [
        sys.executable,
        "-m",
        "eagle_ray.cli",
        "run",
        "-i",
        str(rows),
        "-o",
        str(output),
        *words,
    ]


def read_rows(output: Path, columns: list[str]) -> pa.Table:
    """Return these columns of all rows that are in files."""
    paths = sorted((output / "data").glob("*.parquet"))
    tables = [pq.read_table(path, columns=columns, partitioning=None) for path in paths]
    return pa.concat_tables(tables) if tables else pa.table({name: [] for name in columns})


def num_rows_in_files(output: Path) -> int:
    return sum(pq.read_metadata(path).num_rows for path in (output / "data").glob("*.parquet"))


class Driver:
    """`eagle-ray run` in a session of its own; a thread reads its log.

    Attributes:
        lines: (seconds since the start, line) of its log.
        processes: those of its tree that were seen while it was waited for.
    """

    def __init__(self, command: list[str], log: Path):
        self.lines: list[tuple[float, str]] = []
        self.processes: dict[Process, str] = {}
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()

    def _read(self, log: Path) -> None:
        assert self._process.stdout is not None
        with log.open("a") as file:
            for line in self._process.stdout:
                seconds = self.seconds
                self.lines.append((seconds, line.rstrip()))
                file.write(f"{seconds:7.2f} {line}")
                file.flush()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def wait_until(self, is_reached: Callable[[], bool], limit_s: float) -> bool:
        """Wait for a condition, at most until the driver ends or the time is over; return whether it holds."""
        listed_at = -TREE_EVERY_S
        while self.code is None and self.seconds < limit_s:
            if is_reached():
                return True
            if self.seconds - listed_at >= TREE_EVERY_S:
                self.processes |= process_tree(self._process.pid)
                listed_at = self.seconds
            time.sleep(LOOK_EVERY_S)
        return is_reached()

    def kill(self) -> None:
        """Kill the driver's process group with SIGKILL: no handler runs."""
        if self.code is None:
            self.processes |= process_tree(self._process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def phases(self) -> Row:
        """Return when each part of the start was logged, and the line that says what a worker's start took."""
        found: Row = {}
        for seconds, line in list(self.lines):
            for name, beginning in PHASES.items():
                if line.startswith(beginning):
                    found.setdefault(name, round(seconds, 2))
            if line.startswith(PHASES["ready_s"]):
                found.setdefault("start", line)
        return found


def process_tree(root: int) -> dict[Process, str]:
    """Return a process and all that were started below it, with their command lines."""
    parents: dict[int, int] = {}
    starts: dict[int, str] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        if fields := _fields(int(directory.name)):
            parents[int(directory.name)] = int(fields[1])
            starts[int(directory.name)] = fields[19]
    tree = {root}
    while children := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= children
    return {(pid, starts[pid]): _command_line(pid) for pid in tree if pid in starts}


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, or none if the process is gone or a zombie."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields if fields and fields[0] != "Z" else []
    return []


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:TITLE_CHARACTERS]
        )
    return ""


def wait_until_gone(processes: dict[Process, str], limit_s: float) -> tuple[float, list[str]]:
    """Return after how many seconds none was left, and the command lines of those that had to be killed."""
    started = time.monotonic()
    while (left := _living(processes)) and time.monotonic() - started < limit_s:
        time.sleep(LOOK_EVERY_S)
    seconds = time.monotonic() - started
    for pid, _ in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return seconds, [processes[process] for process in left]


def _living(processes: dict[Process, str]) -> list[Process]:
    return [
        (pid, start) for pid, start in processes if (fields := _fields(pid)) and fields[19] == start
    ]


def gpu_memory_used() -> str:
    """Return what nvidia-smi says, or an empty text without it."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip()
    return ""


@dataclass
class KilledJob:
    """One job over all rows.

    Attributes:
        settings: in addition to the job's own.
        killed_at: share of the rows in files at which the first driver is killed; None: it is not
            killed.
    """

    name: str
    files: JobFiles
    out: Path
    findings: Findings
    settings: Row
    killed_at: float | None = None
    work: Path = field(default_factory=Path.cwd)

    @property
    def output(self) -> Path:
        return self.work / self.name.replace(" ", "-")

    def run(self, budget: TimeBudget) -> None:
        """Run it to its end, or as far as the time reaches; every part that fails is a finding."""
        before: dict[str, list[int]] = {}
        if self.killed_at is not None:
            with self._recorded("kill"):
                before = self._run_and_kill(budget)
        with self._recorded("last attempt"):
            self._run_to_end(budget)
        with self._recorded("rows"):
            self._check_rows(before)
        with self._recorded("speed"):
            self._add_speed()
        with self._recorded("summary"):
            self._add_summary()
        with self._recorded("equality"):
            self._compare_with_cpu()

    def _recorded(self, part: str) -> Recorded:
        return Recorded(self.findings, self.name, part)

    def _start(self) -> Driver:
        command = run_command(self.files.rows, self.output, self.files.settings | self.settings)
        return Driver(command, self.out / f"{self.output.name}.log")

    def _run_and_kill(self, budget: TimeBudget) -> dict[str, list[int]]:
        """Return the rows that were in files when the driver was killed."""
        wanted = max(int((self.killed_at or 0) * len(read_jsonl(self.files.rows))), 1)
        driver = self._start()
        is_reached = driver.wait_until(
            lambda: num_rows_in_files(self.output) >= wanted, budget.left_s / 2
        )
        code, seconds = driver.code, driver.seconds
        driver.kill()
        gone_s, left = wait_until_gone(driver.processes, GONE_WITHIN_S)
        found = read_rows(self.output, ["request_id", "output_token_ids"])
        self.findings.add(
            "kill",
            job=self.name,
            reached=is_reached,
            ended_before=code,
            seconds=round(seconds, 1),
            rows_in_files=len(found),
            processes_gone_after_s=round(gone_s, 2),
            processes_left=left,
            gpu_memory_left=gpu_memory_used(),
        )
        self._add_start(driver, 1)
        return {row["request_id"]: row["output_token_ids"] for row in found.to_pylist()}

    def _run_to_end(self, budget: TimeBudget) -> None:
        attempt = 1 if self.killed_at is None else 2
        driver = self._start()
        driver.wait_until(lambda: False, max(budget.left_s - CHECKS_S, budget.left_s / 2))
        code, seconds = driver.code, driver.seconds
        driver.kill()
        _, left = wait_until_gone(driver.processes, GONE_WITHIN_S)
        self._add_start(driver, attempt)
        self.findings.add(
            "end",
            job=self.name,
            exit_code="time was over" if code is None else code,
            seconds=round(seconds, 1),
            processes_left=left,
            last_line=next((line for _, line in reversed(driver.lines) if code and line), ""),
        )

    def _add_start(self, driver: Driver, attempt: int) -> None:
        self.findings.add("start", job=self.name, attempt=attempt, **driver.phases())

    def _check_rows(self, before: dict[str, list[int]]) -> None:
        found = read_rows(
            self.output, ["request_id", "status", "attempt", "output_token_ids", "error_message"]
        )
        rows = found.to_pylist()
        times = Counter(row["request_id"] for row in rows)
        asked = {row["id"] for row in read_jsonl(self.files.rows)}
        ids = {row["request_id"]: row["output_token_ids"] for row in rows}
        errors = [row for row in rows if row["status"] != "ok"]
        self.findings.add(
            "rows",
            job=self.name,
            asked=len(asked),
            once=sum(times[name] == 1 for name in asked),
            missing=sum(times[name] == 0 for name in asked),
            twice=sum(count > 1 for count in times.values()),
            unknown=len(set(times) - asked),
            errors=len(errors),
            error=errors[0]["error_message"] if errors else "",
            by_attempt=dict(Counter(row["attempt"] for row in rows)),
            changed_after_kill=sum(ids.get(name) != tokens for name, tokens in before.items()),
        )

    def _add_speed(self) -> None:
        """Add each attempt's tokens a second, from its first row's start to its last row's end."""
        columns = ["attempt", "status", "prompt_tokens", "completion_tokens", *TIMES]
        rows = [row for row in read_rows(self.output, columns).to_pylist() if row["status"] == "ok"]
        for attempt in sorted({row["attempt"] for row in rows}):
            own = [row for row in rows if row["attempt"] == attempt]
            seconds = (
                max(r["finished_at"] for r in own) - min(r["started_at"] for r in own)
            ).total_seconds()
            output_tokens = sum(row["completion_tokens"] for row in own)
            prompt_tokens = sum(row["prompt_tokens"] for row in own)
            self.findings.add(
                "speed",
                job=self.name,
                attempt=attempt,
                rows=len(own),
                seconds=round(seconds, 2),
                output_tokens=output_tokens,
                prompt_tokens=prompt_tokens,
                output_tokens_per_s=round(output_tokens / seconds, 1),
                prompt_and_output_tokens_per_s=round((prompt_tokens + output_tokens) / seconds, 1),
            )

    def _add_summary(self) -> None:
        """Add the job's own figures, and its whole summary to a file of all jobs."""
        summary = json.loads((self.output / "_summary.json").read_text())
        with (self.out / SUMMARIES).open("a") as file:
            file.write(json.dumps({"job": self.name, **summary}) + "\n")
        total, work = summary["total"], summary["last_work"]
        figures = {
            key: total[key]
            for key in ("mean_acceptance_length", "draft_acceptance_rate", "nodes_per_step")
        }
        figures |= {
            key: work[key]
            for key in ("tokens_per_s", "working_s", "elapsed_s", "busy_slots", "engine_busy")
        }
        self.findings.add("summary", job=self.name, **figures, **work["engine"])

    def _compare_with_cpu(self) -> None:
        """Compare the sampled rows' tokens with the CPU's; a difference must be a near-tie of the CPU's logits."""
        from eagle_ray.evaluation.method_comparison import Equivalence, compare, first_difference

        answers = {row["id"]: row["ids"] for row in read_jsonl(self.files.cpu_answers)}
        found = read_rows(
            self.output, ["request_id", "prompt", "output_token_ids", "status"]
        ).to_pylist()
        model, tokenizer, near_tie = self._reference()
        total = Equivalence()
        unexplained = []
        for row in found:
            plain = answers.get(row["request_id"])
            if plain is None or row["status"] != "ok":
                continue
            prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
            result = compare(model, [prompt], [row["output_token_ids"]], [plain], near_tie=near_tie)
            total += result
            if result.num_compared and not result.is_explained:
                unexplained.append(
                    (row["request_id"], first_difference(row["output_token_ids"], plain))
                )
        self.findings.add(
            "equality",
            job=self.name,
            sampled=len(answers),
            compared=total.num_compared,
            equal=total.num_equal,
            near_ties=total.num_near_ties,
            near_tie_logits=near_tie,
            unexplained=len(unexplained),
            examples=unexplained[:EXAMPLES],
        )

    def _reference(self) -> tuple[Any, Any, float]:
        """Return the target in fp32 on the CPU, its tokenizer, and how far the job's dtype moves its logits."""
        import torch

        from eagle_ray.assembly.hub import download
        from eagle_ray.models.loader import load_causal_lm
        from eagle_ray.sampling.near_tie import NEAR_TIE
        from eagle_ray.text.tokenizer import Tokenizer

        path = download(self.files.settings["model.target"], "target")
        dtype = getattr(torch, self.settings["model.dtype"])
        return load_causal_lm(path, torch.float32, "cpu"), Tokenizer.load(path), NEAR_TIE[dtype]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A part whose exception becomes a finding, so that the rest goes on."""

    findings: Findings
    job: str
    part: str

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self.findings.add(
            "failed", job=self.job, part=self.part, error=f"{type(error).__name__}: {error}"[:600]
        )
        return True
