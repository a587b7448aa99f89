"""What the pages and --help promise, and the test of each promise.

tests/documented.yaml is the list. An entry quotes sentences as they stand in their page, and names
the tests that go in by a user's way (a command, LLM, a job, HTTP), or says why there is none.

    README.md:
    - says:
      - Ids that occur twice are refused before the start, with both places.
      tests:
          [cli/test_documented_inputs.py::test_an_id_that_occurs_twice_is_refused_with_both_places]
    - says:
      - FP8 layers have not run on a GPU yet.
      untested: a GPU
      below: [kernels/test_gpu_linears.py::test_fp8_weight_is_nearest]  # tests of what is behind
          the way, if any

A page is cut into units: sentences, table rows, lines of code, arguments of --help. A promise is
quoted whole, so one that is worded anew is looked at again with its test.

    $ python -m tests.support.documented     # make documented: promises with tests, what has none, the rest
"""

from __future__ import annotations

import ast
import io
import os
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
LIST = TESTS / "documented.yaml"
COMMAND = "eagle-ray"
FOLDERS = ("api", "batch", "serve", "training", "methods", "parallel", "planner")
PAGES = ("README.md", "configs/README.md", "eagle_ray/README.md")
PAGES += tuple(f"eagle_ray/{folder}/README.md" for folder in FOLDERS)
PAGES += ("infra/README.md", "docs/embeddings.md")
SENTENCE_END = re.compile(r"(?<=[.?!)\"])(?<!\.\.\.)(?<![^.?!][)\"]) (?=[A-Z`*\"\[(])")
LIST_ITEM = re.compile(r"^ *[-*] ")
TABLE_RULE = re.compile(r"[|:\- ]+")
ARGUMENT = re.compile(r" {2,4}(?=\S)")  # where the help of one begins
LONG_OPTION = re.compile(r"--[a-z-]+")
WIDE = "400"  # columns, so that --help breaks no line
WIDTH = 110  # of the printed list
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Entry:
    """Promises of a page with their tests.

    Attributes:
        says: units of the page that promise something.
        tests: those that go in by a user's way, as PATH below tests/ and ::NAME.
        below: tests of what is behind the way.
        untested: why there is no test by a user's way.
    """

    says: tuple[str, ...]
    tests: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    untested: str = ""

    @classmethod
    def of(cls, content: dict[str, Any]) -> Entry:
        values = {
            name: tuple(map(one_line, value))
            for name, value in content.items()
            if isinstance(value, list)
        }
        return cls(**{**content, **values})


# The pages


def units_of_page(page: str) -> list[str]:
    """Return the units of a page of the repository, or of `eagle-ray COMMAND --help`."""
    if page.startswith(COMMAND):
        return units_of_help(help_of(tuple(page.split()[1:-1])))
    return units_of_markdown((ROOT / page).read_text())


def units_of_markdown(text: str) -> list[str]:
    """Cut a page into units. Headings, rules of tables and pictures are none."""
    units: list[str] = []
    paragraph: list[str] = []
    is_code = False

    def end_paragraph() -> None:
        sentences = SENTENCE_END.split(one_line(" ".join(paragraph)))
        units.extend(filter(None, sentences))
        paragraph.clear()

    for line in text.splitlines():
        if line.startswith("```") and (not is_code or line.strip() == "```"):
            end_paragraph()
            is_code = not is_code
        elif is_code:
            units += [one_line(line)] if line.strip() else []
        elif line.startswith("#"):
            end_paragraph()
        elif line.startswith("|"):
            end_paragraph()
            units += [] if TABLE_RULE.fullmatch(line) else [one_line(line)]
        else:
            if not line.strip() or LIST_ITEM.match(line):
                end_paragraph()
            paragraph.append(LIST_ITEM.sub("", line))
    end_paragraph()
    return [unit for unit in units if not unit.startswith("![")]


def help_pages() -> list[str]:
    """Return `eagle-ray --help` and those of every command."""
    from eagle_ray.cli.main import COMMANDS

    words = ["", *COMMANDS, "bench cost"]
    return [" ".join([COMMAND, *name.split(), "--help"]) for name in words]


