"""Names of states and counters: those of torch's optimizers, and what no cast may round."""

from __future__ import annotations

import pytest

from paddle_flexckpt.optimizer_states import ACCUMULATORS, STATES, is_counter, is_torch_state

OF_TORCH = (
    "optim.state.w.exp_avg",
    "optim.state.layers.0.w.exp_avg_sq",
    "optimizer.state.w.step",
    "optimizer.state.w.a_state_of_no_known_name",
    "optimizer_0.state.w.momentum_buffer",
    "optimizers.1.state.w.exp_avg",
    "opt.state.w.shampoo.factor",
    "app.optim.state.w.exp_avg",
    "optim.param_groups.w.lr",
    "optimizer_state_dict.state.0.exp_avg",
    "state.w.exp_avg",
    "state.w.step",
    "param_groups.w.betas",
    "my_own.state.w.square_avg",
)
OF_MODELS = (
    "state.w",
    "w.exp_avg",
    "encoder.state.weight",
    "encoder.state.proj.weight",
    "rnn.state.sum",
    "optimal.w",
    "optimizer.weight",
    "model.optim.w",
    "estate.w.exp_avg",
    "param_groups",
    "optim.state",
)


@pytest.mark.parametrize("key", OF_TORCH)
def test_states_of_torchs_optimizers(key):
    assert is_torch_state(key)


@pytest.mark.parametrize("key", OF_MODELS)
def test_names_of_models_are_no_states_of_torchs(key):
    assert not is_torch_state(key)


def test_counters_and_positions():
    for key in (
        "step",
        "train_state.global_step",
        "bn.num_batches_tracked",
        "embed.position_ids",
        "optim.state.w.step",
    ):
        assert is_counter(key)
    for key in ("step.weight", "step_size", "misstep", "epochs_embedding", "w", "position"):
        assert not is_counter(key)


def test_a_name_that_models_have_too_makes_no_parameter_a_state():
    assert {f"{name}_0" for name in ACCUMULATORS} - STATES == {
        *("d_0", "m_0", "y_0", "restore_0", "slow_0", "sum_1_0", "sum_2_0", "sum_3_0")
    }
