"""Identify a file by its first bytes, and suggest the command that converts it to a readable one.

A file that is named as something else, such as a gzip file without .gz, is refused with both.

    >>> kind = foreign_kind(b"PK\\x03\\x04" + bytes(26) + b"a.jsonl")
    >>> print(advice(kind, StoragePath.of("/data/a.jsonl")))
    it is a ZIP archive. Unpack it: mv /data/a.jsonl /data/a.jsonl.zip && unzip -p /data/a.jsonl.zip
        > /data/a.jsonl
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
from dataclasses import dataclass

from eagle_ray.core.errors import ENCODING_BYTES, wide_encoding
from eagle_ray.storage.decompressed import CODECS
from eagle_ray.storage.path import StoragePath

START_BYTES = 64 << 10  # bytes of a file's start that tell what it is
PARQUET_EXTENSION = ".parquet"
_ARROW = "from pyarrow import {module} as f, parquet; parquet.write_table(f.read_table(sys.argv[1]), sys.argv[2])"
_EXCEL = "import pandas; pandas.read_excel(sys.argv[1]).to_csv(sys.argv[2], index=False)"
_SEPARATED = (
    "import csv; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={separator!r}))"
)
_MOVE = {"s3": "aws s3 mv", "gs": "gcloud storage mv"}  # by scheme
_COPY = {"s3": "aws s3 cp", "gs": "gcloud storage cp"}


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file that can be found in place of the one that its name or the configuration states.

    Attributes:
        about: description of such a file, to follow "it is".
        extension: usual extension of such files. A conversion command first renames the file to one
            with it.
        what_to_do: advice, as a sentence without its full stop.
        command: command that makes the file {new} from the file {old}; None if renaming is enough.
        result: extension of {new}, if such a file is always converted to one format; None keeps the
            name's own.
        has_remedy: whether a command can help.
    """

    about: str
    extension: str = ".old"
    what_to_do: str = "Unpack it"
    command: str | None = None
    result: str | None = None
    has_remedy: bool = True


def _python(code: str, **values: str) -> str:
    return f"python3 -c {shlex.quote('import sys; ' + code.format(**values))}"


_OFFICE = FileKind(
    "an Excel workbook", ".xlsx", "Save it as CSV", f"{_python(_EXCEL)} {{old}} {{new}}", ".csv"
)
_ZIP = FileKind("a ZIP archive", ".zip", command="unzip -p {old} > {new}")
_TAR = FileKind("a tar archive", ".tar", command="tar -xOf {old} > {new}")
_TO_PARQUET = "Write it as Parquet"
_IPC = FileKind(
    "an Arrow file",
    ".arrow",
    _TO_PARQUET,
    f"{_python(_ARROW, module='feather')} {{old}} {{new}}",
    PARQUET_EXTENSION,
)
_ORC = FileKind(
    "an ORC file",
    ".orc",
    _TO_PARQUET,
    f"{_python(_ARROW, module='orc')} {{old}} {{new}}",
    PARQUET_EXTENSION,
)
_AVRO = FileKind("an Avro file", ".avro", _TO_PARQUET, has_remedy=False)
_PARQUET = FileKind("a Parquet file", PARQUET_EXTENSION, "Name it so, with input.format auto")
_PAGE = FileKind("a web page", what_to_do="Download the file itself", has_remedy=False)
_XML = FileKind(
    "XML, as storage answers with an error", what_to_do="Download the file itself", has_remedy=False
)
_LFS = FileKind(
    "a Git LFS pointer", what_to_do="Run `git lfs pull` where it lies", has_remedy=False
)
_SIGNATURES = {
    b"\x1f\x8b": FileKind("a gzip file", ".gz", "Name it so"),
    b"\x28\xb5\x2f\xfd": FileKind("a Zstandard file", ".zst", "Name it so"),
    b"BZh": FileKind("a bzip2 file", ".bz2", command="bzip2 -dc {old} > {new}"),
    b"\xfd7zXZ\0": FileKind("an xz file", ".xz", command="xz -dc {old} > {new}"),
    b"\x04\x22\x4d\x18": FileKind("an LZ4 file", ".lz4", command="lz4 -dc {old} > {new}"),
    b"7z\xbc\xaf\x27\x1c": FileKind("a 7z archive", ".7z", command="7z e -so {old} > {new}"),
    b"Rar!\x1a\x07": FileKind("a RAR archive", ".rar", command="unrar p -inul {old} > {new}"),
    b"\x1f\x9d": FileKind("a file of compress", ".Z", command="gzip -dc {old} > {new}"),
    b"\xff\x06\0\0sNaPpY": FileKind("a Snappy file", ".sz", command="snzip -dc {old} > {new}"),
    b"PAR1": _PARQUET,
    b"ARROW1": _IPC,
    b"FEA1": _IPC,
    b"ORC": _ORC,
    b"Obj\x01": _AVRO,
    b"SQLite format 3\0": FileKind(
        "an SQLite database", what_to_do="Export a table as CSV", has_remedy=False
    ),
    b"\x89HDF\r\n\x1a\n": FileKind("an HDF5 file", what_to_do=_TO_PARQUET, has_remedy=False),
    b"\x93NUMPY": FileKind("a NumPy array", what_to_do=_TO_PARQUET, has_remedy=False),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": FileKind(
        "an old Excel workbook",
        ".xls",
        "Save it as CSV",
        f"{_python(_EXCEL)} {{old}} {{new}}",
        ".csv",
    ),
    b"%PDF-": FileKind("a PDF document", what_to_do="Write its texts as JSONL", has_remedy=False),
    b"{\\rtf": FileKind("an RTF document", what_to_do="Save it as plain text", has_remedy=False),
    b"version https://git-lfs": _LFS,
}
_BROTLI = FileKind("a Brotli file", ".br", command="brotli -dc {old} > {new}")  # has no signature
UNPACKED = {  # files compressed in other ways than CODECS, by extension
    ".br": _BROTLI,
    ".zip": _ZIP,
    **{
        kind.extension: kind
        for kind in _SIGNATURES.values()
        if kind.extension in (".bz2", ".xz", ".lz4", ".7z")
    },
}
_CARRIAGE_RETURNS = FileKind(
    "text whose lines end in carriage returns alone",
    what_to_do="End them in line feeds",
    command=r"tr '\r' '\n' < {old} > {new}",
)
_JSON_ARRAY = FileKind(
    "one JSON array",
    ".json",
    "Write one object a line",
    "jq -c '.[]' {old} > {new}",
    result=".jsonl",
)
_INDENTED = FileKind(
    "JSON objects of several lines",
    ".json",
    "Write one object a line",
    "jq -c . {old} > {new}",
    result=".jsonl",
)
_JSON_LINES = FileKind("JSONL", ".jsonl", "Name it so")
_CSV = FileKind("CSV", ".csv", "Name it so")
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_EXCEL_HINT = re.compile(rb'"?sep=.')
_CSV_HEADER = re.compile(r'"?[A-Za-z_][\w .-]*"?(,"?[A-Za-z_][\w .-]*"?)+')