@cache
def help_of(words: tuple[str, ...]) -> str:
    from eagle_ray.cli.main import main

    shown = io.StringIO()
    with patch.dict(os.environ, COLUMNS=WIDE), redirect_stdout(shown), suppress(SystemExit):
        main([*words, "--help"])
    return shown.getvalue()


def units_of_help(text: str) -> list[str]:
    """Return each argument and each command with its help: `--limit input.limit: only the first N rows`."""
    found: list[tuple[str, str]] = []
    for line in text.partition("\n\n")[2].splitlines():
        if ARGUMENT.match(line):
            invocation, _, description = line.strip().partition("  ")
            long_name = LONG_OPTION.search(invocation)
            found.append((long_name[0] if long_name else invocation, description))
        elif line.startswith("   ") and found:
            name, description = found.pop()
            found.append((name, f"{description} {line}"))
    described = [(name, one_line(description)) for name, description in found]
    return [
        f"{name} {description}"
        for name, description in described
        if description and name != "--help"
    ]


def one_line(text: str) -> str:
    return " ".join(text.split())


def block(page: str, language: str, heading: str) -> str:
    """Return the first block of code in a language below a heading of a page."""
    text = "\n" + (ROOT / page).read_text()
    section = text.partition(f"\n{heading}\n")[2]
    return section.partition(f"```{language}\n")[2].partition("\n```")[0]


# The list


