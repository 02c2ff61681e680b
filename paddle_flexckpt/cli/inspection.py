"""flexckpt inspect. Tested in tests/cli/test_cli.py."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.texts import format_bytes, printable
from paddle_flexckpt.cli.common import add_checkpoint, add_json, table
from paddle_flexckpt.foreign.formats import FORMATS, SourceDirectory
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.optimizer_states import split_state
from paddle_flexckpt.tools.step_record import LAYOUT, RECORD, read_degrees, read_record

if TYPE_CHECKING:
    from paddle_flexckpt.cli.outputs import InspectReport


def add_command(commands: Any) -> None:
    """Add the parser of ``flexckpt inspect``."""
    parser = commands.add_parser(
        "inspect",
        help="list what a checkpoint holds",
        epilog="example: flexckpt inspect run/step_00000100 --key model.norm",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        help="the shards of this tensor, or of those of a pattern with *; may be given several times",
    )
    add_json(parser, "all")
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> str:
    """Return all keys in the manifest, or the shards of some."""
    directory, keys = SourceDirectory(options.source), options.key
    manifest = directory.read_manifest(options.unique_id, [*keys, LAYOUT, RECORD] if keys else None)
    rows = dict(_rows_by_key(manifest.catalog))
    if not rows.keys() >= {*keys}:  # patterns, or names that are wrong
        manifest = directory.read_manifest(options.unique_id)
        rows = dict(_rows_by_key(manifest.catalog))
    chosen = _chosen(keys, rows) if keys else [*rows]
    if keys and not options.json:
        return "\n".join(line for key in chosen for line in _shards(manifest.catalog, key, rows[key]))
    degrees, why = _degrees(directory, manifest)
    if options.json:
        return _inspect_report(directory, manifest, {key: rows[key] for key in chosen}, degrees).to_json()
    head = _head(directory, manifest, _run_of(directory, manifest), degrees)
    return "\n".join([head, *why, *_keys(manifest.catalog), *_totals(manifest)])


def _degrees(directory: CheckpointDirectory, manifest: Manifest) -> tuple[dict[str, int], list[str]]:
    """Return the degrees of the saving run, where they are recorded, or why they cannot be read."""
    try:
        return read_degrees(directory.backend, manifest, quickly=True), []
    except (CheckpointError, OSError) as error:
        return {}, [f"the degrees of parallelism cannot be read: {error}"]


def _chosen(keys: Sequence[str], there: Mapping[str, object]) -> list[str]:
    """Return the keys of names and patterns, in their order; errors as of :func:`choose_keys`."""
    from paddle_flexckpt.tools.holders import choose_keys  # most commands do without

    choose_keys(keys, {*there})  # all that are wrong at once
    return [*dict.fromkeys(key for each in keys for key in sorted(choose_keys([each], {*there})))]


def _inspect_report(
    directory: CheckpointDirectory, manifest: Manifest, rows: Mapping[str, np.ndarray], degrees: dict[str, int]
) -> InspectReport:
    """Return the report on the given rows, by key."""
    from paddle_flexckpt.cli.outputs import InspectReport, Shard, StoredTensor

    catalog, length = manifest.catalog, manifest.catalog.byte_length
    tensors = {}
    for key, own in rows.items():
        first, order = int(own[0]), catalog.order(int(catalog.key[own[0]]))
        tensors[key] = StoredTensor(
            dtype=catalog.dtype_name(first),
            shape=list(catalog.unpadded(first, catalog.global_shape)),
            order=None if order is None or order.axis is None else order.describe(),
            shards=[
                Shard(
                    global_offset=list(catalog.unpadded(row, catalog.offset)),
                    local_shape=list(catalog.unpadded(row, catalog.shape)),
                    description=catalog.describe(row),
                    rank=int(catalog.rank[row]),
                    file=catalog.file_name(row),
                    byte_offset=int(catalog.byte_offset[row]),
                    bytes=int(length[row]),
                )
                for row in own.tolist()
            ],
        )
    return InspectReport(
        path=directory.path,
        unique_id=manifest.unique_id,
        step=manifest.step,
        world_size=manifest.world_size,
        degrees=degrees,
        format=FORMATS[manifest.origin].title if manifest.foreign else "flexckpt",
        tensors=tensors,
        run=_run_of(directory, manifest) or None,
    )


def _run_of(directory: CheckpointDirectory, manifest: Manifest) -> str:
    """Return what identifies the run that saved a checkpoint; "" if no manager did, or it cannot be read."""
    with contextlib.suppress(CorruptCheckpointError, ValidationError, OSError):
        record = read_record(directory.backend, manifest, quickly=True)
        return record.run if record else ""
    return ""


def _head(directory: CheckpointDirectory, manifest: Manifest, run: str, degrees: Mapping[str, int]) -> str:
    told = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    others = [number for number in directory.list_ids() if number != manifest.unique_id]
    ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
    return (
        f"{directory.path}, id {manifest.unique_id}: saved by {ranks}{f' ({told})' if told else ''}, step "
        f"{'unknown' if manifest.step is None else manifest.step}"
        + (f", run {run}" if run else "")
        + (f"; {FORMATS[manifest.origin].title}, without checksums" if manifest.foreign else "")
        + (f"; partial: {manifest.partial}" if manifest.partial else "")
        + (f"; other ids here: {others}" if others else "")
    )


def _rows_by_key(catalog: Catalog) -> list[tuple[str, np.ndarray]]:
    """Return the rows of each key, sorted by name."""
    order = np.argsort(catalog.key, kind="stable")
    numbers, starts = np.unique(catalog.key[order], return_index=True)
    rows = np.split(order, starts[1:])
    return sorted(((catalog.keys[number], found) for number, found in zip(numbers, rows)), key=lambda pair: pair[0])


def _keys(catalog: Catalog) -> list[str]:
    length = catalog.byte_length
    lines = [("key", "dtype", "shape", "shards", "files", "bytes")]
    everything = {*catalog.keys}
    named = [(split_state(key, everything), key, rows) for key, rows in _rows_by_key(catalog)] if len(catalog) else []
    for (parameter, state), key, rows in sorted(named, key=lambda each: each[0]):
        row = int(rows[0])
        shape = str(list(catalog.unpadded(row, catalog.global_shape)))
        files = len(np.unique(catalog.file[rows]))
        size = int(length[rows].sum())
        name = f"  .{state}" if state and parameter in everything else key
        lines.append((name, catalog.dtype_name(row), shape, str(len(rows)), str(files), str(size)))
    return table(lines, right=(3, 4, 5))


def _totals(manifest: Manifest) -> list[str]:
    catalog = manifest.catalog
    keys = [catalog.keys[number] for number in np.unique(catalog.key)]
    extra = sorted(key for key in keys if key.startswith(EXTRA_STATE))
    stored, files = int(catalog.byte_length.sum()), int(manifest.file_bytes.sum())
    return [
        f"extra state: {', '.join(map(printable, extra)) if extra else 'none'}",
        f"total: {len(keys)} keys, {len(catalog)} shards, {stored} bytes ({format_bytes(stored)}) in "
        f"{len(catalog.files)} files of {files} bytes",
    ]


def _shards(catalog: Catalog, key: str, rows: np.ndarray) -> list[str]:
    length = catalog.byte_length
    order = catalog.order(int(catalog.key[rows[0]]))
    return [
        printable(key if order is None or order.axis is None else f"{key}: {order.describe()}"),
        *(
            f"  {catalog.describe(row)}, rank {catalog.rank[row]}, {catalog.file_name(row)}, bytes "
            f"{catalog.byte_offset[row]} to {catalog.byte_offset[row] + length[row]}"
            for row in rows.tolist()
        ),
    ]
