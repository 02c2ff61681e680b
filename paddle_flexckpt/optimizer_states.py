"""The states of optimizers, by the names that Paddle gives them: the one list of them.

The names of Paddle's optimizers 3.0 to 3.3 are their ``_..._acc_str``; ModelAverage's are literals. A state of another
optimizer becomes known by its name in one of the tuples here. Tested in tests/aoa/test_states.py.
"""

from __future__ import annotations

# The end of the key of a float32 master weight.
MASTER = "w_0"
# One number for each parameter, whatever the parameter's shape. They have to be known by name, because a parameter of
# one element has accumulators of that shape too. (Numbers of other optimizers, such as NAdam's mu_product, are in
# tensors of the parameter's shape, and are split like it.)
SCALARS = ("beta1_pow_acc", "beta2_pow_acc")
# The first moments, of the optimizers with powers of beta.
FIRST_MOMENTS = ("moment1", "moment")
# ASGD's last gradients. By name, because a history of one has as many elements as the parameter.
HISTORY = "y"
# A parameter may have such a name too: it is a state's only after the name of a parameter.
COMMON = ("d", "m", "restore", "slow", "sum_1", "sum_2", "sum_3", HISTORY)
# Names of all accumulators.
ACCUMULATORS = (
    *SCALARS, *FIRST_MOMENTS, *COMMON,
    "_avg_squared_grad", "_avg_squared_update", "beta1_pow", "beta2_pow", "inf_norm", "learning_rates", "mean_grad",
    "mean_square", "moment2", "moment2_max", "momentum", "momentum_decay_pow", "mu_product", "num_accumulates",
    "num_updates", "old_num_accumulates", "prevs", "rho", "velocity",
)  # fmt: skip
# The accumulators of Adam and AdamW, in their order.
ADAM = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
# The ends of keys of states, by their names in torch's optimizers.
OF_TORCH = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0"}
