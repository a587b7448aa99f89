"""Programs that pages name are in the tree, or stand beside the last commit that has them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        ROOT / "README.md",
        *(p for name in ("eagle_ray", "jobs", "tests") for p in (ROOT / name).rglob("*.md")),
    ]
)
MODULE = re.compile(r"python3? -m ((?:jobs|tests)(?:\.\w+)+)")
FILE = re.compile(r"(?<![\w/])((?:jobs|tests)/[\w/.-]+\.(?:py|yaml|md|jsonl?))")
LEFT = "commit 42aa3d0f"  # of a paragraph about what has left the tree


def paths_of(paragraph: str) -> set[Path]:
    """Return the files that a paragraph names, a package by its __main__."""
    modules = {ROOT / name.replace(".", "/") for name in MODULE.findall(paragraph)}
    files = {ROOT / name for name in FILE.findall(paragraph)}
    return files | {
        path / "__main__.py" if path.is_dir() else path.with_suffix(".py") for path in modules
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_programs_that_are_there(page: Path):
    paragraphs = [
        paragraph for paragraph in page.read_text().split("\n\n") if LEFT not in paragraph
    ]
    named = set().union(*map(paths_of, paragraphs))
    assert not {str(path.relative_to(ROOT)) for path in named if not path.exists()}
