"""Other versions of PaddleFormers have what install() takes hold of; told from their wheels' sources.

Wheels are looked for in the directory that PADDLEFORMERS_WHEELS names:
``pip download --no-deps -d DIRECTORY paddleformers==1.1.1``.
"""

from __future__ import annotations

import ast
import os
import zipfile
from pathlib import Path
from types import FunctionType

import pytest

from paddle_flexckpt.trainer.flags import SHARED
from paddle_flexckpt.trainer.installation import _MIXINS, _OPTIONAL

VERSIONS = ("0.4.1", "1.0.0", "1.1.1", "1.2.0")
# What the mixins and the checkpointer read of a trainer's arguments without asking whether it is there.
FIELDS = {*SHARED, "output_dir", "ignore_save_lr_and_optim", "ignore_load_lr_and_optim", "save_total_limit"}
FIELDS |= {"load_best_model_at_end", "resume_from_checkpoint"}


def classes_in(version: str, path: str) -> dict[str, ast.ClassDef]:
    wheel = Path(os.environ.get("PADDLEFORMERS_WHEELS", ""), f"paddleformers-{version}-py3-none-any.whl")
    if "PADDLEFORMERS_WHEELS" not in os.environ or not wheel.exists():
        pytest.skip(f"there is no {wheel.name} in PADDLEFORMERS_WHEELS")
    tree = ast.parse(zipfile.ZipFile(wheel).read(f"paddleformers/{path}"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_trainer_has_the_methods(version):
    trainer = classes_in(version, "trainer/trainer.py")["Trainer"]
    there = {node.name: node for node in trainer.body if isinstance(node, ast.FunctionDef)}
    mixins = _MIXINS["paddleformers"]
    wanted = {name for mixin in mixins for name, method in vars(mixin).items() if isinstance(method, FunctionType)}
    assert wanted - _OPTIONAL <= there.keys()
    loop = [argument.arg for argument in there["_inner_training_loop"].args.args]
    assert "resume_from_checkpoint" in loop
    # What --flex_data_position relies on.
    named = {node.attr for node in ast.walk(there["_inner_training_loop"]) if isinstance(node, ast.Attribute)}
    assert {"on_load_data_end", "on_step_end", "ignore_data_skip"} <= named
    assert "train_dataloader" in loop
    assert {"_get_train_sampler", "get_train_dataloader"} <= there.keys()
    called = {node.attr for node in ast.walk(there["train"]) if isinstance(node, ast.Attribute)}
    assert {"_load_flex_checkpoint", "_inner_training_loop"} <= called


@pytest.mark.parametrize("version", VERSIONS)
def test_the_arguments_have_the_fields(version):
    arguments = classes_in(version, "trainer/training_args.py")["TrainingArguments"]
    there = {node.target.id for node in arguments.body if isinstance(node, ast.AnnAssign)}
    assert there >= FIELDS
