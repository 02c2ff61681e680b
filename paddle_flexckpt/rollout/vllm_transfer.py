"""vLLM's weight-transfer engine ``flexckpt``, for engines of one worker.

vLLM loses count of replies where one of several workers raises, and its weight-transfer engines answer only by raising.

Tested in tests/rollout/test_vllm.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.rollout.engine_client import PROTOCOL
from paddle_flexckpt.rollout.vllm_extension import worker_of


@dataclass
class FlexInitInfo(WeightTransferInitInfo):
    """The arguments of ``/init_weight_transfer_engine``."""

    protocol: int = PROTOCOL


@dataclass
class FlexUpdateInfo(WeightTransferUpdateInfo):
    """The arguments of ``/update_weights``: a version and its segment."""

    version: str
    path: str


class FlexTransferEngine(WeightTransferEngine[FlexInitInfo, FlexUpdateInfo]):
    """The engine: an update is staged and committed at once, or leaves the version before."""

    init_info_cls = FlexInitInfo
    update_info_cls = FlexUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        """Implement the base class; ValidationError if the engine has several workers."""
        super().__init__(config, vllm_config, device, model)
        workers = vllm_config.parallel_config.world_size
        if workers != 1:
            raise ValidationError(
                f"the weight-transfer engine 'flexckpt' serves one worker, and this engine has {workers}; leave out "
                "--weight-transfer-config and use the routes of FlexExtension"
            )

    def init_transfer_engine(self, init_info: FlexInitInfo) -> None:
        """Implement the base class."""
        if init_info.protocol != PROTOCOL:
            raise ValidationError(f"protocol {init_info.protocol} is asked for; this engine has {PROTOCOL}")

    def start_weight_update(self) -> None:
        """Implement the base class; an update begins with its segment."""

    def receive_weights(self, update_info: FlexUpdateInfo) -> None:
        """Implement the base class: commit here, as a failed ``finish_weight_update`` would block later updates."""
        worker = worker_of(self.model, self.vllm_config)
        worker.stage(update_info.version, update_info.path)
        try:
            worker.commit(update_info.version)
        except BaseException:
            worker.rollback()
            raise
        worker.accept(update_info.version)

    def finish_weight_update(self) -> None:
        """Implement the base class."""

    def shutdown(self) -> None:
        """Implement the base class; the segment of the current version stays mapped for a roll-back."""
