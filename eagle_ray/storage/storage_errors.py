"""What goes wrong with storage that is not a file system's: a request that failed for good.

The message names the object and the endpoint. A local file raises the system's own OSError.

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
    """A request failed, and trying again did not help: the storage is at fault, not what it holds."""


class NotFound(StorageError, FileNotFoundError):
    """There is no such object or bucket."""


class NotAllowed(StorageError, PermissionError):
    """The credentials, or the lack of them."""


class StorageTimeout(StorageError, TimeoutError):
    """The server did not respond in time."""


class ConditionFailed(StorageError):
    """The object is there, or is another one, though the request asked for the contrary."""


class NotSupported(StorageError):
    """The server lacks what a job needs, such as conditional writes: another try does not help."""


class ObjectChanged(StorageError):
    """The object was replaced while it was read."""
