"""What a rehearsal says without ranks is what the ranks of a real job count and raise."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

pytest.importorskip("paddle")
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.planning.layouts import Layout, ModelTensor
from paddle_flexckpt.planning.strategy import parse_strategy
from paddle_flexckpt.tools.rehearsal import rehearse
from paddle_flexckpt.transfer.options import LoadOptions
from tests.distributed.matrix import jobs
from tests.distributed.matrix.rehearsals import JOBS, layout_of, miscounted, missaved, undescribed
from tests.distributed.matrix.strategies import BY_NAME, MODELS, sample
from tests.distributed.matrix.table import Matrix
from tests.distributed.test_layouts import model_of

PAIRS = [
    ("tied", "single", "tp2xpp2"),
    ("untied", "tp2xv2x2", "v2x2xpp2"),
    ("untied", "v2x4", "stage3x2"),
    ("untied", "stage3x4", "tp2"),
    ("tied", "pp2", "pp4xvpp2"),
    ("untied", "pp4", "tp2xv1x2"),
    ("experts", "ep4", "ep2xtp2"),
]
# Each of these strategies, or one that cuts as it does, is in a pair above.
LIKE_THEM = [
    ("tied", "tp2", "tp4"),
    ("untied", "stage2x2", "dp2"),
    ("untied", "v1x2", "v2x4"),
    ("experts", "ep2", "ep4"),
]


def load_more(strategy, model, folder):
    """What a rank raises that also has a tensor which the checkpoint lacks, and one of another shape."""
    state = jobs.begin(strategy, model, "other").state()
    state["new.weight"] = paddle.zeros([3, 4])
    state["1.frozen"] = paddle.zeros([5])
    try:
        fc.load_state_dict(state, folder)
    except fc.ValidationError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def matrix(world, tmp_path_factory):
    return Matrix(world, tmp_path_factory.mktemp("rehearsed"))


def saved(matrix, model, name):
    matrix.saved(model, name)
    return os.path.join(matrix._folder, model, name, "checkpoint")


# The seeded ones are those of worlds up to four, of which CI runs none; `make test-rehearsals` compares all.
SEEDED = [(model, *pair) for model in MODELS for pair in sample(model, count=3, largest_world=4, seed=1)[-3:]]


@pytest.mark.parametrize(
    ("model", "one", "other"),
    PAIRS + [pytest.param(*each, marks=pytest.mark.slow) for each in [*LIKE_THEM, *SEEDED] if each not in PAIRS],
)
def test_counts_are_those_of_a_real_job(world, matrix, model, one, other):
    path, strategy = saved(matrix, model, one), BY_NAME[other]
    counted = world(strategy.world).run(f"{JOBS}:load", strategy=other, model=model, folders={one: path})
    assert miscounted(path, layout_of(strategy, model), [found[one] for found in counted]) == []


SAVES = [
    ("tied", "tp2xpp2"),
    ("tied", "tp2xv1x2"),
    ("untied", "v2x2xpp2"),
    ("untied", "stage3x4"),
    ("experts", "ep2xtp2"),
]


@pytest.mark.parametrize(("model", "name"), SAVES)
def test_a_save_counts_what_is_said(world, tmp_path, model, name):
    strategy = BY_NAME[name]
    found = world(strategy.world).run(f"{JOBS}:save", strategy=name, model=model, folder=str(tmp_path))
    layout = layout_of(strategy, model)
    assert undescribed(layout, [rank["rows"] for rank in found]) == []
    assert missaved(layout, [rank["counted"] for rank in found]) == []


def test_errors_are_those_of_a_real_job(world, matrix):
    path, strategy = saved(matrix, "untied", "single"), BY_NAME["tp2"]
    known = model_of(strategy, "untied")
    tensors = [replace(each, shape=(5,)) if each.name == "1.frozen" else each for each in known.tensors]
    tensors = (*tensors, ModelTensor("new.weight", (3, 4), is_trained=False))
    (text,) = {*world(2).run(load_more, strategy="tp2", model="untied", folder=path)}
    layout = Layout(replace(known, tensors=tensors), parse_strategy("tp=2"))
    report = rehearse(path, layout, LoadOptions())
    assert "'new.weight'" in text and "'1.frozen'" in text
    assert text == report.error
