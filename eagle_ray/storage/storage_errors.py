"""Errors of object storage: a request that failed after all retries.

The message names the object and the endpoint. Local files raise the system's own OSError.

    >>> issubclass(StorageTimeout, TimeoutError) and issubclass(StorageTimeout, StorageError)
    True
"""

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def remedy_of(error: OSError) -> str:
    """Return what to do about a write that failed, as the last sentence of a message."""
    again = "run the same command again to resume"
    return f"Free some space there, then {again}." if error.errno in DISK_FULL else f"{again.capitalize()}."


class StorageError(OSError):
    """A request failed in spite of retries, because of the storage itself."""


class NotFound(StorageError, FileNotFoundError):
    """The object does not exist. of_bucket: neither does its bucket, so nothing is known of the object."""

    of_bucket = False


class NotAllowed(StorageError, PermissionError):
    """The credentials are missing or not sufficient."""


class StorageTimeout(StorageError, TimeoutError):
    """The server did not respond in time."""


class ConditionFailed(StorageError):
    """A condition of the request did not hold: the object exists, or has another version."""


class NotSupported(StorageError):
    """The server lacks a feature, such as conditional writes; a retry does not help."""


class ObjectChanged(StorageError):
    """The object was replaced while it was read."""


def is_bucket_missing(error: OSError) -> bool:
    """Return whether a whole bucket is missing: then nothing is known of its files."""
    return isinstance(error, NotFound) and error.of_bucket


def check_bucket(error: FileNotFoundError) -> None:
    """Raise the error again if a whole bucket is missing."""
    if is_bucket_missing(error):
        raise error


class FileDamaged(Exception):
    """A file of a run does not hold the bytes that were written."""
