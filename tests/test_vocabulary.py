"""Docstrings, comments, strings and documents are plain English: none of WORDS is in them.

Identifiers use the field's words, none of RETIRED. No two modules of the package define a constant
of one name.
"""

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIRECTORIES = ["eagle_ray", "jobs", "configs", "infra"]
NOT_OURS_TO_SAY = {"assets", "corpus"}  # texts that models learn from and answer
WORDS = ["who", "whom", "whoever", "nobody", "somebody", "anybody", "in vain", "as it comes"]
WORDS += ["anew", "beside", "so many", "does not know"]
RETIRED = """
asked said told heard kept held found pick learn forget meet obey untold passthrough
most least fewest board door companies foldings twin lesson wish stranger places
"""
RETIRED_IN_TENSORS = "columns column cells cell"  # positions, or an index
TENSOR_PACKAGES = {
    "attention",
    "core",
    "engine",
    "kernels",
    "kv",
    "methods",
    "models",
    "planner",
    "sampling",
    "tree",
}
ALLOWED = {
    "most_common",
    "FileNotFoundError",
    "NotFound",
    "PackageNotFoundError",
    "LocalEntryNotFoundError",
    "EntryNotFoundError",
    "RemoteEntryNotFoundError",
    "RepositoryNotFoundError",
    "TableNotFoundError",
}
ALLOWED |= {"passthrough"}  # a key of the configuration
ALLOWED |= {"held_out", "HeldOutResult", "MAX_HELD_OUT_SHARE", "held_out_prompts", "held_out_tau"}
PENDING = """
"""  # packages whose identifiers are not mended yet; this only shrinks
UNREAD = {tokenize.OP, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
PATTERN = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)


def test_no_word_of_an_idiom_of_our_own():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r}"
        for path in texts()
        for line, text in (prose_of(path) if path.suffix == ".py" else lines_of(path))
        for match in PATTERN.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_identifiers_have_the_words_of_the_field():
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "eagle_ray").rglob("*.py"))
        if (package := path.relative_to(ROOT / "eagle_ray").parts[0])
        not in {"assets", *PENDING.split()}
        for name in sorted(identifiers_of(path) - ALLOWED)
        if words_of(name) & retired_in(package)
    ]
    assert not wrong, "\n".join(wrong)


def retired_in(package: str) -> set[str]:
    return {*RETIRED.split(), *(RETIRED_IN_TENSORS.split() if package in TENSOR_PACKAGES else ())}


def identifiers_of(path: Path) -> set[str]:
    return {t.string for t in tokens_of(path) if t.type == tokenize.NAME}


@cache
def tokens_of(path: Path) -> list[tokenize.TokenInfo]:
    with path.open("rb") as file:
        return [t for t in tokenize.tokenize(file.readline) if t.type not in UNREAD]


def words_of(name: str) -> set[str]:
    """Return the words of a name in either case, such as `max_rows` or `MaxRows`."""
    return {word.lower() for word in re.split(r"_+|(?<=[a-z])(?=[A-Z])", name)}


def texts() -> list[Path]:
    files = [
        path
        for name in DIRECTORIES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".md")
    ]
    return [
        ROOT / "README.md",
        *(path for path in sorted(files) if not NOT_OURS_TO_SAY & set(path.parts)),
    ]


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    return enumerate(path.read_text().splitlines(), 1)


def prose_of(path: Path) -> list[tuple[int, str]]:
    """Return the line and text of the module's comments and strings."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    return [(t.start[0], t.string) for t in tokens_of(path) if t.type in kinds]


# A Triton kernel reads only constants of its own module, so it has a copy of each of these.
COPIES_IN_KERNELS = ["LARGEST_LOGIT", "MIX_1", "MIX_2", "_TAKEN"]


def constants() -> dict[str, dict[str, ast.expr]]:
    """Return the value of each constant, by its name and module."""
    found: dict[str, dict[str, ast.expr]] = defaultdict(dict)
    for path in sorted((ROOT / "eagle_ray").rglob("*.py")):
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.Assign):
                targets = statement.targets
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                targets = [statement.target]
            else:
                continue
            assert statement.value is not None
            for target in targets:
                if isinstance(target, ast.Name) and target.id.isupper():
                    found[target.id][str(path.relative_to(ROOT))] = statement.value
    return found


CONSTANTS = constants()


def plain_value(value: ast.expr) -> str:
    """Return the source of a value, without the constexpr(...) around it."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "tl.constexpr":
        [value] = value.args
    return ast.unparse(value)


def test_a_name_is_of_one_module():
    several = {name: sorted(modules) for name, modules in CONSTANTS.items() if len(modules) > 1}
    others = {name: modules for name, modules in several.items() if name not in COPIES_IN_KERNELS}
    assert not others, (
        "one name, several constants. Import it from one module if it is one, else name what each holds"
    )


@pytest.mark.parametrize("name", COPIES_IN_KERNELS)
def test_a_copy_in_a_kernel_has_the_value(name):
    modules = CONSTANTS[name]
    assert len(modules) == 2, "no copy any more: remove it from COPIES_IN_KERNELS"
    assert any(module.startswith("eagle_ray/kernels/") for module in modules)
    assert len({plain_value(value) for value in modules.values()}) == 1
