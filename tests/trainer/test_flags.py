"""What the flags mean, without a trainer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.trainer import TrainerOptions, options_of
from paddle_flexckpt.transfer.options import LoadOptions
from tests.remedies.following import provoked

FLEX = {"save_checkpoint_format": "flex_checkpoint", "load_checkpoint_format": "flex_checkpoint"}


def options(**flags) -> TrainerOptions:
    return options_of(SimpleNamespace(**flags))


def test_without_flags_nothing_is_asked_for():
    assert options() == TrainerOptions()
    assert not TrainerOptions().save
    assert not TrainerOptions().load
    assert options(save_checkpoint_format="unified_checkpoint", unified_checkpoint=True) == TrainerOptions()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {}),
        ({"flex_verify": "full"}, {"verify": "full"}),
        ({"flex_strict": "both"}, {"strict": True}),
        ({"flex_strict": "none"}, {"strict": False}),
        ({"flex_strict": "unexpected"}, {"strict": "unexpected"}),
        ({"flex_cast": True}, {"dtype": "cast"}),
        ({"flex_convert_master_weights": True}, {"master_weights": "convert"}),
        ({"flex_ignore_optimizer_states": True}, {"optimizer_states": "ignore"}),
        ({"aoa_config": '["a -> b"]'}, {"aoa_config": {"aoa_statements": ["a -> b"]}}),
        ({"aoa_config": "rules.yaml"}, {"aoa_config": "rules.yaml"}),
        ({"aoa_config": {"aoa_statements": ["a -> b"]}}, {"aoa_config": {"aoa_statements": ["a -> b"]}}),
        ({"aoa_config": ""}, {"aoa_config": None}),
    ],
)
def test_flags_reach_the_load(flags, expected):
    plain = {"aoa_config": None, "strict": "missing", "verify": "read", "dtype": "raise", "master_weights": "exact"}
    plain["optimizer_states"] = "raise"
    assert options(**FLEX, **flags).loading() == LoadOptions(**{**plain, **expected})


@pytest.mark.parametrize("name", ["async_save", "fallback", "export_hf", "save_replicas", "data_position"])
def test_switches(name):
    for value in (True, False):
        assert getattr(options(**FLEX, **{f"flex_{name}": value}), name) is value


@pytest.mark.parametrize("name", ["save_checkpoint_format", "load_checkpoint_format"])
@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("flex", "flex_checkpoint"),
        ("Flex_Checkpoint", "flex_checkpoint"),
        ("flex-checkpoint ", "flex_checkpoint"),
        ("unified", "unified_checkpoint"),
        ("shard_io", "sharding_io"),
        ("safetensors", "flex_checkpoint"),
        (True, "flex_checkpoint"),
    ],
)
def test_a_format_that_nobody_knows_is_refused_with_what_is_meant(name, value, meant):
    with provoked("trainer/flags.py", ", if it is meant") as caught:
        options(**{name: value})
    assert f"got {value!r}. Remedy (FC905): --{name} {meant}, if" in str(caught.value)
    assert (options(**{name: meant}) == TrainerOptions()) is (meant != "flex_checkpoint")


@pytest.mark.parametrize("name", ["cast", "ignore_schedule", "async_save"])
def test_a_switch_may_be_a_text(name):
    """As PaddleFleet's, or one of a configuration file: the text 'false' counted as true."""
    for value in ("true", "True", "1", 1, True):
        assert options(**{f"flex_{name}": value}) == options(**{f"flex_{name}": True})
    for value in ("false", "0", 0, None, False):
        assert options(**{f"flex_{name}": value}) == options()
    for value in ("yes", "ture", "", 2):
        with pytest.raises(ValidationError, match=f"--flex_{name} is True or False; got {value!r}"):
            options(**{f"flex_{name}": value})


def test_staging():
    assert options(**FLEX).staging() == {"async_save": False, "slice_bytes": None, "staging_bytes": None}
    sliced = options(**FLEX, flex_async_save=True, flex_slice_bytes=1 << 20)
    assert sliced.staging() == {"async_save": True, "slice_bytes": 1 << 20, "staging_bytes": None}
    assert options(**FLEX, flex_async_save=True, flex_staging_bytes=64 << 20).staging_bytes == 64 << 20


def test_replicas():
    assert options(**FLEX).check_replicas == "close"
    for value, expected in (
        ("equal", "equal"),
        ("all", "all"),
        ("1", "equal"),
        (True, "equal"),
        ("first", False),
        (False, False),
    ):
        assert options(**FLEX, flex_check_replicas=value).check_replicas == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"flex_verify": "some"}, "--flex_verify has to be one of read, full, off; got 'some'"),
        ({"flex_check_replicas": "any"}, "--flex_check_replicas has to be one of close, equal, all, first; got 'any'"),
        ({"flex_strict": "yes"}, "--flex_strict has to be one of missing, unexpected, both, none; got 'yes'"),
        ({"unified_checkpoint": True}, "leave --unified_checkpoint out"),
        ({"save_sharded_model": True}, "leave --save_sharded_model out"),
        ({"load_sharded_model": True}, "leave --load_sharded_model out"),
        ({"use_async_save": True}, "--flex_async_save, not --use_async_save"),
        (
            {"enable_auto_parallel": True, "flex_fallback": True},
            "cannot go back to another. Remedy (FC905): leave it out",
        ),
        (
            {"enable_auto_parallel": True, "save_model_with_sharding_tensor_fusion": True},
            "--save_model_with_sharding_tensor_fusion is of the trainer's own format",
        ),
        ({"flex_slice_bytes": 1 << 20}, "--flex_async_save 0: slice_bytes=1048576 needs async_save"),
        ({"flex_async_save": True, "flex_staging_bytes": 1}, "--flex_async_save 1: staging_bytes=1 needs async_save"),
        (
            {"enable_auto_parallel": True, "flex_async_save": True, "flex_slice_bytes": 1 << 20},
            "--flex_slice_bytes: the semi-automatic trainer (--enable_auto_parallel) may step in a static graph",
        ),
        ({"aoa_config": "[no json"}, "--aoa_config is no JSON"),
        ({"aoa_config": 3}, "--aoa_config has to be statements or the path of a file; got a int"),
    ],
)
def test_what_cannot_be_is_said(flags, said):
    with pytest.raises(ValidationError) as caught:
        options(**{**FLEX, **flags})
    assert said in str(caught.value)


def test_a_tilde_of_which_the_trainer_would_make_a_directory_is_refused(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    with provoked("trainer/flags.py", "give the path in full, ") as caught:
        options(**FLEX, output_dir="~/runs/1")
    assert "a directory that is called ~. Remedy (FC905): give the path in full, /home/me/runs/1" in str(caught.value)
    assert options(**FLEX, output_dir="/home/me/runs/1").save


def test_the_semi_automatic_trainer_is_served_and_that_of_paddleformers_is_not():
    flags = {**FLEX, "enable_auto_parallel": True}
    assert options(**flags) == options(**FLEX)
    theirs = type("TrainingArguments", (SimpleNamespace,), {"__module__": "paddleformers.trainer.training_args"})
    with pytest.raises(ValidationError, match="does not serve PaddleFormers' semi-automatic trainer"):
        options_of(theirs(**flags))
