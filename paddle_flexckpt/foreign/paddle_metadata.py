"""Write the file beside the manifest by which Paddle's own loader reads the data files, or refuses them.

Paddle takes numbered safetensors files for a Hugging Face directory, and every shard in them for a whole tensor, unless
it finds this file. It is a pickle of Paddle's class ``Metadata``. Where Paddle would read other values than those
saved, the file makes Paddle fail with an error that has the reason.

Tested in tests/save/test_paddle_reads.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paddle_flexckpt.catalog import Catalog, Metadata, group_replicas
from paddle_flexckpt.foreign.paddle_files import encode_metadata
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.foreign.pickle_writer import BEGIN, END, UNFRAMED, named, text
from paddle_flexckpt.native.companion import Companion
from paddle_flexckpt.native.manifest import Manifest

# The only name that Paddle looks for, whatever the id.
PADDLE_METADATA = "flex-ckpt.auto_generated.metadata"
# The types that Paddle 3.3.1 reads from safetensors files bit for bit.
_DTYPES = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
    | {"float8_e4m3fn", "float8_e5m2", "complex64"}
)
# A protocol and a string. Python's own pickler puts a frame between them, and has another string in protocol 3: so
# these bytes identify this library's file.
_BEGINS = tuple(begin + text("")[:1] for begin in (UNFRAMED, BEGIN))


class PaddleMetadata(Companion):
    """The companion file for Paddle's own loader."""

    name = PADDLE_METADATA
    # More rows than this take seconds, and have to be at hand: a manifest in one file has no more.
    most_rows = 100_000

    def refuse(self, reason: str) -> bytes:
        """Return a file that stops Paddle: it names a module that does not exist, so that the error has the reason."""
        # If the name had dots in it the error would show only its beginning.
        return BEGIN + named(_sentence(reason), "Metadata") + END

    def encode(self, manifest: Manifest) -> bytes:
        """Encode the keys of the only checkpoint of a directory, and their places.

        Keys that Paddle would read wrong have, instead of their files, a missing one, whose name is the reason.
        """
        catalog = manifest.catalog
        reason = _why_not(catalog)
        if reason:
            catalog = replace(catalog, files=(_sentence(reason),) * len(catalog.files))
        return encode_metadata(catalog)

    def stored(self, data: bytes, file: str) -> dict[str, set[str]]:
        """Return the keys by data file; keys that Paddle would read wrong are under the reason."""
        metadata = load_pickle(data, file)
        found: dict[str, set[str]] = {}
        for index, name in metadata.storage_metadata.items() if type(metadata) is Metadata else ():
            found.setdefault(name, set()).add(index.tensor_key)
        return found

    def is_ours(self, data: bytes) -> bool:
        """Return whether a file of that name was written by this library, if only in part.

        After a loss of power a file may have its length without its bytes: they read as zeros.
        """
        return any(begin.startswith(data[: len(begin)]) for begin in _BEGINS) or not any(data)


def _sentence(reason: str) -> str:
    return f"paddle_flexckpt wrote this and can load it; Paddle cannot, because {reason}"


def _why_not(catalog: Catalog) -> str:
    """Return why Paddle would read these shards wrong; empty if it reads them right."""
    unknown = sorted({catalog.dtypes[dtype] for dtype in np.unique(catalog.dtype)} - _DTYPES)
    if unknown:
        return f"it has tensors of {' and '.join(unknown)}"
    if any(order.axis is not None for order in catalog.orders):
        return "it has fused parameters, which lie in another order under another tensor-parallel degree"
    if "__metadata__" in catalog.keys:
        return "it has a tensor called __metadata__"
    if (catalog.size == 0).any():
        return "it has a tensor without elements"
    if len(np.unique(catalog.key * np.int64(len(catalog.files)) + catalog.file)) != len(catalog):
        return "a file has several shards of one tensor"
    rows = group_replicas(catalog).first
    sizes = np.zeros(len(catalog.keys), dtype=np.int64)
    np.add.at(sizes, catalog.key[rows], catalog.size[rows])
    if (sizes[catalog.key[rows]] != catalog.global_shape[rows].prod(axis=1)).any():
        return "shards of one tensor overlap"
    return misread_range(catalog, rows[catalog.is_flattened[rows]])[0]


def misread_range(catalog: Catalog, rows: np.ndarray) -> tuple[str, str]:
    """Return why Paddle misreads flattened ranges that it has to assemble, and a key; empty if it does not.

    Paddle turns a range into the smallest box around it, wrongly with three axes, and fills the box from only those
    ranges that are not boxes themselves.

    Args:
        catalog: Stored shards.
        rows: Those of them that are flattened ranges, one of each replica group.
    """
    start, stop = catalog.flat_start[rows], catalog.flat_stop[rows]
    first_axis = catalog.width - catalog.ndim[rows, None]
    below = np.where(np.arange(catalog.width) > first_axis, catalog.shape[rows], 1).prod(axis=1)
    below = np.maximum(below, 1)
    partial = (start % below != 0) | (stop % below != 0)
    wide = np.flatnonzero(partial & (catalog.ndim[rows] > 2))
    if len(wide):
        reason = "a flattened range of a tensor with three or more axes begins or ends inside a row"
        return reason, catalog.key_name(int(rows[wide[0]]))
    places = [(int(key), *offset) for key, offset in zip(catalog.key[rows], catalog.offset[rows].tolist())]
    first, last = start // below, (stop - 1) // below
    inside = {(places[i], int(first[i])) for i in np.flatnonzero(partial & (first == last))}
    for i in np.flatnonzero(partial & (first != last)):
        cut = [int(first[i])] * bool(start[i] % below[i]) + [int(last[i])] * bool(stop[i] % below[i])
        if any((places[i], row) in inside for row in cut):
            return "flattened ranges that cross rows meet ranges inside a row", catalog.key_name(int(rows[i]))
    return "", ""