def foreign_kind(start: bytes, format_: str = "jsonl") -> FileKind | None:
    """Return the kind of a file by its first bytes; None if it is of the given format, or of no known kind.

    Args:
        format_: jsonl, openai_batch, csv, text (any text is right) or parquet.
    """
    signed = _signed_kind(start)
    if signed is not None:
        return None if signed is _PARQUET and format_ == "parquet" else signed
    if (encoding := wide_encoding(start[:ENCODING_BYTES])) is not None:
        return _wide_text(start, encoding)
    return None if format_ == "text" else _kind_of_text(start, format_)


def _signed_kind(start: bytes) -> FileKind | None:
    """Return the kind of a file that begins with the signature of one."""
    for signature, kind in _SIGNATURES.items():
        if start.startswith(signature):
            return kind
    if start.startswith(b"PK\x03\x04"):
        return (
            _OFFICE
            if start[30:].startswith((b"[Content_Types]", b"xl/", b"_rels/", b"docProps/"))
            else _ZIP
        )
    return _TAR if start[257:262] == b"ustar" else None


def _wide_text(start: bytes, encoding: str) -> FileKind:
    codec = json.detect_encoding(start[:ENCODING_BYTES]).upper()
    name = re.sub("-(LE|BE)$", r"\1", codec)  # as iconv spells UTF-16LE, without a byte order mark
    return FileKind(
        f"{encoding} text",
        what_to_do="Write it as UTF-8",
        command=f"iconv -f {name} -t UTF-8 {{old}} > {{new}}",
    )


def _kind_of_text(start: bytes, format_: str) -> FileKind | None:
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    beginning = text[:64].lower()
    if beginning.startswith((b"<!doctype html", b"<html")):
        return _PAGE
    if beginning.startswith(b"<?xml"):
        return _XML
    if _has_bare_returns(text, format_):
        return _CARRIAGE_RETURNS
    lines = [line.strip() for line in text.split(b"\n") if line.strip()]
    if format_ == "csv":
        return _kind_of_csv(lines)
    if format_ == "parquet":
        return _JSON_LINES if lines and _is_object(lines[0]) else None
    return _kind_of_json(lines)


def _has_bare_returns(text: bytes, format_: str) -> bool:
    """Return whether lines end in carriage returns alone. In a line of JSON one may stand between two values."""
    if b"\n" in text or b"\r" not in text.strip():
        return False
    return format_ == "csv" or _is_object(text.split(b"\r", 1)[0])


