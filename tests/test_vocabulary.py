"""Docstrings, comments, strings and documents are plain English: none of WORDS is in them."""

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIRECTORIES = ["eagle_ray", "jobs", "configs", "infra"]
NOT_OURS_TO_SAY = {"assets", "corpus"}  # texts that models learn from and answer
WORDS = ["who", "whom", "whoever", "nobody", "somebody", "anybody", "in vain", "as it comes"]
WORDS += ["anew", "beside", "so many", "does not know"]
PATTERN = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)


def test_no_word_of_an_idiom_of_our_own():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r}"
        for path in texts()
        for line, text in (prose_of(path) if path.suffix == ".py" else lines_of(path))
        for match in PATTERN.finditer(text)
    ]
    assert not found, "\n".join(found)


def texts() -> list[Path]:
    files = [path for name in DIRECTORIES for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md")]
    return [ROOT / "README.md", *(path for path in sorted(files) if not NOT_OURS_TO_SAY & set(path.parts))]


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    return enumerate(path.read_text().splitlines(), 1)


def prose_of(path: Path) -> list[tuple[int, str]]:
    """Return the line and text of the module's comments and strings."""
    with path.open("rb") as file:
        kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
        return [(t.start[0], t.string) for t in tokenize.tokenize(file.readline) if t.type in kinds]
