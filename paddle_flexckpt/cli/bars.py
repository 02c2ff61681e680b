"""Progress bars of long commands: only on a terminal, on standard error, and removed at the end.

tqdm draws them if it is installed (the extra ``cli``); otherwise a line counts per cent. Tested in
tests/cli/test_bars.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.progress import Progress, ProgressCallback

_COLOUR = "green"


@contextlib.contextmanager
def progress_bar(as_json: bool = False, stream: TextIO | None = None) -> Iterator[ProgressCallback | None]:
    """Return the callback that draws progress, in a with statement; None where it would not be seen.

    Args:
        as_json: Whether a program reads the command's output.
        stream: Where to draw; standard error by default.
    """
    stream = sys.stderr if stream is None else stream
    if as_json or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    bar = _bar(stream)
    try:
        yield bar.show
    finally:
        bar.close()


def _bar(stream: TextIO) -> _Line | _Tqdm:
    try:
        from tqdm import tqdm
    except ImportError:
        return _Line(stream)
    return _Tqdm(tqdm, stream)


class _Line:
    """A line that counts per cent."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._width = stream, 0

    def show(self, progress: Progress) -> None:
        sizes = f"{format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)}"
        self._write(f"{progress.phase} {progress.fraction:4.0%}  {sizes}")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r{text.ljust(self._width)}")
        self._stream.flush()
        self._width = len(text)

    def close(self) -> None:
        """Clear the line."""
        if self._width:
            self._write("")
            self._stream.write("\r")
            self._stream.flush()


class _Tqdm:
    """A bar of tqdm, without colour if NO_COLOR is set (https://no-color.org)."""

    def __init__(self, tqdm: Any, stream: TextIO) -> None:
        self._tqdm, self._stream = tqdm, stream
        self._bar: Any = None

    def show(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = self._tqdm(
                total=progress.bytes_total,
                desc=progress.phase,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                leave=False,
                file=self._stream,
                colour=None if os.environ.get("NO_COLOR") else _COLOUR,
            )
        self._bar.update(progress.bytes_done - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