def _kind_of_json(lines: list[bytes]) -> FileKind | None:
    if len(lines) < 2:
        return None
    first, second = lines[:2]
    if first == b"[" or (first.startswith(b"[{") and not _is_json_text(first)):
        return _JSON_ARRAY
    if first == b"{" and not _is_object(second):  # before an object it is one bad line
        return _INDENTED
    is_header = _CSV_HEADER.fullmatch(first.decode(errors="replace")) is not None
    return _CSV if is_header and not second.startswith((b"{", b"[")) else None


def _kind_of_csv(lines: list[bytes]) -> FileKind | None:
    if not lines:
        return None
    if _is_object(lines[0]):
        return _JSON_LINES
    if lines[0] == b"[" or lines[0].startswith(b"[{"):
        return _JSON_ARRAY
    if _EXCEL_HINT.match(lines[0]) and len(lines) > 1:
        return FileKind(
            "CSV with Excel's line 'sep=' first",
            what_to_do="Delete it",
            command="tail -n +2 {old} > {new}",
        )
    for separator, name in _SEPARATORS.items():
        if _is_separated_by(separator, lines):
            command = f"{_python(_SEPARATED, separator=separator)} < {{old}} > {{new}}"
            return FileKind(
                f"CSV separated by {name}", what_to_do="Separate it by commas", command=command
            )
    return None


def _is_separated_by(separator: str, lines: list[bytes]) -> bool:
    """Return whether the header is one column by commas, and as many as the first row has by another separator."""
    texts = [line.decode(errors="replace") for line in lines[:50]]
    try:
        [by_comma] = csv.reader(texts[:1])
        names, values = [
            row for _, row in zip(range(2), csv.reader(texts, delimiter=separator), strict=False)
        ]
    except (csv.Error, ValueError):  # no second row
        return False
    return len(by_comma) == 1 < len(names) == len(values) and all(names)


def _is_object(line: bytes) -> bool:
    return line.lstrip().startswith(b"{") and _is_json_text(line)


def _is_json_text(line: bytes) -> bool:
    try:
        json.loads(line)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def advice(kind: FileKind, file: StoragePath) -> str:
    """Return the kind of the file and how to convert it, as two sentences without the last full stop."""
    about = f"it is {kind.about}. {kind.what_to_do}"
    if not kind.has_remedy:
        return about
    stem, extension = os.path.splitext(file.text)
    if extension.lower() in CODECS:
        return f"{about}, after `{'gzip' if extension.lower() == '.gz' else 'zstd'} -dk {shlex.quote(file.text)}`"
    return f"{about}: {_command(kind, file, stem, extension)}"


def advice_on_packed(start: bytes, file: StoragePath) -> str | None:
    """Return advice on a file that is not compressed as its extension says; None if it is."""
    stem, extension = os.path.splitext(file.text)
    kind = _signed_kind(start)
    if kind is None:
        is_text = bool(start) and b"\0" not in start
        return f"it is not compressed. Name it so: {_move(file, stem)}" if is_text else None
    if kind.extension == extension.lower():
        return None
    if kind.extension in CODECS:
        return f"it is {kind.about}. Name it so: {_move(file, f'{stem}{kind.extension}')}"
    return f"it is {kind.about}. {kind.what_to_do}"


def _command(kind: FileKind, file: StoragePath, stem: str, extension: str) -> str:
    """Return the command. The file itself is kept."""
    has_name = extension.lower() == kind.extension
    if kind.command is None:
        is_format = kind.extension in (PARQUET_EXTENSION, ".jsonl", ".csv")
        return _move(file, f"{stem if is_format else file.text}{kind.extension}")
    old = file.text if has_name else f"{file.text}{kind.extension}"
    inner = stem if has_name else file.text
    stem, extension = os.path.splitext(inner)
    new = inner
    if kind.result is None and not extension:
        new = f"{inner}.jsonl"
    elif kind.result not in (None, extension.lower()):
        new = f"{stem if extension else inner}{kind.result}"
    if file.is_local:
        made = kind.command.format(old=shlex.quote(old), new=shlex.quote(new))
        return made if has_name else f"{_move(file, old)} && {made}"
    return _remote_command(kind.command, file, old, new)


def _move(file: StoragePath, new: str) -> str:
    scheme = file.text.partition("://")[0]
    move = "mv" if file.is_local else _MOVE.get(scheme)
    if move is None:
        return f"save it as {shlex.quote(new.rpartition('/')[2])}"
    return f"{move} {shlex.quote(file.text)} {shlex.quote(new)}"


def _remote_command(command: str, file: StoragePath, old: str, new: str) -> str:
    """Return a command that downloads an object and converts it."""
    here, made = (shlex.quote(text.rpartition("/")[2]) for text in (old, new))
    mend = command.format(old=here, new=made)
    copy = _COPY.get(file.text.partition("://")[0])
    if copy is None:
        return f"save it as {here}, then {mend}"
    return f"{copy} {shlex.quote(file.text)} {here} && {mend} && {copy} {made} {shlex.quote(new)}"
