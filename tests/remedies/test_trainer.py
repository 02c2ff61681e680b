"""Remedies of the trainers' flags and directories, each provoked and followed, without a trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.trainer import options_of
from paddle_flexckpt.trainer.directories import SUBDIRECTORY, TrainerDirectories, choose_checkpoint
from tests.remedies.following import Advice, provoked
from tests.trainer.test_arguments import FLEX, options


class OfPaddleFleet(SimpleNamespace):
    __module__ = "paddlefleet.trainer"


AUTO = {**FLEX, "enable_auto_parallel": True}
FLAGS = [
    (
        Advice("trainer/arguments.py", "leave --unified_checkpoint out; a unified checkpoint loads with"),
        {**FLEX, "unified_checkpoint": True},
        FLEX,
    ),
    (Advice("trainer/arguments.py", "leave --"), {**FLEX, "save_sharded_model": True}, FLEX),
    (Advice("trainer/arguments.py", "leave --"), {**FLEX, "load_sharded_model": True}, FLEX),
    (
        Advice("trainer/arguments.py", "--flex_async_save, not --use_async_save"),
        {**FLEX, "use_async_save": True},
        {**FLEX, "flex_async_save": True},
    ),
    (
        Advice("trainer/arguments.py", "--flex_async_save, not --enable_zero_cost_checkpoint"),
        {**FLEX, "enable_zero_cost_checkpoint": True},
        {**FLEX, "flex_async_save": True},
    ),
    (
        Advice("trainer/arguments.py", "give --ignore_load_lr_and_optim as well"),
        {**FLEX, "load_from_hf": True},
        {**FLEX, "load_from_hf": True, "ignore_load_lr_and_optim": True},
    ),
    (
        Advice("trainer/arguments.py", "leave it out; where a checkpoint is damaged, the error names it, and"),
        {**AUTO, "flex_fallback": True},
        AUTO,
    ),
    (
        Advice("trainer/arguments.py", "leave it out"),
        {**AUTO, "flex_async_save": True, "flex_slice_bytes": 1 << 20},
        {**AUTO, "flex_async_save": True},
    ),
    (Advice("trainer/arguments.py", "leave it out"), {**AUTO, "load_model_with_sharding_tensor_fusion": True}, AUTO),
    (
        Advice("trainer/arguments.py", "leave --save_hf_steps out; the averages are in the checkpoint"),
        {**FLEX, "zcc_save_ema_coef": 0.9, "save_hf_steps": 5},
        {**FLEX, "zcc_save_ema_coef": 0.9},
    ),
    (
        Advice("trainer/arguments.py", "give --aoa_config with the statements of parameters"),
        {**FLEX, "aoa_config_model_state": "x.json"},
        {**FLEX, "aoa_config": '["a -> b"]'},
    ),
]


@pytest.mark.parametrize(
    ("advice", "wrong", "right"), FLAGS, ids=[f"{i}-{f[0].words[:30]}" for i, f in enumerate(FLAGS)]
)
def test_a_flag_is_left_out_or_given(advice, wrong, right):
    fleet = "save_hf_steps" in wrong or "aoa_config_model_state" in wrong
    with provoked(*advice):
        options_of(OfPaddleFleet(**wrong)) if fleet else options(**wrong)
    asked = options_of(OfPaddleFleet(**right)) if fleet else options(**right)
    assert (asked.save, asked.load) == (True, True)
    assert asked.async_save == bool(right.get("flex_async_save"))


def test_a_checkpoint_that_is_not_complete(tmp_path):
    a = np.arange(4, dtype=np.float32)
    directories = TrainerDirectories(tmp_path)

    def save(step):
        directories.begin(step)
        fc.save_state_dict({"a": a + step}, tmp_path / f"checkpoint-{step}" / SUBDIRECTORY)

    def loaded(checkpoint):
        target = {"a": np.zeros_like(a)}
        fc.load_state_dict(target, Path(checkpoint) / SUBDIRECTORY)
        return target["a"].tolist()

    save(2)
    (manifest,) = (tmp_path / "checkpoint-2" / SUBDIRECTORY).glob("*.manifest")
    manifest.unlink()
    with provoked("trainer/directories.py", "there is none before it: "):
        choose_checkpoint(str(tmp_path / "checkpoint-2"), directories, False)
    with provoked(
        "trainer/directories.py", "rebuild a lost manifest by `flexckpt repair`; or begin anew, with another"
    ):
        choose_checkpoint("true", directories, False)
    assert not TrainerDirectories(tmp_path / "another").last()
    assert main(["repair", str(tmp_path / "checkpoint-2" / SUBDIRECTORY), "--id", "0"]) == 0
    for asked in (str(tmp_path / "checkpoint-2"), "true"):
        assert loaded(choose_checkpoint(asked, directories, False)) == (a + 2).tolist()
    save(4)
    (manifest,) = (tmp_path / "checkpoint-4" / SUBDIRECTORY).glob("*.manifest")
    manifest.unlink()
    broken = str(tmp_path / "checkpoint-4")
    with provoked("trainer/directories.py", "or give --flex_fallback 1") as caught:
        choose_checkpoint(broken, directories, False)
    named = str(caught.value).partition("resume from ")[2].partition(", or")[0]
    for checkpoint in (choose_checkpoint(named, directories, False), choose_checkpoint(broken, directories, True)):
        assert loaded(checkpoint) == (a + 2).tolist()
