"""Texts for people: sizes, ranks, printable names, and warnings. Tested in tests/catalog/test_texts.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from paddle_flexckpt.catalog.layer_ranges import grouped

# The most names among which a near one is looked for.
MOST_COMPARED = 5000
# The most patterns of keys that a line shows, and the most keys whose patterns are counted: more would take too long.
_PATTERNS, _KEYS = 3, 20_000
# The most groups of layers that a warning names.
_GROUPS = 5


def format_bytes(count: int) -> str:
    """Return a byte count as text: ``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_ranks(ranks: Sequence[int], most: int | None = None) -> str:
    """Return ranks, in rising order, as text: ``0-3, 8``; beyond some number of ranges only their count."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], rank]
        else:
            ranges.append([rank])
    shown = ", ".join("-".join(map(str, each)) for each in ranges[:most])
    rest = sum(each[-1] - each[0] + 1 for each in ranges[most:]) if most is not None else 0
    return f"{shown} and {rest} more" if rest else shown


def printable(text: str) -> str:
    """Return a text of one line, in which characters that a terminal may interpret are escaped as in JSON.

    A checkpoint's writer chooses its names: control characters would move the cursor, or hide text.
    """
    return text if text.isprintable() else "".join(each if each.isprintable() else _escaped(each) for each in text)


def printable_lines(text: str) -> str:
    """Return :func:`printable` of each line of a text; a text of JSON keeps its meaning."""
    return "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def in_words_of(text: str, names: Mapping[str, str]) -> str:
    """Return an error's text for another interface: with its names of functions, arguments and advice.

    Args:
        text: The text, in the words of the calls in Python.
        names: The interface's words by those of the calls; the first ones are replaced first.
    """
    for name, other in names.items():
        text = text.replace(name, other)
    return text


def meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question for the known name that is nearest to a misspelt one, in brackets; "" if none is near."""
    import difflib  # for messages alone

    return "".join(f" (did you mean {each!r}?)" for each in difflib.get_close_matches(name.lower(), known, 1, cutoff))


def patterns(keys: Sequence[str]) -> str:
    """Return the first patterns of keys, numbers as ``#``, with how many keys each stands for."""
    if len(keys) > _KEYS:
        return ""
    counts = Counter(re.sub(r"\d+", "#", key) for key in keys)
    shown = [pattern if count == 1 else f"{pattern} x {count}" for pattern, count in counts.most_common(_PATTERNS)]
    more = [f"{len(counts) - _PATTERNS} more patterns"] if len(counts) > _PATTERNS else []
    return f" ({', '.join([*shown, *more])})" if shown else ""


def replica_warning(source: str, replicas_used: dict[str, str]) -> str:
    """Return the warning that replicas were read; by key, what was damaged and which file was read instead."""
    key, text = next(iter(replicas_used.items()))
    count = "a tensor was" if len(replicas_used) == 1 else f"{len(replicas_used)} tensors were"
    return (
        f"{source} is damaged: {count} read from replicas, such as {key!r}: {text}. `flexckpt verify` lists all that "
        "is damaged"
    )


def order_warning(source: str, keys: list[str]) -> str:
    """Return the warning that the order of elements is unknown for parameters and states that may be fused."""
    return (
        f"{source} does not say in which order the elements of {len(keys)} tensors lie that are cut along the outputs "
        "of their layer. Where one of them fuses several parameters (q, k and v; gate and up), it is taken as its "
        "shards are: part by part, not in natural order, so another degree would permute it. Remedy (FC207): mark what "
        "is fused with a FusedAxis (parts=1 where all is in natural order); if it was saved without one, load it once "
        "into parameters that are marked with a FusedAxis where they are fused, under the strategy of its save, and "
        "save it again. These are: "
        f"{', '.join(keys)}"
    )


def dropped_warning(source: str, dropped: Sequence[str], is_smaller: bool) -> str:
    """Return the warning about what a load left out; ``is_smaller``: with parameters in layers like the model's own."""
    texts = grouped(dropped)
    more = f"; and {len(texts) - _GROUPS} more" if len(texts) > _GROUPS else ""
    return (
        f"{'THE MODEL IS SMALLER THAN ITS CHECKPOINT' if is_smaller else 'NOT EVERYTHING WAS LOADED'}: "
        f"{'; '.join(texts[:_GROUPS])}{more}: {source} has this, nothing that was given takes it, and it was left out. "
        "Remedy (FC203): make the model as it was when it was saved (numbers of layers and experts, biases, buffers), "
        "give again what was saved as state=, and load again, before the next save; strict=True makes it an error; or, "
        "if it is meant so, say it with strict=False: the report lists it as unexpected"
    )


def untouched_warning(source: str, keys: Sequence[str], is_all: bool = True) -> str:
    """Return the warning that parameters keep the values that they had before the load; ``is_all``: no others do."""
    texts = grouped(keys)
    more = f"; and {len(texts) - _GROUPS} more" if len(texts) > _GROUPS else ""
    many = f"{'' if is_all else 'at least '}{len(keys)} parameters keep the values they", "them"
    who, them = ("1 parameter keeps the values it", "it") if len(keys) == 1 else many
    return f"{who} had, as {source} gives {them} none: {'; '.join(texts[:_GROUPS])}{more}"


def precision_warning(source: str, keys: Sequence[str]) -> str:
    """Return the warning that float32 parameters were cast, though the source has their masters."""
    who = f"{len(keys)} float32 parameters come" if len(keys) > 1 else "1 float32 parameter comes"
    return (
        f"{who} from values of lower precision, such as {keys[0]!r}, though {source} has masters. Remedy (FC204): to "
        "take them from their masters, give master_weights='convert'"
    )


def unread_warning(source: str, unread: Mapping[str, str], keys: Sequence[str]) -> str:
    """Return the warning about AOA statements that make nothing but names that no target has.

    Args:
        source: The source of the load.
        unread: A name of each statement, and the statement.
        keys: The targets' keys, of which a near one is named.
    """
    import difflib  # for messages alone

    key, statement = next(iter(unread.items()))
    near = difflib.get_close_matches(key, keys[:MOST_COMPARED], 1)
    return (
        f"{source}: {len(unread)} AOA statement{'s' * (len(unread) > 1)} made names that no target has, and changed "
        f"nothing, such as {key!r} ({statement}){f'; there is {near[0]!r}' if near else ''}. Remedy (FC601): correct "
        "the name on the right, and load again; or leave the statement out"
    )
