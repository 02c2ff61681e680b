"""Write and open data files: one safetensors file per rank, streamed.

The header is complete before the first byte of data is written, because the write plan knows all sizes. The data then
goes from the tensors' own memory to the file, many neighbours in one call. A thread hashes it meanwhile; a small amount
is hashed right after the write, while it is in cache.

The header describes a rank's file without the manifest.

Tested in tests/native/test_data_file.py and tests/native/test_repair.py.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, CorruptCheckpointError, ValidationError, dtype_of
from paddle_flexckpt.catalog.table import NOT_FLATTENED
from paddle_flexckpt.media.backend import Backend, InputFile, Location, open_member
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.checksums import BLOCK_BYTES, HashThread, hash_block
from paddle_flexckpt.native.json_cursor import JsonCursor
from paddle_flexckpt.native.manifest import Manifest, SaveInfo, format_version
from paddle_flexckpt.native.safetensors_header import MAX_HEADER_BYTES
from paddle_flexckpt.native.save_names import MANIFEST
from paddle_flexckpt.progress import SILENT, Meter

# The most bytes written to the file in one call, as blocks of large items and of many small ones: several calls cost
# more, and a device waits for no more than this. The most blocks likewise.
BATCH_BYTES = 8 << 20
BATCH_BLOCKS = 1024
# Up to so many bytes are hashed by the thread that writes them: handing them to another costs about one block.
HASHED_INLINE = 4 << 20
# The save token is within the first bytes of the file, so that a reader can check it with one small read.
TOKEN_WINDOW = 256


def write_data_file(
    directory: Location, items: Catalog, data: Iterable[np.ndarray], save: SaveInfo, meter: Meter = SILENT
) -> Manifest:
    """Write one rank's data file, make it durable, and return this rank's part of the manifest.

    Args:
        directory: The directory of the file.
        items: This rank's rows of the write plan, in the order of their byte offsets (which count from the start of
            the data here). All are in one file.
        data: The items' bytes in order: contiguous uint8 arrays, of which up to ``BATCH_BYTES`` are kept until they are
            written. An item may come in several arrays; all but its last are of whole blocks.
        save: The save of the file.
        meter: Counts the bytes that are written.

    Raises:
        OSError: The file system refused.
        ValueError: The data has not the planned length, or the header is too long.
    """
    if not len(items):
        return Manifest.of_save(save, replace(items, files=()), (), {})
    backend, name = open_backend(directory), items.file_name(0) or ""
    path = backend.where(name)

    header = encode_header(items, save)
    if len(header) - 8 > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header of {path} would have {len(header) - 8} bytes; safetensors allows {MAX_HEADER_BYTES}. "
            "Remedy (FC705): save with more ranks, or parts of the state dict in directories of their own"
        )
    lengths = items.byte_length.tolist()
    checksums: list[int] = []
    file_bytes = len(header) + sum(lengths)
    ends, written = list(itertools.accumulate(lengths)) if meter.is_heard else [], 0
    with contextlib.closing(HashThread()) as hashing, backend.create(name, size=file_bytes) as file:
        file.write(header)
        for blocks in _batches(path, lengths, data):
            beside = hashing.hash(blocks) if sum([block.nbytes for block in blocks]) > HASHED_INLINE else None
            file.write_many([memoryview(block) for block in blocks])
            if meter.is_heard:
                written += sum([block.nbytes for block in blocks])
                meter.reach(written, bisect.bisect_right(ends, written))
            checksums += map(hash_block, blocks) if beside is None else beside.result()
    stored = replace(
        items, files=(name,), file=np.zeros(len(items), dtype=np.int32), byte_offset=items.byte_offset + len(header)
    )
    return Manifest.of_save(save, stored, checksums, {name: file_bytes})


def _batches(path: str, lengths: Sequence[int], data: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Yield the blocks of the items, neighbours together; every array is released before the next list is requested."""
    blocks: list[np.ndarray] = []
    count = done = held = 0
    for part in data:
        nbytes, planned = part.nbytes, lengths[count] if count < len(lengths) else -1
        done += nbytes
        if done > planned or (done < planned and nbytes % BLOCK_BYTES):
            raise ValueError(f"item {count} of {path} has {done} bytes, which were not planned")
        if done == planned:
            count, done = count + 1, 0
        for start in range(0, nbytes, BLOCK_BYTES):
            block = part[start : start + BLOCK_BYTES]
            blocks.append(block)
            held += block.nbytes
            if held >= BATCH_BYTES or len(blocks) >= BATCH_BLOCKS:
                yield blocks
                blocks, held = [], 0
    if count != len(lengths):
        raise ValueError(f"{path} got {count} items of the {len(lengths)} that were planned")
    if blocks:
        yield blocks


