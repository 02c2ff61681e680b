"""The compiler against the oracle: random programs under random layouts, bit for bit.

``AOA_PROGRAMS`` sets the number of programs (default 1,500); :mod:`tests.aoa.differential` runs any number of them.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from tests.aoa.differential import Totals, check_planned, failure_of, kind_of, run_seeds, shrink
from tests.aoa.oracle import Source, Target, run_program
from tests.aoa.program_writer import Program
from tests.aoa.programs import make_program

PROGRAMS = int(os.environ.get("AOA_PROGRAMS", "1500"))
BATCHES = 10
SYSTEM_EVERY = 25


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(1, BATCHES))])
def test_random_programs(batch):
    seeds = range(batch * PROGRAMS // BATCHES, (batch + 1) * PROGRAMS // BATCHES)
    totals = run_seeds(seeds, SYSTEM_EVERY, max_failures=1)
    assert not totals.failures, totals.failures[0][1]
    assert totals.programs == len(seeds)
    assert totals.whole_system >= len(seeds) // SYSTEM_EVERY
    assert min(totals.inverted, totals.undone["undone"], totals.undone["refused"]) > 0
    assert min(totals.moved, totals.computed, totals.kept) > 0


def test_the_generator_makes_every_kind_of_statement_and_the_same_program_again():
    kinds = {kind for seed in range(400) for kind in make_program(seed).kinds}
    assert kinds >= set(
        "rename pairwise swap copy cut array join stack unstack star ragged sum average lora_merge dequant fused_qkv "
        "fused_qkv_old fused_ffn remove keep fill optional states".split()
    )
    assert make_program(7).describe() == make_program(7).describe()


def test_every_attribute_and_every_dtype_is_met():
    text = " ".join(text for seed in range(1500) for text in make_program(seed).texts)
    for word in (
        'permute= reshape= reshape="auto" slice= pad= resize= resize="auto" fill= fill="keep" repeat= block= dtype= '
        'src_dtype= dst_dtype= scale= optional states= weights= sizes= sizes="auto" copy stack unstack sum average '
        'lora_merge dequant="fp8" dequant="mxfp4" $LAYER_ID $EXPERT_ID $LAYER_ID_OFFSET ${L+1} .*. [0:3] ^T # \n'
    ).split(" "):
        assert word in text, word
    dtypes = {str(each.array.dtype) for seed in range(400) for each in make_program(seed).source.values()}
    assert len(dtypes) == 17


def program_of(texts: list[str], source: dict[str, np.ndarray]) -> Program:
    """A program with one target, x, that is as the oracle says."""
    sources = {key: Source(value) for key, value in source.items()}
    return Program(0, texts, len(texts), sources, {"x": Target((2, 3), "float32")})


def test_a_wrong_result_is_a_difference_and_a_refusal_is_one_too(monkeypatch):
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    program = program_of(["a -> x"], {"a": value, "b": value + 1})
    totals = Totals()
    check_planned(program, totals)
    assert (totals.moved, totals.computed, totals.kept) == (totals.elements, 0, 0)

    import tests.aoa.differential as differential

    wrong = program_of(["b -> x"], {"a": value, "b": value + 1})
    monkeypatch.setattr(
        differential, "run_program", lambda *_: run_program(wrong.texts, wrong.source, wrong.destination)
    )
    reason = failure_of(program, whole_system=False)
    assert reason is not None
    assert kind_of(reason).startswith("Difference")
    monkeypatch.undo()
    refused = failure_of(replace(program, texts=["nowhere -> x"]), whole_system=False)
    assert refused is not None
    assert "nowhere" in refused


def test_failing_programs_are_made_smaller(monkeypatch):
    import tests.aoa.differential as differential

    value = np.ones((2, 3), dtype=np.float32)
    program = program_of(["a -> b", "c -> d", "b -> x"], {"a": value, "c": value, "e": value})
    monkeypatch.setattr(differential, "failure_of", lambda each, _: "wrong" if "b -> x" in each.texts else None)
    small = shrink(program)
    assert (small.texts, list(small.source), list(small.destination)) == (["a -> b", "b -> x"], ["a"], ["x"])
