"""A layout of a live model on one rank equals what the ranks of a real job describe, and a load of it is counted."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("paddle")
import paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.live_rehearsal import describe_model, layout_of_model
from paddle_flexckpt.testing import cpu_world
from tests.distributed import test_experts as experts
from tests.distributed.matrix.network import BLOCKS, Block, Embedding, Head, Loss, tied_head
from tests.distributed.matrix.strategies import BY_NAME
from tests.distributed.test_layouts import describe, rows_of, text_of
from tests.documents import code_block

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what the one rank runs --------------------------------------------------------------------------------------------

EXPERT_CUTS = [(f"*.experts.*.{name}", axis) for name, axis in experts.AXES.items()]


def pipeline(tied):
    """The model of the matrix in one process: one stage, with layers that tensor parallelism could split."""
    fc.install()
    hcg = cpu_world.init_fleet()
    first, last = LayerDesc(Embedding, 2), LayerDesc(Head)
    if tied:
        shared = {"shared_weight_attr": "embedding_weight", "mp": 2}
        first = SharedLayerDesc("embedding", Embedding, **shared)
        last = SharedLayerDesc("embedding", Embedding, forward_func=tied_head, **shared)
    descs = [first, *(LayerDesc(Block, 2) for _ in range(BLOCKS)), last]
    net = PipelineLayer(descs, num_stages=1, loss_fn=Loss(), topology=hcg.topology(), seg_method="layer:Block")
    return net, paddle.optimizer.AdamW(0.01, parameters=[p for p in net.parameters() if not p.stop_gradient])


def one_rank(model):
    """A model of the matrix, its optimizer, and what tensor parallelism cuts of it that no layer says."""
    if model == "experts":
        fc.install()
        cpu_world.init_fleet()
        net = experts.Net()
        return net, experts.adamw(net), EXPERT_CUTS
    return (*pipeline(model == "tied"), [])


def layouts(model, texts):
    """What each rank would have under strategies, with the optimizer, and with the one that is taken for granted."""
    net, optimizer, cuts = one_rank(model)
    found = []
    for text in texts:
        made = [layout_of_model(net, text, optimizer=given, cuts=cuts)[0] for given in (optimizer, None)]
        found.append([[rows_of(each.catalog(rank)) for rank in range(each.strategy.ranks)] for each in made])
    return found


def errors(folder, example):
    """What is said of models that do not say enough; and of one that does, by the example of a document."""
    net, optimizer = pipeline(True)
    state = net.sharded_state_dict()
    fc.save_state_dict({**state, **optimizer.sharded_state_dict(state)}, folder)

    def said(call):
        try:
            call()
        except (ValueError, fc.CheckpointError) as error:
            return str(error)
        return None

    class Own(nn.Layer):
        def __init__(self):
            super().__init__()
            self.weight = self.create_parameter([4, 2])

        def _get_shard_rules(self):
            return {"weight": 0}

        def _get_shard_group(self):
            return fleet.get_hybrid_communicate_group().get_data_parallel_group()

    listed = nn.Sequential(("experts", nn.LayerList([nn.Linear(2, 2) for _ in range(2)])))
    own = nn.Sequential(("stacked", Own()))
    part = {"w": fc.ShardedWeight("w", paddle.zeros([2]), (2,), (4,), (0,))}
    cut = type("Cut", (), {"sharded_state_dict": lambda self: part})()
    every = paddle.optimizer.AdamW(0.01, parameters=net.parameters())
    report = fc.rehearse(folder, "tp=2,pp=2", model=net, optimizer=optimizer)
    fc.uninstall()
    again = fc.rehearse(folder, "tp=2,pp=2", model=net, optimizer=optimizer)
    left = {"fc": fc, "net": net, "optimizer": optimizer}
    exec(example.replace('"checkpoint"', "folder"), {**left, "folder": folder}, left)
    other = fc.rehearse(folder, "tp=2", model=nn.Sequential(("new", nn.Linear(2, 2))), cuts=[("*weight", 1)])
    return {
        "part": said(lambda: layout_of_model(cut, "tp=2")),
        "listed": said(lambda: layout_of_model(listed, "dp=2,ep=2")),
        "own": said(lambda: layout_of_model(own, "tp=2")),
        "own cut": said(lambda: layout_of_model(own, "tp=2", cuts=[("stacked.weight", 1)])),
        "whole": said(lambda: layout_of_model(nn.Linear(2, 2), "tp=2")),
        "seg_method": said(lambda: layout_of_model(net, "pp=2", seg_method="layer:Nothing")),
        "no pipeline": said(lambda: layout_of_model(own, "pp=2", seg_method="uniform")),
        "frozen": said(lambda: layout_of_model(net, "sharding=v2:2", optimizer=every)),
        "frozen, whole": said(lambda: layout_of_model(net, "dp=2", optimizer=every)),
        "uniform": describe_model(net, optimizer, seg_method="uniform")[0].counted,
        "report": [report.ok, report.error, [each.bytes_needed for each in report.ranks], report.notes],
        "by itself": [again.error, again.ranks == report.ranks],
        "example": [left["report"].ok, left["report"].error, left["report"].world_size],
        "missing": other.error,
        "both": said(lambda: fc.rehearse(folder, layout_of_model(net, "tp=2")[0], model=net)),
    }


# -- what is asserted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("tied", ["tp2xpp2", "pp4xvpp2", "v2x2xpp2"]),
        ("untied", ["tp2xv1x2", "tp2xv2x2"]),
        ("experts", ["ep2xtp2", "v2x4+ep2", "tp2xv2x2+ep4tp"]),
    ],
)
def test_a_layout_of_a_live_model_is_that_of_real_ranks(world, model, names):
    chosen = [BY_NAME[name] for name in names]
    (said,) = world(1).run(layouts, model=model, texts=[text_of(each) for each in chosen])
    for strategy, (given, granted) in zip(chosen, said):
        real = world(strategy.world).run(describe, strategy=strategy.name, model=model)
        assert given == real
        assert granted == real


def test_a_load_is_rehearsed_and_what_is_not_known_is_refused(world, tmp_path):
    example = code_block("docs/rehearsal.md", "model=net, optimizer=optimizer")
    (said,) = world(1).run(errors, folder=os.fspath(tmp_path), example=example)
    assert said["example"] == [True, "", 64]
    assert said["by itself"] == ["", True]  # without install() before
    assert "parts of a parallel job, such as w" in said["part"] and "in one process" in said["part"]
    assert "'experts.0.weight'" in said["listed"] and "ExpertParallelMixin" in said["listed"]
    assert "'stacked.weight'" in said["own"] and "cuts=[('stacked.weight', None)]" in said["own"]
    assert said["own cut"] is None
    assert "nothing says how tensor parallelism cuts" in said["whole"] and "cuts=" in said["whole"]
    assert "'layer:NAME' with one of ['Block', 'Embedding']" in said["seg_method"]
    assert "needs a PipelineLayer" in said["no pipeline"]
    assert "frozen parameters" in said["frozen"] and "without stop_gradient" in said["frozen"]
    assert said["frozen, whole"] is None
    assert said["uniform"] is None
    ok, error, needed, notes = said["report"]
    assert (ok, error) == (True, "") and len(needed) == 4 and min(needed) > 0
    (note,) = notes  # of parameters that no rule splits
    assert "1.cube" in note
    assert "'new.weight'" in said["missing"]
    assert "a layout has its own model" in said["both"]
