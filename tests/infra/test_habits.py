"""What a stranger reads first agrees with what is there: versions, Makefile, workflows, hooks, pages of the site."""

import re
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from docs.pages import paths_of, resolve
from eagle_ray import __version__
from infra.check_wheel import main, missing_libraries
from infra.lowest import lowest_versions

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github").rglob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PINS = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
WHEEL = "eagle_ray-0.2.0-cp310-abi3-manylinux_2_28_{}.whl"


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_citation_and_changelog_have_the_version():
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == __version__
    assert f"\n## {__version__} " in text_of("CHANGELOG.md")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_is_yaml_and_names_existing_targets(path):
    workflow = yaml.safe_load(path.read_text())
    named = set(re.findall(r"\bmake ([a-z-]+)", path.read_text()))
    for job in workflow.get("jobs", {}).values():
        named |= set(job.get("strategy", {}).get("matrix", {}).get("target", []))
    assert named <= TARGETS


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", "README.md", "tests/README.md", "docs/START.md"]
)
def test_page_names_existing_targets(page):
    named = set(re.findall(r"(?:`|\$ )make ([a-z-]+)", text_of(page)))
    assert named and named <= TARGETS


def test_contributing_names_existing_files():
    named = set(re.findall(r"`([\w/.-]+\.(?:py|md|txt|cpp))`", text_of("CONTRIBUTING.md")))
    roots = [
        ROOT,
        ROOT / "eagle_ray",
        ROOT / "tests" / "gguf",
        ROOT / "tests" / "engine",
        ROOT / "eagle_ray" / "models",
    ]
    assert not [name for name in named if not any((root / name).exists() for root in roots)]


def test_contributing_names_existing_lists():
    """Recipes name lists in capitals: each one is assigned in the file that is named beside it."""
    page = text_of("CONTRIBUTING.md")
    sources = "".join(
        path.read_text()
        for name in ("eagle_ray", "jobs", "tests")
        for path in (ROOT / name).rglob("*.py")
    )
    named = set(re.findall(r"`([A-Z][A-Z_]{3,})`", page))
    assert named and not [
        name for name in named if not re.search(rf"^{name}\b.*=", sources, re.MULTILINE)
    ]


def test_the_site_has_every_page_once():
    pages: list[str] = re.findall(r"([\w./-]+\.md)$", text_of("mkdocs.yml"), re.MULTILINE)
    assert sorted(pages) == paths_of(".md"), "name each page in nav of mkdocs.yml"


def test_a_page_in_backticks_is_found_from_where_it_is_named():
    known = set(paths_of(".md"))
    assert resolve("KEYS.md", "configs", known) == "configs/KEYS.md"
    assert resolve("configs/KEYS.md", "eagle_ray/batch", known) == "configs/KEYS.md"
    assert resolve("methods/CONTRACT.md", "", known) == "eagle_ray/methods/CONTRACT.md"
    assert resolve("NONE.md", "configs", known) is None


def test_locked_and_installed_versions_are_not_below_the_lowest():
    locked = {normal(name): pin for name, pin in PINS.findall(text_of("infra/constraints.txt"))}
    lowest = {
        normal(name): bound
        for name, bound in lowest_versions().items()
        if normal(name) not in ("bitsandbytes", "pyiceberg")  # extras that are not installed
    }
    assert not [name for name, bound in lowest.items() if Version(locked[name]) < Version(bound)]
    assert Version(version("torch")) >= Version(lowest["torch"])


def test_every_dependency_has_a_lower_bound():
    project = text_of("pyproject.toml").partition("[project.scripts]")[0]
    requirements = [
        Requirement(text) for text in re.findall(r'^    "([^"]+)",', project, re.MULTILINE)
    ]
    assert {each.name for each in requirements} == lowest_versions().keys()
    assert "<" in str(next(each for each in requirements if each.name == "ray").specifier)


def test_hooks_have_the_locked_versions():
    locked = dict(PINS.findall(text_of("infra/constraints.txt")))
    hooks = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    pins = {pin for hook in hooks for pin in hook["additional_dependencies"]}
    assert {f"{name}=={locked[name]}" for name in ("ruff", "clang-format")} <= pins
    assert all(hook["language"] == "python" for hook in hooks)


@pytest.mark.parametrize(
    ("platform", "lacks"), [("x86_64", ["_cpu_avx2", "_cpu_avx512"]), ("aarch64", [])]
)
def test_a_wheel_without_its_processors_libraries_is_refused(tmp_path, capsys, platform, lacks):
    wheel = tmp_path / WHEEL.format(platform)
    with ZipFile(wheel, "w") as archive:
        for name in ("_cpu_base", "_lookup"):
            archive.writestr(f"eagle_ray/kernels/{name}.abi3.so", "")
    assert missing_libraries(wheel) == [f"eagle_ray/kernels/{name}.abi3.so" for name in lacks]
    assert main([str(wheel)]) == bool(lacks)
    assert bool(capsys.readouterr().out) == bool(lacks)
