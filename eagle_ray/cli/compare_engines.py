"""Compare engines on the same rows: ``eagle-ray compare --engines own.yaml,vllm.yaml -i IN -o OUT``.

Each configuration is a job, whose output is a directory of OUT named after the file. So existing
rows are not generated again, and an interrupted comparison resumes.

    jobs = engine_jobs(["own.yaml", "vllm.yaml"], "runs/engines", [], {"input.limit": 100})
    print(engines_table(run_engines(jobs)))
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from eagle_ray.batch.driver.job_run import complete_job
from eagle_ray.cli.arguments import check_comparable
from eagle_ray.config import JobConfig
from eagle_ray.config.load import load_config
from eagle_ray.core.errors import ConfigError
from eagle_ray.report.engine_comparison import EngineRun, engine_numbers
from eagle_ray.runs.layout import data_of, output_of
from eagle_ray.runs.part_files import read_tables

log = logging.getLogger("eagle_ray")
EQUAL_SECTIONS = ("task", "seed", "input", "sampling", "chat")  # sections that must be equal


def engine_jobs(
    files: Sequence[str], output: str, sets: Sequence[str], flags: Mapping[str, Any]
) -> dict[str, JobConfig]:
    """Return the job of each configuration file, by the file's name without its extension.

    Raises ConfigError if a file is wrong, if two have one name, or if they differ in keys that must
    be equal.

    Args:
        output: directory that contains the output of each job.
        sets: values for all of them, as in --set.
        flags: values of named flags, by dotted key.
    """
    names = [PurePath(file).stem for file in files]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"--engines: two configurations are called {repeated[0]}, and each has an output of "
            "that name. Rename one file."
        )
    jobs = {}
    for name, file in zip(names, files, strict=True):
        own = {"output.path": f"{output.rstrip('/')}/{name}", "name": name}
        jobs[name] = load_config(file, sets=sets, overrides={**flags, **own})
    check_comparable(jobs, "--engines", "engines are compared on equal rows", EQUAL_SECTIONS)
    return jobs


def run_engines(jobs: Mapping[str, JobConfig]) -> list[dict[str, Any]]:
    """Run the jobs one after the other, and return the results of each. Raises as `complete_job` does."""
    runs: list[EngineRun] = []
    for name, config in jobs.items():
        log.info("%s: %s", name, config.output.path)
        summary = complete_job(config)
        model = config.model.target if config.engine.is_own else config.engine.model
        read = partial(read_tables, data_of(output_of(config)))
        runs.append(EngineRun(name, config.engine.kind, str(model), summary, read))
    first, *others = runs
    return [engine_numbers(first, None), *(engine_numbers(run, first) for run in others)]
