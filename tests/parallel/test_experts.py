"""Experts' numbers and marks in one process, with groups that are only described."""

from __future__ import annotations

from types import SimpleNamespace

import paddle
import pytest
from paddle import nn
from paddle.incubate.distributed.models.moe import MoELayer

from paddle_flexckpt.parallel.experts import ExpertParallelMixin

pytestmark = pytest.mark.compat


def group(rank, size):
    return SimpleNamespace(rank=rank, nranks=size, ranks=list(range(size)))


class OwnMoE(ExpertParallelMixin, nn.Layer):
    def __init__(self, moe_group, experts, total=None):
        super().__init__()
        self.moe_group, self.num_experts = moe_group, total
        self.gate = nn.Linear(2, 4)
        self.experts = nn.LayerList([nn.Linear(2, 3) if expert else None for expert in experts])


def numbers(layer):
    return sorted({int(key.split(".")[1]) for key in layer.sharded_state_dict() if key.startswith("experts.")})


def test_numbers_follow_the_rank_in_the_group():
    assert numbers(OwnMoE(group(0, 3), [1, 1])) == [0, 1]
    assert numbers(OwnMoE(group(2, 3), [1, 1], total=6)) == [4, 5]
    assert numbers(OwnMoE(None, [1, 1, 1])) == [0, 1, 2]
    # Paddle gives the rank of a group of one as -1.
    assert numbers(OwnMoE(group(-1, 1), [1, 1])) == [0, 1]


def test_a_slot_for_every_expert_has_its_number_already():
    assert numbers(OwnMoE(group(1, 2), [0, 0, 1, 1], total=4)) == [2, 3]


def test_keys_shapes_and_prefix():
    layer = nn.Sequential(("block", OwnMoE(group(1, 2), [1, 1])))
    state = layer.sharded_state_dict("model.")
    wanted = {f"model.block.experts.{i}.{p}" for i in (2, 3) for p in ("weight", "bias")}
    assert set(state) == wanted | {"model.block.gate.weight", "model.block.gate.bias"}
    assert all(weight.key == key for key, weight in state.items())
    weight = state["model.block.experts.3.weight"]
    assert weight.global_shape == weight.local_shape == (2, 3)
    assert weight.local_tensor is layer.block.experts[1].weight


def test_tied_experts_know_each_others_numbers():
    layer = OwnMoE(group(1, 2), [1, 1])
    layer.experts[1].bias = layer.experts[0].bias
    state = layer.sharded_state_dict()
    assert state["experts.2.bias"].aliases == ("experts.3.bias",)
    assert state["experts.3.bias"].aliases == ("experts.2.bias",)


def test_several_lists():
    class Two(OwnMoE):
        def _get_expert_lists(self):
            return ("experts", "small")

    layer = Two(group(1, 2), [1, 1])
    layer.small = nn.LayerList([nn.Linear(1, 1)])
    assert {"experts.2.weight", "experts.3.weight", "small.1.weight"} <= set(layer.sharded_state_dict())


@pytest.mark.parametrize(
    ("group_size", "experts", "total", "text"),
    [
        (2, [1, 1], 3, "has to be a multiple of the 2 ranks.*got 3.*Remedy"),
        (2, [1, 1, 1], 4, "expected 2 experts on each of 2 ranks, 4 in all; got 3 on this rank.*Remedy"),
        (2, [1], 4, "expected 2 experts .* got 1"),
        (2, [1, 0, 1, 0], 4, r"has to hold those from 2 to 3 .* got \[0, 2\] of 4.*Remedy"),
        (2, [1, 1, 0], None, r"of 4 on rank 1 of the group; got \[0, 1\] of 3"),
        (2, [], None, "LayerList of at least one expert; got LayerList"),
    ],
)
def test_numbers_that_do_not_fit(group_size, experts, total, text):
    with pytest.raises(ValueError, match=rf"OwnMoE.experts.*{text}"):
        OwnMoE(group(1, group_size), experts, total).sharded_state_dict()


def test_no_group_and_not_a_member():
    layer = OwnMoE(None, [1])
    del layer.moe_group
    with pytest.raises(
        ValueError, match=r"OwnMoE does not say over which process group.*Remedy .FC803.: set moe_group"
    ):
        layer.sharded_state_dict()
    with pytest.raises(ValueError, match="this rank is not in the group"):
        OwnMoE(group(-1, 2), [1]).sharded_state_dict()


def moe_layer(experts, moe_group, monkeypatch):
    from paddle.incubate.distributed.models.moe import moe_layer as module

    monkeypatch.setattr(module, "check_nccl_version_for_p2p", lambda: None)
    experts = nn.LayerList([nn.Linear(4, 4) for _ in range(experts)])
    return MoELayer(d_model=4, experts=experts, gate={"type": "naive", "top_k": 1}, moe_group=moe_group)


def test_paddles_layer(monkeypatch):
    layer = moe_layer(2, group(1, 2), monkeypatch)
    assert numbers(layer) == [2, 3]
    assert {"gate.gate.weight", "gate.gate.bias"} <= set(layer.sharded_state_dict())
    layer.experts.append(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"MoELayer.experts: expected 2 experts on each of 2 ranks.*got 3"):
        layer.sharded_state_dict()


def test_a_correction_bias_that_is_not_of_all_experts_is_refused():
    layer = OwnMoE(group(0, 2), [1, 1])
    layer.gate.e_score_correction_bias = layer.create_parameter([4], is_bias=True)
    layer.gate.e_score_correction_bias.is_distributed = True
    assert layer.sharded_state_dict()["gate.e_score_correction_bias"].global_shape == (4,)
    assert layer.gate.e_score_correction_bias.is_distributed
    layer.gate.e_score_correction_bias = layer.create_parameter([2], is_bias=True)
    layer.gate.e_score_correction_bias.is_distributed = True
    with pytest.raises(ValueError, match="marked is_distributed, but no rule"):
        layer.sharded_state_dict()


def test_marks_come_back_after_an_error():
    layer = OwnMoE(group(0, 2), [1, 1])
    layer.experts[0].weight.is_distributed = True  # one process: nobody could have another part
    layer.gate.weight.is_distributed = True
    with pytest.raises(ValueError, match=r"gate\.weight.*marked is_distributed"):
        layer.sharded_state_dict()
    assert layer.experts[0].weight.is_distributed
    layer.gate.weight.is_distributed = False
    assert layer.sharded_state_dict()["experts.0.weight"].global_shape == (2, 3)


def test_a_stacked_parameter_needs_only_a_rule():
    class Stacked(nn.Layer):
        def __init__(self):
            super().__init__()
            self.weight = self.create_parameter([2, 3, 5])
            self.weight.is_distributed = True

        def _get_shard_rules(self):
            return {"weight": 0}

        def _get_shard_group(self):
            return group(1, 4)

    weight = Stacked().sharded_state_dict()["weight"]
    assert (weight.global_shape, weight.global_offset) == ((8, 3, 5), (2, 0, 0))


def test_optimizer_states_have_the_experts_numbers():
    layer = OwnMoE(group(1, 2), [1, 1])
    optimizer = paddle.optimizer.Momentum(parameters=layer.parameters())
    state = optimizer.sharded_state_dict(layer.sharded_state_dict())
    assert "experts.3.weight.velocity_0" in state
    assert "experts.1.weight.velocity_0" not in state
