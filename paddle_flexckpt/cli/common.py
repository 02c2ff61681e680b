"""The common part of several commands: arguments, their values, the outcome, and a bar of progress.

Tested in tests/cli/test_cli.py and tests/cli/test_bars.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, overload

from paddle_flexckpt.catalog import Catalog, CorruptCheckpointError, ValidationError, without_extra_state
from paddle_flexckpt.catalog.texts import format_bytes, printable, printable_lines
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.file_names import redacted
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.directory import CheckpointInfo, list_checkpoints
from paddle_flexckpt.progress import Progress, ProgressCallback

if TYPE_CHECKING:
    from paddle_flexckpt.aoa.statements import AoaConfig
# A command in the text of an error.
COMMAND = re.compile(r"\bflexckpt [a-z]+")
# The end of the help of an argument whose run :func:`newest_taken` replaces.
OF_RUN = "or of a run, of which the highest complete step is taken"
_COLOUR = "green"


def quoted(path: str) -> str:
    """Return a path or URL as a word of a command line, without secrets."""
    return shlex.quote(redacted(path) if "://" in path else path)


class Outcome(NamedTuple):
    """The text to print and the exit code of a command that may find a problem."""

    text: str
    code: int = 0


def add_aoa(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add ``--aoa``."""
    parser.add_argument(
        "--aoa",
        required=required,
        metavar="CONFIG",
        help="the AOA statements: a statement, JSON, or a JSON or YAML file; '-' reads JSON from standard input",
    )


def add_checkpoint(parser: argparse.ArgumentParser, all_steps: bool = False) -> None:
    """Add ``CHECKPOINT`` and ``--id``; of a run a command takes all steps, or the highest."""
    of_run = "or of a run with its steps" if all_steps else OF_RUN
    parser.add_argument("source", metavar="CHECKPOINT", help=f"directory or URL of the checkpoint, {of_run}")
    parser.add_argument("--id", type=int, dest="unique_id", metavar="ID", help="its id; by default the highest")
    if not all_steps:
        parser.set_defaults(newest={"source": "unique_id"})


def add_cut(parser: argparse.ArgumentParser) -> None:
    """Add ``--cut``."""
    parser.add_argument(
        "--cut",
        action="append",
        default=[],
        metavar="GLOB=AXIS",
        help="the axis along which tensor parallelism cuts these tensors, or none; may be given several times, and the "
        "first that fits counts; by default as they were cut at the save",
    )


def parse_cut(text: str) -> tuple[str, int | None]:
    """Return the glob and the axis of a ``--cut``.

    Raises:
        ValidationError: It has none.
    """
    glob, equals, axis = text.rpartition("=")
    if not equals or not (axis == "none" or axis.lstrip("-").isdigit()):
        raise ValidationError([f"--cut takes GLOB=AXIS, with a number or none; got {text!r}"])
    return glob, None if axis == "none" else int(axis)


def parse_parameter(text: str) -> tuple[str, Any]:
    """Return the name and value of a ``--set``.

    Raises:
        ValidationError: It has none.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValidationError([f"--set takes NAME=VALUE; got {text!r}"])
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def add_json(parser: argparse.ArgumentParser, what: str = "the report") -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add ``--verify``."""
    parser.add_argument(
        "--verify",
        choices=("read", "full", "off"),
        default="read",
        help="compare all that is used with its checksums (default); so, but read blocks whole; or nothing",
    )


def add_set(parser: argparse.ArgumentParser, example: str) -> None:
    """Add ``--set``."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"a parameter of the family, such as {example}; may be given several times",
    )


def add_html(parser: argparse.ArgumentParser) -> None:
    """Add ``--html``."""
    parser.add_argument("--html", metavar="FILE", help="write a page for a browser too, which needs no network")


def write_page(path: str, content: str) -> str:
    """Write a page, and return a line about it.

    Raises:
        ValidationError: The file cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise ValidationError(
            [f"cannot write the page: {error}. Remedy (FC406): give a file of a directory that is there"]
        ) from error
    return f"wrote {path}"


