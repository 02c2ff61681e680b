"""Whether a verification names what is damaged: the file, and for bytes of data the tensor, the rank and the range."""

from __future__ import annotations

import numpy as np

from paddle_flexckpt.catalog import Problem
from paddle_flexckpt.native.data_file import TOKEN_WINDOW
from paddle_flexckpt.report import VerifyReport
from tests.damage.checkpoint import ID, Files, Saves


def differences(old: bytes, new: bytes | None) -> np.ndarray:
    """Positions of the bytes that are not as they were; those that are missing or too many count."""
    if new is None:
        return np.arange(len(old))
    common, longest = min(len(old), len(new)), max(len(old), len(new))
    a, b = np.frombuffer(old, np.uint8, common), np.frombuffer(new, np.uint8, common)
    return np.concatenate([np.flatnonzero(a != b), np.arange(common, longest)])


def damaged(files: Files, saves: Saves) -> dict[str, np.ndarray]:
    """The files that are not as they were, with the positions of their differing bytes."""
    found = {name: differences(saves.files[name], files[name]) for name in files if files[name] != saves.files[name]}
    return {name: positions for name, positions in found.items() if len(positions)}


def may_load(damage: dict[str, np.ndarray], files: Files, saves: Saves) -> bool:
    """Whether all that targets need is there: every block of every shard, in some file that is the one it says it is.

    Without replicas, what is damaged then is headers behind their save tokens.
    """
    if saves.manifest_name in damage:
        return False
    catalog, block_bytes = saves.manifest.catalog, saves.manifest.checksums.block_bytes
    wanted, intact = set(), set()
    for row in range(len(catalog)):
        shard = (catalog.key_name(row), *catalog.offset[row], *catalog.shape[row], catalog.flat_start[row])
        name, begin = catalog.files[catalog.file[row]], int(catalog.byte_offset[row])
        count = -(-int(catalog.byte_length[row]) // block_bytes)
        wanted |= {(shard, block) for block in range(count)}
        if is_usable(files[name], name, saves):
            positions = damage.get(name, np.zeros(0, dtype=np.int64))
            inside = positions[(positions >= begin) & (positions < begin + int(catalog.byte_length[row]))]
            bad = set(((inside - begin) // block_bytes).tolist())
            intact |= {(shard, block) for block in range(count) if block not in bad}
    return wanted == intact


def is_usable(content: bytes | None, name: str, saves: Saves) -> bool:
    """Whether a data file is the one that was written, by its size and its save token."""
    token = saves.manifest.save_token.encode()
    return content is not None and len(content) == len(saves.files[name]) and token in content[:TOKEN_WINDOW]


def damaged_keys(damage: dict[str, np.ndarray], files: Files, saves: Saves) -> set[str]:
    """Tensors of which some copy cannot be read."""
    catalog, keys = saves.manifest.catalog, set()
    for row in range(len(catalog)):
        name, begin = catalog.files[catalog.file[row]], int(catalog.byte_offset[row])
        positions = damage.get(name, np.zeros(0, dtype=np.int64))
        touched = (positions >= begin) & (positions < begin + int(catalog.byte_length[row]))
        if touched.any() or not is_usable(files[name], name, saves):
            keys.add(catalog.key_name(row))
    return keys


def why_not_located(
    outcome: VerifyReport | Exception, damage: dict[str, np.ndarray], files: Files, saves: Saves
) -> str | None:
    """What a verification should have said and did not, or said and should not have; None if all is well."""
    manifest = str(saves.path / saves.manifest_name)
    if isinstance(outcome, Exception):
        # Without a manifest there is nothing to compare with; another format version is what a bit of it may say.
        what = (str(saves.path), f"id {ID}") if files[saves.manifest_name] is None else (manifest, "format version")
        text = str(outcome)
        return None if saves.manifest_name in damage and all(word in text for word in what) else text
    if outcome.ok:
        return "nothing is said to be wrong"
    problems: dict[str, list[Problem]] = {}
    for problem in outcome.problems:
        problems.setdefault(problem.file or "", []).append(problem)
    if saves.manifest_name in damage:
        return None if manifest in problems else f"the manifest is not among {sorted(problems)}"
    expected, named = {str(saves.path / name) for name in damage}, set(problems)
    # Where all files are another save's it may be the manifest that is not theirs.
    if expected != named and (named - {manifest} != expected or len(expected) < len(saves.data_names)):
        return f"problems with {sorted(named)}; damaged are {sorted(expected)}"
    for name, positions in damage.items():
        reason = _file(name, problems[str(saves.path / name)], positions, files[name], saves)
        if reason:
            return f"{name}: {reason}"
    return None


def _file(name: str, problems: list[Problem], positions: np.ndarray, content: bytes | None, saves: Saves) -> str | None:
    """Why the problems of one file do not tell where it is damaged."""
    whats = [problem.what for problem in problems]
    if content is None:
        return None if whats == ["a file that the manifest names is missing"] else f"missing, but {whats}"
    size, start = len(saves.files[name]), saves.data_start(name)
    if len(content) != size and not any(
        (p.offset, p.end) == (min(size, len(content)), max(size, len(content))) for p in problems
    ):
        return f"it has {len(content)} bytes instead of {size}, but {whats}"
    header = positions[positions < start]
    in_header = [p for p in problems if p.offset is not None and p.offset < start and p.end is not None]
    if len(header) and not (
        in_header and min(p.offset for p in in_header) <= header[0] and header[-1] < max(p.end for p in in_header)
    ):
        return f"the header differs from byte {header[0]} to {header[-1]}, but {in_header}"
    if not len(header) and any("header" in p.what for p in in_header):
        return f"the header is as it was, but {in_header}"
    if any("another save's file" in p.what and p.end == max(size, len(content)) for p in problems):
        return None
    return _data(name, problems, positions[positions >= start], len(content), saves)


def _data(name: str, problems: list[Problem], positions: np.ndarray, size: int, saves: Saves) -> str | None:
    """Why the problems do not say which blocks of which tensors are damaged."""
    catalog, block_bytes = saves.manifest.catalog, saves.manifest.checksums.block_bytes
    rank = int(catalog.rank[catalog.file == catalog.files.index(name)][0])
    found = np.zeros(max(len(saves.files[name]), size), dtype=bool)
    found[len(saves.files[name]) :] = True  # bytes too many: told by the size
    for row in np.flatnonzero(catalog.file == catalog.files.index(name)).tolist():
        begin, end = int(catalog.byte_offset[row]), int(catalog.byte_offset[row] + catalog.byte_length[row])
        mine = positions[(positions >= begin) & (positions < end)]
        blocks = set(((mine - begin) // block_bytes).tolist())
        for problem in problems:
            if problem.key != catalog.key_name(row) or " of the shard " not in problem.what:
                continue
            if problem.offset is None or problem.end is None or not begin <= problem.offset < problem.end <= end:
                continue
            if problem.rank != rank:
                return f"rank {rank} wrote it: {problem}"
            found[problem.offset : problem.end] = True
            first, last = (problem.offset - begin) // block_bytes, -(-(problem.end - begin) // block_bytes)
            if not set(range(first, last)) <= blocks:
                return f"blocks {sorted(blocks)} of {problem.key!r} are damaged: {problem}"
        # The rest of a block in which the file ends has nothing to be compared with.
        if begin < size < end:
            found[size - (size - begin) % block_bytes : size] = True
    missed = positions[~found[positions]]
    return f"bytes {missed[:5]} are not in {[str(p) for p in problems]}" if len(missed) else None
