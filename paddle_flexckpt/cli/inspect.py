"""flexckpt inspect: what a checkpoint holds, from its manifest alone. Tested in tests/cli/test_verify.py."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, Problem, ValidationError
from paddle_flexckpt.cli.arguments import add_checkpoint
from paddle_flexckpt.foreign.formats import ORIGINS, SourceDirectory
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.report import format_bytes


def add_command(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("inspect", help="list what a checkpoint holds")
    add_checkpoint(parser)
    parser.add_argument(
        "--key", action="append", default=[], help="the shards of this tensor; may be given several times"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the text to print."""
    directory = SourceDirectory(options.source)
    manifest = directory.read_manifest(options.unique_id)
    if options.key:
        return "\n".join(line for key in options.key for line in _shards(manifest.catalog, key))
    return "\n".join([_head(directory, manifest), *_keys(manifest.catalog), *_totals(manifest)])


def _head(directory: CheckpointDirectory, manifest: Manifest) -> str:
    others = [number for number in directory.list_ids() if number != manifest.unique_id]
    ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
    return (
        f"{directory.path}, id {manifest.unique_id}: saved by {ranks}, step "
        f"{'unknown' if manifest.step is None else manifest.step}"
        + (f"; {ORIGINS[manifest.origin]}, without checksums" if manifest.foreign else "")
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
    table = [("key", "dtype", "shape", "shards", "files", "bytes")]
    for key, rows in _rows_by_key(catalog) if len(catalog) else []:
        row = int(rows[0])
        shape = str(list(catalog.unpadded(row, catalog.global_shape)))
        files = len(np.unique(catalog.file[rows]))
        size = int(length[rows].sum())
        table.append((key, catalog.dtype_name(row), shape, str(len(rows)), str(files), str(size)))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            text.ljust(width) if i < 3 else text.rjust(width) for i, (text, width) in enumerate(zip(line, widths))
        )
        for line in table
    ]


def _totals(manifest: Manifest) -> list[str]:
    catalog = manifest.catalog
    keys = [catalog.keys[number] for number in np.unique(catalog.key)]
    extra = sorted(key for key in keys if key.startswith(EXTRA_STATE))
    stored, files = int(catalog.byte_length.sum()), int(manifest.file_bytes.sum())
    return [
        f"extra state: {', '.join(extra) if extra else 'none'}",
        f"total: {len(keys)} keys, {len(catalog)} shards, {stored} bytes ({format_bytes(stored)}) in "
        f"{len(catalog.files)} files of {files} bytes",
    ]


def _shards(catalog: Catalog, key: str) -> list[str]:
    rows = np.flatnonzero(np.asarray([name == key for name in catalog.keys], dtype=bool)[catalog.key])
    if not len(rows):
        alike = sorted(catalog.keys)[:3]
        raise ValidationError(
            [Problem("there is no such key", key=key, got=f"{len(catalog.keys)} keys such as {alike}")]
        )
    length = catalog.byte_length
    order = catalog.order(int(catalog.key[rows[0]]))
    return [
        key if order is None or order.axis is None else f"{key}: {order.describe()}",
        *(
            f"  {catalog.describe(row)}, rank {catalog.rank[row]}, {catalog.file_name(row)}, bytes "
            f"{catalog.byte_offset[row]} to {catalog.byte_offset[row] + length[row]}"
            for row in rows.tolist()
        ),
    ]
