"""Docstrings, comments and strings of the package are plain English: none of WORDS stands in them."""

import re
import tokenize
from pathlib import Path

import eagle_ray

PACKAGE = Path(eagle_ray.__file__).parent
NOT_OURS_TO_SAY = {"assets", "corpus"}  # texts that models learn from and answer
WORDS = ["who", "whom", "whoever", "nobody", "somebody", "anybody", "in vain", "as it comes"]
WORDS += ["anew", "beside", "so many", "does not know"]
PATTERN = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)


def test_no_word_of_an_idiom_of_our_own():
    found = [
        f"{path.relative_to(PACKAGE)}:{token.start[0]}: {match[0]!r}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not NOT_OURS_TO_SAY & set(path.parts)
        for token in tokens_of(path)
        for match in PATTERN.finditer(token.string)
    ]
    assert not found, "\n".join(found)


def tokens_of(path: Path) -> list[tokenize.TokenInfo]:
    """Return the file's comments and strings."""
    with path.open("rb") as file:
        kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
        return [token for token in tokenize.tokenize(file.readline) if token.type in kinds]
