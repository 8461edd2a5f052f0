"""A Chrome trace read event by event: a file of any size in the memory of one event and one chunk.

The file is a JSON object with a list `traceEvents`, as torch.profiler writes it, or that list
alone. It may be gzipped, whatever its name is.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from interlace.errors import InputError

EVENTS = "traceEvents"
"""Key of the list of events in a trace."""
_CHUNK = 1 << 20
"""Characters read at once; a choice."""
_LARGEST = 1 << 26
"""Characters that one value may have. What is longer is taken for damage, so that a file with a
broken event in its middle is not read into memory."""
_GZIP = b"\x1f\x8b"
"""The first bytes of a gzipped file."""
_WHAT = (
    "give traces that torch.profiler wrote with export_chrome_trace (.json or .json.gz), or the "
    "output folder of a run"
)
"""Hint where a file is no trace."""


class EventStream:
    """The events of one file. `header` grows while events are read: it has what the file says
    outside of them, such as `distributedInfo`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every event that is an object. Raises InputError for a file that cannot be read, is
        empty, is no JSON, ends too early, or has no list of events."""
        try:
            with self._open() as file:
                yield from self._events(_JsonText(file))
        except json.JSONDecodeError as error:
            raise self._not_json(error) from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(
                f"{self.path} ends before its gzip stream does, or is damaged: {error}",
                hint="copy it again, or record the trace again",
            ) from error
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}", hint=_WHAT) from error

    def _open(self) -> IO[str]:
        with self.path.open("rb") as file:
            packed = file.read(2) == _GZIP
        opened = gzip.open if packed else open
        return cast("IO[str]", opened(self.path, "rt", encoding="utf-8", errors="replace"))

    def _events(self, text: "_JsonText") -> Iterator[dict[str, Any]]:
        first = text.sign()
        if not first:
            raise InputError(f"{self.path} is empty", hint=_WHAT)
        if first == "[":
            yield from text.elements()
            return
        found = False
        for key in text.object_keys():
            if key == EVENTS and text.sign() == "[":
                found = True
                yield from text.elements()
            else:
                self.header[key] = text.value()
        if not found:
            raise InputError(
                f"{self.path} is JSON, but no trace: it has no list {EVENTS!r}", hint=_WHAT
            )

    def _not_json(self, error: json.JSONDecodeError) -> InputError:
        if error.msg == _JsonText.ENDED:
            return InputError(
                f"{self.path} ends in the middle of an event: it was cut off",
                hint="wait until export_chrome_trace has returned, then copy it again",
            )
        near = error.doc[max(0, error.pos - 10) : error.pos + 30]
        return InputError(f"{self.path} is not JSON: {error.msg}, near {near!r}", hint=_WHAT)


class _JsonText:
    """JSON values from a file, one after the other."""

    ENDED = "the text ends"

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def sign(self) -> str:
        """The next character that is no white space, which stays; empty at the end."""
        while True:
            while self._at < len(self._text):
                sign = self._text[self._at]
                if not sign.isspace():
                    return sign
                self._at += 1
            if not self._more(_CHUNK):
                return ""

    def value(self) -> Any:
        """The next value, as Python has it."""
        self.sign()
        size = _CHUNK
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > _LARGEST:
                    raise
                if not self._more(size):
                    raise self._ended() if self._is_cut(error) else error from None
                size *= 2
                continue
            if end == len(self._text) and self._more(size):
                continue  # a number may go on behind the chunk
            self._at = end
            return value

    def object_keys(self) -> Iterator[str]:
        """The keys of the object that begins here; each value is to be read before the next."""
        self._take("{")
        while self.sign() != "}":
            key = self.value()
            self._take(":")
            yield key
            if self.sign() == ",":
                self._take(",")
            elif self.sign() != "}":
                raise self._unexpected("',' or '}'")
        self._take("}")

    def elements(self) -> Iterator[dict[str, Any]]:
        """The objects in the list that begins here."""
        self._take("[")
        while self.sign() != "]":
            value = self.value()
            if isinstance(value, dict):
                yield value
            if self.sign() == ",":
                self._take(",")
            elif self.sign() != "]":
                raise self._unexpected("',' or ']'")
        self._take("]")

    def _more(self, size: int) -> bool:
        read = self._file.read(size)
        self._text = self._text[self._at :] + read
        self._at = 0
        return bool(read)

    def _take(self, wanted: str) -> None:
        if self.sign() != wanted:
            raise self._unexpected(repr(wanted))
        self._at += 1

    def _is_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether a value that cannot be read may have been cut off by the end of the file."""
        open_string = error.msg.startswith("Unterminated")
        return open_string or error.pos >= len(self._text.rstrip()) - 1

    def _ended(self) -> json.JSONDecodeError:
        return json.JSONDecodeError(self.ENDED, self._text, len(self._text))

    def _unexpected(self, wanted: str) -> json.JSONDecodeError:
        if not self.sign():
            return self._ended()
        return json.JSONDecodeError(f"expected {wanted}", self._text, self._at)
