"""The import rule: packages import downwards only, and heavy libraries stay where they belong."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "eagle_ray"
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "assets" not in p.parts)

# Packages, their sub-packages and modules of the root, the lowest first; those of one line import
# none of each other. Requests stand below the configuration, which is made of the table of what a
# request may say.
ORDER = """
core families
gguf kernels report scaling storage
text
sampling
requests
methods.method
config tree
kv parallel
attention
runs
publishing
batch.reader models
training
methods
planner
methods.eagle
methods.dflash methods.medusa methods.draft_model methods.lookup
methods.combine
engine
assembly
evaluation port
batch.worker
batch batch.driver training.job
serve.http
api doctor serve.batches
serve
cli lm_eval
"""
LEVEL = {name: level for level, line in enumerate(ORDER.split("\n")) for name in line.split()}
MAX_IMPORTS_OF_A_STEP = 12  # of the four that batch.driver.job_run calls in turn
MAX_IMPORTS = 20  # modules of our own that one module imports
FAMILIES = [  # modules with functions of one name and meaning, of which another picks one
    r"storage\.(local|remote|s3)",
    r"(kernels|attention)\.\w+|sampling\.sampler|methods\.coupling",  # a kernel, and its form in torch
    r"methods\.\w+\.(checkpoint|drafter|switch|suffix|rest|token_recycling|lookahead)",
    r"cli\.main|lm_eval",
]
ROLES = {
    "heads",
    "checkpoint",
    "drafter",
    "calibration",
    "recipe",
}  # the same files in the folder of each method
TORCH_FREE = {"config", "gguf", "publishing", "report", "runs", "scaling", "storage"}
HEAVY = {
    "ray": {"batch", "serve", "training", "doctor", "cli"},
    "transformers": {"attention", "models", "text", "methods", "assembly", "training", "doctor"},
    "triton": {"kernels"},
    "torch": {name.split(".")[0] for name in LEVEL} - TORCH_FREE,
    "pydantic": {"config", "requests", "serve", "api"},
}
ENGINE_PACKAGES = {
    "kernels",
    "sampling",
    "tree",
    "kv",
    "attention",
    "core",
    "models",
    "methods",
    "planner",
    "engine",
}
ENGINE_LIBRARIES = {
    "llguidance",
    "numpy",
    "torch",
    "transformers",
    "safetensors",
    "triton",
    "jaxtyping",
    "eagle_ray",
}
NO_TORCH = ["config", "report", "storage", "requests/row_schema.py", "batch/worker/sink.py"]


def package(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    """Dotted names of all modules a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def name_of(path: Path) -> str:
    """Return a module's name below eagle_ray, that of a package for its ``__init__``; of the root it is empty."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imported_modules(path: Path) -> set[str]:
    """Return our own modules that a file imports, the root left out."""
    names = {
        name.removeprefix("eagle_ray.") for name in imports(path) if name.startswith("eagle_ray.")
    }
    found = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    return {name for name in found if name} - {name_of(path)}


@cache
def all_imports() -> dict[str, set[str]]:
    """Return our own modules that each module imports."""
    return {name: imported_modules(path) for name, path in MODULES.items() if name}


def unit(module: str) -> str:
    """Return the package or sub-package that a module stands in; a module of the root is one itself."""
    is_package = (PACKAGE / module.replace(".", "/")).is_dir()
    return (
        module if is_package or module in LEVEL or "." not in module else module.rpartition(".")[0]
    )


def upwards() -> set[tuple[str, str]]:
    """Return the pairs of a module and one that it imports from its own level or above, outside its own package."""
    pairs = {(module, other) for module, others in all_imports().items() for other in others}
    return {(a, b) for a, b in pairs if unit(a) != unit(b) and LEVEL[unit(b)] >= LEVEL[unit(a)]}


def test_every_package_has_a_level():
    assert {unit(module) for module in all_imports()} == set(LEVEL)


def test_packages_and_sub_packages_import_downwards_only():
    assert not [f"eagle_ray.{a} must not import eagle_ray.{b}" for a, b in sorted(upwards())]


def test_no_modules_import_each_other_in_a_circle():
    left, before = dict(all_imports()), {}
    while (
        left != before
    ):  # drop what imports nothing of the rest, and what nothing of the rest imports
        before, used = left, set().union(*left.values())
        left = {module: others & left.keys() for module, others in left.items() if module in used}
        left = {module: others for module, others in left.items() if others}
    assert not left


def test_no_folders_import_each_other():
    folders = {
        (folder(module), folder(other))
        for module, others in all_imports().items()
        for other in others
    }
    assert not {f"{a}-{b}" for a, b in folders if a < b and (b, a) in folders}


def folder(module: str) -> str:
    """Return the folder of a module; a module of the root is one itself."""
    return (
        module
        if (PACKAGE / module.replace(".", "/")).is_dir()
        else module.rpartition(".")[0] or module
    )


def test_functions_of_one_name_are_of_one_protocol():
    modules: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in tree(path).body:
            if isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef
            ) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(module)
    shared = {
        name
        for name, places in modules.items()
        if len(places) > 1
        and not any(all(re.fullmatch(family, place) for place in places) for family in FAMILIES)
    }
    assert not shared


def test_no_module_imports_too_many_others():
    assert not {
        module: len(others) for module, others in all_imports().items() if len(others) > MAX_IMPORTS
    }


@pytest.mark.parametrize("step", ["job_plan", "claim", "execute", "settle"])
def test_a_step_of_a_job_imports_little(step):
    assert len(all_imports()[f"batch.driver.{step}"]) <= MAX_IMPORTS_OF_A_STEP


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


def test_the_engine_and_the_drafters_reach_no_configuration():
    """They run where pydantic is not installed; what trains heads reads the configuration of that."""
    engine = {
        name
        for name in all_imports()
        if name.split(".")[0] in ENGINE_PACKAGES and not name.endswith(".recipe")
    }
    reached, new = set(), engine
    while new:
        reached |= new
        new = {other for name in new for other in all_imports().get(name, ())} - reached
    assert not {
        name for name in reached if name.split(".")[0] in ("config", "batch", "serve", "assembly")
    }


@pytest.mark.parametrize("place", NO_TORCH)
def test_no_torch_where_only_tables_and_settings_live(place):
    files = [PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).rglob("*.py")
    assert not [
        p
        for p in files
        if any(name.split(".")[0] in ("torch", "transformers") for name in imports(p))
    ]


def test_a_process_that_reads_rows_does_not_load_torch():
    modules = "eagle_ray.batch.reader.file_slices, eagle_ray.serve.batches.batch_input"
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
        == "False\n"
    )


def test_no_type_checking_imports():
    """If one seems needed, the layer is wrong."""
    assert not [p for p in FILES if "TYPE_CHECKING" in p.read_text()]


def test_no_two_modules_share_a_name():
    names = Counter(p.stem for p in FILES if p.stem not in {"__init__", "__main__", *ROLES})
    assert not [name for name, count in names.items() if count > 1]


def test_no_two_public_classes_share_a_name():
    names = Counter(
        node.name
        for path in FILES
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize(
    "name", ["InputPlan", "JobPlan", "MemoryPlan", "Method", "Request", "Run", "WorkerPlan"]
)
def test_a_central_noun_is_one_class(name):
    """A second class that ends so, such as a plan of replicas beside that of workers, would say the same once more."""
    ending = rf"{name.removesuffix('Plan')}Plan$" if name.endswith("Plan") else rf"^{name}$"
    classes = [
        node.name for path in FILES for node in tree(path).body if isinstance(node, ast.ClassDef)
    ]
    assert [each for each in classes if re.search(ending, each)] == [name]
