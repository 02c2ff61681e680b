"""Names of Paddle's counter alone: believed where one assignment is possible, else an error that lists the pairs."""

from __future__ import annotations

import pytest

from paddle_flexckpt.transfer import problems
from paddle_flexckpt.transfer.names import SourceKeys, Unresolved, find_compatible
from paddle_flexckpt.transfer.problems import find_guesses


def guesses(targets, source, known=None):
    """The problems of states (key and shape) that are looked for in a source, of which some are recorded."""
    wanted = [Unresolved(key, 5, shape=shape, **more) for key, shape, more in targets]
    there = SourceKeys(source, known or {})
    found = find_compatible(wanted, there, {})
    return find_guesses(wanted, there, found)


def states(number, shape, path="", **more):
    """A moment, of the parameter's shape, and a power, of none."""
    prefix = f"{path}linear_{number}.w_0"
    return [(f"{prefix}_moment1_0", shape, more), (f"{prefix}_beta1_pow_acc_0", (1,), more)]


def table(*of_parameters):
    return {key: shape for each in of_parameters for key, shape, _ in each}


def test_shapes_tell_parameters_apart_and_their_powers_follow():
    both = [*states(0, (4, 4)), *states(1, (4, 8))]
    assert guesses(both, table(both)) == []
    assert guesses(states(0, (4, 4)), table(both)) == []
    assert guesses([("a", (4,), {})], {"a": (4,), "b": (4,)}) == []


@pytest.mark.parametrize("path", ["", "optimizer.", "actor_opt."])
def test_parameters_of_one_shape_are_an_error_that_lists_them(path):
    both = [*states(0, (4, 4), path), *states(1, (4, 4), path)]
    (problem,) = guesses(both, table(both))
    assert (problem.key, problem.rank) == (both[0][0], 5)
    assert "several parameters have the shape [4, 4]" in problem.what
    assert problem.got.count("linear_0.w_0") == problem.got.count("linear_1.w_0") == 2
    assert "raw_names='trusted'" in problem.remedy and "AOA statements" in problem.remedy


def test_it_is_enough_that_one_side_has_several():
    one, both = states(0, (4, 4)), [*states(0, (4, 4)), *states(1, (4, 4))]
    (fewer,) = guesses(one, table(both))
    assert fewer.got == "'linear_0.w_0' from 'linear_0.w_0', nothing from 'linear_1.w_0'"
    (more,) = guesses(both, table(one))
    assert more.got == "'linear_0.w_0' from 'linear_0.w_0'"


def test_paths_of_a_nested_state_dict_are_no_guesses():
    actor, critic = states(0, (4, 4), "actor_opt."), states(0, (4, 4), "critic_opt.")
    assert guesses([*actor, *critic], table(actor, critic)) == []


def test_what_is_recorded_is_no_guess():
    both = [*states(0, (4, 4)), *states(1, (4, 4))]
    known = {key: (f"layer{key.split('.')[0]}.weight.{key.split('w_0_')[1]}",) for key, _, _ in both}
    wanted = [(key, shape, {"state_names": known[key]}) for key, shape, _ in both]
    assert guesses(wanted, table(both), known) == []
    # A state that is recorded as one parameter's is no rival of the one that is not.
    half = {key: names for key, names in known.items() if key.startswith("linear_0")}
    mixed = [(key, shape, {"state_names": half[key]} if key in half else {}) for key, shape, _ in both]
    assert guesses(mixed, table(both), half) == []
    (problem,) = guesses(both, table(both), known)
    assert "load the model's state in the same state dict" in problem.remedy


def test_structured_targets_are_named_and_many_are_counted():
    many = [state for number in range(12) for state in states(number, (3,))]
    wanted = [
        (f"layers.{key.split('.')[0]}.{key.split('w_0_')[1]}", shape, {"raw_names": (key,)}) for key, shape, _ in many
    ]
    (problem,) = guesses(wanted, table(many))
    assert problem.got.startswith("'layers.linear_0' from 'linear_0.w_0', 'layers.linear_1' from 'linear_1.w_0'")
    assert problem.got.endswith(" and 4 more")
    names = [(f"mine_{number}_moment1_0", (3,), {}) for number in range(2)]
    assert guesses(names, table(names)) == [], "names that a user gave count nothing"


def test_each_parameter_is_looked_at_a_few_times_however_many_there_are(monkeypatch):
    split, calls = problems.split_raw, []
    monkeypatch.setattr(problems, "split_raw", lambda *given: calls.append(given) or split(*given))
    many = [each for number in range(50) for each in states(number, (4, 4 + number))]
    assert guesses(many, table(many)) == []
    assert len(calls) <= 4 * len(many)
