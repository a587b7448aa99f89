"""Match paths against glob patterns without looking at files, by the rules of the standard library's glob.

>>> glob_matches(["**", "*.jsonl"], ["a", "b.jsonl"])
True
"""

from __future__ import annotations

from fnmatch import fnmatchcase


def glob_matches(pattern: list[str], name: list[str]) -> bool:
    """Match part by part: ** is any number of parts; neither it nor * matches a hidden name."""
    if not pattern:
        return not name
    visible = bool(name) and (pattern[0].startswith(".") or not name[0].startswith("."))
    if pattern[0] == "**":
        return glob_matches(pattern[1:], name) or (visible and glob_matches(pattern, name[1:]))
    return visible and fnmatchcase(name[0], pattern[0]) and glob_matches(pattern[1:], name[1:])
