"""Readers: which rank reads which section of a checkpoint for the ranks that want it.

A stored shard is cut into sections of whole blocks. Where ranks read together, one rank reads a section, once, and
sends it to the others that want it. A rank reads sections that it wants itself, up to an equal share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.algebra.rows import distinct, group_rows, lexsort_packed, sum_axes
from paddle_flexckpt.catalog import Catalog, ReplicaGroups, group_replicas, validate_coverage
from paddle_flexckpt.catalog.validate import Coverage
from paddle_flexckpt.planning.holder_sets import find_sets, share_out
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher, concat_pieces
from paddle_flexckpt.planning.sights import Sight

# The largest section. A reader holds up to four of them, so that reading and sending overlap within 64 MiB.
MOST_SECTION_BYTES = 8 << 20
# Sections for each rank, if blocks are small enough: one more or less is 1 % of a share.
SECTIONS_OF_A_RANK = 100
# Bytes of a round; it may read up to one section more.
ROUND_BYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class Sections:
    """Sections of stored shards, in the order of the files.

    Attributes:
        catalog: One row for each; a section of a shard is a flattened shard.
        group: int64, the replica group of each.
        start: int64, the first element of each in its stored shard.
    """

    catalog: Catalog
    group: np.ndarray
    start: np.ndarray


def cut_sections(stored: Catalog, groups: ReplicaGroups, ranks: int, block_bytes: int) -> Sections:
    """Cut the stored shards, one of each replica group, into sections that begin and end where blocks do.

    Args:
        stored: The stored shards.
        groups: Their replica groups.
        ranks: Number of ranks that share the reading.
        block_bytes: Bytes of a block.
    """
    group = lexsort_packed([stored.file[groups.first], stored.byte_offset[groups.first]], len(groups))
    rows = groups.first[group]
    size, itemsize = stored.size[rows], stored.itemsize[rows]
    share = int((size * itemsize).sum()) // (ranks * SECTIONS_OF_A_RANK)
    most = max(min(share, MOST_SECTION_BYTES) // block_bytes, 1) * block_bytes
    step = np.maximum(most // np.maximum(itemsize, 1), 1)
    count = np.maximum(-(-size // step), 1)
    of = np.repeat(np.arange(len(rows)), count)
    start = (np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)) * step[of]
    stop = np.minimum(start + step[of], size[of])
    catalog, is_cut = stored.take(rows[of]), count[of] > 1
    base = np.where(catalog.is_flattened, catalog.flat_start, 0)
    catalog = replace(
        catalog,
        flat_start=np.where(is_cut, base + start, catalog.flat_start),
        flat_stop=np.where(is_cut, base + stop, catalog.flat_stop),
        byte_offset=catalog.byte_offset + start * itemsize[of],
    )
    return Sections(catalog, group[of], start)


class MatchedSections(NamedTuple):
    """The sections, and the pieces that fill targets from them.

    Attributes:
        sections: The sections.
        rows: The sections as shards of a rank that does not exist, so that no rank has them in its memory.
        alike: The replica groups of these shards.
        coverage: Their coverage.
        pieces: The pieces.
    """

    sections: Sections
    rows: Catalog
    alike: ReplicaGroups
    coverage: Coverage
    pieces: Pieces


def match_sections(
    stored: Catalog,
    groups: ReplicaGroups,
    targets: Catalog,
    ranks: int,
    block_bytes: int,
    maps: BoxMaps | None,
    nobody: int,
) -> MatchedSections:
    """Cut stored shards into sections, and find the pieces that fill the targets of all ranks.

    Args:
        stored: The stored shards.
        groups: Their replica groups.
        targets: The targets of all ranks.
        ranks: Number of ranks.
        block_bytes: Bytes of a block.
        maps: What the keys that it defines are made of.
        nobody: A number that no rank has.

    Raises:
        ValidationError: Too many shards of a key overlap.
    """
    sections = cut_sections(stored, groups, ranks, block_bytes)
    rows = replace(sections.catalog, rank=np.full(len(sections.group), nobody, dtype=np.int32))
    alike = group_replicas(rows)
    coverage = validate_coverage(rows, alike)
    return MatchedSections(
        sections, rows, alike, coverage, ShardMatcher(rows, alike, coverage).match(targets, maps=maps)
    )


def find_wanted(pieces: Pieces, place: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sections that each rank wants: ``(section, place of the rank)``, sorted, each pair once.

    Args:
        pieces: What fills the targets of all ranks; their sources are sections.
        place: int64 per row of the targets, the place of its rank in the group.
        ranks: Number of ranks.
    """
    pairs = distinct(pieces.source * ranks + place[pieces.target])
    return pairs // ranks, pairs % ranks


