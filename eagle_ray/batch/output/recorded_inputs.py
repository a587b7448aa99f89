"""The input files that a run was made from, with their fingerprints: ``_inputs-<digest>.json`` beside ``_run.json``.

``_run.json`` names it. It is a file of its own because every writer reads ``_run.json`` before it publishes: with a
hundred thousand input files that would be 22 MB for each part file. Its name is a digest of its content, so it never
changes: both are current together, also after a kill between the two.

    >>> manifest["inputs"] = write_inputs(output, {"/data/in.jsonl": {"size": 12, "mtime_ns": 1700000000000000000}})
    >>> manifest["inputs"]
    {'files': 1, 'bytes': 12, 'list': '_inputs-5c1f0a9e2b47.json'}
    >>> read_inputs(output, manifest)
    {'/data/in.jsonl': {'size': 12, 'mtime_ns': 1700000000000000000}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from eagle_ray.batch.fingerprints import Fingerprint
from eagle_ray.batch.job_errors import OutputDamaged
from eagle_ray.batch.output.layout import RUN
from eagle_ray.storage.path import StoragePath, read_json

INPUTS = "_inputs-{}.json"
FORMAT_WITH_INPUTS = 1  # of a _run.json that has the fingerprints in itself


def read_inputs(output: StoragePath, manifest: Mapping[str, Any]) -> dict[str, Fingerprint]:
    """Return the fingerprints by path. Raises OutputDamaged if the list is gone or damaged."""
    noted = manifest["inputs"]
    if manifest.get("format_version") == FORMAT_WITH_INPUTS or not noted:
        return dict(noted)
    file = output / noted["list"]
    try:
        found = read_json(file)
    except ValueError as error:
        raise _damaged(output, file, str(error)) from None
    if not isinstance(found, dict):
        raise _damaged(output, file, "it is gone" if found is None else "not a list of files")
    return found


def _damaged(output: StoragePath, file: StoragePath, reason: str) -> OutputDamaged:
    return OutputDamaged(
        f"{file} is damaged ({reason}): {output / RUN} names it as its list of input files. Put it back from a copy, "
        "or adopt the rows with eagle-ray repair, choose another output.path, or start again with --overwrite."
    )


def write_inputs(output: StoragePath, inputs: Mapping[str, Fingerprint]) -> dict[str, Any]:
    """Write the list, unless it is there undamaged, and return what ``_run.json`` has of it."""
    data = json.dumps(inputs, separators=(",", ":")).encode()
    file = output / INPUTS.format(hashlib.blake2b(data, digest_size=6).hexdigest())
    if not (file.exists() and file.read_bytes() == data):
        file.write_atomic(data)
    return {"files": len(inputs), "bytes": sum(each["size"] for each in inputs.values()), "list": file.name}


def remove_unused_inputs(output: StoragePath, used: str | None) -> None:
    """Delete the lists of earlier attempts, and those of killed ones. used: the name of the one to keep."""
    for file in output.glob(INPUTS.format("*")):
        if file.name != used:
            file.remove()
