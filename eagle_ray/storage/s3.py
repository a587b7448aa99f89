"""S3 objects with atomic and conditional writes: the s3:// part of ``storage.StoragePath``.

Every request goes through one function with limits on time and retries; failures are OSErrors with
the object and the endpoint. A write is one PUT, because leaving an output stream by an exception
would publish a partial object. Endpoint, credentials and region come from the standard environment.

    create("s3://bucket/runs/a/_lock", b"mine", None)      # FileVersion(size=4, version='"8fcb0a1ec9e8ba3e..."')
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, BinaryIO
from uuid import uuid4

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync
from s3fs import S3FileSystem

from eagle_ray.storage.retries import extended_waits
from eagle_ray.storage.store import (
    ConditionFailed,
    FileVersion,
    NotAllowed,
    NotFound,
    NotSupported,
    ObjectChanged,
    Precondition,
    ReadOnlyFile,
    StorageError,
    StorageTimeout,
    glob_matches,
)

SCHEME = "s3://"
CONNECT_S = 5.0  # limit without a connection
READ_S = 10.0  # limit without a byte
MIN_BYTES_PER_S = 32 << 10  # bytes per second, below which a transfer is given up
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between the tries, of which there is one more
RETRYABLE_CODES = {
    "InternalError",
    "SlowDown",
    "RequestTimeout",
    "Throttling",
    "ServiceUnavailable",
    "OperationAborted",
}
TIMEOUT_ERRORS = (
    boto.ReadTimeoutError,
    boto.ConnectTimeoutError,
    asyncio.TimeoutError,
    TimeoutError,
)
RETRYABLE_ERRORS = (
    *TIMEOUT_ERRORS,
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    aiohttp.ClientError,
    ConnectionError,
    ResponseParserError,
)
EXPIRED_CODES = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "TokenRefreshRequired",
    "RequestExpired",
}
CREDENTIAL_ERRORS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
)
REQUEST_ERRORS = (*RETRYABLE_ERRORS, boto.ClientError, boto.BotoCoreError)
NO_BUCKET = "NoSuchBucket"
PAGE_SIZE = 1000  # names in one answer to a listing
SMALL_OBJECT_BYTES = 1 << 20  # an object of this size is read at once
MIN_READAHEAD_BYTES = 64 << 10
MAX_READAHEAD_BYTES = 8 << 20

answered_requests: set[tuple[str | None, str, str]] = set()  # endpoint, bucket and method


def is_file(url: str) -> bool:
    try:
        stat(url)
    except NotFound:
        return False
    return True


def is_directory(url: str) -> bool:
    bucket, prefix = _prefix(url)
    return bool(
        _request(url, "list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1).get("Contents")
    )


def stat(url: str) -> FileVersion:
    bucket, key = split_url(url)
    if not key:
        raise NotFound(f"{url}: a bucket is no file")
    response = _request(url, "head_object", Bucket=bucket, Key=key)
    return FileVersion(response["ContentLength"], response["ETag"])


def read_with_version(url: str, size: int = SMALL_OBJECT_BYTES) -> tuple[bytes, FileVersion]:
    """Return an object's bytes and its version.

    Args:
        size: expected bytes, for the time limit.
    """
    bucket, key = split_url(url)
    response = _request(url, "get_object", size, Bucket=bucket, Key=key)
    return response["Body"], FileVersion(len(response["Body"]), response["ETag"])


def open_file(url: str) -> BinaryIO:
    """Open an object as a stream that reads ranges, with readahead for sequential reads; never a whole large object."""
    return io.BufferedReader(RangeFile(url, stat(url)), MIN_READAHEAD_BYTES)


def list_files(directory: str) -> dict[str, FileVersion]:
    return dict(_list_objects(directory, ""))


def list_names(directory: str) -> list[str]:
    _, prefix = _prefix(directory)
    keys: list[str] = []
    for page in _pages(directory, "", Delimiter="/"):
        keys += [entry["Key"] for entry in page.get("Contents", ())]
        keys += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
    return sorted(key.removeprefix(prefix).rstrip("/") for key in keys)


def glob(directory: str, pattern: str) -> dict[str, FileVersion]:
    parts = pattern.split("/")
    start = len(directory) + 1
    literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return {
        url: stamp
        for url, stamp in _list_objects(directory, literal)
        if glob_matches(parts, url[start:].split("/"))
    }


def write_atomic(url: str, data: bytes, precondition: Precondition) -> FileVersion:
    """Replace an object in one PUT."""
    return _put(url, data, precondition)


def create(url: str, data: bytes, precondition: Precondition) -> FileVersion | None:
    """Create an object. If it exists, return None and leave it unchanged."""
    return _put_if(url, data, precondition, IfNoneMatch="*")


def replace(
    url: str, data: bytes, version: int | str, precondition: Precondition
) -> FileVersion | None:
    """Replace an object if it still has this version; else return None."""
    return _put_if(url, data, precondition, IfMatch=version)


def remove(url: str, missing_ok: bool) -> None:
    if not missing_ok:
        stat(url)  # S3 deletes what is not there
    bucket, key = split_url(url)
    _request(url, "delete_object", Bucket=bucket, Key=key)


def remove_tree(directory: str) -> None:
    for url in list_files(directory):
        remove(url, missing_ok=True)


def make_directory(url: str) -> None:
    """Do nothing: S3 has no directories."""


def remove_temporary(directory: str) -> None:
    """Do nothing: an aborted PUT leaves no object."""


def check_writable(directory: str) -> None:
    """Raise OSError if the bucket is not writable, or if the server ignores conditional writes. Leaves no object."""
    probe = f"{directory}/.probe-{uuid4().hex[:12]}"
    create(probe, b"first", None)
    is_conditional = (
        create(probe, b"second", None) is None and read_with_version(probe)[0] == b"first"
    )
    remove(probe, missing_ok=True)
    if not is_conditional:
        raise NotSupported(
            f"{directory} at {_endpoint() or 'the default endpoint'}: the server ignores If-None-Match, so that two "
            "drivers could write at once: choose one with conditional writes"
        )


class RangeFile(ReadOnlyFile):
    """A seekable stream over an object. Raises ObjectChanged if the object was replaced since it was opened."""

    def __init__(self, url: str, version: FileVersion):
        self._url = url
        self._version = version
        self._position = 0
        self._start = 0
        self._chunk = b""
        self._readahead = MIN_READAHEAD_BYTES

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (
            offset
            + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._version.size}[whence]
        )
        return self._position

    def _read(self, size: int) -> bytes:
        wanted = min(size, self._version.size - self._position)
        if wanted <= 0:
            return b""
        if not self._start <= self._position < self._start + len(self._chunk):
            self._fetch(wanted)
        offset = self._position - self._start
        part = self._chunk[offset : offset + wanted]
        self._position += len(part)
        return part

    def _fetch(self, wanted: int) -> None:
        in_order = self._position == self._start + len(self._chunk)
        self._readahead = (
            min(2 * self._readahead, MAX_READAHEAD_BYTES) if in_order else MIN_READAHEAD_BYTES
        )
        start = self._position
        stop = min(self._version.size, self._position + max(wanted, self._readahead))
        if self._version.size <= SMALL_OBJECT_BYTES:
            start = 0
            stop = self._version.size
        self._chunk = self._get(start, stop)
        self._start = start

    def _get(self, start: int, stop: int) -> bytes:
        bucket, key = split_url(self._url)
        span: dict[str, Any] = {
            "Range": f"bytes={start}-{stop - 1}",
            "IfMatch": self._version.version,
        }
        try:
            return _request(self._url, "get_object", stop - start, Bucket=bucket, Key=key, **span)[
                "Body"
            ]
        except ConditionFailed as error:
            raise ObjectChanged(
                f"{self._url} changed while it was read: run the job again"
            ) from error


def split_url(url: str) -> tuple[str, str]:
    """Return bucket and key of a URL; the key is empty if the URL is the bucket itself."""
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    return bucket, key


def _prefix(directory: str) -> tuple[str, str]:
    bucket, key = split_url(directory)
    return bucket, f"{key}/" if key else ""


def _list_objects(directory: str, start: str) -> Iterator[tuple[str, FileVersion]]:
    """Yield every object below the directory with a name that begins with start, in the order of names."""
    bucket, _ = _prefix(directory)
    for page in _pages(directory, start):
        for entry in page.get("Contents", ()):
            if not entry["Key"].endswith("/"):  # consoles make such a key for an empty directory
                yield f"{SCHEME}{bucket}/{entry['Key']}", FileVersion(entry["Size"], entry["ETag"])


def _pages(directory: str, start: str, **options: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the pages of the listing of what is below the directory and begins with start."""
    bucket, prefix = _prefix(directory)
    arguments: dict[str, Any] = {
        "Bucket": bucket,
        "Prefix": prefix + start,
        "MaxKeys": PAGE_SIZE,
        **options,
    }
    while arguments:
        page = _request(directory, "list_objects_v2", **arguments)
        yield page
        token = page.get("NextContinuationToken")
        arguments = (
            arguments | {"ContinuationToken": token} if page.get("IsTruncated") and token else {}
        )