def byte_count(text: str) -> int:
    """Return the bytes of a text such as ``5GiB``, ``5GB``, ``512 KiB`` or ``4096``.

    Raises:
        ArgumentTypeError: It is something else, or less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    count = 0
    if match:
        unit = " KMGT".index((match[2] or " ").upper())
        count = int(float(match[1]) * (1024 if match[3] else 1000) ** unit)
    if count < 1:
        raise argparse.ArgumentTypeError(f"has to be a number of bytes such as 5GiB, 5GB or 4096; got {text!r}")
    return count


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table; columns in ``right`` are aligned right. What a terminal may interpret is escaped."""
    cells = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return [
        "  ".join(
            text.rjust(width) if i in right else text.ljust(width) for i, (text, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in cells
    ]


def checkpoints_of(source: str, unique_id: int | None) -> list[CheckpointInfo]:
    """Return the checkpoints right below a directory that has none itself, as a run's has; else none."""
    directory, found = SourceDirectory(source), list[CheckpointInfo]()
    try:
        if unique_id is not None or directory.is_file or directory.list_ids():
            return []
        found = list_checkpoints(directory.backend)
        if found:  # reading another program's files takes longer
            directory.origin()
    except CorruptCheckpointError:
        return []
    except ValidationError:
        return found
    return []


@contextlib.contextmanager
def newest_taken(options: argparse.Namespace) -> Iterator[None]:
    """Put a run's highest complete step in the place of its directory, say so on standard error, and keep it locked.

    ``newest`` of a command's arguments has the names of those that are checkpoints, and of their ids.
    """
    with contextlib.ExitStack() as locks:
        for name, its_id in getattr(options, "newest", {}).items():
            path, is_taken = getattr(options, name), False
            while path is not None and not is_taken:
                found = checkpoints_of(path, getattr(options, its_id, None))
                steps = [each for each in found if each.complete and each.step is not None]
                if not steps:
                    break
                newest = steps[-1]
                with contextlib.suppress(FileNotFoundError):  # it was just removed, so a later one is there
                    locks.enter_context(open_backend(newest.path).locks.share(f"{newest.unique_id}.manifest"))
                    is_taken = True
            if not is_taken:
                continue
            setattr(options, name, newest.path)
            lines = [f"{quoted(path)} is a run; its highest complete step is taken, {quoted(newest.path)}"]
            lines += [f"not complete: {quoted(each.path)}: {each.problem}" for each in found if not each.complete]
            text = "\n".join(f"flexckpt {options.command}: {line}" for line in lines)
            print(printable_lines(text), file=sys.stderr)
        yield


@overload
def aoa_config(value: str) -> AoaConfig: ...
@overload
def aoa_config(value: str | None) -> AoaConfig | None: ...
def aoa_config(value: str | None) -> AoaConfig | None:
    """Return the statements of ``--aoa``; None without it."""
    return sys.stdin.read() if value == "-" else value


@overload
def read_catalog(path: str) -> Catalog: ...
@overload
def read_catalog(path: None) -> None: ...
def read_catalog(path: str | None) -> Catalog | None:
    """Return the shards of a checkpoint's newest save, without a run's extra state; None without a path.

    Raises:
        CheckpointError: There is no checkpoint, or its manifest is damaged.
    """
    return None if path is None else without_extra_state(SourceDirectory(path).read_manifest(None).catalog)


@contextlib.contextmanager
def progress_bar(as_json: bool = False, stream: TextIO | None = None) -> Iterator[ProgressCallback | None]:
    """Yield the callback that draws progress on standard error; None if nobody sees it, or a program reads the output.

    The bar goes at the end. tqdm draws it if it is installed (the extra ``cli``); otherwise a line counts per cent.
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
