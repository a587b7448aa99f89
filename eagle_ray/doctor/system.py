"""Checks of the machine: cores, memory, disks, installed versions.

Needs neither torch nor Ray, and imports none of the packages that it checks, so it works where they
are broken. In a container the limits are the container's (control groups v2), not the host's.

    >>> 0 < free_memory() < psutil.virtual_memory().total
    True
"""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from math import ceil
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from eagle_ray import __version__
from eagle_ray.doctor.finding import Finding
from eagle_ray.report.text import GIB, gib

MIN_OUTPUT = GIB  # free bytes for rows and the record of a run
MIN_SHARED = 256 << 20  # bytes of Ray's object store of a job on this machine alone
FULL_DISK = 0.95  # share of a disk from which on Ray writes no objects to it
CGROUP = Path("/sys/fs/cgroup")
PACKAGE = "eagle-ray"


def num_cores(cgroup: Path = CGROUP) -> int:
    """Return the CPU cores that this process may use."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))

    # A container's limit: microseconds of CPU time in each period.
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if not (quota.isdigit() and period.isdigit()):
        return cores
    limit = ceil(int(quota) / int(period))
    return min(cores, max(1, limit))


def free_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes available without swapping."""
    free = psutil.virtual_memory().available
    limit = _read(cgroup / "memory.max")
    used = _read(cgroup / "memory.current")
    if not (limit.isdigit() and used.isdigit()):
        return free
    return min(free, max(int(limit) - int(used), 0))


def disks(output: str, temporary: str, cache: Path) -> list[Finding]:
    """Check the space for a job's files.

    Args:
        output: output directory of the job, s3:// or local.
        temporary: Ray's temporary directory.
        cache: directory of measured costs.
    """
    return [_output(output), _temporary(temporary), _shared_memory(), _cache(cache)]


def _output(output: str) -> Finding:
    if "://" in output:
        says = f"the output goes to {output}: `eagle-ray validate` tries to write there"
        return Finding("disk", says)

    place = _existing(Path(output).expanduser().absolute())
    free = shutil.disk_usage(place).free
    facts = {"path": str(place), "free_bytes": free}
    if not os.access(place, os.W_OK):
        problem = "choose another output.path (-o)"
        return Finding("disk", f"{place} cannot be written", facts, problem)

    says = f"{gib(free)} free for the output in {place}"
    if free >= MIN_OUTPUT:
        return Finding("disk", says, facts)
    return Finding("disk", says, facts, "make room there, or choose another output.path (-o)")


def _temporary(temporary: str) -> Finding:
    place = _existing(Path(temporary))
    usage = shutil.disk_usage(place)
    share = usage.used / usage.total
    advice = None
    if share >= FULL_DISK:
        advice = "from 95 % on Ray keeps no objects there: make room, or set RAY_TMPDIR"
    says = f"Ray's temporary files in {place}, {share:.0%} full"
    return Finding("disk", says, {"path": str(place), "used_share": share}, advice=advice)


def _shared_memory(place: Path = Path("/dev/shm")) -> Finding:
    """Check shared memory, where Ray keeps objects; if it is small, as in containers, Ray uses slower files."""
    if not place.is_dir():
        return Finding("disk", "no /dev/shm on this system: Ray keeps objects in temporary files")
    free = shutil.disk_usage(place).free
    facts = {"path": str(place), "free_bytes": free}
    advice = None
    if free < MIN_SHARED:
        advice = "Ray will use slower files: start the container with --shm-size=1g or more"
    return Finding("disk", f"{gib(free)} free in {place}", facts, advice=advice)


def _cache(cache: Path) -> Finding:
    writable = os.access(_existing(cache), os.W_OK)
    facts = {"path": str(cache), "writable": writable}
    if writable:
        return Finding("disk", f"measured costs of steps are kept in {cache}", facts)
    advice = "every start measures them again: set EAGLE_RAY_CACHE to a directory that can be kept"
    return Finding("disk", f"{cache} cannot be written", facts, advice=advice)


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
    """Report the versions of eagle_ray, Python and the main packages."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    facts = {"eagle_ray": __version__, "python": python}
    about = Finding("eagle_ray", f"{__version__}, Python {python}", facts)
    try:
        required = [Requirement(text) for text in metadata.requires(PACKAGE) or ()]
    except metadata.PackageNotFoundError:
        says = "eagle_ray runs from its files and is not installed"
        todo = "run `pip install -e .` in the checkout: without it the versions of its packages are not checked"
        return [about, Finding("packages", says, advice=todo)]
    wanted = [each for each in required if each.marker is None or each.marker.evaluate()]
    return [about, packages(wanted)]


def packages(wanted: list[Requirement]) -> Finding:
    """Check the packages' versions against the required ones."""
    versions = {each.name: installed_version(each.name) for each in wanted}
    wrong = [each for each in wanted if not _satisfies(versions[each.name], each)]
    says = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    if not wrong:
        return Finding("packages", says, dict(versions))
    quoted = [repr(str(each)) for each in wrong]
    return Finding("packages", says, dict(versions), f"pip install {' '.join(quoted)}")


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _satisfies(version: str | None, wanted: Requirement) -> bool:
    return version is not None and wanted.specifier.contains(version, prereleases=True)
