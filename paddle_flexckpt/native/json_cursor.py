"""Read JSON step by step: only what the caller expects is built, so memory stays in proportion.

``json.loads`` makes 64 bytes of every ``[],`` of a file. Here the caller chooses what is read next: an object, whose
entries it reads one at a time, a text, or a small value.

Tested in tests/attacks/test_files.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# A name or value of more bytes than this is not one of a header.
MAX_VALUE_BYTES = 1 << 14
MAX_TEXTS = 4096
_USUAL_VALUE_BYTES = 512
_MAX_DIGITS = 32
_SPACES = b" \t\n\r"
_SPACE = re.compile(rb"[ \t\n\r]*")
# Up to the end of a text, or to that of the window: the expression takes memory for every escape.
_TEXT_WINDOW = 1 << 12
_PLAIN_NAME = re.compile(rb'"([^"\\\x00-\x1f]{0,255})"')
_TEXT = re.compile(rb'(?:[^"\\\x00-\x1f]+|\\[^\x00-\x1f])*')


class JsonCursor:
    """A position in a JSON text, from which every method reads on.

    A method raises ValueError if the text does not have there what the method reads.
    """

    def __init__(self, text: bytes) -> None:
        """Begin at the first byte of a JSON text."""
        self._text = text
        self._at = 0

    def entries(self) -> Iterator[str]:
        """Yield the names of an object; the caller reads the value of each before it requests the next one."""
        self._expect(b"{")
        seen: set[str] = set()
        if self._peek() == b"}":
            self._at += 1
            return
        while True:
            name = self.string(MAX_VALUE_BYTES)
            if name in seen:
                raise ValueError(f"{name[:80]!r} stands in it twice")
            seen.add(name)
            self._expect(b":")
            yield name
            if self._expect(b",}") == b"}":
                return

    def string(self, most: int | None = None) -> str:
        """Read a text, of at most so many bytes if a number is given."""
        usual = _PLAIN_NAME.match(self._text, self._at)
        if usual is not None:
            self._at = usual.end()
            return usual[1].decode()
        if self._peek() != b'"':
            raise ValueError(f"byte {self._at}: {self._text[self._at : self._at + 8]!r} where a text stands")
        end = self._at + 1
        while True:
            match = _TEXT.match(self._text, end, end + _TEXT_WINDOW)
            stop = end if match is None else match.end()
            if self._text[stop : stop + 1] == b'"':
                break
            if stop == end or (most is not None and stop > self._at + most):
                raise ValueError(f"byte {stop}: a text without an end, or one that is too long")
            end = stop
        value: str = json.loads(self._text[self._at : stop + 1].decode())
        self._at = stop + 1
        return value

    def texts(self) -> dict[str, str]:
        """Read an object of at most :data:`MAX_TEXTS` texts."""
        found: dict[str, str] = {}
        for name in self.entries():
            found[name] = self.string()
            if len(found) > MAX_TEXTS:
                raise ValueError(f"byte {self._at}: more than {MAX_TEXTS} texts")
        return found

    def match(self, pattern: re.Pattern[bytes]) -> tuple[bytes, ...] | None:
        """Return the groups of a pattern if it matches here; None, with nothing read, if it does not."""
        match = pattern.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return match.groups()

    def value(self, with_fractions: bool = False) -> Any:
        """Read a value of at most :data:`MAX_VALUE_BYTES` bytes: whole numbers, texts, lists and objects of them.

        With ``with_fractions`` other numbers are accepted too, and returned as they are.
        """
        decoder = _FRACTIONS_TOO if with_fractions else _DECODER
        self._peek()
        for size in (_USUAL_VALUE_BYTES, MAX_VALUE_BYTES):
            window = self._text[self._at : self._at + size].decode("utf-8", "surrogateescape")
            is_last = size == MAX_VALUE_BYTES or len(self._text) - self._at <= size
            try:
                value, end = decoder.raw_decode(window)
            except (ValueError, RecursionError) as error:
                if is_last:
                    raise ValueError(f"byte {self._at}: {str(error)[:200]}") from error
                continue
            # A number may go on beyond the window.
            if end < len(window) or is_last:
                break
        # Bytes that are not UTF-8 are lone surrogates here, which cannot be encoded.
        self._at += len(window[:end].encode())
        return value

    def end(self) -> None:
        """Check that nothing follows but spaces."""
        if self._peek():
            raise ValueError(f"byte {self._at}: more than one JSON value")

    def _peek(self) -> bytes:
        got = self._text[self._at : self._at + 1]
        if got and got not in _SPACES:
            return got
        match = _SPACE.match(self._text, self._at)
        self._at = self._at if match is None else match.end()
        return self._text[self._at : self._at + 1]

    def _expect(self, options: bytes) -> bytes:
        got = self._peek()
        if not got or got not in options:
            raise ValueError(f"byte {self._at}: {got!r} where one of {options.decode()!r} stands")
        self._at += 1
        return got


def _parse_int(text: str) -> int:
    # The time of int() rises with the square of the number of digits.
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text[:80]} where only whole numbers stand")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:80]!r} stands in it twice")
    return table


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_parse_int, parse_float=_refuse, parse_constant=_refuse
)
_FRACTIONS_TOO = json.JSONDecoder(object_pairs_hook=_object, parse_int=_parse_int)
