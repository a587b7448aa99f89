"""The Dockerfile, as far as it can be held to its word without a docker engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import image_root

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent.parent
INSTRUCTIONS = {"WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD"}
STAGES = image_root.stages((ROOT / "infra" / "Dockerfile").read_text())
FINAL = STAGES[-1]
STUB = "gcc -shared -fPIC -o /usr/lib/x86_64-linux-gnu/libcuda.so.1 /tmp/stub.c && ldconfig"
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaUtils
from triton.compiler import ASTSource

from eagle_ray.kernels.fused_layer import _silu_mul

assert callable(CudaUtils().launch)
types = {"gate_up": "*bf16", "out": "*bf16", "gate_row": "i32", "width": "i32", "BLOCK": "constexpr"}
made = triton.compile(ASTSource(_silu_mul, types, {(4,): 1024}), target=GPUTarget("cuda", 90, 32))
print(len(made.asm["cubin"]))
"""


def instructions() -> list[tuple[str, str]]:
    """Return (word, rest) for each line but FROM, continuations joined."""
    return [line for stage in STAGES for line in stage.instructions]


def debian_packages() -> set[str]:
    """Return the Debian packages of the final stage."""
    (line,) = [
        rest for word, rest in FINAL.instructions if word == "RUN" and "apt-get install" in rest
    ]
    return set(re.split(r"--no-install-recommends|&&", line)[2].split())


def copied() -> list[str]:
    """Paths that come from the checkout, not from another stage."""
    sources = [
        rest.split()[:-1]
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
    ]
    return [path for paths in sources for path in paths]


def test_it_is_made_of_known_instructions():
    assert {word for word, _ in instructions()} == INSTRUCTIONS


def test_stages_copied_from_are_defined_before():
    used = [
        rest.split()[0].removeprefix("--from=")
        for word, rest in instructions()
        if rest.startswith("--from=")
    ]
    assert used == [stage.name for stage in STAGES[:-1]] == ["requirements", "wheel"]


def test_triton_has_a_compiler():
    """It builds its driver module at the first use of a GPU; without a compiler every job takes the portable path."""
    assert {"gcc", "libc6-dev"} <= debian_packages()


def test_a_change_of_code_leaves_the_layer_of_the_dependencies():
    """Which has all of them, so the wheel comes after it, alone."""
    runs = [rest for word, rest in FINAL.instructions if word in ("RUN", "COPY")]
    (dependencies,) = [
        i for i, rest in enumerate(runs) if "--requirement /tmp/requirements.txt" in rest
    ]
    wheel = runs.index("--from=wheel /wheels /tmp/wheels")
    assert (
        dependencies < wheel
        and runs[wheel + 1] == "pip install --no-cache-dir --no-deps /tmp/wheels/*.whl"
    )
    assert {rest.split()[0] for rest in runs[:dependencies]} == {
        "apt-get",
        "infra/constraints.txt",
        "--from=requirements",
    }
    copied_first = [rest for word, rest in STAGES[0].instructions if word == "COPY"]
    assert STAGES[0].name == "requirements" and copied_first == ["pyproject.toml ./"]


def test_what_is_copied_is_there_and_is_sent_to_the_engine():
    kept = (ROOT / "infra" / "Dockerfile.dockerignore").read_text().splitlines()
    for path in copied():
        assert (ROOT / path).exists(), path
        assert f"!{path}" in kept, path


def test_its_python_is_one_that_the_package_runs_on():
    assert {stage.image for stage in STAGES} == {"python:3.12-slim-bookworm"}
    assert (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
        == ">=3.10,<3.14"
    )


def test_its_command_is_a_script_of_the_package():
    (command,) = [json.loads(rest) for word, rest in instructions() if word == "CMD"]
    assert command[0] in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.slow
def test_a_wheel_is_made_from_what_is_copied_and_nothing_else(tmp_path):
    """The first stage, in a directory instead of an image; the build's own requirements are this environment's."""
    for path in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / path, tmp_path)
    shutil.copytree(ROOT / "eagle_ray", tmp_path / "eagle_ray")
    make = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*make, "--wheel-dir", "wheels", "."], cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "wheels").glob("eagle_ray-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    data = {
        "assets/tiny/target/model.safetensors",
        "report/templates/run.html.j2",
        "report/templates/style.css",
    }
    data |= {"cli/main.py", "serve/page/index.html"}
    assert {f"eagle_ray/{name}" for name in data} <= set(names)


@pytest.mark.slow
@pytest.mark.skipif(
    "EAGLE_RAY_IMAGE_ROOT" not in os.environ, reason="minutes and ten gigabytes: `make image-root`"
)
def test_the_image_compiles_a_kernel_for_a_gpu():
    """All stages, made without a docker engine; stubs stand for the library of a GPU's driver."""
    if missing := image_root.missing_tool(FINAL.image):
        pytest.skip(missing)
    root = image_root.make(Path(os.environ["EAGLE_RAY_IMAGE_ROOT"]))
    as_user = {"HOME": "/home/ray"}, "/home/ray", "1000:0"
    assert image_root.run_in(root, "eagle-ray --help", *as_user).startswith("usage: eagle-ray")

    (driver,) = root.glob("usr/local/lib/python3*/site-packages/triton/backends/nvidia/driver.c")
    functions = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\()", driver.read_text())))
    (root / "tmp/stub.c").write_text(
        "".join(f"int {name}(void) {{ return 999; }}\n" for name in functions)
    )
    image_root.run_in(root, STUB, {})
    (root / "tmp/compile.py").write_text(COMPILE)
    assert (
        int(image_root.run_in(root, "python /tmp/compile.py", *as_user)) > 1000
    )  # bytes of machine code
