"""Two-way with stock Paddle, in real ranks, for each strategy of the matrix in the same layout, bit for bit.

What Paddle's save_state_dict has written, this library loads. What this library has saved and converted to Paddle's
format, Paddle's load_state_dict loads. ``make test-matrix`` runs all strategies.
"""

from __future__ import annotations

import functools
import random
import re
from unittest import mock

import pytest

pytest.importorskip("paddle.distributed.flex_checkpoint")

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.tools import models
from paddle_flexckpt.tools.conversion import convert_checkpoint
from tests.distributed.matrix.assembly import assemble, differing
from tests.distributed.matrix.strategies import BY_NAME, STRATEGIES
from tests.distributed.test_layouts import text_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

JOBS = "tests.distributed.matrix.stock"
# Stage 3 cuts parameters of more elements; group_sharded_parallel was told so.
SEGMENT_SIZE = 64
# In a pipeline a tied weight is two stages'; a checkpoint does not say which, so Paddle has to send it.
CASES = [(each.name, "experts" if "untied" not in each.models else "untied") for each in STRATEGIES]
CASES += [(name, "tied") for name in ("tp2", "pp2", "tp2xpp2")]
IN_CI = random.Random(0).sample([case for case in CASES if BY_NAME[case[0]].world == 2], 2)
# Of these Paddle puts flattened ranges together wrong, of its own files too: parameters of three axes are cut inside
# rows ("minimal_nd_slice" looks at one axis before).
PADDLE_READS_WRONG = {"tp2xv2x2", "stage3x2", "stage3x4"}


def convert(folder, name, save_replicas=False):
    """The checkpoint of this library in Paddle's format, in the layout of the ranks that saved it."""
    output = f"paddle-{'replicas' if save_replicas else 'once'}"
    sized = functools.partial(models.Model, segment_size=SEGMENT_SIZE)
    with mock.patch.object(models, "Model", sized):
        convert_checkpoint(
            folder / "ours",
            folder / output,
            format="paddle",
            strategy=text_of(BY_NAME[name]),
            save_replicas=save_replicas,
        )
    return output


@pytest.mark.parametrize(
    ("name", "model"),
    [pytest.param(*case, marks=() if case in IN_CI else pytest.mark.slow, id="-".join(case)) for case in CASES],
)
def test_two_way_with_stock_paddle(world, tmp_path, name, model):
    ranks = BY_NAME[name].world
    job = {"strategy": name, "model": model, "folder": str(tmp_path)}
    keys = world(ranks).run(f"{JOBS}:save", **job)
    saved = assemble(tmp_path / "saved", ranks)
    assert sorted(saved) == sorted({key for each in keys for key in each})

    def wrong(loaded):
        try:
            return differing(saved, assemble(tmp_path / f"loaded-{loaded}", ranks))
        except AssertionError as error:  # ranks disagree, or have lost elements
            return [str(error).split(":")[0].split(" on rank")[0]]

    # From Paddle to this library.
    world(ranks).run(f"{JOBS}:load_with_us", names=["stock-once", "stock-replicas"], **job)
    assert (wrong("stock-once"), wrong("stock-replicas")) == ([], [])

    # From this library to Paddle. Where every rank has all of its own, Paddle moves nothing.
    names = [convert(tmp_path, name, save_replicas=True)]
    if name in PADDLE_READS_WRONG:
        with pytest.raises(ValidationError, match="Paddle reads this wrong: a flattened range of a tensor with three"):
            convert(tmp_path, name)
    else:
        names.append(convert(tmp_path, name))
    local = world(ranks).run(f"{JOBS}:load_with_stock", names=[*names, "stock-once"], **job)
    assert [wrong(each) for each in names] == [[]] * len(names)
    is_spread = model == "tied" and BY_NAME[name].pp > 1
    assert all("paddle-replicas" in each for each in local) == (not is_spread)
    # Where this library refuses, Paddle's own file is no better, and of the same tensors.
    assert bool(wrong("stock-once")) == (name in PADDLE_READS_WRONG)
    assert {re.sub(r"^\d+\.|\.moment._0$", "", key) for key in wrong("stock-once")} <= {"cube"}