def entries() -> dict[str, list[Entry]]:
    """Return the entries of each page."""
    content = yaml.load(LIST.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {page: [Entry.of(one) for one in found] for page, found in content.items()}


def reworded(units: Collection[str], found: Iterable[Entry]) -> list[str]:
    """Return the promises that the page does not have as they are listed."""
    return [promise for entry in found for promise in entry.says if promise not in units]


def unlisted(units: Iterable[str], found: Iterable[Entry]) -> list[str]:
    """Return the units that are no promise by the list."""
    listed = {promise for entry in found for promise in entry.says}
    return [unit for unit in units if unit not in listed]


# The tests


@dataclass(frozen=True)
class ParsedModule:
    """A module of tests or of their support, by its syntax.

    Attributes:
        definitions: functions, methods (CLASS::NAME), classes and constants by name.
        imports: module and name of each imported name.
    """

    definitions: dict[str, ast.AST]
    imports: dict[str, tuple[str, str]]


@cache
def module_of(name: str) -> ParsedModule | None:
    """Return tests.api.test_llm; None if there is no such file."""
    file = ROOT / f"{name.replace('.', '/')}.py"
    if not file.exists():
        return None
    tree = ast.parse(file.read_text())
    imports = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imports |= {
                alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names
            }
        elif isinstance(node, ast.Import):
            imports |= {
                alias.asname or alias.name.split(".")[0]: (alias.name, "") for alias in node.names
            }
    return ParsedModule(dict(_definitions(tree.body)), imports)


def _definitions(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield node.name, node
            yield from _definitions(node.body, f"{node.name}::")
        elif isinstance(node, ast.Assign):
            yield from (
                (target.id, node) for target in node.targets if isinstance(target, ast.Name)
            )


def exists(test: str) -> bool:
    path, _, name = test.partition("::")
    module = module_of(module_name(path))
    return module is not None and isinstance(module.definitions.get(name), Function)


def module_name(path: str) -> str:
    return f"tests.{path.removesuffix('.py').replace('/', '.')}"


WAYS = {  # of a user, by module and name, with the name of the way
    ("eagle_ray.cli", "main"): "command",
    ("eagle_ray.cli.main", "main"): "command",
    ("eagle_ray", "LLM"): "LLM",
    ("eagle_ray.batch.driver.job_run", "complete_job"): "job",
    ("eagle_ray.batch.driver.job_run", "run_to_end"): "job",
    ("eagle_ray.serve.app", "build_app"): "HTTP",
    ("eagle_ray.serve.proxy_errors", "middlewares"): "HTTP",
}
ATTRIBUTES = {"complete_job": "job", "generate": "job"}  # of eagle_ray
IN_TEXTS = {  # in programs within strings, and in commands
    r"eagle_ray\.cli\b|^eagle-ray\b": "command",
    r"\bimport (\w+, )*eagle_ray\b|\bimport LLM\b": "Python",
    r"^(make|deploy)$": "command",
    r"^count_tokens\.py$": "command",
    r"^README\.md$": "Python",
}


def ways_of(test: str) -> set[str]:
    """Return the ways of a user by which a test goes in, as far as its names and those of its helpers tell."""
    path, _, name = test.partition("::")
    seen: set[tuple[str, str]] = set()
    return set(_ways(module_name(path), name, seen))


def _ways(module: str, name: str, seen: set[tuple[str, str]]) -> Iterator[str]:
    """Yield the ways of a definition and of all that it names: helpers, fixtures, constants."""
    if (
        (module, name) in seen
        or (here := module_of(module)) is None
        or (node := here.definitions.get(name)) is None
    ):
        return
    seen.add((module, name))
    used = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            used.add(inner.id)
        elif isinstance(inner, ast.arg):
            used.add(inner.arg)
        elif isinstance(inner, ast.Attribute):
            used.add(inner.attr)
            if (
                isinstance(inner.value, ast.Name)
                and inner.value.id == "eagle_ray"
                and inner.attr in ATTRIBUTES
            ):
                yield ATTRIBUTES[inner.attr]
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield from (way for pattern, way in IN_TEXTS.items() if re.search(pattern, inner.value))
            used |= {inner.value} if inner.value.isidentifier() else set()  # of usefixtures
    for other in used:
        if other in here.imports and (way := WAYS.get(here.imports[other])):
            yield way
        yield from _ways(*_place_of(module, other), seen)


def _place_of(module: str, name: str) -> tuple[str, str]:
    """Return the module and name of what a name means in a module: its own, an imported one, or a fixture."""
    here = module_of(module)
    assert here is not None
    if name in here.imports:
        source, original = here.imports[name]
        return (source, original) if source.startswith("tests.") else (module, "")
    if name in here.definitions:
        return module, name
    parts = module.split(".")[:-1]
    for number in range(len(parts), 0, -1):
        conftest = ".".join([*parts[:number], "conftest"])
        found = module_of(conftest)
        if found is not None and name in found.definitions:
            return conftest, name
        if found is not None and name in found.imports:
            return found.imports[name]
    return module, ""


# What is printed


def listing() -> str:
    """Return the list page by page, then what has no test by a user's way, by reason, and what promises nothing."""
    listed = entries()
    everything = [(page, entry) for page, found in listed.items() for entry in found]
    lines: list[str] = []
    for page, found in listed.items():
        lines += _heading(page)
        for entry in found:
            lines += [*map(_sentence, entry.says), *(f"    {test}" for test in entry.tests)]
            lines += [] if entry.tests else [f"    no test: {entry.untested}"]
    lines += _heading("Without a test by a user's way")
    for reason in sorted({entry.untested for _, entry in everything if entry.untested}):
        lines += ["", f"{reason}:"]
        for page, entry in everything:
            if entry.untested == reason:
                lines += [_sentence(f"{page}: {promise}") for promise in entry.says]
                lines += [f"    below: {test}" for test in entry.below]
    lines += _heading("No promise, by the list")
    for page, found in listed.items():
        lines += [_sentence(f"{page}: {unit}") for unit in unlisted(units_of_page(page), found)]
    num = Counter(bool(entry.tests) for _, entry in everything for _ in entry.says)
    total = (
        f"{num.total()} sentences, rows and lines: {num[True]} with a test, {num[False]} without"
    )
    return "\n".join([*lines, "", total]).strip()


def _heading(text: str) -> list[str]:
    return ["", text, "=" * len(text)]


def _sentence(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False
    )


if __name__ == "__main__":
    print(listing())
