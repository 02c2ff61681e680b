"""Read ``.npz`` archives of numpy: each array's bytes are a stretch of the file.

Archives of ``numpy.savez_compressed`` are refused, and so are arrays of Python objects, which are pickles.
"""

from __future__ import annotations

import math
import re
import struct
from functools import partial

import xxhash

from paddle_flexckpt.catalog import CatalogBuilder, Problem, ValidationError
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.foreign.formats import ForeignCheckpoint, Listing, Reader
from paddle_flexckpt.foreign.strided_boxes import MOST_BOXES, BoxBudget, boxes_of, row_major
from paddle_flexckpt.foreign.zip_directory import STORED, ZipMember, damaged, find_bytes, read_directory
from paddle_flexckpt.media.backend import Backend, InputFile
from paddle_flexckpt.native.manifest import Manifest

_ARCHIVE, _ARRAY = ".npz", ".npy"
# numpy's own limit for a header is 10,000.
_MOST_HEADER_BYTES = 10_000
_MAX_AXES = 32
_HEADER = re.compile(
    rb"\{'descr': (?P<type>'[^'\\]{1,40}'|\[.*\]), 'fortran_order': (?P<columns>True|False), "
    rb"'shape': \((?P<shape>(?:\d{1,18},? ?)*)\),? ?\} *\n?",
    re.ASCII | re.DOTALL,
)
_TYPES = {f"'{dtype.numpy.str}'": name for name, dtype in DTYPES.items() if dtype.numpy.kind in "biufc"}
# The only one of numpy's types without a name that has two bytes.
_TYPES.update({"'<V2'": "bfloat16", "'|V2'": "bfloat16"})
_NUMBERS = "save arrays of numbers in this machine's byte order, by numpy.savez or as safetensors"


def _detect(listing: Listing) -> ForeignCheckpoint | None:
    archives = [listing.file] if listing.file else sorted(name for name in listing.names if name.endswith(_ARCHIVE))
    if len(archives) > 1:
        path = listing.backend.path
        raise ValidationError(
            f"{path} has several files of arrays: {listed(archives)}. Remedy (FC301): give the path of the one that is "
            f"meant, such as {path}/{archives[0]}"
        )
    return ForeignCheckpoint("npz", partial(read_npz_manifest, listing.backend, archives[0])) if archives else None


def read_npz_manifest(backend: Backend, name: str) -> Manifest:
    """Read the arrays of an archive as a manifest without checksums; ``w.npy`` in it has the key ``w``.

    Raises:
        CorruptCheckpointError: The archive or an array in it is damaged.
        ValidationError: Arrays are compressed, or not numbers; the text has a remedy.
    """
    where = backend.where(name)
    builder = CatalogBuilder(0, name)
    problems: list[Problem | str] = []
    digest, budget = xxhash.xxh3_128(), BoxBudget()
    with backend.open(name) as file:
        members = read_directory(file.read, file.size, where)
        arrays = [member for member in members if member.name.endswith(_ARRAY)]
        packed = [member.name for member in arrays if member.method != STORED]
        if packed:
            raise ValidationError(
                f"{where} is compressed (numpy.savez_compressed): {packed[0]!r} and {len(packed) - 1} more arrays have "
                "no byte ranges. Remedy (FC701): numpy.savez(new, **numpy.load(old)) writes them uncompressed"
            )
        if not arrays:
            raise ValidationError(f"{where} has no arrays in it. Remedy (FC301): correct the path")
        for member in arrays:
            text, problem = _add_array(builder, budget, file, member, where)
            digest.update(member.name.encode() + text)
            problems += [problem] if problem else []
        size = file.size
    if problems:
        raise ValidationError(problems, f"{where} cannot be read")
    return Manifest.of_foreign("npz", builder.build(), {name: size}, digest.hexdigest(), 0, 1)


def _add_array(
    builder: CatalogBuilder, budget: BoxBudget, file: InputFile, member: ZipMember, where: str
) -> tuple[bytes, Problem | None]:
    """Add an array to the catalog; return its header, and a problem with it, if any."""
    key = member.name[: -len(_ARRAY)]
    begin = find_bytes(file.read, member, where)
    head = file.read(begin, min(128, member.size))
    if head[:6] != b"\x93NUMPY" or head[6:7] not in (b"\1", b"\2", b"\3") or len(head) < 12:
        raise damaged(where, f"{member.name[:80]!r} is no array")
    width = 2 if head[6] == 1 else 4
    length = struct.unpack_from("<H" if width == 2 else "<L", head, 8)[0]
    skipped = 8 + width + length
    if skipped > member.size or length > _MOST_HEADER_BYTES:
        raise damaged(where, f"the header of {member.name[:80]!r} has {length} bytes")
    text = head[8 + width : skipped] if skipped <= len(head) else file.read(begin + 8 + width, length)
    match = _HEADER.fullmatch(text)
    if match is None:
        raise damaged(where, f"the header of {member.name[:80]!r} is none that numpy writes")
    dtype = _TYPES.get(match["type"].decode("latin-1"))
    if dtype is None:
        what = "a pickle of Python objects" if b"O" in match["type"] else "an array of another type than numbers"
        got = match["type"].decode("latin-1")[:80]
        return text, Problem(f"{what} is not read", key, file=where, got=got, code="FC701", remedy=_NUMBERS)
    shape = tuple(int(extent) for extent in match["shape"].replace(b",", b" ").split())
    itemsize = DTYPES[dtype].itemsize
    expected = math.prod(shape) * itemsize
    if len(shape) > _MAX_AXES or member.size - skipped != expected:
        got = member.size - skipped
        raise damaged(where, f"an array of {dtype} {list(shape)[:8]} has {expected} bytes, {member.name[:80]!r} {got}")
    strides = row_major(shape[::-1])[::-1] if match["columns"] == b"True" else row_major(shape)
    if not budget.allows(shape, strides):
        what = f"arrays in column-major order with more than {MOST_BOXES} columns in all are not read"
        return text, Problem(
            what, key, file=where, got=list(shape), code="FC701", remedy="save numpy.ascontiguousarray of it"
        )
    for box in boxes_of(shape, strides):
        builder.add(key, dtype, shape, box.offset, box.shape, byte_offset=begin + skipped + box.begin * itemsize)
    return text, None


NPZ = Reader(_detect)
