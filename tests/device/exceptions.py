"""The tests for the host that cannot pass with a device current, each with its reason.

Each is run all the same, unless it would take the process with it, and has to fail: what passes has to leave this list.
"""

from __future__ import annotations

import fnmatch
from typing import NamedTuple


class Exempt(NamedTuple):
    """One entry.

    Attributes:
        name: A test's id, or a pattern of ids.
        kind: ``host`` where the test itself assumes host memory, ``paddle`` for limits of Paddle or of its CPU build.
        reason: Why it fails.
        run: Whether it can be run without ending the process.
    """

    name: str
    kind: str
    reason: str
    run: bool = True


# Shapes with elements: the others have nothing to stage.
_FILLED = ("shape0", "shape1", "shape2", "shape5")
_TENSORS = "tests/runtime/test_tensors.py"

EXCEPTIONS: tuple[Exempt, ...] = (
    *(
        Exempt(
            f"{_TENSORS}::test_bits_are_exact_and_a_contiguous_tensor_is_not_copied[{shape}-*]",
            "host",
            "asserts that a contiguous tensor is used where it stands; one of a device has to be staged",
        )
        for shape in _FILLED
    ),
    *(
        Exempt(
            f"{_TENSORS}::test_views_are_read_as_they_are_seen[{view}-*]",
            "host",
            "asserts that a contiguous view is not staged; one of a device has to be",
        )
        for view in ("rows", "broadcast")
    ),
)


def exception_of(nodeid: str) -> Exempt | None:
    """Return the entry that covers a test."""
    # Brackets are part of an id, not a set of characters.
    plain = str.maketrans("[]", "()")
    for entry in EXCEPTIONS:
        if fnmatch.fnmatchcase(nodeid.translate(plain), entry.name.translate(plain)):
            return entry
    return None
