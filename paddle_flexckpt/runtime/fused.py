"""Fused parameters that are cut into parts of another size than in the source, and the statements that mend it.

Every rank holds its parts of q, k and v (gate and up) side by side, so the whole tensor in rank order is another
permutation for every degree of tensor parallelism. A :class:`FusedAxis` says which; the AOA statement
``"key -> key, {fused.statement}"`` moves the parts. It is added to a load's statements for just those keys whose cut
differs and of which no statement of the user's speaks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.aoa import fused_statement
from paddle_flexckpt.catalog import Catalog, Problem
from paddle_flexckpt.sharded_weight import FusedAxis


@dataclass(frozen=True)
class OtherCut:
    """A fused target that the source holds in parts of another size.

    Attributes:
        key: The target.
        rank: Whose it is.
        found: The source key.
        axis: The axis that is cut; not negative.
        extent: Extent of the whole tensor along it.
        here: Extent of the target's part.
        there: Extents of the source's parts.
        statement: Tags and attributes of the statement, the axis among them; None where none is known.
    """

    key: str
    rank: int
    found: str
    axis: int
    extent: int
    here: int
    there: tuple[int, ...]
    statement: str | None

    def describe(self) -> str:
        """What becomes of it, for the report: ``2 parts -> 4 parts``."""
        counts = sorted({self.extent / extent for extent in self.there if extent})
        parts = " or ".join(f"{count:g}" for count in counts)
        return f"{parts} parts -> {self.extent / max(self.here, 1):g} parts"

    def problem(self, other_name: bool = False) -> Problem:
        """The problem that it is, where it may not be mended.

        Args:
            other_name: Whether the source key is another of the target's names, of which statements that put
                parameters right, and their states with them, do not know.
        """
        remedy = "load under the tensor-parallel degree of the save: no AOA statement is known for this parameter"
        if self.statement is not None:
            text = fused_statement(self.found, self.key, self.statement, ())
            convert = "" if other_name else 'fused="convert", or with '
            remedy = f'load with {convert}the AOA statement "{text}"'
        return Problem(
            "the parts of a fused parameter lie side by side on every rank, so another cut would permute them",
            key=self.key,
            rank=self.rank,
            expected=f"parts of {self.here} along axis {self.axis}, as here",
            got=f"parts of {list(self.there)}",
            remedy=remedy,
        )


def other_cut(target: Catalog, row: int, source: Catalog, source_key: int, fused: FusedAxis) -> OtherCut | None:
    """Whether a fused parameter is cut into parts of another size than in the source.

    Args:
        target: The targets.
        row: The target's row.
        source: The source's shards.
        source_key: The key number of what the source has for it.
        fused: The target's rule.
    """
    ndim = int(target.ndim[row])
    axis = fused.axis % ndim
    here = int(target.shape[row, target.width - ndim + axis])
    # Shards without elements say nothing about the cut.
    rows = (source.key == source_key) & (source.size > 0)
    there = tuple(sorted(set(source.shape[rows, source.width - ndim + axis].tolist())))
    if there == (here,) or here == 0:
        return None
    statement = fused.statement
    if statement is not None and axis != 1 and not re.search(r"\baxis\s*=", statement):
        statement = f"{statement}, axis={axis}"
    return OtherCut(
        key=target.key_name(row),
        rank=int(target.rank[row]),
        found=source.keys[source_key],
        axis=axis,
        extent=int(target.global_shape[row, target.width - ndim + axis]),
        here=here,
        there=there,
        statement=statement,
    )


def completion(cuts: Iterable[OtherCut], keys: Collection[str]) -> tuple[str, ...]:
    """The statements that put fused parameters right, each once, sorted.

    They are about parameters: their states follow, those among them that are no targets do no harm.

    Args:
        cuts: Parameters and states that need it.
        keys: The keys of both sides, which tell states from parameters.
    """
    known = [(cut.found, cut.key, cut.statement) for cut in cuts if cut.statement is not None]
    return tuple(sorted({fused_statement(found, key, statement, keys) for found, key, statement in known}))


def indivisible_rows(catalog: Catalog, rules: Iterable[FusedAxis | None]) -> np.ndarray:
    """Bool per row: whether a save has to write this shard whole, not split among its replicas.

    A shard is split along its first axis of more than one element. Where that is the axis of a fused parameter, the
    pieces would look like parts of a higher degree of tensor parallelism.

    Args:
        catalog: One rank's shards.
        rules: Their rules, by row.
    """
    whole, flattened = np.zeros(len(catalog), dtype=bool), catalog.is_flattened
    for row, fused in enumerate(rules):
        if fused is None or flattened[row]:
            continue
        ndim = int(catalog.ndim[row])
        shape = catalog.shape[row, catalog.width - ndim :]
        whole[row] = ndim > 0 and fused.axis % ndim == int(np.argmax(shape > 1))
    return whole
