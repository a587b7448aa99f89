"""API keys: read from a file and the environment, kept as salted digests, compared in constant time.

The command that starts the endpoint reads the keys. Replicas get the digests alone, so that a key stands in no command
line, log, deployment or process of Ray.

    >>> keys = ApiKeys.of(["one", "two"])
    >>> keys.find(b"two")
    1
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from eagle_ray.config import ConfigError

ENV_NAME = "EAGLE_RAY_API_KEYS"


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Digests of the keys. A client is known by its key's index; without keys every client is number 0."""

    salt: bytes = b""
    digests: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[str], salt: bytes | None = None) -> ApiKeys:
        """Digest each key once, in order. salt: one that is kept, if owners are to be the same at the next start."""
        salt = salt or secrets.token_bytes(16)
        return cls(salt, tuple(_digest(salt, key.encode()) for key in dict.fromkeys(keys)))

    def __len__(self) -> int:
        return len(self.digests)

    def owner(self, client: int) -> str:
        """Return the name under which a client's files and batches are kept; without keys all have the same."""
        return f"key-{hashlib.blake2b(self.digests[client], digest_size=16).hexdigest()}" if self.digests else "all"

    def client_of(self, owner: str) -> int | None:
        """Return the index of the key with this owner, or None if its key is no longer accepted."""
        owners = [self.owner(client) for client in range(max(1, len(self)))]
        return owners.index(owner) if owner in owners else None

    def find(self, *spellings: bytes) -> int | None:
        """Return the index of the key that is one of the spellings. Every key is compared, whichever one matches."""
        found = None
        for spelling in spellings:
            given = _digest(self.salt, spelling)
            for i, digest in enumerate(self.digests):
                if hmac.compare_digest(given, digest):
                    found = i
        return found


def read_keys(path: str | None, env: MutableMapping[str, str] = os.environ, salt: bytes | None = None) -> ApiKeys:
    """Read the keys of the file and of EAGLE_RAY_API_KEYS, and remove the variable: child processes inherit the rest.

    salt: see ApiKeys.of.

    Raises ConfigError if a source is given and cannot be read, or holds no key: the endpoint must not open by mistake.
    """
    keys = [] if path is None else _from_file(Path(path).expanduser())
    if ENV_NAME in env:
        keys += _from_env(env.pop(ENV_NAME))
    return ApiKeys.of(keys, salt)


def _from_file(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"serving.api_keys_file: cannot read {path} ({reason}). Name a file with one key a line."
        ) from None
    keys = {i: line.strip() for i, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")}
    for i, key in keys.items():
        _check(key, f"serving.api_keys_file: line {i} of {path}")
    if not keys:
        raise ConfigError(f"serving.api_keys_file: {path} holds no key. Write one key a line, or remove the setting.")
    return list(keys.values())


def _from_env(value: str) -> list[str]:
    keys = [key for key in re.split(r"[,\s]+", value) if key]
    for i, key in enumerate(keys, 1):
        _check(key, f"{ENV_NAME}: key {i}")
    if not keys:
        raise ConfigError(f"{ENV_NAME}: it is set but holds no key. Set it to keys separated by commas, or unset it.")
    return keys


def _check(key: str, where: str) -> None:
    """Raise ConfigError, without the key, if no client could send it in a header."""
    if not key.isprintable() or " " in key:
        raise ConfigError(f"{where} has a space or a control character in it. A key is one word.")


def _digest(salt: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(key, key=salt, digest_size=32).digest()
