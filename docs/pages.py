"""A hook of MkDocs: the site's pages are the repository's own Markdown files, where they are.

A page that names another one in backticks, such as `configs/KEYS.md`, gets a link to it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"runs", "build", "dist"}  # and what begins with a dot
NAMED = re.compile(r"`([\w./-]+\.md)`(?!\])")


def paths_of(suffix: str) -> list[str]:
    """Return the paths of the repository's files with this suffix, below the root, with slashes."""
    paths = [path.relative_to(ROOT) for path in ROOT.rglob(f"*{suffix}")]
    ours = [
        path
        for path in paths
        if not any(part.startswith(".") or part in LEFT_OUT for part in path.parts)
    ]
    return sorted(path.as_posix() for path in ours)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to MkDocs' files, by their paths in the repository."""
    from mkdocs.structure.files import File, Files

    paths = [*paths_of(".md"), *paths_of(".png")]
    ours = [File.generated(config, path, abs_src_path=str(ROOT / path)) for path in paths]
    return Files([file for file in files if not file.src_uri.endswith(".md")] + ours)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Link the pages that a page names."""
    folder = posixpath.dirname(page.file.src_uri)
    known = set(paths_of(".md"))

    def linked(match: re.Match[str]) -> str:
        target = resolve(match[1], folder, known)
        return (
            match[0]
            if target is None
            else f"[{match[0]}]({posixpath.relpath(target, folder or '.')})"
        )

    return NAMED.sub(linked, markdown)


def resolve(name: str, folder: str, known: set[str]) -> str | None:
    """Return the page that a name means, seen from the folder or from the root; None if there is none."""
    candidates = [
        posixpath.normpath(posixpath.join(base, name)) for base in (folder, "", "eagle_ray")
    ]
    return next((path for path in candidates if path in known), None)
