"""Find the tensors of an archive of ``torch.save`` by byte ranges: nothing is unpickled, unpacked, or read as a whole.

``data.pkl`` has element types, shapes and strides; the members ``data/0``, ``data/1``, ... are the elements.

Tested in tests/foreign/test_torch_dcp.py and tests/foreign/test_deepspeed.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.foreign.pickle_values import Vocabulary
from paddle_flexckpt.foreign.torch_values import UNTYPED, SavedTensor
from paddle_flexckpt.foreign.zip_directory import STORED, Read, ZipMember, damaged, find_bytes, read_directory


class Archive(NamedTuple):
    """An archive: the prefix of its members' names, the members, the pickled object, and the members read."""

    start: str
    members: Mapping[str, ZipMember]
    value: Any
    texts: Sequence[ZipMember]


def open_archive(
    read: Read, size: int, where: str, vocabulary: Vocabulary, most_bytes: int, known: dict[bytes, Any]
) -> Archive:
    """Read the directory and the pickle of an archive of so many bytes.

    ``known`` has the results of equal pickles; ``most_bytes`` is the most bytes that a pickle may have.

    Raises:
        CorruptCheckpointError: It is not an archive of torch.save; UnsafePickleError if the pickle is more than data.
        ValidationError: It was written on a machine with another byte order.
    """
    members = {member.name: member for member in read_directory(read, size, where)}
    found = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(found) != 1:
        raise damaged(where, "it is no archive of torch.save")
    start, pickle = found[0][: -len("data.pkl")], members[found[0]]
    order = members.get(start + "byteorder")
    if order is not None and read(find_bytes(read, order, where), order.size) != b"little":
        remedy = "load it in torch on a machine of this byte order, and save it there"
        raise ValidationError(f"{where}: the machine that wrote it had another byte order. Remedy: {remedy}")
    if pickle.size > most_bytes or pickle.method != STORED:
        raise damaged(where, f"data.pkl has {pickle.size} bytes, compressed by method {pickle.method}")
    text = read(find_bytes(read, pickle, where), pickle.size)
    if text not in known:
        known[text] = load_pickle(text, where, vocabulary)
    return Archive(start, members, known[text], [pickle] if order is None else [pickle, order])


def place_elements(read: Read, archive: Archive, tensor: SavedTensor, where: str) -> tuple[int, ZipMember]:
    """Return the place of a tensor's first element in its archive, and its member.

    Raises:
        CorruptCheckpointError: The elements are missing, compressed, or fewer than the pickle says.
    """
    member = archive.members.get(f"{archive.start}data/{tensor.storage.member}")
    if member is None or member.method != STORED:
        raise damaged(where, f"the elements (data/{tensor.storage.member[:20]}) are missing or compressed")
    itemsize = DTYPES[tensor.dtype].itemsize
    count = tensor.storage.number * (1 if tensor.storage.dtype == UNTYPED else itemsize)
    is_empty = 0 in tensor.size
    reach = tensor.offset + 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.size, tensor.stride))
    reach = max(reach, math.prod(tensor.size))  # torch never stores one element for several
    if count != member.size or (not is_empty and reach * itemsize > member.size):
        raise damaged(where, f"a storage of {count} bytes, of which {reach * itemsize} are needed, has {member.size}")
    return find_bytes(read, member, where) + tensor.offset * itemsize, member
