"""Progress bars of commands that take long: on a terminal only, on standard error, and gone when the command ends.

With tqdm installed (the extra ``cli``) it draws them; without it, a line counts per cent. Tested in
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
    """Give what draws progress for the time of a with statement; None where nobody sees it.

    Args:
        as_json: Whether a program reads what the command prints.
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
    """Count per cent in one line."""

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
        """Leave nothing on the line."""
        if self._width:
            self._write("")
            self._stream.write("\r")
            self._stream.flush()


class _Tqdm:
    """Draw a bar with tqdm; without colour where NO_COLOR says so (https://no-color.org)."""

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
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