def choose_readers(
    wanted: tuple[np.ndarray, np.ndarray],
    nbytes: np.ndarray,
    ranks: int,
    together: bool,
    sight: Sight | None = None,
    group: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the readers: ``(section, place of its reader)``, sorted, -1 where no rank can read it.

    Args:
        wanted: As of :func:`find_wanted`.
        nbytes: int64 per section.
        ranks: Number of ranks.
        together: Whether each section is read by one rank only. Else every rank reads the sections that it wants and
            sees, and one other rank reads a section that none of those that want it sees.
        sight: The replica groups that ranks can read; None: each can read all.
        group: int64 per section, its replica group, where there is a ``sight``.
    """
    section, place = wanted
    own, others = wanted, (section[:0], place[:0])
    if sight is not None and group is not None:
        able = sight.rows(group[section], place) >= 0
        own = section[able], place[able]
        # A section that no rank sees of those that want it: another rank reads it for them.
        foreign = np.setdiff1d(section, own[0])
        number, reader = sight.readers(group[foreign])
        others = foreign[number], reader
    nobody = np.setdiff1d(np.arange(len(nbytes)), np.concatenate([own[0], others[0]]))
    if together:
        pairs = np.concatenate([own[0], others[0]]), np.concatenate([own[1], others[1]])
        order = lexsort_packed(pairs, len(pairs[0]))
        found = [_share_out((pairs[0][order], pairs[1][order]), nbytes, ranks)]
        if sight is None:
            found = [_level(*found[0], nbytes, ranks)]
    else:
        found = [own, _share_out(others, nbytes, ranks)]
    found.append((nobody, np.full(len(nobody), -1)))
    section, place = (np.concatenate(column) for column in zip(*found))
    order = lexsort_packed([section, place], len(section))
    return section[order], place[order]


def _share_out(pairs: tuple[np.ndarray, np.ndarray], nbytes: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Give each section to one of its ranks, so that all read about as much."""
    section, start = np.unique(pairs[0], return_index=True)
    groups = ReplicaGroups(np.arange(len(pairs[0])), np.append(start, len(pairs[0])))
    sets, of_section = find_sets(groups, pairs[1])
    size, order = nbytes[section], np.argsort(of_section, kind="stable")
    amount = np.bincount(of_section, size, len(sets)).astype(np.int64)
    # All sets' lines, one after the other; a section stays on its set's line.
    member = _interval_of_middle(size[order], np.cumsum(share_out(sets, amount, ranks)))
    of_section = of_section[order]
    reader = np.zeros(len(section), dtype=np.int64)
    reader[order] = sets.members[np.clip(member, sets.start[of_section], sets.start[of_section + 1] - 1)]
    return section, reader


def _level(section: np.ndarray, reader: np.ndarray, nbytes: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Give sections beyond a rank's share to ranks with less, though they do not want these."""
    size, order = nbytes[section], np.argsort(reader, kind="stable")
    load = np.bincount(reader, size, ranks)
    share = load.sum() / ranks
    # Sections that begin beyond the share: less than a section is not moved.
    begin = np.cumsum(size[order]) - size[order] - (np.cumsum(load) - load)[reader[order]]
    beyond = np.sort(order[begin > share])
    if len(beyond):
        kept = np.ones(len(section), dtype=bool)
        kept[beyond] = False
        room = np.maximum(share - np.bincount(reader[kept], size[kept], ranks), 0)
        reader = reader.copy()
        reader[beyond] = np.minimum(_interval_of_middle(size[beyond], np.cumsum(room)), ranks - 1)
    return section, reader


def _interval_of_middle(size: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Lay sections end to end; return for each the number of the interval, between edges, that has its middle."""
    return np.searchsorted(edges, np.cumsum(size) - size / 2, side="right")


def number_rounds(reader: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Return int64 per section, the round in which its reader reads and sends it."""
    order = np.argsort(reader, kind="stable")
    before = np.cumsum(nbytes[order]) - nbytes[order]
    first = np.flatnonzero(np.append(True, reader[order][1:] != reader[order][:-1])) if len(order) else order
    before -= np.repeat(before[first], np.diff(np.append(first, len(order))))
    rounds = np.zeros(len(order), dtype=np.int64)
    rounds[order] = before // ROUND_BYTES
    return rounds


def reads_of_rows(parts: list[Pieces]) -> Pieces:
    """Return the reads of rows that pieces need, into memory as long as the rows, at the same places; sorted by row.

    They are the parts of the pieces, each once; or a row's whole reach, if the parts are no less than that.
    """
    pieces = concat_pieces([part for part in parts if len(part)], parts[0].extents.shape[1])
    if not len(pieces):
        return pieces
    width = pieces.extents.shape[1]
    columns = [pieces.source, pieces.source_base, *pieces.extents.T, *pieces.source_strides.T]
    order, start = group_rows(columns, len(pieces))
    shown = pieces.take(order[start[:-1]])
    row, base, extents, strides = shown.source, shown.source_base, shown.extents, shown.source_strides
    start = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
    end = base + sum_axes((extents - 1) * strides) + 1
    first, last = np.minimum.reduceat(base, start), np.maximum.reduceat(end, start)
    whole = np.add.reduceat(shown.size, start) >= last - first
    scattered = ~np.repeat(whole, np.diff(np.append(start, len(shown))))
    reach = np.ones((int(whole.sum()), width), dtype=np.int64)
    reach[:, -1:] = (last - first)[whole][:, None]
    row, base = np.append(row[start][whole], row[scattered]), np.append(first[whole], base[scattered])
    extents = np.concatenate([reach, extents[scattered]])
    strides = np.concatenate([np.ones_like(reach), strides[scattered]])
    return Pieces(row, row, extents, base, strides, base, strides).take(np.argsort(row, kind="stable"))
