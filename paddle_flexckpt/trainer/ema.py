"""Moving averages of the weights in PaddleFormers and PaddleFleet (``--zcc_save_ema_coef``), as part of a checkpoint.

The libraries' callback keeps the averages on the host and writes them beside the checkpoint, before that is saved.
Here they are shards of the checkpoint itself, a part of its extra state. So there is one commit for both, the averages
are restored under any strategy, and a run without averages ignores them. Averages in the libraries' own directories
are restored in the same way.

Tested in tests/paddleformers/test_ema.py and tests/paddlefleet/test_directories.py.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

from paddle_flexckpt.catalog import EXTRA_STATE, Problem, ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.marks import paddle_ids
from paddle_flexckpt.foreign.paddle_checkpoint import EMA_DIRECTORY
from paddle_flexckpt.load.loader import load_state_dict
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.trainer.flags import TrainerOptions

PREFIX = f"{EXTRA_STATE}ema."
# The prefix of the keys of averages that are read from the libraries' own directories.
PREFIX_IN_DIRECTORY = f"{EMA_DIRECTORY}."
# The methods that are used of the callback's buffer of averages.
_NEEDED = ("_build_ema_save_sharded_state_dict", "_fc_to_buffer_format", "save", "ema_accumulate")


class AverageState:
    """The averages of one trainer, to be saved and restored."""

    def __init__(self, buffer: Any) -> None:
        """Take over a buffer of the trainer's callback, which then saves nothing itself.

        Raises:
            ValidationError: The buffer is not of a known kind.
        """
        missing = [name for name in _NEEDED if not callable(getattr(buffer, name, None))]
        if missing:
            raise ValidationError(
                Problem(
                    f"the averages of the weights are in a {type(buffer).__name__} without {', '.join(missing)}",
                    expected="that of PaddleFormers 1.2.0 or PaddleFleet",
                    remedy="leave --zcc_save_ema_coef out, and train without averages",
                ),
                "cannot save moving averages",
            )
        self._buffer = buffer
        buffer.save = _saved_with_the_checkpoint

    def shards(self, shards: Mapping[str, Any]) -> dict[str, Any]:
        """Return the averages as shards, split as those of model and optimizer; none before the first update."""
        if not (self._buffer.master_weights or self._buffer.model_params):
            return {}
        averages = self._buffer._build_ema_save_sharded_state_dict()
        return {PREFIX + key: _average_of(shards[key], weight.local_tensor) for key, weight in averages.items()}

    def targets(self, shards: Mapping[str, Any], prefix: str = PREFIX) -> dict[str, Any]:
        """Return fresh tensors: there is an average of each master weight and of each float32 parameter."""
        import paddle

        model, targets = self._buffer.model.state_dict(), {}
        for key, weight in shards.items():
            tensor = weight.local_tensor
            if key.endswith(".w_0") or (key in model and tensor.dtype == paddle.float32):
                targets[prefix + key] = _average_of(weight, paddle.zeros(tensor.shape, dtype="float32"), prefix)
        return targets

    def restore(
        self,
        path: str,
        prefix: str,
        describe: Callable[[], Mapping[str, Any]],
        comm: Communicator,
        options: TrainerOptions,
    ) -> bool:
        """Fill the averages from a checkpoint, by keys with the prefix; return whether it has averages.

        Raises:
            ValidationError: They do not fit.
            CorruptCheckpointError: They are damaged.
        """
        context = f"cannot restore the moving averages from {path}"

        def look() -> tuple[None, bytes]:
            if comm.position != 0:
                return None, b""
            found = any(key.startswith(prefix) for key in SourceDirectory(path).read_manifest().catalog.keys)
            if found and options.aoa_config is not None:
                remedy = "resume without --aoa_config; or without --zcc_save_ema_coef, which leaves them behind"
                raise ValidationError([f"--aoa_config does not apply to moving averages. Remedy: {remedy}"])
            return None, b"found" if found else b""

        if not comm.together(look, context)[1][0]:
            return False
        targets, _ = comm.together(lambda: (self.targets(describe(), prefix), b""), context)
        load_state_dict(targets, path, comm, strict="missing", verify=options.verify)
        self._buffer._fc_to_buffer_format({key[len(prefix) :]: weight for key, weight in targets.items()})
        return True


def average_state(trainer: Any) -> AverageState:
    """Return the averages of a trainer whose callback has just been added; errors of :class:`AverageState`."""
    return AverageState(getattr(trainer.callback_handler.callbacks[-1], "buffer", None))


def has_averages(directory: str) -> bool:
    """Return whether a directory of the libraries' own format has averages with metadata."""
    return bool(paddle_ids(os.path.join(directory, EMA_DIRECTORY)))


def _average_of(weight: Any, values: Any, prefix: str = PREFIX) -> Any:
    """Return the average of a shard, split as it is."""
    average = copy.copy(weight)
    average.key, average.local_tensor, average.aliases = prefix + weight.key, values, ()
    return average


def _saved_with_the_checkpoint(global_step: int) -> None:
    """Save nothing, in place of the buffer's ``save``: the averages are shards of the checkpoint of the same step."""