def check_data_file(backend: Backend, manifest: Manifest, name: str, size: int, version: object = None) -> InputFile:
    """Open a data file that has the size and the save token in the manifest.

    One that was open before has to be of the same version.

    Raises:
        CorruptCheckpointError: It is missing, of another size, or of another save.
    """
    path = backend.where(name)

    def remedy() -> str:
        return f"restore the file or load another checkpoint{other_whole(backend, manifest)}"

    try:
        file = open_member(backend, name) if manifest.foreign else backend.open(name)
    except FileNotFoundError:
        nodes = manifest.nodes_of(name)
        if nodes:
            raise CorruptCheckpointError(
                f"{path} is missing: the checkpoint was saved with storage='per_node', and the file is on node "
                f"{' and '.join(nodes)}. Remedy (FC504): load with storage='per_node' where a rank sees that "
                "directory, or copy the nodes' directories into one"
            ) from None
        raise CorruptCheckpointError(f"{path} is missing; the manifest names it. Remedy (FC304): {remedy()}") from None
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        if file.size != size:
            raise CorruptCheckpointError(
                f"{path} has {file.size} bytes; expected {size} (truncated?). Remedy (FC305): {remedy()}"
            )
        if not manifest.foreign and manifest.save_token.encode() not in file.read(0, TOKEN_WINDOW):
            raise CorruptCheckpointError(
                f"{path} belongs to another save: its save token is not the manifest's. Remedy (FC304): {remedy()}"
            )
        if version not in (None, file.version):
            raise CorruptCheckpointError(f"{path} has changed since it was first opened. Remedy (FC304): {remedy()}")
        stack.pop_all()
    return file


def other_whole(backend: Backend, manifest: Manifest) -> str:
    """Return a text about the highest other id of the directory whose files are all here, of their size; "" if none."""
    if manifest.foreign:
        return ""
    with contextlib.suppress(OSError):
        found = sorted((int(match[1]) for match in map(MANIFEST.fullmatch, backend.names()) if match), reverse=True)
        for unique_id in found:
            with contextlib.suppress(OSError, CorruptCheckpointError, ValidationError):
                other = Manifest.decode(backend.read(f"{unique_id}.manifest"), backend.where(f"{unique_id}.manifest"))
                if unique_id != manifest.unique_id and not other.partial and _have_sizes(backend, other.sizes):
                    return f", such as id {unique_id} here (unique_id={unique_id}), whose files are all there"
    return ""


def _have_sizes(backend: Backend, sizes: Mapping[str, int]) -> bool:
    for name, size in sizes.items():
        with backend.open(name) as file:
            if file.size != size:
                return False
    return True


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
        """Read a header from the bytes of :func:`read_header_bytes`.

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
        **({"unique_id": "", "world_size": "", "step": ""} | save.texts()),
        "shards": f"{{{', '.join(shards)}}}",
    }
    start = json.dumps({"__metadata__": info}, ensure_ascii=False, separators=(",", ":"))
    text = "".join([start[:-1], *entries, "}"]).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def order_in_file(items: Catalog, header: bytes = b"") -> np.ndarray:
    """Return the order in which a data file with this header has items: by byte offset.

    Several without elements may be at one place. Only the header has their order, where partitions have their rows.
    """
    order = np.lexsort((items.byte_length, items.byte_offset))
    begin, is_empty = items.byte_offset[order], items.byte_length[order] == 0
    if not (is_empty[1:] & is_empty[:-1] & (begin[1:] == begin[:-1])).any():
        return order
    try:
        shards = DataFileHeader.decode(header).shards.values()
    except ValueError:
        return order
    place: dict[tuple[str, str], int] = {}
    for shard in shards:
        key = str(shard.pop("key", ""))
        place.setdefault((key, _dump_shard(shard)), len(place))
    wanted = [(items.key_name(row), shard) for row, (_, shard) in enumerate(_descriptions(items))]
    places = np.asarray([place.get(each, -1) for each in wanted])
    return np.lexsort((places, items.byte_length, items.byte_offset))


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
        made[description] = entry, _dump_shard(shard)
    return [made[description] for description in descriptions]


def _dump_shard(shard: dict[str, Any]) -> str:
    return json.dumps(shard, ensure_ascii=False)[1:-1]


def _table(name: str, cursor: JsonCursor) -> dict[str, Any]:
    value = cursor.value()
    if not isinstance(value, dict):
        raise ValueError(f"its entry for {name[:80]!r} is not an object")
    return value


def read_header_bytes(file: InputFile) -> bytes:
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
