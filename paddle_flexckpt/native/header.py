"""Make and read headers of data files: they describe a rank's file without the manifest.

Tested in tests/native/test_data_file.py and tests/native/test_repair.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, dtype_of
from paddle_flexckpt.catalog.table import NOT_FLATTENED
from paddle_flexckpt.media.backend import InputFile
from paddle_flexckpt.native.json_cursor import JsonCursor
from paddle_flexckpt.native.manifest import SaveInfo, format_version
from paddle_flexckpt.native.safetensors_header import MAX_HEADER_BYTES


@dataclass(frozen=True)
class DataFileHeader:
    """The contents of a data file's header.

    Attributes:
        info: Its ``__metadata__`` without ``shards``.
        shards: The shard that each item is, by the item's name.
        entries: safetensors' own description of each item, by the item's name.
    """

    info: dict[str, str]
    shards: dict[str, dict[str, Any]]
    entries: dict[str, dict[str, Any]]

    @classmethod
    def of_items(cls, items: Catalog, save: SaveInfo) -> DataFileHeader:
        """Return the header that :func:`encode_header` makes of the same arguments."""
        return cls.decode(encode_header(items, save))

    @classmethod
    def decode(cls, data: bytes) -> DataFileHeader:
        """Read a header from the bytes of :func:`read_header`.

        Raises:
            ValueError: It is not the header of a data file; the text says why.
        """
        # JSON would allow other whitespace; the padding is spaces.
        text = data[8:].rstrip(b" ")
        if text[:1] != b"{" or text[-1:] != b"}":
            raise ValueError("it is not a JSON object that is padded with spaces")
        info: dict[str, str] = {}
        entries: dict[str, dict[str, Any]] = {}
        cursor = JsonCursor(text)
        for name in cursor.entries():
            if name == "__metadata__":
                info = cursor.texts()
            else:
                entries[name] = _table(name, cursor)
        cursor.end()
        if "shards" not in info:
            raise ValueError("it is not the header of a data file: it has no shards")
        cursor = JsonCursor(info.pop("shards").encode())
        shards = {name: _table(name, cursor) for name in cursor.entries()}
        cursor.end()
        return cls(info, shards, entries)


def encode_header(items: Catalog, save: SaveInfo) -> bytes:
    """Return the first bytes of one file of a save: the length and the padded text.

    Byte offsets of items rise, and count from the start of the data.
    """
    names = map(encode_basestring, item_names(items))
    keys = map(encode_basestring, [items.keys[key] for key in items.key.tolist()])
    begins, ends = items.byte_offset.tolist(), (items.byte_offset + items.byte_length).tolist()
    entries, shards = [], []
    for name, key, (entry, shard), begin, end in zip(names, keys, _descriptions(items), begins, ends):
        entries.append(f',{name}:{entry},"data_offsets":[{begin},{end}]}}')
        shards.append(f'{name}: {{"key": {key}, {shard}}}')
    info = {
        # First, so that it is within the first bytes of the file.
        "save_token": save.save_token,
        "format": "flexckpt",
        "format_version": format_version(items),
        "unique_id": str(save.unique_id),
        "world_size": str(save.world_size),
        "step": "" if save.step is None else str(save.step),
        "shards": f"{{{', '.join(shards)}}}",
    }
    start = json.dumps({"__metadata__": info}, ensure_ascii=False, separators=(",", ":"))
    text = "".join([start[:-1], *entries, "}"]).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _descriptions(items: Catalog) -> list[tuple[str, str]]:
    """Return the texts of each item without names, key and place: for safetensors' own entry, and for ours."""
    descriptions = items.descriptions()
    made = {}
    for description, row in dict(zip(descriptions, range(len(items)))).items():
        dtype, flat = dtype_of(items.dtype_name(row)), [int(items.flat_start[row]), int(items.flat_stop[row])]
        shape = list(items.unpadded(row, items.shape))
        stored = shape if flat[0] == NOT_FLATTENED else [flat[1] - flat[0]]
        shard = {
            "dtype": dtype.name,
            "global_shape": items.unpadded(row, items.global_shape),
            "global_offset": items.unpadded(row, items.offset),
            "local_shape": shape,
            "flattened_range": None if flat[0] == NOT_FLATTENED else flat,
        }
        order = items.order(int(items.key[row]))
        # For natural order, headers are those of format version 1, byte by byte.
        if order is not None and order.is_permuted:
            shard["order"] = order.encode()
        extents = json.dumps([*stored, dtype.trailing] if dtype.trailing > 1 else stored, separators=(",", ":"))
        entry = f'{{"dtype":"{dtype.safetensors}","shape":{extents}'
        made[description] = entry, json.dumps(shard, ensure_ascii=False)[1:-1]
    return [made[description] for description in descriptions]


def _table(name: str, cursor: JsonCursor) -> dict[str, Any]:
    value = cursor.value()
    if not isinstance(value, dict):
        raise ValueError(f"its entry for {name[:80]!r} is not an object")
    return value


def read_header(file: InputFile) -> bytes:
    """Read the first bytes of a data file, up to its first tensor.

    Raises:
        ValueError: The file cannot have such a header; the text says why.
        OSError: The medium failed.
    """
    first = file.read(0, 8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(MAX_HEADER_BYTES, file.size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {file.size} bytes")
    data = file.read(0, 8 + length)
    if len(data) < 8 + length:
        raise ValueError(f"the file ends at byte {len(data)}, inside its header")
    return data


def item_names(items: Catalog) -> list[str]:
    """Name the items in a data file: by the key, numbered where a file holds several shards of one key."""
    names = [items.keys[key] for key in items.key.tolist()]
    taken = set(names)
    if len(taken) == len(names) and "__metadata__" not in taken:
        return names
    count = np.bincount(items.key, minlength=len(items.keys))[items.key].tolist()
    seen: dict[str, int] = {}
    for row, key in enumerate(names):
        if count[row] > 1 or key == "__metadata__":
            name = key
            while name in taken:  # the name of another item is the key itself
                name = f"{key}#{seen.setdefault(key, 0)}"
                seen[key] += 1
            names[row] = name
    return names
