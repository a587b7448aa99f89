"""Check the name of a publishing destination, as `output.publish.to` and `eagle-ray publish --to` take it.

>>> check_destination("hf://datasets/org/name/folder")
'hf://datasets/org/name/folder'
>>> check_destination("hf://org/name")
Traceback (most recent call last):
ValueError: 'hf://org/name' is not hf://datasets/OWNER/NAME[/FOLDER], ...
"""

from __future__ import annotations

import re

HUB = "hf://datasets/"
DELTA = "delta:"
ICEBERG = "iceberg:"
DESTINATION_FORM = (
    "hf://datasets/OWNER/NAME[/FOLDER], delta:TABLE for a directory or s3:// address, or "
    "iceberg:[CATALOG/]NAMESPACE.TABLE"
)
_ICEBERG = re.compile(r"([^/\s]+/)?[^/.\s]+(\.[^/.\s]+)+")


def check_destination(text: str) -> str:
    """Return the text unchanged if it names a destination. Raises ValueError."""
    kind = next((kind for kind in (HUB, DELTA, ICEBERG) if text.startswith(kind)), None)
    place = text.removeprefix(kind or "")
    parts = place.split("/")
    is_valid = {
        None: False,
        HUB: len(parts) >= 2 and all(part not in ("", ".", "..") for part in parts),
        DELTA: bool(place),
        ICEBERG: _ICEBERG.fullmatch(place) is not None,
    }
    if not is_valid[kind]:
        raise ValueError(f"{text!r} is not {DESTINATION_FORM}")
    return text
