"""Make the stages of infra/Dockerfile as root directories, on a machine that has no docker engine.

    python -m tests.support.image_root DIRECTORY   # as root; minutes and ten gigabytes, most of them CUDA libraries
    chroot DIRECTORY/final python -c 'import triton'

Every RUN of the file is run in its stage's directory, every COPY copied. The base image is
imitated: Debian by debootstrap, and this machine's own Python of the image's version under
/usr/local, headers included, as in the image.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MIRROR = "http://deb.debian.org/debian"
# What the libraries of CPython's standard modules are in, which the base image has.
BASE_PACKAGES = "ca-certificates netbase tzdata libssl3 libffi8 libsqlite3-0 libbz2-1.0 liblzma5 zlib1g libuuid1"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SEARCHED = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
FINAL = "final"  # the name of the last stage, which has none


@dataclass
class Stage:
    """One FROM of a Dockerfile and its instructions, as (word, rest), continuations joined."""

    image: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)


def stages(dockerfile: str) -> list[Stage]:
    found: list[Stage] = []
    for line in dockerfile.replace("\\\n", " ").splitlines():
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            image, _, name = rest.partition(" AS ")
            found.append(Stage(image, name or FINAL))
        else:
            found[-1].instructions.append((word, rest))
    return found


def missing_tool(image: str) -> str | None:
    """Return what this machine lacks to make the stages of an image, or None."""
    if os.geteuid() != 0:
        return "only root can change the root directory"
    absent = [
        name for name in ("apt-get", "dpkg", "chroot", "unshare") if shutil.which(name) is None
    ]
    if absent:
        return f"there is no {absent[0]} here"
    return None if _python_of(image) else f"there is no Python of {image} here"


def make(directory: Path) -> Path:
    """Make all stages under the directory and return the last one's root."""
    made: dict[str, Path] = {}
    for stage in stages((REPOSITORY / "infra" / "Dockerfile").read_text()):
        base = directory / stage.image.replace(":", "-")
        if not base.is_dir():
            _make_base(base, stage.image)
        root = directory / stage.name
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(["cp", "--archive", "--reflink=auto", base, root], check=True)
        _run_stage(stage, root, made)
        made[stage.name] = root
    return made[FINAL]


def run_in(
    root: Path, command: str, env: dict[str, str], where: str = "/", user: str = "0:0"
) -> str:
    """Run a shell command in a root directory with processes of its own and return what it printed."""
    settings = [f"{name}={value}" for name, value in ({"PATH": SEARCHED} | env).items()]
    separate = ["unshare", "--mount", "--pid", "--fork", f"--mount-proc={root}/proc"]
    inside = [
        "chroot",
        f"--userspec={user}",
        root,
        "env",
        "-i",
        *settings,
        "sh",
        "-c",
        f"cd {where} && {command}",
    ]
    done = subprocess.run([*separate, *inside], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{command}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    return done.stdout


def _run_stage(stage: Stage, root: Path, made: dict[str, Path]) -> None:
    where, env, user = "/", _network(root), "0:0"
    for word, rest in stage.instructions:
        print(f"{stage.name}: {word} {rest[:90]}", file=sys.stderr, flush=True)
        if word == "RUN":
            run_in(root, rest, env, where, user)
        elif word == "COPY":
            _copy(rest.split(), root, where, made)
        elif word == "ENV":
            env |= dict(re.findall(r"(\w+)=(\S+)", rest))
        elif word == "WORKDIR":
            where = rest
            (root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            user = f"{rest}:0"
        elif word != "CMD":
            raise ValueError(
                f"infra/Dockerfile: {word} is an instruction that this script does not run. Add it here."
            )


def _copy(words: list[str], root: Path, where: str, made: dict[str, Path]) -> None:
    source = REPOSITORY
    if words[0].startswith("--from="):
        source = made[words.pop(0).removeprefix("--from=")]
    *names, last = words
    target = root / os.path.join(where, last).lstrip("/")
    for name in names:
        path = source / name.lstrip("/")
        if path.is_dir():
            shutil.copytree(
                path,
                target,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__", "*.so"),
            )
        else:
            is_directory = last.endswith("/")
            (target if is_directory else target.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def _make_base(base: Path, image: str) -> None:
    """Make the root directory of an image such as python:3.12-slim-bookworm."""
    root = base.with_name(f"{base.name}.partial")  # renamed once it is whole
    shutil.rmtree(root, ignore_errors=True)
    suite = image.rpartition("-")[2]
    debootstrap, scripts = _debootstrap(root.parent / "debootstrap")
    command = [
        debootstrap,
        "--variant=minbase",
        f"--include={','.join(BASE_PACKAGES.split())}",
        suite,
        root,
        MIRROR,
    ]
    subprocess.run(
        command, check=True, capture_output=True, env=os.environ | {"DEBOOTSTRAP_DIR": str(scripts)}
    )
    python = _python_of(image)
    assert python is not None
    kept = shutil.ignore_patterns("__pycache__", "site-packages", "test", "*.a")
    shutil.copytree(python, root / "usr" / "local", symlinks=True, dirs_exist_ok=True, ignore=kept)
    (root / "usr/local/lib" / f"python{_version_of(image)}" / "site-packages").mkdir()
    shutil.rmtree(root / "usr/local/bin")
    (root / "usr/local/bin").mkdir()
    shutil.copy(python / "bin" / f"python{_version_of(image)}", root / "usr/local/bin")
    for name in ("python", "python3"):
        (root / "usr/local/bin" / name).symlink_to(f"python{_version_of(image)}")
    run_in(root, "ldconfig && python -m ensurepip && ln -s pip3 /usr/local/bin/pip", _network(root))
    root.rename(base)


def _debootstrap(directory: Path) -> tuple[Path, Path]:
    """Return the program and its scripts, unpacked without installing them."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["apt-get", "download", "-qq", "debootstrap"],
        cwd=directory,
        check=True,
        capture_output=True,
    )
    (package,) = directory.glob("debootstrap_*.deb")
    subprocess.run(["dpkg", "-x", package, directory], check=True)
    return directory / "usr/sbin/debootstrap", directory / "usr/share/debootstrap"


def _network(root: Path) -> dict[str, str]:
    """Let programs in the root directory reach what this machine reaches; return the settings that they need."""
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    shutil.copy(
        CERTIFICATES, root / "etc" / "build-certificates.crt"
    )  # a mirror may have a certificate of its own
    return {
        "PIP_CERT": "/etc/build-certificates.crt",
        "PIP_ROOT_USER_ACTION": "ignore",
        "LANG": "C.UTF-8",
    }


def _python_of(image: str) -> Path | None:
    """Return the prefix of this machine's Python of the image's version, with its headers; None without one."""
    version = _version_of(image)
    prefixes = [*sorted(Path.home().glob(f".pyenv/versions/{version}.*")), Path("/usr/local")]
    needed = (f"bin/python{version}", f"include/python{version}/Python.h")
    return next(
        (each for each in prefixes if all((each / name).is_file() for name in needed)), None
    )


def _version_of(image: str) -> str:
    return image.removeprefix("python:").partition("-")[0]


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
