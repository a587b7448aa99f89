"""Resolve revisions in hf:// paths to commits, because a branch moves and a run must read one commit of it.

>>> known = {"hf://datasets/org/name@main": "5f0c2a91"}
>>> fixed_revisions(["hf://datasets/org/name@main/data/*.parquet", "b.jsonl"], known)
(['hf://datasets/org/name@5f0c2a91/data/*.parquet', 'b.jsonl'], {'hf://datasets/org/name@main':
'5f0c2a91'})
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from eagle_ray.storage.store import NotAllowed, NotFound, StorageError

HUB_SCHEME = "hf://"
# A repository with its revision, which has a slash only as refs/pr/1 or refs/convert/parquet, and a path in it.
HUB_PATH = re.compile(
    r"(?P<repository>hf://(?:(?P<kind>datasets|spaces|models)/)?(?P<name>[^/@]+/[^/@]+))"
    r"(?:@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?(?P<path>/.*)?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
DEFAULT_REVISION = "main"


def fixed_revisions(
    paths: Sequence[str], known: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the paths with each revision replaced by its commit, and the commits by repository and revision.

    Args:
        known: commits of an earlier start, which are used without asking the hub.

    Raises:
        StorageError: the hub does not answer, has no such revision, or refuses this user.
    """
    fixed = []
    commits = dict(known)
    for path in paths:
        match = HUB_PATH.fullmatch(path)
        if match is None or COMMIT.fullmatch(match["revision"] or ""):
            fixed.append(path)
            continue
        named = path.removesuffix(match["path"] or "")
        if named not in commits:
            revision = unquote(match["revision"] or DEFAULT_REVISION)
            commits[named] = _commit_of(named, match["kind"], match["name"], revision)
        fixed.append(f"{match['repository']}@{commits[named]}{match['path'] or ''}")
    return fixed, commits


def _commit_of(named: str, kind: str | None, repository: str, revision: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    repo_type = None if kind is None else kind.removesuffix("s")
    try:
        commit = HfApi().repo_info(repository, repo_type=repo_type, revision=revision).sha
    except HFValidationError as error:
        raise NotFound(f"{named}: no repository of the hub has such a name ({error})") from None
    except HfHubHTTPError as error:
        raise _error_of(named, getattr(error.response, "status_code", None)) from error
    except Exception as error:  # of the network: each version has classes of its own
        raise StorageError(f"{named}: {type(error).__name__}: {error}") from error
    if commit is None:
        raise StorageError(f"{named}: the hub names no commit of it")
    return commit


def _error_of(named: str, status: int | None) -> StorageError:
    """Return the error for an answer of the hub, which hides what a user may not see."""
    if status in (401, 404):
        return NotFound(
            f"{named}: the hub has no such repository or revision, or hides it from this user (hf auth login, or "
            "HF_TOKEN)"
        )
    if status == 403:
        return NotAllowed(
            f"{named}: the hub refuses this user. Ask for access on its page, and log in (hf auth login, or HF_TOKEN)"
        )
    return StorageError(f"{named}: the hub answers with status {status}")
