"""The rule of tests: helpers come from tests/support, and no private name of another object is used.

The programs in tests/system import each other, too: one is a longer form of another.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
IMPORT = re.compile(
    r"^\s*(?:from|import) (tests(?!\.support\b)\b.*)", re.MULTILINE
)  # in programs within strings, too
OURS = ("eagle_ray", "jobs", "tests")
SETTERS = {"setattr", "delattr", "getattr", "hasattr"}  # of Python and of monkeypatch
LIBRARIES = {  # private names of others' objects that have no public one for what is tested; this only shrinks
    "_parameters": "torch: what a module keeps its own tensors in, which fake ones replace",
    "_buffers": "torch: what a module keeps its own tensors in, which fake ones replace",
    "_linear_pointwise": "torch: an operation that a build may lack",
    "_convert_weight_to_int4pack_for_cpu": "torch: a CPU's form of what a layer of 4 bits computes on a GPU",
    "_weight_int4pack_mm_for_cpu": "torch: a CPU's form of what a layer of 4 bits computes on a GPU",
    "_resolve_process_group": "torch: how symmetric memory finds the group that the engine names",
    "_execute_child": "subprocess: the one step of Popen that a warm process does in its place",
    "_reschedule": "xdist: the step of its scheduler that gives a worker more tests",
    "_exit": "os: how a process dies",
    "_private": "ray: what this process is to a cluster",
    "_global_node": "ray: what this process is to a cluster",
    "_unhandled_error_handler": "ray: what it calls for an error that nothing waits for",
    "_load_module_from_path": "triton: what raises if the host's compiler fails",
    "_convert_float": "triton: its interpreter, mended",
    "_patch_attr": "triton: its interpreter, mended",
    "_patch_builtin": "triton: its interpreter, mended",
    "_patch_lang_tensor": "triton: its interpreter, mended",
    "_LangPatchScope": "triton: its interpreter, made faster",
    "_patch_lang": "triton: its interpreter, made faster",
    "_get_np_dtype": "triton: its interpreter, made faster",
    "_unwrap_if_constexpr": "triton: its interpreter, made faster",
}
MOST_LETTERS = 60  # of a test's name


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield each private name of another object that is read, set, imported or replaced."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and ast.unparse(node.value) not in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            yield from filter(is_private, [alias.name for alias in node.names])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in SETTERS:
            names = [
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            ]
            yield from (part for name in names for part in name.split(".") if is_private(part))


def test_helpers_are_imported_from_support_only():
    found = {name_of(path): IMPORT.findall(path.read_text()) for path in FILES}
    for name in filter(lambda name: name.startswith("system/"), found):
        found[name] = [line for line in found[name] if not line.startswith("tests.system.")]
    assert not {name: lines for name, lines in found.items() if lines}


def test_no_private_name_of_another_object_is_used():
    used = {name_of(path): set(private_names(ast.parse(path.read_text()))) for path in FILES}
    assert not {
        name: names - LIBRARIES.keys() for name, names in used.items() if names - LIBRARIES.keys()
    }
    assert not LIBRARIES.keys() - set().union(*used.values()), (
        "take it out of LIBRARIES: no test uses it"
    )


def test_names_of_tests_fit_a_line_of_a_report():
    """A longer name is two tests in one, or words that say nothing."""
    found = [
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert not [name for name in found if name.startswith("test_") and len(name) > MOST_LETTERS]
