"""Remedies about parameters whose parts lie side by side on each rank, provoked and followed."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.memory.test_orders import make_old
from tests.remedies.following import advised, provoked

GATE = np.arange(16, dtype=np.float32).reshape(2, 8)
UP = GATE + 100
NATURAL = np.concatenate([GATE, UP], axis=1)
FFN = fc.FusedAxis(1, "fused_ffn")


def held(rank: int, degree: int) -> np.ndarray:
    """A rank's part: its half of the gate, then its half of the other matrix."""
    return np.concatenate([np.split(GATE, degree, 1)[rank], np.split(UP, degree, 1)[rank]], axis=1)


def state(rank: int, degree: int, rule, values=None) -> dict:
    values = np.full((2, 16 // degree), -1, np.float32) if values is None else values
    return {"w": fc.ShardedWeight("w", values, values.shape, (2, 16), (0, 16 // degree * rank), fused=rule)}


def save(path, degree: int, rule, values=held) -> None:
    def job(comm):
        fc.save_state_dict(state(comm.rank, degree, rule, values(comm.rank, degree)), path, comm)

    SimulatedWorld(degree).run(job)


def load(path, degree: int, rule, **options) -> list[np.ndarray]:
    def job(comm):
        target = state(comm.rank, degree, rule)
        fc.load_state_dict(target, path, comm, **options)
        return target["w"].local_tensor

    return SimulatedWorld(degree).run(job)


def check(found: list[np.ndarray], expected) -> None:
    for rank, values in enumerate(found):
        assert values.tolist() == expected(rank, len(found)).tolist()


def stored(rank: int, degree: int) -> np.ndarray:
    """A rank's part of what two ranks saved, in the order in which it stands there."""
    return np.split(np.concatenate([held(0, 2), held(1, 2)], axis=1), degree, axis=1)[rank]


def test_another_degree_is_loaded_by_the_option_or_the_statement(tmp_path):
    save(tmp_path, 2, FFN)
    with provoked("transfer/fused.py", "load with ") as caught:
        load(tmp_path, 4, FFN, fused="exact")
    statement = str(caught.value).partition('the AOA statement "')[2].partition('"')[0]
    assert 'fused="convert"' in str(caught.value)
    check(load(tmp_path, 4, FFN, fused="convert"), held)
    check(load(tmp_path, 4, FFN, fused="exact", aoa_config={"aoa_statements": [statement]}), held)


def test_a_layout_without_a_statement_is_loaded_under_its_degree_or_as_it_is_stored(tmp_path):
    rule = fc.FusedAxis(1, None)
    save(tmp_path, 2, rule)
    with provoked("transfer/fused.py", "load it under the degree of the save, or take it as it is stored") as caught:
        load(tmp_path, 4, rule)
    statement = str(caught.value).partition('the AOA statement "')[2].partition('"')[0]
    check(load(tmp_path, 2, rule), held)
    check(load(tmp_path, 4, rule, aoa_config={"aoa_statements": [statement]}), stored)
    with provoked("transfer/mapping.py", "take it as it is stored, by the AOA statement ") as caught:
        fc.load_merged_state_dict(tmp_path)
    statement = str(caught.value).partition('the AOA statement "')[2].partition('"')[0]
    merged = fc.load_merged_state_dict(tmp_path, aoa_config={"aoa_statements": [statement]})
    assert merged["w"].numpy().tolist() == stored(0, 1).tolist()


def test_a_rule_that_the_save_forgot(tmp_path):
    """Some key has a rule, so the file is none of those from before there were rules."""

    def job(comm):
        other = state(comm.rank, 2, FFN, held(comm.rank, 2))["w"]
        other.key = "v"
        fc.save_state_dict({**state(comm.rank, 2, None, held(comm.rank, 2)), "v": other}, tmp_path / "forgot", comm)

    SimulatedWorld(2).run(job)
    with provoked("transfer/fused.py", "mark it where it is saved; or give an AOA statement: ") as caught:
        load(tmp_path / "forgot", 4, FFN)
    parts, as_they_are = str(caught.value).partition("AOA statement: ")[2].split('"')[1:4:2]
    check(load(tmp_path / "forgot", 4, FFN, aoa_config={"aoa_statements": [parts]}), held)
    check(load(tmp_path / "forgot", 4, FFN, aoa_config={"aoa_statements": [as_they_are]}), stored)
    save(tmp_path / "marked", 2, FFN)
    check(load(tmp_path / "marked", 4, FFN), held)


@pytest.mark.parametrize("natural", [False, True])
def test_a_rule_that_the_load_forgot(tmp_path, natural):
    save(tmp_path, 2, FFN)
    with provoked("transfer/fused.py", "mark it: FusedAxis(") as caught:
        load(tmp_path, 4, None)
    assert "FusedAxis(1, 'fused_ffn') if" in str(caught.value)
    assert "FusedAxis(1, 'fused_ffn', parts=1) if" in str(caught.value)
    if natural:
        check(load(tmp_path, 4, fc.FusedAxis(1, "fused_ffn", parts=1)), lambda rank, n: np.split(NATURAL, n, 1)[rank])
    else:
        check(load(tmp_path, 4, FFN), held)


def test_a_state_lies_as_its_parameter_does(tmp_path):
    moment = {"w.moment1_0": np.zeros((2, 16), np.float32)}

    def job(comm, rule):
        part = state(comm.rank, 2, FFN, held(comm.rank, 2))["w"]
        shard = fc.ShardedWeight(
            "w.moment1_0", held(comm.rank, 2) + 0.5, (2, 8), (2, 16), (0, 8 * comm.rank), fused=rule
        )
        fc.save_state_dict({"w": part, "w.moment1_0": shard}, tmp_path, comm)

    def targets(rule):
        return {
            "w": fc.ShardedWeight("w", np.zeros((2, 16), np.float32), (2, 16), (2, 16), (0, 0), fused=FFN),
            "w.moment1_0": fc.ShardedWeight("w.moment1_0", moment["w.moment1_0"], (2, 16), (2, 16), (0, 0), fused=rule),
        }

    SimulatedWorld(2).run(lambda comm: job(comm, FFN))
    with provoked("transfer/resolver.py", "mark parameter and states with the same FusedAxis, or give AOA statements"):
        fc.load_state_dict(targets(fc.FusedAxis(1, "fused_ffn", parts=2)), tmp_path)
    fc.load_state_dict(targets(FFN), tmp_path)
    assert moment["w.moment1_0"].tolist() == (NATURAL + 0.5).tolist()
    statement = ['w -> w, fused_ffn, axis=1, states="model"', "w.moment1_0 -> w.moment1_0"]
    fc.load_state_dict(
        targets(fc.FusedAxis(1, "fused_ffn", parts=2)), tmp_path, aoa_config={"aoa_statements": statement}
    )
    assert moment["w.moment1_0"].tolist() == (stored(0, 1) + 0.5).tolist()


def test_an_old_checkpoint_is_saved_again_or_read_by_statements(tmp_path, caplog):
    save(tmp_path / "old", 2, FFN)
    make_old(tmp_path / "old")
    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        merged = fc.load_merged_state_dict(tmp_path / "old")["w"].numpy()
    warning = next(record.getMessage() for record in caplog.records if "Remedy" in record.getMessage())
    advised(
        "catalog/texts.py",
        "load it once into parameters that are marked with a FusedAxis where they are fused, under the strategy of",
        warning,
    )
    assert "->" not in warning  # a statement for a parameter that is not fused would permute it
    assert merged.tolist() == stored(0, 1).tolist()
    marked = load(tmp_path / "old", 2, FFN)
    save(tmp_path / "new", 2, FFN, lambda rank, degree: marked[rank])
    assert fc.load_merged_state_dict(tmp_path / "new")["w"].numpy().tolist() == NATURAL.tolist()
