"""A part of the campaign against silence, and what the campaign itself has to notice."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from paddle_flexckpt.catalog import findings
from paddle_flexckpt.catalog.validate import Coverage
from paddle_flexckpt.memory import live_targets as targets
from paddle_flexckpt.saving import replica_checks as replicas
from paddle_flexckpt.transfer import files, options, resolver
from tests.ramdisk import memory_directory
from tests.silence import campaign
from tests.silence.mistakes import MISTAKES
from tests.silence.models import interleaved, natural
from tests.silence.totals import Totals

# Three of four runs make a mistake, in turn: every one is made, or passed over where a run has no place for it.
ROUND = len(MISTAKES) * 4 // 3 + 4


def told(totals: Totals) -> str:
    return "\n".join(f"{seed}, {name}: {what}" for seed, name, what in totals.findings)


@pytest.mark.parametrize("count", [3 * ROUND // 2, pytest.param(2 * ROUND, marks=pytest.mark.slow)])
def test_random_strategies_and_mistakes_end_bit_equal_or_in_an_error(count):
    totals = campaign.run_seeds(range(count))
    assert told(totals) == ""
    assert totals.runs == count
    assert totals.equal["none"] > count // 4
    assert set(MISTAKES) - {*totals.equal, *totals.error, *(name for _, name, _ in totals.findings)} == set()


@pytest.mark.paddle
def test_flows_of_one_process_end_bit_equal_or_in_an_error():
    pytest.importorskip("paddle")
    from tests.silence.flow import collect, run_flows

    flows = collect()
    totals = run_flows(range(8 * len(flows)))
    assert told(totals) == ""
    assert {*totals.equal, *totals.error} == {*flows}


@pytest.mark.multiprocess
@pytest.mark.paddle
@pytest.mark.parametrize("calls", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_models_and_optimizers_of_real_ranks_end_bit_equal_or_in_an_error(world, calls):
    pytest.importorskip("paddle")
    from tests.silence.controller import OVERLAP_EVERY, PER_CALL, run_training

    totals = run_training(0, calls * PER_CALL, world)
    assert told(totals) == ""
    assert totals.runs == calls * PER_CALL + calls * PER_CALL // OVERLAP_EVERY


def first_finding(name: str, ways: tuple[str, ...] = ("files", "memory"), most: int = 2000) -> str:
    """What the campaign first finds in runs with a mistake."""
    logging.getLogger("paddle_flexckpt").setLevel(logging.CRITICAL)
    totals = Totals()
    with memory_directory() as root:
        for seed in range(most):
            # Made in the same way as any run, but for this mistake's turn.
            if campaign.mistake_of(seed) != name:
                continue
            directory = root / str(seed)
            directory.mkdir()
            campaign.run_seed(seed, directory, totals, ways)
            if totals.findings:
                (finding,) = totals.findings
                assert finding[1] in (name, "none")
                return finding[2]
    raise AssertionError(f"nothing was found in {totals.runs} runs")


def nothing(*_args, **_kwargs):
    return None


# What the library could forget, the runs that notice it, and what they say.
MUTANTS = {
    "replicas are not compared": (
        [(replicas.Replicas, "compare", lambda self, *_: np.zeros(len(self._groups), dtype=bool))],
        "a rank is a step behind", "(saved|resharded), though .*differs from another",
    ),
    "holes are not seen": (
        [(findings, "validate_coverage", lambda *_: Coverage())],
        "a rank leaves a tensor out", "(saved|resharded), though .*nobody holds|raw|refused|left waiting",
    ),
    "what is missing is left out": (
        [(options.TransferOptions, "missing_is_an_error", property(lambda _: False))],
        "the optimizer is missing from the save", "accepted without an error|listed as missing",
    ),
    "shapes are not compared": (
        [(resolver, "fit", lambda *_: ("", None))],
        "another size of the model", "accepted|filled, though|raw|targets were touched|different things",
    ),
    "nothing is read": (
        [(files, "read_pieces", nothing)],
        "loaded twice", "was not loaded, and nothing says so",
    ),
    "a piece is read twice over": (
        [(files, "read_pieces", "reversed")],
        "loaded twice", "has wrong values|was not loaded",
    ),
    "an error is not the library's": (
        [(targets, "open_state", "raising")],
        "loaded twice", "raw|refused",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_of_the_library_is_found(mutant, monkeypatch):
    changes, name, reason = MUTANTS[mutant]
    for owner, attribute, change in changes:
        original = getattr(owner, attribute)
        if change == "reversed":

            def change(reader, pieces, memory, computes, original=original):
                original(reader, pieces, memory, computes=computes)
                for tensor in memory._memory._state.tensors:
                    flat = np.asarray(tensor).reshape(-1)
                    flat[...] = flat[::-1].copy()

        elif change == "raising":

            def change(*_args):
                raise KeyError("w")

        monkeypatch.setattr(owner, attribute, change)
    assert re.search(reason, first_finding(name))


def test_the_oracle_of_fused_parameters_is_its_own_inverse():
    whole = np.arange(32.0).reshape(2, 16)
    for parts in (1, 2, 4):
        assert (natural(interleaved(whole, (8, 4, 4), parts), (8, 4, 4), parts) == whole).all()
    assert interleaved(whole, (8, 8), 2)[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
