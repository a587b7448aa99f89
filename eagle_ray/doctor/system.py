"""Finding, the result of one check, and checks of the machine: cores, memory, disks, installed versions.

    ok       packages   torch 2.13.0, transformers 5.23.0, ...
    problem  memory     a worker takes 17.3 GiB and cuda:0 has 15.2 GiB free
                        -> set execution.slots to 5 or less

Needs neither torch nor Ray, and imports none of the packages that it checks, so it works where they are broken. In a
container the limits are the container's (control groups v2), not the host's.

    >>> 0 < free_memory() < psutil.virtual_memory().total
    True
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass, field
from importlib import metadata
from math import ceil
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from eagle_ray import __version__
from eagle_ray.report.text import GIB, gib

MIN_OUTPUT = GIB  # free, for rows and the record of a run
MIN_SHARED = 256 << 20  # Ray's object store of a job on this machine alone
FULL = 0.95  # of a disk: from there on Ray writes no objects to it
CGROUP = Path("/sys/fs/cgroup")
PACKAGE = "eagle-ray"


@dataclass(frozen=True, slots=True)
class Finding:
    """Attributes:
    part: what was checked.
    says: the result as text.
    facts: the result for programs.
    problem: what to do, if a job would fail.
    advice: what to do, if a job would be slower than possible.
    """

    part: str
    says: str
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    advice: str | None = None

    @property
    def level(self) -> str:
        """Return problem, advice or ok."""
        return "problem" if self.problem else "advice" if self.advice else "ok"

    @property
    def text(self) -> str:
        """Return a line, and a second one with the advice."""
        todo = [f"{'':20}-> {line}" for line in (self.problem, self.advice) if line]
        return "\n".join([f"{self.level:<9}{self.part:<11}{self.says}", *todo])


def num_cores(cgroup: Path = CGROUP) -> int:
    """Return the CPU cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    return min(cores, max(1, ceil(int(quota) / int(period)))) if quota.isdigit() and period.isdigit() else cores


def free_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes available without swapping."""
    free = psutil.virtual_memory().available
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    return min(free, max(int(limit) - int(used), 0)) if limit.isdigit() and used.isdigit() else free


def disks(output: str, temporary: str, cache: Path) -> list[Finding]:
    """Check the space for a job's files. output: its directory, s3:// or local. temporary: Ray's. cache: of measured
    costs.
    """
    return [_output(output), _temporary(temporary), _shared_memory(), _cache(cache)]


def _output(output: str) -> Finding:
    if "://" in output:
        return Finding("disk", f"the output goes to {output}: `eagle-ray validate` tries to write there")
    place = _existing(Path(output).expanduser().absolute())
    free = shutil.disk_usage(place).free
    facts, says = {"path": str(place), "free_bytes": free}, f"{gib(free)} free for the output in {place}"
    if not os.access(place, os.W_OK):
        return Finding("disk", f"{place} cannot be written", facts, problem="choose another output.path (-o)")
    problem = "make room there, or choose another output.path (-o)" if free < MIN_OUTPUT else None
    return Finding("disk", says, facts, problem)


def _temporary(temporary: str) -> Finding:
    place = _existing(Path(temporary))
    usage = shutil.disk_usage(place)
    share = usage.used / usage.total
    advice = "from 95 % on Ray keeps no objects there: make room, or set RAY_TMPDIR" if share >= FULL else None
    says = f"Ray's temporary files in {place}, {share:.0%} full"
    return Finding("disk", says, {"path": str(place), "used_share": share}, advice=advice)


def _shared_memory(place: Path = Path("/dev/shm")) -> Finding:
    """Check shared memory, where Ray keeps objects; if it is small, as in containers, Ray uses slower files."""
    if not place.is_dir():
        return Finding("disk", "no /dev/shm on this system: Ray keeps objects in temporary files")
    free = shutil.disk_usage(place).free
    advice = "Ray will use slower files: start the container with --shm-size=1g or more" if free < MIN_SHARED else None
    return Finding("disk", f"{gib(free)} free in {place}", {"path": str(place), "free_bytes": free}, advice=advice)


def _cache(cache: Path) -> Finding:
    writable = os.access(_existing(cache), os.W_OK)
    advice = (
        None if writable else "every start measures them again: set EAGLE_RAY_CACHE to a directory that can be kept"
    )
    says = f"measured costs of steps are kept in {cache}" if writable else f"{cache} cannot be written"
    return Finding("disk", says, {"path": str(cache), "writable": writable}, advice=advice)


def _existing(path: Path) -> Path:
    """Return the path or its nearest existing parent."""
    return next(p for p in (path, *path.parents) if p.exists())


def _read(path: Path) -> str:
    """Return the content of a one-value system file, or ""."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def software() -> list[Finding]:
    """Return the versions of eagle_ray and Python, then of packages."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    about = Finding("eagle_ray", f"{__version__}, Python {python}", {"eagle_ray": __version__, "python": python})
    try:
        wanted = [Requirement(text) for text in metadata.requires(PACKAGE) or ()]
    except metadata.PackageNotFoundError:
        todo = "run `pip install -e .` in the checkout: without it the versions of its packages are not checked"
        return [about, Finding("packages", "eagle_ray runs from its files and is not installed", advice=todo)]
    return [about, packages([each for each in wanted if each.marker is None or each.marker.evaluate()])]


def packages(wanted: list[Requirement]) -> Finding:
    """Check the packages' versions against the required ones."""
    versions = {each.name: installed_version(each.name) for each in wanted}
    wrong = [each for each in wanted if not _satisfies(versions[each.name], each)]
    says = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    problem = f"pip install {' '.join(repr(str(each)) for each in wrong)}" if wrong else None
    return Finding("packages", says, dict(versions), problem)


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _satisfies(version: str | None, wanted: Requirement) -> bool:
    return version is not None and wanted.specifier.contains(version, prereleases=True)
