"""docs/cpu.md tells which kernels Paddle's CPU build has, and how seeds work under tensor parallelism.

The jobs: a tensor-parallel layer with and without a seed of its own.
"""

from __future__ import annotations

import re
import warnings

import pytest

pytest.importorskip("paddle")
import paddle
import paddle.nn.functional as F
from paddle.distributed import fleet

from paddle_flexckpt.testing import cpu_world
from tests.documents import ROOT

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def first_values(seed):
    """The sum of a tensor-parallel layer's first values, and that of another layer."""
    strategy = fleet.DistributedStrategy()
    if seed is not None:
        strategy.tensor_parallel_configs = {"tensor_init_seed": seed}
    cpu_world.init_fleet(mp=2, strategy=strategy)
    paddle.seed(1)
    parallel = fleet.meta_parallel.ColumnParallelLinear(4, 8, has_bias=False, gather_output=True)
    return float(parallel.weight.sum()), float(paddle.nn.Linear(4, 4).weight.sum())


# -- what is asserted --------------------------------------------------------------------------------------------------


def step_of_adamw(dtype):
    layer = paddle.nn.Linear(4, 4)
    layer.to(dtype=dtype)
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters(), multi_precision=True)
    weight, bias = layer.weight.astype("float32"), layer.bias.astype("float32")
    F.linear(paddle.ones([2, 4]), weight, bias).mean().backward()
    optimizer.step()


def operations(dtype):
    x, image = paddle.ones([4, 4]).astype(dtype), paddle.ones([1, 1, 4, 4]).astype(dtype)
    return {
        "add": lambda: x + x,
        "adamw": lambda: step_of_adamw(dtype),
        "cast": lambda: x.astype("float32"),
        "concat": lambda: paddle.concat([x, x]),
        "conv2d": lambda: F.conv2d(image, image),
        "cross_entropy": lambda: F.cross_entropy(x, paddle.to_tensor([0, 1, 2, 3])),
        "dropout": lambda: F.dropout(x, 0.5),
        "embedding": lambda: F.embedding(paddle.to_tensor([0, 1]), x),
        "gelu": lambda: F.gelu(x),
        "layer_norm": lambda: F.layer_norm(x, 4),
        "linear": lambda: F.linear(x, x),
        "matmul": lambda: paddle.matmul(x, x),
        "mean": x.mean,
        "multiply": lambda: x * x,
        "randn": lambda: paddle.randn([2, 2], dtype=dtype),
        "relu": lambda: F.relu(x),
        "silu": lambda: F.silu(x),
        "softmax": lambda: F.softmax(x),
        "sum": x.sum,
    }


def has_kernel(operation) -> bool:
    try:
        operation()
    except RuntimeError as error:
        if "is not registered" not in str(error):
            raise
        return False
    return True


@pytest.mark.skipif(paddle.__version__ != "3.3.1", reason="the page has the kernels of this release")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_page_has_the_kernels_of_a_dtype(dtype):
    page = (ROOT / "docs" / "cpu.md").read_text(encoding="utf-8")
    there, missing = (cell.split(", ") for cell in re.findall(rf"^\| {dtype} \| (.*) \| (.*) \|$", page, re.M)[0])
    found = {name: has_kernel(operation) for name, operation in operations(dtype).items()}
    assert f"Of {len(found)} operations" in page
    assert there == [name for name, is_there in found.items() if is_there]
    assert missing == [name for name, is_there in found.items() if not is_there]


def test_amp_leaves_float32():
    layer = paddle.nn.Linear(4, 4)
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer, optimizer = paddle.amp.decorate(models=layer, optimizers=optimizer, level="O2", dtype="bfloat16")
    assert layer.weight.dtype == paddle.float32
    with pytest.warns(UserWarning, match="makes no effect"), paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
        assert layer(paddle.ones([2, 4])).dtype == paddle.float32


def test_tensor_parallel_layers_ignore_the_seed_of_all_others(world2):
    first, second, seeded, again = (world2.run(first_values, seed=seed)[0] for seed in (None, None, 1, 1))
    assert first[0] != second[0]
    assert seeded == again
    assert len({values[1] for values in (first, second, seeded)}) == 1
