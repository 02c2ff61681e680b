"""Head counts: those of statements for fused parameters, against those of a model's configuration.

Tested in tests/aoa/test_head_counts.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from paddle_flexckpt.aoa.statements import AoaConfig, AoaError, Place, Statements, describe_problem, read_config

_HEADS = re.compile(r"\bnum_heads\s*=\s*[\"']?(\d+)")
_GROUPS = re.compile(r"\bnum_key_value_groups\s*=\s*[\"']?(\d+)")
# Entries of configurations: num_attention_heads, n_head, encoder_attention_heads; num_key_value_heads, num_kv_heads.
_ENTRY = re.compile(r"(?:n|num)_(?:\w+_)?heads?|\w+_attention_heads")
_OF_KEYS = re.compile(r"\w*(?:key_value|kv)\w*_heads|multi_query_group_num")


def check_heads(aoa_config: AoaConfig | Statements, settings: Mapping[str, Any]) -> None:
    """Check that the head counts of statements are among those of a ``config.json``, wherever it has any.

    Raises:
        AoaError: A statement has others: it would cut q, k and v at wrong places.
    """
    counts = list(_counts(settings))
    if not counts:
        return
    problems = []
    for number, text in enumerate(read_config(aoa_config).statements, 1):
        found, grouped = _HEADS.search(text), _GROUPS.search(text)
        if found is None:
            continue
        heads, groups = int(found[1]), int(grouped[1]) if grouped else None
        if not any(heads in theirs and (not keys or groups is None or groups in keys) for theirs, keys in counts):
            known = ", or ".join(_listed(theirs) + ", of keys " * bool(keys) + _listed(keys) for theirs, keys in counts)
            message = (
                f"the model's config.json says other numbers of heads, {known}, and q, k and v would be cut at wrong "
                "places. Remedy (FC606): give the rules the numbers of that configuration, as "
                "fc.model_rules(config=...) does; or, if it is not that of these weights, put theirs in its place"
            )
            problems.append(describe_problem(message, Place(number, text, found.start() + 1)))
    if problems:
        raise AoaError(problems)


def _listed(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _counts(settings: Any) -> Iterator[tuple[set[int], set[int]]]:
    """Yield the numbers of heads, and of those of keys and values, of each model in a configuration."""
    if not isinstance(settings, Mapping):
        return
    numbers = {name: value for name, value in settings.items() if type(value) is int and isinstance(name, str)}
    keys = {value for name, value in numbers.items() if _OF_KEYS.fullmatch(name)}
    if settings.get("multi_query") is True:  # there is one, whatever the number says that is for models without it
        keys = set()
    heads = {value for name, value in numbers.items() if _ENTRY.fullmatch(name) and not _OF_KEYS.fullmatch(name)}
    if heads:
        yield heads, keys
    for value in settings.values():
        yield from _counts(value)
