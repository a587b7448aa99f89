"""HubDataset: publish to a dataset of the Hugging Face hub, by one commit per publication with a record and a card.

    OWNER/NAME/data/part-001-000000.parquet ...
    OWNER/NAME/_published.json
    OWNER/NAME/README.md

Files are uploaded first, and become visible with the commit. The commit names its parent, so the
hub refuses it (412) if another commit came first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from eagle_ray.core.errors import ConfigError, one_line
from eagle_ray.core.json_text import dump_json
from eagle_ray.publishing.publication import PUBLICATION_RECORD, Commit, LostRace
from eagle_ray.runs.job_errors import PublishError

Result = TypeVar("Result")
LOST = (409, 412)  # status of a commit whose parent is not the last one
ACCESS_DENIED = (401, 403)
READ_ONLY = "read"  # role of a token, and of a member of an organisation
LOG_IN = "Log in with a token that may write there (hf auth login, or HF_TOKEN)"


class HubDataset:
    """A dataset of the hub, or a folder of one, that a run is published to.

    Args:
        name: name as the user gave it.
        repo: OWNER/NAME.
        folder: path of the folder; "" is the whole dataset.
        private: whether a newly created dataset is private.
    """

    def __init__(self, name: str, repo: str, folder: str, private: bool):
        from huggingface_hub import HfApi

        self._name = name
        self._repo = repo
        self._private = private
        self._prefix = f"{folder}/" if folder else ""
        self._api = HfApi()
        # The last commit when the record was read; None if there is no dataset yet.
        self._parent: str | None = None

    @property
    def name(self) -> str:
        return self._name

    def check(self) -> None:
        """Raise ConfigError unless this user may write the dataset, or create it."""
        self._call(self._check_rights)

    def record(self) -> dict[str, Any] | None:
        return self._call(self._read_record)

    def commit(self, commit: Commit, card: str) -> None:
        self._call(lambda: self._commit(commit, card))

    def _check_rights(self) -> None:
        from huggingface_hub.errors import RepositoryNotFoundError

        user = self._api.whoami()
        token = user.get("auth", {}).get("accessToken", {})
        if token.get("role") == READ_ONLY:
            raise ConfigError(f"{self._name}: the token may only read. {LOG_IN}")
        try:
            self._api.auth_check(self._repo, repo_type="dataset", write=True)
        except RepositoryNotFoundError:  # it will be made
            self._check_owner(user)

    def _check_owner(self, user: dict[str, Any]) -> None:
        """Raise ConfigError unless this user may create datasets of the owner."""
        owner = self._repo.partition("/")[0]
        roles = {each["name"]: each.get("roleInOrg") for each in user.get("orgs", [])}
        if owner != user["name"] and roles.get(owner, READ_ONLY) == READ_ONLY:
            raise ConfigError(
                f"{self._name}: there is no such dataset, and {user['name']} may create none of {owner}. {LOG_IN}"
            )

    def _make(self) -> None:
        self._api.create_repo(self._repo, repo_type="dataset", private=self._private, exist_ok=True)

    def _read_record(self) -> dict[str, Any] | None:
        """Return the record in the last commit, without the files that others have deleted since."""
        from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError

        try:
            info = self._api.dataset_info(self._repo)
        except RepositoryNotFoundError:
            self._parent = None
            return None
        self._parent = info.sha
        try:
            path = self._api.hf_hub_download(
                self._repo,
                self._prefix + PUBLICATION_RECORD,
                repo_type="dataset",
                revision=self._parent,
            )
        except RemoteEntryNotFoundError:  # the local one says that the hub does not answer
            return None
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        there = {sibling.rfilename for sibling in info.siblings or ()}
        files = record["files"].items()
        present = {name: facts for name, facts in files if f"{self._prefix}data/{name}" in there}
        return record | {"files": present}

    def _commit(self, commit: Commit, card: str) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        if self._parent is None:
            self._make()
            self._parent = self._api.dataset_info(self._repo).sha
        added = []
        for name in commit.written:
            data = commit.files[name].read_bytes()
            file = CommitOperationAdd(f"{self._prefix}data/{name}", data)
            # Frees the bytes.
            self._api.preupload_lfs_files(self._repo, [file], repo_type="dataset")
            added.append(file)
        removed = [
            CommitOperationDelete(f"{self._prefix}data/{name}") for name in sorted(commit.removed)
        ]
        texts = {PUBLICATION_RECORD: dump_json(commit.after.as_json(), indent=1), "README.md": card}
        pages = [
            CommitOperationAdd(self._prefix + name, text.encode()) for name, text in texts.items()
        ]
        self._api.create_commit(
            self._repo,
            [*added, *removed, *pages],
            commit_message=commit.summary,
            repo_type="dataset",
            parent_commit=self._parent,
        )

    def _call(self, work: Callable[[], Result]) -> Result:
        """Call the hub. Raises LostRace, ConfigError or PublishError for its errors."""
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        try:
            return work()
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", None)
            if status in LOST:
                raise LostRace("another commit came first") from error
            if status in ACCESS_DENIED:
                raise ConfigError(f"{self._name}: the hub refuses this user. {LOG_IN}") from error
            raise PublishError(f"{self._name}: {one_line(error)}") from error
        except (HTTPError, OSError) as error:
            raise PublishError(f"{self._name}: {one_line(error)}") from error
