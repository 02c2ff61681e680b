"""Compare two checkpoints, of any format and layout, tensor by tensor. Tested in tests/tools/test_comparison.py."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import AoaConfig, TensorMapping
from paddle_flexckpt.catalog import group_replicas
from paddle_flexckpt.catalog.texts import format_bytes, printable
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.optimizer_states import split_state
from paddle_flexckpt.progress import Meter, ProgressCallback
from paddle_flexckpt.report import Report
from paddle_flexckpt.tools.differences import DifferenceSums, Position, TensorDifference, Tolerances
from paddle_flexckpt.tools.whole_tensors import compare_head, iterate_bands
from paddle_flexckpt.transfer.arguments import plain_arguments
from paddle_flexckpt.transfer.files import read_settings
from paddle_flexckpt.transfer.mapping import tensor_infos, whole_mapping
from paddle_flexckpt.transfer.names import is_state


def _with_states(keys: list[str]) -> Iterator[str]:
    """Yield keys, each with its optimizer states that are among them."""
    everything = {*keys}
    states: dict[str, list[str]] = {}
    for key in keys:
        parameter, state = split_state(key, everything)
        if state and parameter in everything:
            states.setdefault(parameter, []).append(state)
        else:
            states.setdefault(key, [])
    for key, found in states.items():
        yield f"{key} with its states {', '.join(found)}" if found else key


@dataclass(frozen=True)
class DiffReport(Report):
    """The differences between two checkpoints.

    Attributes:
        first: The first checkpoint's directory.
        second: The second one's.
        keys: Number of tensors in both.
        only_in_first: Keys that only the first has.
        only_in_second: Keys that only the second has.
        unlike: Shape and dtype in the first and in the second, by key, of tensors that differ in these.
        differing: The differences of tensors of the same shape and dtype, by key: those that the tolerances do not
            allow first, of these those with values that are not finite, then the largest ``max_relative``.
        bytes_by_checksum: Bytes of tensors that were compared by their checksums alone.
        bytes_read: Bytes of tensors that were read, from both.
        rtol: The relative tolerance.
        atol: The absolute tolerance.
        left_out: Optimizer states of both that were not compared.
        seconds: Wall time; ``total`` is all of it.
    """

    first: str
    second: str
    keys: int
    only_in_first: list[str]
    only_in_second: list[str]
    unlike: dict[str, list[str]]
    differing: dict[str, TensorDifference]
    bytes_by_checksum: int
    bytes_read: int
    rtol: float = 0.0
    atol: float = 0.0
    left_out: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    derived = ("equal", "within_tolerance")

    @property
    def equal(self) -> bool:
        """Return whether nothing differs."""
        return self.within_tolerance and not self.differing

    @property
    def within_tolerance(self) -> bool:
        """Return whether keys, shapes and dtypes are equal, and the tolerances allow all differences of values."""
        unlike = self.only_in_first or self.only_in_second or self.unlike
        return not unlike and all(each.within_tolerance for each in self.differing.values())

    def lines(self) -> list[str]:
        """Return a line for each difference, for people."""
        lines = [
            *(f"- {text}: only in the first" for text in _with_states(self.only_in_first)),
            *(f"+ {text}: only in the second" for text in _with_states(self.only_in_second)),
            *(f"! {key}: {one} in the first, {two} in the second" for key, (one, two) in self.unlike.items()),
            *(f"{'=' if each.within_tolerance else '~'} {key}: {each}" for key, each in self.differing.items()),
        ]
        return list(map(printable, lines))

    def summary(self) -> str:
        """Return one line for people."""
        by_checksum, both = format_bytes(self.bytes_by_checksum), f"{self.keys} tensors"
        read = f"{format_bytes(self.bytes_read)} read, {by_checksum} compared by checksums alone"
        read += f"; {self.left_out} states left out" if self.left_out else ""
        if self.equal:
            return f"{self.first} and {self.second} are equal: {both}; {read}"
        within = sum(each.within_tolerance for each in self.differing.values())
        tolerances = f"within the tolerances (rtol {self.rtol:g}, atol {self.atol:g})"
        if self.within_tolerance:
            return (
                f"{self.first} and {self.second} are equal {tolerances}: {both}, of which {within} differ in values; "
                f"{read}"
            )
        allowed = f", {within} of these {tolerances}," if self.rtol or self.atol else ""
        return (
            f"{self.first} and {self.second} differ: of {both} in both, {len(self.differing)} differ in values"
            f"{allowed} and {len(self.unlike)} in shape or dtype; {len(self.only_in_first)} are only in the first, "
            f"{len(self.only_in_second)} only in the second; {read}"
        )


@plain_arguments
def diff(
    first: Location,
    second: Location,
    aoa_config: AoaConfig | None = None,
    *,
    first_id: int | None = None,
    second_id: int | None = None,
    states: bool = True,
    extra_state: bool = False,
    rtol: float = 0.0,
    atol: float = 0.0,
    progress: ProgressCallback | None = None,
) -> DiffReport:
    """Compare two checkpoints of any format and layout.

    ::

        report = fc.diff("run/shards", "exported", states=False)
        if not report.equal:
            print(report.lines())

    Tensors with the same shards in both are compared by the checksums of their blocks, and only blocks that differ are
    read. Others are read, at most 64 MiB of each side at a time. Values are compared by their bits.

    Args:
        first: A checkpoint's directory: a path, a URL, or what ``open_storage`` gives; or a safetensors file.
        second: Another, likewise.
        aoa_config: AOA statements that bring the first one's tensors to the names and shapes of the second one's.
        first_id: Which checkpoint of the first directory; None takes the highest id.
        second_id: Likewise of the second.
        states: Whether optimizer states are compared.
        extra_state: Whether a run's extra state is compared too.
        rtol: Relative tolerance, as in numpy: the report says where ``|first - second| <= atol + rtol * |second|`` too.
        atol: Absolute tolerance.
        progress: Called with a :class:`~paddle_flexckpt.progress.Progress` as tensors of the first are compared.

    Returns:
        The differences.

    Raises:
        ValidationError: There is no such checkpoint, the statements do not fit, or a tolerance is not finite.
        CorruptCheckpointError: A checkpoint is damaged.
        OSError: The file system refused.
    """
    begin, tolerances = time.perf_counter(), Tolerances(rtol, atol)
    tolerances.check()
    with contextlib.ExitStack() as stack:
        one = _Side(stack, first, first_id, aoa_config, extra_state)
        two = _Side(stack, second, second_id, None, extra_state)
        left_out = 0 if states else one.leave_out_states() + two.leave_out_states()
        both = sorted(one.infos.keys() & two.infos.keys())
        unlike = {key: [str(one.infos[key]), str(two.infos[key])] for key in both if one.infos[key] != two.infos[key]}
        keys = [key for key in both if key not in unlike]
        differing, counts = _differences(one, two, keys, tolerances, progress)
        return DiffReport(
            first=one.directory.path,
            second=two.directory.path,
            keys=len(both),
            only_in_first=sorted(one.infos.keys() - two.infos.keys()),
            only_in_second=sorted(two.infos.keys() - one.infos.keys()),
            unlike=unlike,
            differing=differing,
            rtol=rtol,
            atol=atol,
            left_out=left_out,
            seconds={"total": time.perf_counter() - begin},
            **counts,
        )


def _differences(
    one: _Side, two: _Side, keys: list[str], tolerances: Tolerances, progress: ProgressCallback | None
) -> tuple[dict[str, TensorDifference], dict[str, int]]:
    """Return the tensors that differ, of these keys, and the bytes compared by checksums and read."""
    meter = Meter(progress, "compare", sum(one.infos[key].nbytes for key in keys), len(keys))
    counts = {"bytes_by_checksum": 0, "bytes_read": 0}
    found = {key: DifferenceSums(one.infos[key], tolerances) for key in keys}
    cut_differently = []
    for key in keys:
        pairs = _pairs(one, two, key)
        if pairs is None:
            cut_differently.append(key)
            continue
        for pair in pairs:
            _compare_items(one, two, pair, found[key], counts)
        meter.add(one.infos[key].nbytes, items=1)
    for key, start, former, latter in _both_in_bands(one, two, cut_differently):
        found[key].add(former, latter, lambda element: element, start)
        counts["bytes_read"] += former.nbytes + latter.nbytes
        meter.add(former.nbytes, items=not start)
        del former, latter  # gone before the next ones are read
    meter.finish()
    return _by_weight({key: found[key].result() for key in keys if found[key].changed}), counts


def _by_weight(differing: dict[str, TensorDifference]) -> dict[str, TensorDifference]:
    """Return differences that the tolerances do not allow first, then those not finite, then the largest."""

    def weight(pair: tuple[str, TensorDifference]) -> tuple[bool, bool, float, str]:
        key, each = pair
        return each.within_tolerance, not each.not_finite, -each.max_relative, key

    return dict(sorted(differing.items(), key=weight))


class _Side:
    """One of the two checkpoints, open."""

    def __init__(
        self, stack: contextlib.ExitStack, path: Location, unique_id: int | None, aoa_config: Any, extra_state: bool
    ) -> None:
        self.directory = SourceDirectory(path)
        self.manifest = stack.enter_context(LockedManifest(self.directory, unique_id))
        self.catalog = self.manifest.catalog
        self._sizes = self.catalog.size
        self.mapping: TensorMapping | None = whole_mapping(
            compare_head(aoa_config, self.directory.backend, self.manifest),
            self.catalog,
            settings=lambda: read_settings(self.directory),
        )
        self.infos = tensor_infos(self.catalog, self.mapping, extra_state)
        self.reader = stack.enter_context(FileReader(self.directory.backend, self.manifest))
        # The first of each replica group, by key.
        self._rows: dict[str, list[int]] = {}
        if not self.manifest.foreign:
            for row in group_replicas(self.catalog).first.tolist():
                self._rows.setdefault(self.catalog.key_name(row), []).append(row)
        # The stored tensor that equals a tensor, element by element.
        self._stored = dict.fromkeys(self.infos) if self.mapping is None else self.mapping.copied_keys(self.infos)

    def leave_out_states(self) -> int:
        """Leave optimizer states out of the comparison; return how many."""
        everything = self.infos
        self.infos = {key: info for key, info in everything.items() if not is_state(key, everything)}
        return len(everything) - len(self.infos)

    def items(self, key: str) -> dict[tuple[tuple[int, ...], ...], int] | None:
        """Return the rows of a tensor by their places in it; None if they cannot be compared by checksum.

        These are other programs' tensors, which have no checksums, and tensors that statements make or cast.
        """
        if self.manifest.foreign or key not in self._stored:
            return None
        catalog, rows = self.catalog, self._rows.get(self._stored[key] or key, [])
        if any(catalog.dtype_name(row) != self.infos[key].dtype for row in rows):
            return None
        return {
            (
                catalog.unpadded(row, catalog.offset),
                catalog.unpadded(row, catalog.shape),
                (int(catalog.flat_start[row]), int(catalog.flat_stop[row])),
            ): row
            for row in rows
            if self._sizes[row]
        }


def _pairs(one: _Side, two: _Side, key: str) -> list[tuple[int, int]] | None:
    """Return the pairs of items of a tensor in the same place; None if the two are cut differently."""
    if one.manifest.checksums.block_bytes != two.manifest.checksums.block_bytes:
        return None
    mine, others = one.items(key), two.items(key)
    if mine is None or others is None or mine.keys() != others.keys():
        return None
    return [(row, others[place]) for place, row in mine.items()]


def _compare_items(
    one: _Side, two: _Side, rows: tuple[int, int], found: DifferenceSums, counts: dict[str, int]
) -> None:
    """Compare two items in the same place: by checksums, and by values where these differ."""
    sums = [side.manifest.checksums.of_item(row) for side, row in zip((one, two), rows)]
    length = int(one.catalog.byte_length[rows[0]])
    block_bytes = one.manifest.checksums.block_bytes
    blocks = np.flatnonzero(sums[0] != sums[1])
    read, place = 0, _position_in(one, rows[0])
    for block in blocks.tolist():
        begin, end = block * block_bytes, min((block + 1) * block_bytes, length)
        values = []
        for side, row in zip((one, two), rows):
            buffer = np.empty(end - begin, dtype=np.uint8)
            side.reader.fill(row, begin, buffer)
            values.append(buffer.view(found.dtype))
        found.add(values[0], values[1], place, begin // found.dtype.itemsize)
        read += end - begin
    counts["bytes_read"] += 2 * read
    counts["bytes_by_checksum"] += length - read


def _position_in(side: _Side, row: int) -> Position:
    """Return the function from the number of an element of an item to its position in the whole tensor."""
    catalog = side.catalog
    start = int(catalog.flat_start[row]) if catalog.is_flattened[row] else 0
    offset, shape, whole = (
        catalog.unpadded(row, each) for each in (catalog.offset, catalog.shape, catalog.global_shape)
    )

    def position(element: int) -> int:
        if not shape:
            return 0
        place = np.unravel_index(start + element, shape)
        return int(np.ravel_multi_index([int(p) + o for p, o in zip(place, offset)], whole))

    return position


def _both_in_bands(one: _Side, two: _Side, keys: list[str]) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """Yield the values of tensors in both, at most a band at a time: key, number of the first element, elements."""
    if not keys:
        return
    bands, others = (iterate_bands(side.directory.backend, side.manifest, side.mapping, keys) for side in (one, two))
    key, start = "", 0
    for name, _, array in bands:
        key, start = name, start if name == key else 0
        yield key, start, array.ravel(), next(others)[2].ravel()
        start += array.size
        del array  # gone before the next one is read
    next(others, None)
