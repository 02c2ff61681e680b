"""Headers of data files: what a rank's file says about itself, without the manifest."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, dtype_of
from paddle_flexckpt.storage.manifest import FORMAT_VERSION
from paddle_flexckpt.storage.safetensors_header import MAX_HEADER_BYTES, parse_int, without_duplicates


@dataclass(frozen=True)
class DataFileHeader:
    """What the header of a data file says.

    Attributes:
        info: Its ``__metadata__`` without ``shards``.
        shards: The shard that each item is, by the item's name.
        entries: safetensors' own description of each item, by the item's name.
    """

    info: dict[str, str]
    shards: dict[str, dict[str, Any]]
    entries: dict[str, dict[str, Any]]

    @classmethod
    def of_items(
        cls, items: Catalog, *, save_token: str, unique_id: int, world_size: int, step: int | None
    ) -> DataFileHeader:
        """The header of one file.

        Args:
            items: Its items in the order of their byte offsets, which count from the start of the data.
            save_token: Random text of the save.
            unique_id: The checkpoint's id.
            world_size: Ranks that take part in the save.
            step: Training step, if known.
        """
        shards, entries = {}, {}
        flattened = items.is_flattened
        for row, name in enumerate(item_names(items)):
            dtype = dtype_of(items.dtype_name(row))
            flat = [int(items.flat_start[row]), int(items.flat_stop[row])] if flattened[row] else None
            shape = [flat[1] - flat[0]] if flat else list(items.unpadded(row, items.shape))
            begin = int(items.byte_offset[row])
            length = math.prod(shape) * dtype.itemsize
            entries[name] = {
                "dtype": dtype.safetensors,
                "shape": [*shape, dtype.trailing] if dtype.trailing > 1 else shape,
                "data_offsets": [begin, begin + length],
            }
            shards[name] = {
                "key": items.key_name(row),
                "dtype": dtype.name,
                "global_shape": list(items.unpadded(row, items.global_shape)),
                "global_offset": list(items.unpadded(row, items.offset)),
                "local_shape": list(items.unpadded(row, items.shape)),
                "flattened_range": flat,
            }
        info = {
            # First, so that it stands within the first bytes of the file.
            "save_token": save_token,
            "format": "flexckpt",
            "format_version": str(FORMAT_VERSION),
            "unique_id": str(unique_id),
            "world_size": str(world_size),
            "step": "" if step is None else str(step),
        }
        return cls(info, shards, entries)

    def encode(self) -> bytes:
        """The first bytes of the file: the length and the padded text."""
        info = {**self.info, "shards": json.dumps(self.shards, ensure_ascii=False)}
        text = json.dumps({"__metadata__": info, **self.entries}, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @classmethod
    def decode(cls, data: bytes) -> DataFileHeader:
        """Reads a header.

        Args:
            data: What :func:`read_header` gave.

        Raises:
            ValueError: It is not the header of a data file; the text says why.
        """
        text = data[8:].rstrip(b" ")
        # JSON would allow other whitespace; the padding is spaces.
        if not (text.startswith(b"{") and text.endswith(b"}")):
            raise ValueError("it is not a JSON object that is padded with spaces")
        try:
            entries = _parse(text.decode())
            info = entries.pop("__metadata__")
            shards = _parse(info.pop("shards"))
        except (KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"it is not the header of a data file ({error!r})") from error
        for what, table in (("tensors", entries), ("shards", shards)):
            if not isinstance(table, dict) or not all(isinstance(value, dict) for value in table.values()):
                raise ValueError(f"{what} are not JSON objects")
        if not all(isinstance(value, str) for value in info.values()):
            raise ValueError("__metadata__ has values that are not text")
        return cls(info, shards, entries)


def read_header(descriptor: int) -> bytes:
    """The first bytes of a data file, up to its first tensor.

    Raises:
        ValueError: The file cannot have such a header; the text says why.
        OSError: The file system failed.
    """
    size = os.fstat(descriptor).st_size
    first = os.pread(descriptor, 8, 0)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size} bytes")
    data = first
    while len(data) < 8 + length:
        more = os.pread(descriptor, 8 + length - len(data), len(data))
        if not more:
            raise ValueError(f"the file ends at byte {len(data)}, inside its header")
        data += more
    return data


def item_names(items: Catalog) -> list[str]:
    """Names of the items in a data file: the key, numbered where a file holds several shards of one key."""
    count = np.bincount(items.key, minlength=len(items.keys))
    seen: dict[str, int] = {}
    names = []
    taken = {items.keys[k] for k in np.unique(items.key)} if len(items) else set()
    for row in range(len(items)):
        key = items.key_name(row)
        name = key
        if count[items.key[row]] > 1 or key == "__metadata__":
            while name in taken:  # as the key itself is
                name = f"{key}#{seen.setdefault(key, 0)}"
                seen[key] += 1
        names.append(name)
    return names


def _parse(text: str) -> Any:
    return json.loads(
        text,
        object_pairs_hook=without_duplicates,
        parse_int=parse_int,
        parse_float=_refuse,
        parse_constant=_refuse,
    )


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} where only whole numbers stand")
