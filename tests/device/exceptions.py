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
_TENSORS = "tests/memory/test_tensors.py"

EXCEPTIONS: tuple[Exempt, ...] = (
    *(
        Exempt(
            f"{_TENSORS}::test_bits_are_exact_and_a_contiguous_tensor_is_not_copied[{shape}]",
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
    Exempt(
        "tests/loading/test_memory.py::test_each_call_of_*_stays_within_its_budget*",
        "host",
        "fills its tensors through the array of a HostTensor, which is a copy of a device tensor",
    ),
    Exempt(
        "tests/run_state/test_extra_state.py::test_generators",
        "host",
        "lists the generators of a process without a device, which has one more",
    ),
    Exempt(
        "tests/run_state/test_extra_state.py::test_everything_is_a_tensor_with_a_name_and_text_is_json",
        "host",
        "asserts that a tensor that it has made on the current device is on the host",
    ),
    *(
        Exempt(
            f"tests/parallel/test_optimizers_all.py::{test}[RMSProp*",
            "paddle",
            "rmsprop has no kernel of the device, and the fallback gives the parameter other memory, which it refuses",
        )
        for test in ("test_continuation", "test_groups_and_frozen_parameters", "test_states_of_cut_parameters")
    ),
    Exempt(
        "tests/parallel/test_optimizers_all.py::test_model_average_goes_on_to_the_bit",
        "paddle",
        "average_accumulates has no kernel of the device, and Paddle's for the host follows the device's addresses",
        run=False,
    ),
    *(
        Exempt(
            f"tests/manager/test_schedule.py::{test}",
            "host",
            "asserts that a process prints nothing; Paddle tells of the device that it loads",
        )
        for test in (
            "test_a_signal_to_a_fork_that_has_not_begun_does_what_it_did_before",
            "test_an_exception_of_a_handler_is_raised_where_a_process_forks",
        )
    ),
    *(
        Exempt(
            f"tests/memory/test_odd_tensors.py::{test}",
            "paddle",
            "Paddle makes a sparse tensor with a kernel for the host, which follows the device's addresses",
            run=False,
        )
        for test in (
            "test_what_looks_like_a_tensor_of_its_shape_is_refused_by_key[*-coo]",
            "test_what_looks_like_a_tensor_of_its_shape_is_refused_by_key[*-csr]",
            "test_the_remedies_give_what_looks_the_same*",
        )
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
