"""Kinds of damage: each changes some files of a checkpoint, at random.

A kind gets the files as they are (None: missing) and changes the dict; what it does may turn out to change nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.damage.checkpoint import Files, Saves

Random = np.random.Generator
Kind = Callable[[Random, Files, Saves], None]
MOST_BYTES = 200_000


def _data_file(random: Random, files: Files, saves: Saves) -> str | None:
    """A data file that is there and not empty."""
    names = [name for name in saves.data_names if files[name]]
    return str(random.choice(names)) if names else None


def _any_file(random: Random, files: Files, saves: Saves) -> str | None:
    """As often as not the manifest, where it is there."""
    if files[saves.manifest_name] and random.integers(2):
        return saves.manifest_name
    return _data_file(random, files, saves)


def _part(random: Random, content: bytes, low: int, high: int) -> tuple[int, int]:
    """A range of bytes, as likely short as long, that begins in ``[low, high)``."""
    high = min(high, len(content))
    low = min(low, high - 1)
    begin = int(random.integers(low, high))
    length = int(np.exp(random.uniform(0, np.log(MOST_BYTES))))
    return begin, min(begin + length, high)


def _area(random: Random, name: str, saves: Saves, area: str) -> tuple[int, int]:
    start = saves.data_start(name) if name in saves.data_names else 0
    return {"header": (0, start), "length": (0, 8), "data": (start, 1 << 62), "any": (0, 1 << 62)}[area]


def _changes(area: str, change: Callable[[Random, bytes], bytes]) -> Kind:
    """A kind that puts as many other bytes in the place of some bytes of a file."""

    def kind(random: Random, files: Files, saves: Saves) -> None:
        name = saves.manifest_name if area == "manifest" else _data_file(random, files, saves)
        content = files[name] if name else None
        if name and content:
            low, high = (0, len(content)) if area == "manifest" else _area(random, name, saves, area)
            begin, end = _part(random, content, low, high)
            files[name] = content[:begin] + change(random, content[begin:end]) + content[end:]

    return kind


def _flip(random: Random, part: bytes) -> bytes:
    return bytes([part[0] ^ 1 << int(random.integers(8))]) + part[1:]


def _overwrite(random: Random, part: bytes) -> bytes:
    return random.bytes(len(part))


def _transpose(random: Random, part: bytes) -> bytes:
    return part[1::-1] + part[2:]


def _zero_sectors(random: Random, files: Files, saves: Saves) -> None:
    name = _any_file(random, files, saves)
    if name is None:
        return
    content = bytearray(files[name] or b"")
    sector = int(random.choice([512, 4096]))
    first = int(random.integers(-(-len(content) // sector))) * sector
    last = min(len(content), first + sector * int(random.integers(1, 17)))
    content[first:last] = bytes(last - first)
    files[name] = bytes(content)


def _old_sectors(random: Random, files: Files, saves: Saves) -> None:
    """Writes that never reached the disk: what was there before is there still."""
    name = _any_file(random, files, saves)
    if name is None:
        return
    content, old = bytearray(files[name] or b""), saves.others["twin"][name]
    first = int(random.integers(-(-len(content) // 4096))) * 4096
    last = first + 4096 * int(random.integers(1, 17))
    content[first:last] = old[first : min(last, len(content))]
    files[name] = bytes(content)


def _truncate(random: Random, files: Files, saves: Saves) -> None:
    name = _any_file(random, files, saves)
    if name is None:
        return
    content = files[name] or b""
    start = saves.data_start(name) if name in saves.data_names else len(content)
    # Often inside the header, often by a few bytes.
    size = random.choice([0, random.integers(min(start, len(content))), random.integers(len(content))])
    files[name] = content[: int(random.choice([size, max(0, len(content) - int(random.integers(1, 17)))]))]


def _extend(random: Random, files: Files, saves: Saves) -> None:
    name = _any_file(random, files, saves)
    if name is None:
        return
    count = int(random.choice([1, random.integers(1, 17), random.integers(1, 10_000)]))
    content = files[name] or b""
    files[name] = content + (bytes(count), random.bytes(count), content[:count], b" " * count)[int(random.integers(4))]


def _shift(random: Random, files: Files, saves: Saves) -> None:
    """Bytes that come in, or are lost, in the middle of a file whose size stays what it was."""
    name = _any_file(random, files, saves)
    if name is None:
        return
    content = files[name] or b""
    begin, count = int(random.integers(len(content))), int(random.integers(1, 65))
    added = random.bytes(count)
    shifted = content[:begin] + (added + content[begin:] if random.integers(2) else content[begin + count :] + added)
    files[name] = shifted[: len(content)]


def _exchange_parts(random: Random, files: Files, saves: Saves) -> None:
    """Two equally long parts of a file change places."""
    name = _any_file(random, files, saves)
    content = bytearray(files[name] or b"") if name else b""
    if name is None or len(content) < 2:
        return
    length = int(np.exp(random.uniform(0, np.log(len(content) // 2))))
    first = int(random.integers(len(content) - 2 * length + 1))
    second = int(random.integers(first + length, len(content) - length + 1))
    a, b = content[first : first + length], content[second : second + length]
    content[first : first + length], content[second : second + length] = b, a
    files[name] = bytes(content)


def _swap(random: Random, files: Files, saves: Saves) -> None:
    a, b = (str(name) for name in random.choice(saves.data_names, 2, replace=False))
    files[a], files[b] = files[b], files[a]


def _duplicate(random: Random, files: Files, saves: Saves) -> None:
    """The file of one rank stands in the place of another's too."""
    a, b = (str(name) for name in random.choice(saves.data_names, 2, replace=False))
    files[a] = files[b]


