"""Packages: Python and the packages that eagle_ray asks for, their versions held against what it asks.

Reads what the installer wrote down and imports none of it, so that it works where they are broken.
"""

from __future__ import annotations

import platform
from importlib import metadata

from packaging.requirements import Requirement

from eagle_ray import __version__
from eagle_ray.doctor.check_result import Finding

OURS = "eagle-ray"


def software() -> list[Finding]:
    """eagle_ray and Python, then its packages."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    about = Finding("eagle_ray", f"{__version__}, Python {python}", {"eagle_ray": __version__, "python": python})
    try:
        wanted = [Requirement(text) for text in metadata.requires(OURS) or ()]
    except metadata.PackageNotFoundError:
        todo = "run `pip install -e .` in the checkout: without it the versions of its packages are not checked"
        return [about, Finding("packages", "eagle_ray runs from its files and is not installed", advice=todo)]
    return [about, packages([each for each in wanted if each.marker is None or each.marker.evaluate()])]


def packages(wanted: list[Requirement]) -> Finding:
    """Their versions; a problem where one is missing or not of the versions that are asked for."""
    found = {each.name: _version(each.name) for each in wanted}
    wrong = [each for each in wanted if not _satisfies(found[each.name], each)]
    says = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    problem = f"pip install {' '.join(repr(str(each)) for each in wrong)}" if wrong else None
    return Finding("packages", says, dict(found), problem)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _satisfies(version: str | None, wanted: Requirement) -> bool:
    return version is not None and wanted.specifier.contains(version, prereleases=True)
