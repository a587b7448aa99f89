"""The import rule: packages import downwards only, and heavy libraries stay where they belong."""

import ast
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "eagle_ray"
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "assets" not in p.parts)

LEVELS = [
    {"gguf", "kernels", "report"},
    {"sampling", "storage"},
    {"config", "tree"},
    {"kv"},
    {"attention"},
    {"models"},
    {"drafters", "smollm2"},
    {"planner"},
    {"engine", "registry"},
    {"build"},
    {"evaluation", "batch", "training"},
    {"serve", "doctor", "api"},
    {"cli", "lm_eval"},
]
CUT_PACKAGES = ("core", "text", "requests")  # each of whose modules has a place of its own in the order
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
TORCH_FREE = {"config", "gguf", "report", "storage"}
HEAVY = {
    "ray": {"batch", "serve", "training", "doctor", "cli"},
    "transformers": {"attention", "models", "text", "registry", "doctor"},
    "triton": {"kernels"},
    "torch": {*LEVEL, *CUT_PACKAGES} - TORCH_FREE,
    "pydantic": {"config", "serve", "api"},
}
ENGINE_PACKAGES = {"kernels", "sampling", "tree", "kv", "attention", "core", "models", "drafters", "planner", "engine"}
ENGINE_LIBRARIES = {"llguidance", "numpy", "torch", "transformers", "safetensors", "triton", "jaxtyping", "eagle_ray"}
NO_TORCH = ["config", "report", "storage", "batch/output/sink.py"]
NO_TORCH += [
    f"requests/{name}.py"
    for name in ("answers", "parameters", "response_answers", "row_schema", "token_logprobs", "values")
]


def package(path: Path) -> str:
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


def unit(parts: tuple[str, ...]) -> str:
    """Return the package, or the module of a package whose modules have levels, of a dotted or slashed path."""
    return ".".join(parts[: 2 if parts[0] in CUT_PACKAGES else 1])


def own_unit(path: Path) -> str:
    return unit(path.relative_to(PACKAGE).with_suffix("").parts)


def own_units(path: Path) -> set[str]:
    parts = [tuple(name.split(".")[1:]) for name in imports(path) if name.startswith("eagle_ray.")]
    return {unit(p) for p in parts} - {own_unit(path), "__version__"}


def test_packages_import_downwards_only():
    upwards = [
        f"{path.relative_to(ROOT)} must not import eagle_ray.{other}"
        for path in FILES
        if path.stem != "__init__" and own_unit(path) in LEVEL
        for other in own_units(path)
        if LEVEL.get(other, -1) >= LEVEL[own_unit(path)]
    ]
    assert not upwards


def test_there_are_no_circles():
    graph: dict[str, set[str]] = {}
    for path in FILES:
        if path.stem != "__init__":
            graph.setdefault(own_unit(path), set()).update(own_units(path))
    list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_stay_in_their_packages(library):
    users = {package(p) for p in FILES if any(name.split(".")[0] == library for name in imports(p))}
    assert users <= HEAVY[library]


def test_the_engine_runs_without_ray_and_pydantic():
    for path in FILES:
        if package(path) in ENGINE_PACKAGES:
            libraries = {name.split(".")[0] for name in imports(path)}
            others = libraries - ENGINE_LIBRARIES - set(sys.stdlib_module_names)
            assert not others, f"{path}: {others}"


@pytest.mark.parametrize("place", NO_TORCH)
def test_no_torch_where_only_tables_and_settings_live(place):
    files = [PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).rglob("*.py")
    assert not [p for p in files if any(name.split(".")[0] in ("torch", "transformers") for name in imports(p))]


def test_a_process_that_reads_rows_does_not_load_torch():
    program = (
        "import sys, eagle_ray.batch.input.source, eagle_ray.serve.batches.batch_input; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_no_type_checking_imports():
    """If one seems needed, the layer is wrong."""
    assert not [p for p in FILES if "TYPE_CHECKING" in p.read_text()]


def test_no_two_modules_share_a_name():
    names = Counter(p.stem for p in FILES if p.stem not in ("__init__", "__main__"))
    assert not [name for name, count in names.items() if count > 1]


def test_no_two_public_classes_share_a_name():
    names = Counter(
        node.name
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]
