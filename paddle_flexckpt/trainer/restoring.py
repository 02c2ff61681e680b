"""Restoring a trainer from a checkpoint directory, of this library or of another format.

Tested in tests/trainer/test_unified_resume.py.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.engine.options import LoadOptions
from paddle_flexckpt.foreign.paddle_checkpoint import read_plain_file
from paddle_flexckpt.live.communicator import Communicator
from paddle_flexckpt.live.loader import load_state_dict
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.run_state.extra_state import (
    load_extra_state,
    restore_extra_state,
    restore_plain_scheduler,
    restore_scaler,
    saved_world_size,
)
from paddle_flexckpt.trainer.arguments import TrainerOptions
from paddle_flexckpt.trainer.contents import collect_shards
from paddle_flexckpt.trainer.directories import SUBDIRECTORY, is_flex

# What the libraries write beside their own formats: pickles of plain values.
_SCHEDULER, _SCALER = "scheduler.pdparams", "scaler.pdparams"


@dataclass
class Restored:
    """Hold what was restored: whether from a native checkpoint, the generators' state, and what is not as it was."""

    path: str
    native: bool
    load: LoadReport
    state: Mapping[str, Any] = field(default_factory=dict)
    not_restored: dict[str, str] = field(default_factory=dict)

    def restore_random_state(self) -> dict[str, str]:
        """Put the generators back, the first time; return what could not be, and why."""
        state, self.state = self.state, {}
        if not state:
            return {}
        report = restore_extra_state(state)
        return {name: why for name, why in report.not_restored.items() if name.split(".")[0] == "rng"}


def restore_from(trainer: Any, path: str, everything: bool, options: TrainerOptions, comm: Communicator) -> Restored:
    """Fill the trainer's tensors and put scheduler and scaler back, on all ranks.

    Raises:
        ValidationError: It does not fit; nothing was changed.
        CorruptCheckpointError: It is damaged; tensors may be partly overwritten.
    """
    context = f"cannot resume from {path}"
    shards, _ = comm.together(lambda: (collect_shards(trainer, everything), b""), context)
    if is_flex(path):
        return _restore_native(trainer, path, shards, everything, options, comm)
    load = load_state_dict(shards, path, comm, **_loading(trainer, everything, options))
    missing, _ = comm.together(lambda: (_restore_foreign(trainer, Path(path)) if everything else {}, b""), context)
    return Restored(path, False, load, not_restored=missing)


def _restore_native(
    trainer: Any, path: str, shards: dict[str, Any], everything: bool, options: TrainerOptions, comm: Communicator
) -> Restored:
    inside = os.path.join(path, SUBDIRECTORY)
    # First of all: it is small, and touches nothing. A model that was saved alone has none.
    state = load_extra_state(inside, process_group=comm) if everything else {}
    load = load_state_dict(shards, inside, comm, **_loading(trainer, everything, options))
    if not everything:
        return Restored(path, True, load)
    scaler = trainer.scaler if trainer.do_grad_scaling else None

    def put_back() -> tuple[dict[str, str], bytes]:
        missing = restore_extra_state(state, trainer.lr_scheduler, scaler, rng=False).not_restored
        return {**missing, **_other_samples(saved_world_size(state), comm.size)}, b""

    missing, _ = comm.together(put_back, f"cannot resume from {path}")
    return Restored(path, True, load, state, missing)


def _loading(trainer: Any, everything: bool, options: TrainerOptions) -> dict[str, Any]:
    """Return how to load: with the optimizer, or the model alone."""
    alone = not everything or trainer.optimizer is None
    asked = replace(options.loading(), optimizer_states="ignore") if alone else options.loading()
    return asked.keywords(LoadOptions)


def dequant_transform(model: Any, path: str | os.PathLike[str], library: str) -> Any:
    """Return what makes a model's weights of quantized ones, as its library makes it; None where they are not.

    Raises:
        ValidationError: They are quantized, and nobody says how.
    """
    config = Path(path) / "config.json"
    if not config.is_file():
        return None
    said = json.loads(config.read_text(encoding="utf-8"))
    if not (isinstance(said, dict) and said.get("quantization_config")):
        return None
    describe = getattr(model, "_gen_hf_quan_config", None)
    if not callable(describe):
        text = f"{config} says that the weights are quantized, and {type(model).__name__} has no _gen_hf_quan_config()"
        raise ValidationError(
            [f"{text}. Remedy: load dequantized weights; flexckpt convert --model writes them of some families"]
        )
    module = importlib.import_module(f"{library}.quantization.hf_checkpoint")
    return module.build_hf_dequant_load_transform(checkpoint_path=os.fspath(path), quan_config=describe())


def _other_samples(before: int, now: int) -> dict[str, str]:
    """Return why the samples are not those that the saved run would have drawn, if they are not."""
    if (before == 1) == (now == 1):
        return {}
    return {
        "order of samples": f"saved by {before} process{'es' if before > 1 else ''}, resumed by {now}: the trainer's "
        "sampler for one process and that for several draw in different orders. All tensors are as they were; losses "
        "are not comparable step by step"
    }


def _restore_foreign(trainer: Any, path: Path) -> dict[str, str]:
    """Restore scheduler and scaler of another format; return what could not be restored, and why."""
    missing = {"rng": "the checkpoint is not of this library; generators are left to the trainer"}
    scaler = trainer.scaler if trainer.do_grad_scaling else None
    for name, file, target, restore in (
        ("lr_scheduler", _SCHEDULER, trainer.lr_scheduler, restore_plain_scheduler),
        ("scaler", _SCALER, scaler, restore_scaler),
    ):
        if target is None:
            continue
        if not (path / file).is_file():
            missing[name] = f"there is no {file}"
            continue
        state = read_plain_file(path, file)
        if not isinstance(state, Mapping):
            raise ValidationError([f"{path / file} holds a {type(state).__name__}; expected a dict"])
        problem = restore(target, dict(state))
        if problem is not None:
            missing[name] = problem
    return missing