def _put(url: str, data: bytes, precondition: Precondition, **condition: Any) -> FileVersion:
    bucket, key = split_url(url)
    response = _request(
        url, "put_object", len(data), precondition, Bucket=bucket, Key=key, Body=data, **condition
    )
    return FileVersion(len(data), response["ETag"])


def _put_if(
    url: str, data: bytes, precondition: Precondition, **condition: Any
) -> FileVersion | None:
    try:
        return _put(url, data, precondition, **condition)
    except (ConditionFailed, NotFound):
        return _match_earlier_put(url, data)


def _match_earlier_put(url: str, data: bytes) -> FileVersion | None:
    """Return the object's version if it holds these bytes: an earlier try with a lost response has succeeded."""
    try:
        content, version = read_with_version(url, len(data))
    except NotFound:
        return None
    return version if content == data else None


def _request(
    url: str, method: str, size: int = 0, precondition: Precondition = None, **arguments: Any
) -> dict[str, Any]:
    """Return the response to one request, with its body read.

    While a job works, a refusal is retried, too: new credentials are not known everywhere at once.

    Args:
        size: bytes to move, which extend the time limit.
    """
    kind = _endpoint(), split_url(url)[0], method
    for wait in (*WAITS_S, *extended_waits(), None):
        if precondition is not None:
            precondition()
        try:
            session = session_of(os.getpid(), _endpoint())
            limit = CONNECT_S + READ_S + size / MIN_BYTES_PER_S
            response = sync(session.loop, _send, session, method, arguments, timeout=limit)
            answered_requests.add(kind)
            return response
        except REQUEST_ERRORS as error:
            is_refused = bool(extended_waits()) and _is_refusal(error)
            if wait is None or not (is_refused or _is_retryable(error)):
                where = f"{url} at {_endpoint() or 'the default endpoint'}"
                raise _as_storage_error(
                    error, where, is_refused and kind in answered_requests
                ) from error
            if is_refused:
                session_of.cache_clear()  # a client keeps the credentials that it began with, or none
        time.sleep(wait)
    raise AssertionError("the last try returns or raises")


