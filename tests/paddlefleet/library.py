"""The imitated PaddleFleet, on and off the path, and a small model with master weights for its trainer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_flexckpt.trainer import install, uninstall
from paddle_flexckpt.trainer.model_rules import uninstall_model_rules

STUB = Path(__file__).with_name("stub")
INPUTS, INNER, OUTPUTS = 4, 8, 10
# What the imitated model is in: of PaddleFleet's models statements tell which parameters are fused.
MODULE = "paddlefleet.transformers.net"


@contextlib.contextmanager
def imitated(installed: bool = True) -> Iterator[None]:
    """With the imitation as ``paddlefleet``, with or without this library in its trainer."""
    sys.path.insert(0, str(STUB))
    try:
        if installed:
            install("paddlefleet")
        yield
    finally:
        uninstall("paddlefleet")
        uninstall_model_rules("paddlefleet")
        sys.path.remove(str(STUB))
        for name in [name for name in sys.modules if name.partition(".")[0] == "paddlefleet"]:
            del sys.modules[name]


class Half(paddle.nn.Linear):
    """A layer in bfloat16 that computes in float32: the CPU has no other product."""

    def forward(self, x: Any) -> Any:
        return paddle.matmul(x, self.weight.astype("float32")) + self.bias.astype("float32")


def values_of(name: str, shape: Any, salt: str = "") -> np.ndarray:
    """A parameter's first values, the same for every layout."""
    generator = np.random.RandomState(sum(map(ord, name + salt)))
    return (generator.randn(*shape) * 0.3).astype("float32")


def make_model(salt: str = "", degree: int = 1) -> Any:
    """Two linear layers in bfloat16, and a float32 parameter; with tensor parallelism of a degree."""
    from paddle.distributed.fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear
    from paddlefleet.transformers.model_utils import PretrainedModel

    class Net(PretrainedModel):
        def __init__(self) -> None:
            super().__init__()
            paddle.set_default_dtype("bfloat16")
            if degree > 1:
                self.up = ColumnParallelLinear(INPUTS, INNER, has_bias=True, gather_output=False)
                self.down = RowParallelLinear(INNER, OUTPUTS, has_bias=True, input_is_parallel=True)
            else:
                self.up, self.down = Half(INPUTS, INNER), Half(INNER, OUTPUTS)
            paddle.set_default_dtype("float32")
            self.scale = self.create_parameter([OUTPUTS])

        def forward(self, x: Any) -> Any:
            return self.down(self.up(x)) * self.scale

    Net.__module__ = MODULE

    with paddle.utils.unique_name.guard():
        net = Net()
    cuts = {"up.weight": 1, "up.bias": 0, "down.weight": 0} if degree > 1 else {}
    shapes = {
        "up.weight": (INPUTS, INNER), "up.bias": (INNER,), "down.weight": (INNER, OUTPUTS), "down.bias": (OUTPUTS,),
        "scale": (OUTPUTS,),
    }  # fmt: skip
    for name, parameter in net.named_parameters():
        whole = values_of(name, shapes[name], salt)
        mine = np.split(whole, degree, cuts[name])[dist.get_rank() % degree] if name in cuts else whole
        parameter.set_value(paddle.to_tensor(mine).astype(parameter.dtype))
    return net


def make_optimizer(model: Any) -> Any:
    return paddle.optimizer.AdamW(0.01, parameters=model.parameters(), weight_decay=0.1, multi_precision=True)


def train_step(model: Any, optimizer: Any, step: int) -> None:
    """One step on samples that follow from its number, the same on every rank."""
    samples = paddle.to_tensor(np.random.RandomState(step).randn(4, INPUTS).astype("float32"))
    loss = (model(samples) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()


def make_trainer(
    output_dir: Any, salt: str = "", degree: int = 1, wrap: Any = None, optimizer: Any = make_optimizer, **flags: Any
) -> Any:
    from paddlefleet.trainer.trainer import Trainer
    from paddlefleet.trainer.training_args import TrainingArguments

    model = make_model(salt, degree)
    args = TrainingArguments(output_dir=str(output_dir), **flags)
    return Trainer(model, args, optimizer(model), train_step, wrap)


def everything(trainer: Any) -> dict[str, bytes]:
    """All tensors of model and optimizer of one process, as bytes."""
    found = {
        name: np.ascontiguousarray(tensor.numpy()).tobytes() for name, tensor in trainer.model.state_dict().items()
    }
    names = {parameter.name: name for name, parameter in trainer.model.named_parameters()}
    masters = trainer.optimizer._master_weights
    of_master = {master.name: name for name, master in masters.items()}
    for kind, table in {**trainer.optimizer._accumulators, "w": masters}.items():
        for name, tensor in table.items():
            found[f"{names[of_master.get(name, name)]}.{kind}_0"] = tensor.numpy().tobytes()
    return found


def note_commits(trainer: Any, monkeypatch: Any) -> None:
    """Lets the trainer's record of calls have this library's saves, loads and removals too."""
    from paddle_flexckpt.trainer import checkpointer, directories, restoring

    for module, name, said in (
        (checkpointer, "save_state_dict", "flex save"),
        (checkpointer, "write_small_files", "small files"),
        (restoring, "load_state_dict", "flex load"),
    ):
        before = getattr(module, name)

        def noted(*args: Any, _before: Any = before, _said: str = said, **kwargs: Any) -> Any:
            trainer.calls.append(_said)
            return _before(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)
    before_rotate = directories.TrainerDirectories.rotate

    def rotate(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer.calls.append("flex rotate")
        return before_rotate(self, *args, **kwargs)

    monkeypatch.setattr(directories.TrainerDirectories, "rotate", rotate)
