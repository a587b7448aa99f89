"""Docstrings name what there is, noun first: every name under Args and Attributes is a parameter or an attribute."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "eagle_ray").rglob("*.py"))
SECTION = r"^(?:{}):\n((?: {{4}}.*\n?|\n)+)"
Function = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def names_in(docstring: str, sections: str) -> set[str]:
    """Return the names that these sections describe: a line has one name or several, then a colon."""
    found = set()
    for section in re.finditer(SECTION.format(sections), docstring, re.MULTILINE):
        for names in re.findall(r"^ {4}([a-z_]\w*(?:, [a-z_]\w*)*):", section[1], re.MULTILINE):
            found |= set(names.split(", "))
    return found


def parameters(function: Function) -> set[str]:
    args = function.args
    variable = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return {arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, *variable]}


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the fields, properties and attributes of a class, and the parameters of its methods."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, Function):
            found |= {part.name} | parameters(part)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            found.add(part.id)
        elif isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
            found.add(part.attr)
    return found


def misnamed(node: ast.AST) -> set[str]:
    if isinstance(node, Function):
        return names_in(ast.get_docstring(node) or "", "Args") - parameters(node)
    if isinstance(node, ast.ClassDef) and not node.bases:  # others inherit attributes
        return names_in(ast.get_docstring(node) or "", "Args|Attributes") - attributes(node)
    return set()


def described(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the names that lines of a docstring describe, and the first word of each description."""
    yield from re.findall(r"^ *([a-z_]\w*(?:, [a-z_]\w*)*): +(\w+)", docstring, re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_description_begins_with_its_noun(path):
    """`dtype: dtype of the weights`, and not `dtype: of the weights`."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED)]
    assert not [
        names
        for node in nodes
        for names, word in described(ast.get_docstring(node) or "")
        if word == "of"
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_args_and_attributes_exist(path):
    wrong = {
        node.name: names
        for node in ast.walk(ast.parse(path.read_text()))
        if (names := misnamed(node))
    }
    assert not wrong


def test_a_name_that_is_gone_is_seen():
    source = '''
class Step:
    """A step.

    Attributes:
        seconds, rows: of it.
        old: gone.
    """

    seconds: float
    rows: int

    def run(self, count):
        """Run it.

        Args:
            number: of steps.
        """
'''
    assert [misnamed(node) for node in ast.walk(ast.parse(source)) if misnamed(node)] == [
        {"old"},
        {"number"},
    ]
