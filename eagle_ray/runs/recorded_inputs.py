"""The input files that a run was made from, with their fingerprints: ``_inputs-<random>.json`` next to ``_run.json``.

``_run.json`` names it. It is a file of its own because every writer reads ``_run.json`` before it publishes: with a
hundred thousand input files that would be 22 MB for each part file. Another list is another file with a name that was
never used. So ``_run.json`` names a list that is there and does not change, also after a kill between the two, and
what a late driver deletes is never the list of a later one.

    manifest["inputs"] = write_inputs(output, {"/data/in.jsonl": {"size": 12, "mtime_ns": 1700000000000000000}}, {})
    manifest["inputs"]
    # {'files': 1, 'bytes': 12, 'list': '_inputs-5c1f0a9e2b47.json', 'checksum': 2210316158}
    read_inputs(output, manifest)
    # {'/data/in.jsonl': {'size': 12, 'mtime_ns': 1700000000000000000}}
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from eagle_ray.config.records import FingerprintsRecord, InputListRecord, RecordKind, check_record
from eagle_ray.core.errors import one_line
from eagle_ray.runs.job_errors import OutputDamaged
from eagle_ray.runs.layout import RUN
from eagle_ray.storage.path import StoragePath, parse_json_bytes
from eagle_ray.storage.store import check_bucket

INPUTS = "_inputs-{}.json"
FORMAT_WITH_INPUTS = 1  # of a _run.json that has the fingerprints in itself
NOT_CONTENT = ("digest", "state")  # keys of a fingerprint that do not say when, or as what, a file was written

Fingerprint = dict[str, Any]


def read_inputs(output: StoragePath, manifest: Mapping[str, Any]) -> dict[str, Fingerprint]:
    """Return the fingerprints by path. Raises OutputDamaged if the list is gone or is not the one that was written."""
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
    found = _checked(output, output / name, FingerprintsRecord, value)
    if noted.get("checksum", zlib.crc32(data)) != zlib.crc32(data) or _totals(found).items() - noted.items():
        raise _damaged(output, output / name, "it is not what was written")
    return found


def _checked(output: StoragePath, file: StoragePath, kind: RecordKind, value: Any) -> dict[str, Any]:
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
        "they are now with eagle-ray repair, choose another output.path, or start again with --overwrite."
    )


def write_inputs(output: StoragePath, inputs: Mapping[str, Fingerprint], noted: Any) -> dict[str, Any]:
    """Write the list, unless it is the one that is noted, and return what ``_run.json`` has of it.

    noted: what ``_run.json`` had of the last one.
    """
    data = json.dumps(inputs, separators=(",", ":")).encode()
    name = _name_in(noted)
    if name is None or not (output / name).exists() or (output / name).read_bytes() != data:
        name = INPUTS.format(uuid4().hex[:12])
        (output / name).write_atomic(data)
    return _totals(inputs) | {"list": name, "checksum": zlib.crc32(data)}


def input_lists(output: StoragePath) -> list[StoragePath]:
    """Return the lists that are there: the current one, and those of attempts that were killed."""
    return output.glob(INPUTS.format("*"))


def changed_files(recorded: Mapping[str, Fingerprint], found: Mapping[str, Fingerprint]) -> str:
    """Return the files that are not as they are recorded, with what changed of each; empty if none. New files are not
    among them.
    """
    changes = {path: what_changed(recorded.get(path, now), now) for path, now in found.items()}
    return ", ".join(f"{path} ({change})" for path, change in changes.items() if change)


def what_changed(was: Fingerprint, now: Fingerprint) -> str | None:
    """Return what changed, or None."""
    if was["size"] != now["size"]:
        return f"{was['size']:,} bytes then, {now['size']:,} now"
    if "digest" in was and "digest" in now:
        return None if was["digest"] == now["digest"] else "its content"
    stamps = [{key: value for key, value in each.items() if key not in NOT_CONTENT} for each in (was, now)]
    return None if stamps[0] == stamps[1] else "its content" if "etag" in now else "its time; its content is not noted"


def content_of(fingerprint: Fingerprint) -> str:
    """Return a text that differs for files of different content: of the digest, else of the etag or time."""
    return f"{fingerprint['size']} {fingerprint.get('digest') or fingerprint.get('etag') or fingerprint['mtime_ns']}"
