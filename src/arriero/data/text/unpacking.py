"""The bytes of an input, unpacked where it is compressed; what lies before damage can be read."""

import io
import zlib
from pathlib import Path
from typing import IO, Any

from arriero.data.text.sources import Input


def open_input(source: Input) -> IO[bytes]:
    if not source.compression:
        return Path(source.path).open("rb", buffering=2**20)
    return io.BufferedReader(unbuffered(source), 2**20)


def unbuffered(source: Input) -> Any:
    """Reads no further than asked, so that nothing before a damaged place is out of reach."""
    if not source.compression:
        return Path(source.path).open("rb", buffering=0)
    if source.compression == "gzip":
        return _Gunzip(Path(source.path))
    import pyarrow as pa

    return pa.input_stream(source.path, compression=source.compression)


class _Gunzip(io.RawIOBase):
    """Members one after another, zeros allowed after each. A call that fails loses only what it asked for."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=2**18)
        self._member = zlib.decompressobj(wbits=31)
        self._packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._member.eof and not self._next_member():
                return 0
            packed = self._packed or self._file.read(min(2**18, 8 * len(buffer)))
            try:
                unpacked = self._member.decompress(packed, len(buffer))
            except zlib.error as error:
                raise OSError(str(error)) from None
            self._packed = self._member.unconsumed_tail
            if unpacked:
                buffer[: len(unpacked)] = unpacked
                return len(unpacked)
            if not packed and not self._member.eof:
                raise OSError("truncated")

    def _next_member(self) -> bool:
        packed = self._member.unused_data.lstrip(b"\0")
        while not packed and (more := self._file.read(2**18)):
            packed = more.lstrip(b"\0")
        if packed:
            self._packed, self._member = packed, zlib.decompressobj(wbits=31)
        return bool(packed)

    def close(self) -> None:
        self._file.close()
        super().close()
