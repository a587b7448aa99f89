"""The import law of the house: rooms look down, never up or sideways, and heavy libraries stay where they belong."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "eagle_ray"
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "assets" not in p.parts)

LEVEL = {
    "errors": 0,
    "chat_templates": 0,
    "sampling_limits": 0,
    "config": 1,
    "kernels": 1,
    "datastore": 2,
    "draft_vocab": 2,
    "start_log": 1,
    "text": 1,
    "speculative": 2,
    "models": 3,
    "drafting": 4,
    "engine": 5,
    "methods": 6,
    "pair": 7,
    "benchmark": 8,
    "data": 8,
    "serve": 8,
    "training": 8,
    "report": 8,
    "job": 9,
    "on_finish": 9,
    "keep_going": 10,
    "validate": 9,
    "memory_limit": 9,
    "demo": 10,
    "endpoint": 10,
    "review": 10,
    "doctor": 11,
    "evaluate": 11,
    "export": 11,
    "cli": 12,
}
HEAVY = {
    "ray": {"data", "serve", "training", "job", "demo", "endpoint", "doctor", "cli"},
    "transformers": {"models", "text", "methods", "doctor", "benchmark"},
    "triton": {"kernels"},
    "torch": {
        "kernels",
        "speculative",
        "models",
        "drafting",
        "engine",
        "methods",
        "pair",
        "benchmark",
        "data",
        "serve",
        "training",
        "doctor",
        "evaluate",
    },
    "pydantic": {"config", "serve"},
}
ENGINE_ROOMS = {"kernels", "speculative", "models", "drafting", "engine"}
ENGINE_LIBRARIES = {"numpy", "torch", "transformers", "safetensors", "triton", "jaxtyping", "eagle_ray"}
NO_TORCH = ["config", "report", "data/schema.py", "data/sink.py"]


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names of all modules a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_rooms(path: Path) -> set[str]:
    parts = [name.split(".") for name in imports(path) if name.startswith("eagle_ray.")]
    return {p[1] for p in parts} - {room(path), "__version__"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_look_down(path):
    if room(path) == "__init__":
        return
    here = LEVEL[room(path)]
    for other in own_rooms(path):
        assert LEVEL[other] < here, f"{room(path)} must not import {other}"


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_stay_in_their_rooms(library):
    users = {room(p) for p in FILES if any(name.split(".")[0] == library for name in imports(p))}
    assert users <= HEAVY[library]


def test_the_engine_runs_without_ray_and_pydantic():
    import sys

    for path in FILES:
        if room(path) in ENGINE_ROOMS:
            libraries = {name.split(".")[0] for name in imports(path)}
            strangers = libraries - ENGINE_LIBRARIES - set(sys.stdlib_module_names)
            assert not strangers, f"{path}: {strangers}"


@pytest.mark.parametrize("place", NO_TORCH)
def test_no_torch_where_only_tables_and_settings_live(place):
    files = [PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).rglob("*.py")
    assert not [p for p in files if any(name.split(".")[0] in ("torch", "transformers") for name in imports(p))]


def test_no_type_checking_imports():
    """If one seems needed, the layer is wrong."""
    assert not [p for p in FILES if "TYPE_CHECKING" in p.read_text()]
