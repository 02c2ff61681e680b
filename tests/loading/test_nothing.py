"""Calls that would fill nothing: errors, whatever ``strict`` says."""

from __future__ import annotations

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.publishing import publish
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.conversion import convert_checkpoint
from tests.ramdisk import memory_directory
from tests.remedies.following import provoked

SOURCE = {"model.w": np.arange(6.0), "model.b": np.ones(2)}


def test_targets_of_which_the_source_knows_none_are_an_error(move):
    target = {"other": np.full(6, -1.0), "v": np.ones(1)}
    with provoked("transfer/resolution.py", "or give the source's keys these names by AOA statements") as caught:
        move(SOURCE, target, strict=False)
    for words in ("none of the 2 targets", "2 keys, such as 'model.b', 'model.w'"):
        assert words in str(caught.value)
    assert (target["other"] == -1).all()
    move(SOURCE, target, strict=False, aoa_config={"aoa_statements": ["model.w -> other"]})
    assert target["other"].tolist() == [0, 1, 2, 3, 4, 5]
    move(SOURCE, {"model.w": target["other"], "v": target["v"]}, strict=False)


def test_a_state_without_tensors_is_filled_and_so_is_one_of_statements_alone(move):
    assert move(SOURCE, {}).keys == 0
    assert move(SOURCE, {"w": np.ones(1)}, aoa_config={"aoa_statements": ["_ -> w, fill=0"]}).keys == 1


def test_a_rank_may_fill_nothing_where_another_fills_something(move_between):
    whole = np.arange(4.0)
    filled = move_between(
        2, lambda rank, _: {"w": whole}, lambda rank, _: {"w": np.zeros(4)} if rank else {}
    )  # fmt: skip
    assert filled[0] == {}
    assert filled[1]["w"].tolist() == [0, 1, 2, 3]


def test_the_error_is_the_same_on_all_ranks_each_time(tmp_path):
    def job(comm):
        save_state_dict(SOURCE, tmp_path, comm)
        texts = []
        for _ in range(2):
            with pytest.raises(ValidationError, match="none of the 1 targets") as caught:
                load_state_dict({"x": np.zeros(6)} if comm.rank else {}, tmp_path, comm, strict=False)
            texts.append(str(caught.value))
        return texts

    outcomes = SimulatedWorld(2).run(job)
    assert len({text for texts in outcomes for text in texts}) == 1


def test_a_prefix_that_no_key_has_is_an_error_of_every_call(tmp_path):
    comm = SoloCommunicator()
    save_state_dict(SOURCE, tmp_path / "saved", comm)
    calls = {
        "load": lambda prefix, _: fc.load_merged_state_dict(tmp_path / "saved", prefix=prefix),
        "export": lambda prefix, out: fc.export_safetensors(tmp_path / "saved", out, prefix=prefix),
        "merge": lambda prefix, out: fc.merge_sharded_state_dict(tmp_path / "saved", out, prefix, process_group=comm),
        "convert": lambda prefix, out: convert_checkpoint(tmp_path / "saved", out, prefix=prefix),
        "publish": lambda prefix, out: publish(SOURCE, out, comm, prefix=prefix),
    }
    for name, call in calls.items():
        for wrong in ("modle", "model."):
            with pytest.raises(
                ValidationError, match=rf"no key .*starts with '{wrong}\.'.*Remedy .FC201.: correct prefix"
            ):
                call(wrong, tmp_path / name)
            assert not (tmp_path / name).exists()
        call("model", tmp_path / name)


def test_all_that_is_left_out_is_an_error(tmp_path):
    comm = SoloCommunicator()
    save_state_dict(SOURCE, tmp_path / "saved", comm)
    with provoked("tools/tensor_files.py", "give tensors, and leave out fewer"):
        fc.merge_sharded_state_dict(
            tmp_path / "saved", tmp_path / "out", skip_postfix_list=["w", "b"], process_group=comm
        )
    report = fc.merge_sharded_state_dict(
        tmp_path / "saved", tmp_path / "out", skip_postfix_list=["b"], process_group=comm
    )
    assert report.keys == 1
    with memory_directory() as path:
        save_state_dict({}, path, comm)
        with pytest.raises(ValidationError, match="none of the 1 targets .* which has no key"):
            load_state_dict({"w": np.zeros(1)}, path, comm, strict=False)