def _from(save: str) -> Kind:
    """The file of the same rank, of another save."""

    def kind(random: Random, files: Files, saves: Saves) -> None:
        chosen = random.choice(len(saves.data_names), int(random.integers(1, len(saves.data_names))), replace=False)
        theirs = [name for name in saves.others[save] if name.endswith(".safetensors")]
        for index in chosen.tolist():
            files[saves.data_names[index]] = saves.others[save][theirs[index]]

    return kind


def _header_of_another(random: Random, files: Files, saves: Saves) -> None:
    """The header of another save's file, or this one's before another save's data."""
    name = _data_file(random, files, saves)
    if name:
        own, theirs, start = files[name] or b"", saves.others["twin"][name], saves.data_start(name)
        files[name] = theirs[:start] + own[start:] if random.integers(2) else own[:start] + theirs[start:]


def _lose(random: Random, files: Files, saves: Saves) -> None:
    for index in random.choice(len(saves.data_names), int(random.integers(1, 1 + len(saves.data_names)))):
        files[saves.data_names[index]] = None


def _lose_manifest(random: Random, files: Files, saves: Saves) -> None:
    files[saves.manifest_name] = None


def _manifest_of(save: str) -> Kind:
    def kind(random: Random, files: Files, saves: Saves) -> None:
        (manifest,) = (content for name, content in saves.others[save].items() if name.endswith(".manifest"))
        files[saves.manifest_name] = manifest

    return kind


SIMPLE: dict[str, Kind] = {
    "bit in data": _changes("data", _flip),
    "bit in a header": _changes("header", _flip),
    "bit in a header's length": _changes("length", _flip),
    "bit in the manifest": _changes("manifest", _flip),
    "bytes in data": _changes("data", _overwrite),
    "bytes in a header": _changes("header", _overwrite),
    "bytes in the manifest": _changes("manifest", _overwrite),
    "neighbours in a header": _changes("header", _transpose),
    "neighbours in the manifest": _changes("manifest", _transpose),
    "zeroed sectors": _zero_sectors,
    "lost writes": _old_sectors,
    "truncated": _truncate,
    "extended": _extend,
    "shifted": _shift,
    "parts exchanged": _exchange_parts,
    "ranks swapped": _swap,
    "rank duplicated": _duplicate,
    "file of another save": _from("twin"),
    "file of an earlier save": _from("older"),
    "file of another id": _from("next"),
    "header of another save": _header_of_another,
    "file missing": _lose,
}


def _several(random: Random, files: Files, saves: Saves) -> None:
    for name in random.choice(list(SIMPLE), int(random.integers(2, 6))):
        SIMPLE[str(name)](random, files, saves)
    manifest = saves.manifest_name
    # With a file that is of that save too, the others would be the ones that are out of place.
    if files[manifest] == saves.others["twin"][manifest]:
        files[manifest] = saves.files[manifest]


ALL: dict[str, Kind] = {
    **SIMPLE,
    "several at once": _several,
    "manifest missing": _lose_manifest,
    "manifest of another save": _manifest_of("twin"),
    "manifest of an earlier save": _manifest_of("older"),
    "manifest of another id": _manifest_of("next"),
}
