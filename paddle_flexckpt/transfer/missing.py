"""Missing keys: targets that nothing fills, with the reason and a remedy without loss.

Tested in tests/transfer/test_resolution.py and tests/remedies/test_frozen.py.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Catalog, Problem
from paddle_flexckpt.optimizer_states import MASTER
from paddle_flexckpt.transfer.names import CompatibleNames, is_state
from paddle_flexckpt.transfer.remedies import first_value, renamed, untied

_PARAMETER_REMEDY = 'load with master_weights="convert", by which a master that is missing starts from its parameter'


class Missing:
    """The reasons why nothing fills a target: AOA statements, or a wrong name."""

    def __init__(
        self, targets: Catalog, source: Catalog, mapping: TensorMapping | None, compatible: CompatibleNames
    ) -> None:
        """Take targets, source and mapping, and the result of a search by other names."""
        self._catalog, self._source, self._mapping, self._compatible = targets, source, mapping, compatible

    def problem(self, row: int, has_parameter: bool) -> Problem:
        """Return the problem of a target; ``has_parameter``: it is a master that may be made of its parameter."""
        catalog, names, compatible = self._catalog, self._sorted_names, self._compatible
        key = catalog.keys[row]
        where: dict[str, Any] = {"key": key, "rank": int(catalog.rank[row]), "expected": catalog.describe(row)}
        if self._mapping is not None and (key in self._mapping.unfed or key in self._mapping.removed):
            why, remedy = self._not_made(key, self._mapping)
            # A reason may have its own remedy.
            return Problem("nothing feeds a target", **where, got=why, remedy=None if "Remedy:" in why else remedy)
        got = f"{len(names)} keys, among them {self._by_tail.get(_tail(key), names)[:3]}"
        if key in compatible.taken:
            got += f"; what might be meant is taken by target {compatible.taken[key]!r}"
        if key in compatible.of_others:
            got += f"; the one of its raw name is {compatible.of_others[key]!r}, as the source says"
        remedy = "correct the name, or load with strict=False to leave this target as it is"
        if is_state(key, self.known):
            remedy = f"correct the state's name{first_value(key)}"
        if has_parameter:
            remedy = _PARAMETER_REMEDY
        elif key in compatible.lost_by_raw_name and self._has_states:
            # One side has raw names of states, which count layers, and the other side counts others.
            remedy = "give its name by an AOA statement (plain_state_statements() makes them); or correct the name"
        else:
            other = self._renamed + untied(catalog, row, self._source)
            # A state whose parameter has another name in the source has its value there.
            remedy = other.removesuffix("; or ") if other and is_state(key, self.known) else other + remedy
        return Problem("the source has no such key", **where, got=got, remedy=remedy)

    def _not_made(self, key: str, mapping: TensorMapping) -> tuple[str, str]:
        """Return why statements leave a target without a value, and the remedy."""
        why = mapping.provenance.get(key, "a statement removes the source key of that name, and none makes another")
        base, _, state = key.rpartition(".")
        is_there = base in self._there and not (base in mapping.unfed or base in mapping.removed)
        remedy = "add a statement that makes it, or load with strict=False to leave this target as it is"
        if state == MASTER and (base in mapping.tensors or is_there):
            remedy = _PARAMETER_REMEDY
        elif is_state(key, self.known):
            remedy = f"add a statement that makes the state{first_value(key)}"
        return why, remedy

    @cached_property
    def known(self) -> set[str]:
        """Return the keys of both sides."""
        return {*self._source.keys, *self._catalog.keys}

    @cached_property
    def _there(self) -> set[str]:
        return {*self._source.keys}

    @cached_property
    def _has_states(self) -> bool:
        return any(is_state(name, self.known) for name in self._source.keys)

    @cached_property
    def _by_tail(self) -> dict[str, list[str]]:
        """Return the source's keys, sorted, by their last two parts."""
        found: dict[str, list[str]] = {}
        for name in self._sorted_names:
            found.setdefault(_tail(name), []).append(name)
        return found

    @cached_property
    def _renamed(self) -> str:
        return renamed(self._catalog.keys, self._there)

    @cached_property
    def _sorted_names(self) -> list[str]:
        return sorted(self._source.keys)


def _tail(key: str) -> str:
    return ".".join(key.rsplit(".", 2)[-2:])