async def _send(session: S3FileSystem, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    client = await session.set_session()
    response = await getattr(client, method)(**arguments)
    if "Body" in response:
        async with response["Body"] as body:
            response["Body"] = await body.read()
    return response


def _endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


@lru_cache(maxsize=8)
def session_of(process: int, endpoint: str | None) -> S3FileSystem:
    """Return the client for an endpoint, one per process, shared by its threads.

    Raises NotSupported for an endpoint that is not a URL.
    """
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "read_timeout": READ_S,
        "retries": {"total_max_attempts": 1},  # tries are counted in one place
        "max_pool_connections": 32,
    }
    if endpoint:  # S3's friends seldom have a host name per bucket
        config["s3"] = {"addressing_style": "path"}
    region = os.environ.get("AWS_REGION")  # botocore itself reads AWS_DEFAULT_REGION only
    client = {"region_name": region} if region else {}
    session = S3FileSystem(
        endpoint_url=endpoint, config_kwargs=config, client_kwargs=client, skip_instance_cache=True
    )
    try:
        session.connect()
    except ValueError as error:
        raise NotSupported(f"AWS_ENDPOINT_URL: {error}: write it as http://host:port") from None
    return session


def _is_refusal(error: Exception) -> bool:
    """Return whether the credentials are missing, refused or too old, or the bucket is not there."""
    if isinstance(error, boto.ClientError):
        return (
            _status(error) in (401, 403)
            or _code(error) in EXPIRED_CODES
            or _code(error) == NO_BUCKET
        )
    return isinstance(error, CREDENTIAL_ERRORS)


def _is_retryable(error: Exception) -> bool:
    """Return whether a retry may succeed: no connection, no response, a partial response, or a server error."""
    if isinstance(error, boto.ClientError):
        return (
            _status(error) >= 500 or _status(error) in (409, 429) or _code(error) in RETRYABLE_CODES
        )
    return isinstance(error, RETRYABLE_ERRORS)


def _as_storage_error(error: Exception, where: str, was_answered: bool) -> StorageError:
    """Return the failure as an OSError that names the object and the endpoint.

    Args:
        was_answered: such requests were answered before and are refused now, which may pass.
    """
    failure = _failure(error, where)
    if was_answered and isinstance(failure, (NotAllowed, NotFound)):
        return StorageError(f"{failure}. Such requests were answered before")
    return failure


def _failure(error: Exception, where: str) -> StorageError:
    if isinstance(error, boto.ClientError):
        return _response_error(error, where)
    if isinstance(error, CREDENTIAL_ERRORS):
        return NotAllowed(
            f"{where}: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, TIMEOUT_ERRORS):
        return StorageTimeout(
            f"{where}: no answer in time, {len(WAITS_S) + len(extended_waits()) + 1} times"
        )
    return StorageError(f"{where}: {str(error).strip() or type(error).__name__}")


def _response_error(error: boto.ClientError, where: str) -> StorageError:
    message = (
        f"{where}: {_code(error)} {error.response.get('Error', {}).get('Message', '')}".strip()
    )
    if _code(error) == NO_BUCKET:
        missing = NotFound(f"{where}: there is no such bucket")
        missing.of_bucket = True
        return missing
    if _status(error) == 404:
        return NotFound(f"{where}: there is no such object")
    if _code(error) in EXPIRED_CODES:
        return NotAllowed(f"{message}: renew the credentials (AWS_SESSION_TOKEN and its keys)")
    if _status(error) in (401, 403):
        return NotAllowed(
            f"{message}: check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and their rights"
        )
    if _status(error) in (409, 412):
        return ConditionFailed(message)
    is_final = _status(error) < 500 and not _is_retryable(error)
    return NotSupported(message) if is_final else StorageError(message)


def _status(error: boto.ClientError) -> int:
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def _code(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
