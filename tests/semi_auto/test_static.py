"""Static graphs of semi-automatic parallelism (``dist.to_static``) train in the CPU world as one process does.

The jobs: a network turned into a static graph, trained, and read back from its state dict.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
from paddle import nn

from tests.semi_auto import training
from tests.semi_auto.strategies import BY_NAME, SIZES
from tests.semi_auto.test_training import ARRAY, LOSS, copies, shapes_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


class Batches(paddle.io.Dataset):
    """The rows of all batches, one after the other."""

    def __init__(self, sizes):
        self.batches = [training.batch(i, sizes) for i in range(training.STEPS)]

    def __len__(self):
        return training.STEPS * training.ROWS

    def __getitem__(self, i):
        x, y = self.batches[i // training.ROWS]
        return x[i % training.ROWS], y[i % training.ROWS : i % training.ROWS + 1]


def compare(strategy, sizes):
    """Trains a static graph under a strategy and compares with one process.

    Returns:
        ``losses``, each of this rank's rows, beside ``alone``, those of all rows; ``array``, the largest difference of
        an element of any array; ``missing`` keys; ``held``, the number of elements of each tensor on this rank.
    """
    losses, wanted = training.alone(sizes)
    built = training.build(strategy, sizes)
    with paddle.utils.unique_name.guard(built._names):
        loader = paddle.io.DataLoader(Batches(built.sizes), batch_size=training.ROWS)
        cut = "dp" if "dp" in built.strategy.axes else None
        loader = dist.shard_dataloader(loader, meshes=[built.mesh], shard_dims=cut)
        model = dist.to_static(built.model, loader, nn.CrossEntropyLoss(), built.optimizer)
        model.train()
        got_losses = [float(np.array(model(x, y)).reshape(-1)[0]) for x, y in loader]
    tensors = structured(built, model.state_dict())
    got = {key: training.whole(tensor) for key, tensor in tensors.items() if key in wanted}
    return {
        "losses": got_losses,
        "alone": losses,
        "array": max(float(np.abs(got[key].reshape(wanted[key].shape) - wanted[key]).max()) for key in got),
        "missing": sorted(set(wanted) - set(got)),
        "held": {key: int(np.prod(tensors[key]._local_shape)) for key in got},
    }


def structured(built, state):
    """A state dict of a static graph, in which states have Paddle's names, with the keys of the oracle.

    The number at the end of those counts the static graphs of this process.
    """
    keys = {parameter.name: key for key, parameter in built.model.named_parameters()}
    out = {}
    for name, tensor in state.items():
        owner = max((raw for raw in keys if name.startswith(raw + "_")), key=len, default=None)
        out[name if owner is None else f"{keys[owner]}.{name[len(owner) + 1 :].rpartition('_')[0]}_0"] = tensor
    return out


# -- what is asserted -------------------------------------------------------------------------------------------------

JOBS = "tests.semi_auto.test_static"


@pytest.mark.parametrize("name", ["dp2-stage1", "dp2-stage3", "mp2"])
def test_a_static_graph_trains_as_one_process_does(world2, name):
    reports = world2.run(f"{JOBS}:compare", strategy=name, sizes="even")
    # Each rank tells the loss of its own rows.
    losses = np.mean([report["losses"] for report in reports], axis=0)
    assert np.abs(losses - reports[0]["alone"]).max() <= LOSS
    for report in reports:
        assert report["missing"] == []
        assert report["array"] <= ARRAY
    wanted = {
        f"{key}.{moment}": np.prod(shape) * copies(BY_NAME[name], key, moment)
        for key, shape in shapes_of(SIZES["even"]).items()
        for moment in ("moment1_0", "moment2_0")
    }
    assert {key: sum(report["held"][key] for report in reports) for key in wanted} == wanted
