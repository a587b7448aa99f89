"""Record the fingerprints of a run's input files, and compare them with the present files.

``_run.json`` names the list of the input files that a run was made from, with their fingerprints:
``_inputs-<random>.json``. It is a separate file because every writer reads ``_run.json`` before it
publishes: with a hundred thousand input files that would be 22 MB for each part file. A new list
gets a new file name, which was never used before. So the list that ``_run.json`` names exists and
does not change, even after a kill between the two writes, and a late driver never deletes the list
of a later one.

    inputs = {"/data/in.jsonl": {"size": 12, "mtime_ns": 1700000000000000000}}
    manifest["inputs"] = write_inputs(output, inputs, {})
    manifest["inputs"]
    # {'files': 1, 'bytes': 12, 'list': '_inputs-5c1f0a9e2b47.json', 'checksum': 2210316158}
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from eagle_ray.config.records import FingerprintsRecord, InputListRecord, RecordKind, check_record
from eagle_ray.core.errors import one_line
from eagle_ray.core.json_text import dump_json
from eagle_ray.runs.job_errors import OutputDamaged
from eagle_ray.runs.layout import RUN
from eagle_ray.storage.path import StoragePath, parse_json_bytes
from eagle_ray.storage.store import check_bucket

INPUTS = "_inputs-{}.json"
FORMAT_WITH_INPUTS = 1  # version of a _run.json that has the fingerprints in itself
# Keys of a fingerprint that do not say when, or as what, a file was written.
NOT_CONTENT = (
    "digest",
    "state",
)
Fingerprint = dict[str, Any]


def read_inputs(output: StoragePath, manifest: Mapping[str, Any]) -> dict[str, Fingerprint]:
    """Return the recorded fingerprints by path. Raises OutputDamaged if the list is missing or was changed."""
    noted = manifest["inputs"]
    if manifest.get("format_version") == FORMAT_WITH_INPUTS:
        return _checked(output, output / RUN, FingerprintsRecord, noted)
    name = _name_in(noted)
    if name is None:
        raise _damaged(output, output / RUN, "it names no list of its input files")
    _checked(output, output / RUN, InputListRecord, noted)
    try:
        data = (output / name).read_bytes()
    except FileNotFoundError as error:
        check_bucket(error)
        raise _damaged(output, output / name, "it is gone") from None
    try:
        value = parse_json_bytes(data)
    except ValueError as error:
        raise _damaged(output, output / name, one_line(error)) from None
    inputs = _checked(output, output / name, FingerprintsRecord, value)
    if (
        noted.get("checksum", zlib.crc32(data)) != zlib.crc32(data)
        or _totals(inputs).items() - noted.items()
    ):
        raise _damaged(output, output / name, "it is not what was written")
    return inputs


def _checked(
    output: StoragePath, file: StoragePath, kind: RecordKind, value: Any
) -> dict[str, Any]:
    try:
        check_record(kind, value)
    except ValueError as error:
        raise _damaged(output, file, str(error)) from None
    return dict(value)


def _name_in(noted: Any) -> str | None:
    name = noted.get("list") if isinstance(noted, dict) else None
    return name if isinstance(name, str) else None


def _totals(inputs: Mapping[str, Fingerprint]) -> dict[str, int]:
    return {"files": len(inputs), "bytes": sum(each["size"] for each in inputs.values())}


def _damaged(output: StoragePath, file: StoragePath, reason: str) -> OutputDamaged:
    return OutputDamaged(
        f"{file} is damaged ({reason}). It has the input files of {output}: put it back from a copy, record them as "
        "they are now with eagle-ray repair, or choose another output.path."
    )


def write_inputs(
    output: StoragePath, inputs: Mapping[str, Fingerprint], noted: Any
) -> dict[str, Any]:
    """Write the list of input files unless it is already recorded, and return its entry for ``_run.json``.

    Args:
        noted: entry of the last list in ``_run.json``.
    """
    data = dump_json(inputs, separators=(",", ":")).encode()
    name = _name_in(noted)
    if name is None or not _holds(output / name, data):
        name = INPUTS.format(uuid4().hex[:12])
        (output / name).write_atomic(data)
    return _totals(inputs) | {"list": name, "checksum": zlib.crc32(data)}


def _holds(file: StoragePath, data: bytes) -> bool:
    return file.exists() and file.read_bytes() == data


def input_lists(output: StoragePath) -> list[StoragePath]:
    """Return the files of all lists: the current one, and those that killed attempts left."""
    return output.glob(INPUTS.format("*"))


def changed_files(recorded: Mapping[str, Fingerprint], current: Mapping[str, Fingerprint]) -> str:
    """Return the recorded files that have changed, each with a description of the change. New files
    are not included."""
    changes = {path: what_changed(recorded.get(path, now), now) for path, now in current.items()}
    return ", ".join(f"{path} ({change})" for path, change in changes.items() if change)


def what_changed(was: Fingerprint, now: Fingerprint) -> str | None:
    """Return a description of how a file changed, or None if it did not."""
    if was["size"] != now["size"]:
        return f"{was['size']:,} bytes then, {now['size']:,} now"
    if "digest" in was and "digest" in now:
        return None if was["digest"] == now["digest"] else "its content"
    stamps = [
        {key: value for key, value in each.items() if key not in NOT_CONTENT} for each in (was, now)
    ]
    if stamps[0] == stamps[1]:
        return None
    return "its content" if "etag" in now else "its time; its content is not noted"


def content_of(fingerprint: Fingerprint) -> str:
    """Return a text that identifies a file's content: its size with the digest, or else with the etag or the time."""
    return f"{fingerprint['size']} {fingerprint.get('digest') or fingerprint.get('etag') or fingerprint['mtime_ns']}"
