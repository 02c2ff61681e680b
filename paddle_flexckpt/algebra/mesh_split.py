"""How an axis of a tensor is split over the axes of a mesh of processes."""

from __future__ import annotations

from collections.abc import Iterable


def balanced_split(total_nums: int, num_of_pieces: int) -> list[int]:
    """Return the sizes of the pieces that Paddle splits an axis into: equal, rounded up, the rest last.

    Five over four pieces are ``[2, 2, 1, 0]``: where pieces of the rounded size are too many, the last are short or
    empty. (The rule is that of ``BalancedSplit`` in Paddle's reshard_utils.cc, which has a negative piece there.)

    Raises:
        ValueError: There are no pieces, or the extent is negative.
    """
    return [size for _, size in (nested_piece(total_nums, [(num_of_pieces, i)]) for i in range(num_of_pieces))]


def nested_piece(extent: int, cuts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return one piece of an axis that several mesh axes split, each of them the piece of the one before it.

    Args:
        extent: Extent of the axis.
        cuts: Per mesh axis, in the order in which they split: the number of pieces and the index of the wanted one.

    Returns:
        ``(offset, size)`` of the piece. An empty piece is at the end of the piece that it was split from.

    Raises:
        ValueError: The extent is negative, or an index is not one of the pieces.
    """
    if extent < 0:
        raise ValueError(f"an axis of negative extent ({extent}) cannot be split")
    offset, size = 0, extent
    for pieces, index in cuts:
        if not 0 <= index < pieces:
            raise ValueError(f"piece {index} of {pieces} does not exist")
        each = -(-size // pieces)
        begin = min(each * index, size)
        offset, size = offset + begin, min(each, size - begin)
    return offset, size
