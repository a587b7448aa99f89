"""Read compressed files, .gz and .zst, as decompressed streams."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

import pyarrow as pa

from eagle_ray.storage.store import ReadOnlyFile

CODECS = {".gz": "gzip", ".zst": "zstd"}  # by extension
DECOMPRESSED_BUFFER_BYTES = 1 << 20


def open_decompressed(open_source: Callable[[], BinaryIO], codec: str) -> BinaryIO:
    """Open a compressed file as a stream of its decompressed content.

        with open_decompressed(StoragePath.of("a.jsonl.zst").open, "zstd") as lines:
            lines.readline()

    Args:
        codec: gzip or zstd. The file may have several members.
    """
    return io.BufferedReader(DecompressedFile(open_source, codec), DECOMPRESSED_BUFFER_BYTES)


class DecompressedFile(ReadOnlyFile):
    """A decompressed stream. A forward seek reads up to its position; a backward seek starts at the beginning again.

    Zeros behind the last member of a gzip file, which tapes and block devices add, are not content.
    Reading raises OSError if the file is damaged or cut.
    """

    def __init__(self, open_source: Callable[[], BinaryIO], codec: str):
        self._open_source = open_source
        self._codec = codec
        self._open()

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the length of a compressed file is not known")
        target = offset + (self._position if whence == io.SEEK_CUR else 0)
        if target < self._position:
            self._close_stream()
            self._open()
        while self._position < target and self._read(
            min(DECOMPRESSED_BUFFER_BYTES, target - self._position)
        ):
            pass
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._close_stream()
        super().close()

    def _read(self, size: int) -> bytes:
        try:
            data: bytes = self._stream.read(size)
        except (EOFError, zlib.error) as error:
            raise OSError(f"the {self._codec} stream is damaged or cut: {error}") from error
        self._position += len(data)
        return data

    def _open(self) -> None:
        self._source = self._open_source()
        if self._codec == "gzip":
            self._stream: Any = gzip.GzipFile(fileobj=self._source)
        else:
            self._stream = pa.CompressedInputStream(pa.PythonFile(self._source, "r"), self._codec)
        self._position = 0

    def _close_stream(self) -> None:
        self._stream.close()
        self._source.close()  # a GzipFile leaves it open
