"""``checkpoint_transfer`` for FastDeploy: the module that its workers import to receive weights, over files.

FastDeploy has called such a module in three ways, each with classes of its own, which are here. ``directory`` has the
versions by step, ``{directory}/{step}``: snapshots of ``publish_fastdeploy`` for the first two, and models of
``publish`` for the third one. Sizes and headers are checked before the first tensor is yielded. Read from FastDeploy's
sources, and not run with it.

Tested in tests/loading/test_checkpoint_transfer.py.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import paddle

from paddle_flexckpt.catalog import CatalogBuilder, CheckpointError, ValidationError
from paddle_flexckpt.catalog.dtypes import CODES
from paddle_flexckpt.foreign.paddle_files import STAND_INS, StateFile
from paddle_flexckpt.rollout.fastdeploy_versions import open_model, open_snapshot
from paddle_flexckpt.rollout.mapped_tensors import MappedTensors

_NAMES = {code: dtype.name for code, dtype in CODES.items()}


class RDMAWeightsDownloader:
    """``checkpoint_transfer.core``: a rank's tensors as the bytes of one file of ``paddle.save``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take the configuration, with ``directory``."""
        self._directory = _directory(config.get("directory"))

    def initialize(self) -> None:
        """Do nothing; the caller calls this first."""

    def get_weights(self, step: object, rank: int) -> bytes:
        """Return a rank's part of a version; errors as of :func:`open_snapshot`."""
        tensors = open_snapshot(self._directory, step, rank, None, verify=True)
        builder = CatalogBuilder(0)
        for name, (code, shape) in tensors.kinds.items():
            builder.add(name, _NAMES[code], shape, (0,) * len(shape), shape)
        arrays = (array for array in tensors.arrays.values() if array.size)
        return b"".join(part.tobytes() for part in StateFile(builder.build()).pieces(arrays))


class RankTransfer:
    """``checkpoint_transfer.CheckpointTransfer``: a stream of a rank's tensors."""

    def __init__(self, directory: str, local_rank: int, group_size: int) -> None:
        """Take the engine's configuration: the directory of versions, the rank, the number of ranks."""
        self._directory, self._rank, self._ranks = _directory(directory), local_rank, group_size

    def initialize(self) -> None:
        """Do nothing; the caller calls this first."""

    def receive_stream(self, step_id: object, verify_checksum: bool = False) -> Iterator[tuple[str, paddle.Tensor]]:
        """Return names and tensors of a version; errors as of :func:`open_snapshot`, before the first one."""
        return _stream(open_snapshot(self._directory, step_id, self._rank, self._ranks, verify_checksum))


class Role(Enum):
    """The part of a process in a transfer."""

    TRAINER = "trainer"
    INFERENCE = "inference"


class Phase1Backend(Enum):
    """Ways to send, which make no difference here."""

    GPU_DIRECT = "gpu_direct"
    MOONCAKE = "mooncake"
    IPC = "ipc"


@dataclass(frozen=True)
class TransferConfig:
    """The part of the engine's configuration that reaches this module, with the engine's additions.

    Attributes:
        role: Has to be ``Role.INFERENCE``.
        global_rank: The engine's rank.
        group_size: Its ranks.
        phase1_backend: Makes no difference.
        directory: The directory of versions.
    """

    role: Role
    global_rank: int
    group_size: int = 1
    phase1_backend: Phase1Backend = Phase1Backend.GPU_DIRECT
    directory: str = ""


class ModelTransfer:
    """``checkpoint_transfer.transfer.CheckpointTransfer``: a stream of whole tensors under Hugging Face names."""

    def __init__(self, config: TransferConfig) -> None:
        """Take the configuration."""
        if config.role is not Role.INFERENCE:
            raise ValidationError([f"only Role.INFERENCE is served; got {config.role!r}"])
        self._directory = _directory(config.directory)

    async def initialize(self) -> None:
        """Do nothing; the caller awaits this first."""

    async def cleanup(self) -> None:
        """Do nothing; the caller awaits this last."""

    def receive_weights_sync(
        self, step_id: object, output_framework: str = "paddle"
    ) -> Iterator[tuple[str, paddle.Tensor]]:
        """Return names and tensors of a version; errors as of :func:`open_model`, before the first one."""
        if output_framework != "paddle":
            raise ValidationError([f"output_framework is 'paddle'; got {output_framework!r}"])
        return _stream(open_model(self._directory, step_id))


def _directory(directory: object) -> str:
    if not isinstance(directory, str) or not directory:
        raise ValidationError(
            f"the engine's rsync configuration has to have the directory of versions; got {directory!r}. Remedy "
            '(FC101): put it there, as {"directory": "..."}'
        )
    return directory


def _stream(tensors: MappedTensors) -> Iterator[tuple[str, paddle.Tensor]]:
    """Yield tensors in the host's memory, each a copy."""
    for name, array in tensors.arrays.items():
        dtype = _NAMES[tensors.kinds[name][0]]
        # Paddle takes numpy's uint16 for bfloat16.
        values = paddle.to_tensor(array.view(np.dtype(STAND_INS.get(dtype, dtype))), place=paddle.CPUPlace())
        yield name, values if dtype == "bfloat16" or dtype not in STAND_INS else values.view(dtype)


_NAME = "checkpoint_transfer"
_CONTENTS: dict[str, dict[str, Any]] = {
    _NAME: {"CheckpointTransfer": RankTransfer},
    f"{_NAME}.core": {"RDMAWeightsDownloader": RDMAWeightsDownloader},
    f"{_NAME}.config": {"Phase1Backend": Phase1Backend, "Role": Role, "TransferConfig": TransferConfig},
    f"{_NAME}.transfer": {"CheckpointTransfer": ModelTransfer},
}
_made: dict[str, ModuleType] = {}


def register() -> None:
    """Let ``import checkpoint_transfer`` find the classes of this module, in this process.

    Raises:
        CheckpointError: Another module of that name is imported or installed.
    """
    there = [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]
    if all(sys.modules[name] is _made.get(name) for name in there) and len(there) == len(_CONTENTS):
        return
    if there or importlib.util.find_spec(_NAME) is not None:
        raise CheckpointError(
            f"another module {_NAME} is {'imported' if there else 'installed'}. Remedy (FC901): use that, or run the "
            "engine in an environment without it"
        )
    for name, contents in _CONTENTS.items():
        module = _made[name] = ModuleType(name, __doc__)
        vars(module).update(contents, __path__=[])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(_made[parent], child, module)
    sys.modules.update(_made)
