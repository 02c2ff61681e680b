"""Restoring a trainer from a checkpoint directory, of this library or of another format.

Tested in tests/trainer/test_unified_resume.py.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.texts import dropped_warning, in_words_of
from paddle_flexckpt.foreign.paddle_checkpoint import read_plain_file
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.run_state.extra_state import (
    has_position,
    load_extra_state,
    put_back_extra_state,
    saved_data_ranks,
    saved_world_size,
    schedule_left_out,
)
from paddle_flexckpt.run_state.schedules import plain_scheduler_problem, scaler_problem
from paddle_flexckpt.trainer.contents import collect_shards
from paddle_flexckpt.trainer.directories import SUBDIRECTORY, is_flex
from paddle_flexckpt.trainer.flags import TrainerOptions
from paddle_flexckpt.transfer.options import LoadOptions
from paddle_flexckpt.transfer.resolution import left_behind

logger = logging.getLogger("paddle_flexckpt")

# Files that the libraries write beside their own formats: pickles of plain values.
_SCHEDULER, _SCALER = "scheduler.pdparams", "scaler.pdparams"
# Advice and arguments in errors of a load, and the flags for them.
FLAGS = {
    "optimizer_states='ignore', and the optimizer as now": "--flex_ignore_optimizer_states 1",
    "optimizer_states='ignore'": "--flex_ignore_optimizer_states 1",
    "master_weights='convert'": "--flex_convert_master_weights 1",
    'master_weights="convert"': "--flex_convert_master_weights 1",
    'dtype="cast"': "--flex_cast 1",
    "strict='missing'": "--flex_strict missing",
    "strict=True": "--flex_strict both",
    "strict=False": "--flex_strict none",
}


@dataclass
class Restored:
    """The result of a restore: whether the checkpoint was native, the generators' state, and what was not restored."""

    path: str
    native: bool
    load: LoadReport
    state: Mapping[str, Any] = field(default_factory=dict)
    not_restored: dict[str, str] = field(default_factory=dict)

    def restore_random_state(self) -> dict[str, str]:
        """Restore the generators at the first call; return which could not be restored, and why."""
        state, self.state = self.state, {}
        if not state:
            return {}
        report = put_back_extra_state(state)
        return {name: why for name, why in report.not_restored.items() if name.split(".")[0] == "rng"}


def restore_from(
    trainer: Any, path: str, everything: bool, options: TrainerOptions, comm: Communicator, data: Any = None
) -> Restored:
    """Fill the trainer's tensors and restore scheduler, scaler and, with a sampler, its position, on all ranks.

    Raises:
        ValidationError: It does not fit; nothing was changed.
        CorruptCheckpointError: It is damaged; tensors may be partly overwritten.
    """
    context = f"cannot resume from {path}"
    shards, _ = comm.together(lambda: (collect_shards(trainer, everything), b""), context)
    if is_flex(path):
        return _restore_native(trainer, path, shards, everything, options, comm, data)
    foreign: list[tuple[str, Any, Any, str]] = []
    if everything:
        foreign, _ = comm.together(lambda: (_look_at_foreign(trainer, Path(path), options, data), b""), context)
    load = _load(trainer, path, shards, everything, options, comm)
    missing, _ = comm.together(lambda: (_restore_foreign(foreign) if everything else {}, b""), context)
    return Restored(path, False, load, not_restored=missing)


def _restore_native(
    trainer: Any,
    path: str,
    shards: dict[str, Any],
    everything: bool,
    options: TrainerOptions,
    comm: Communicator,
    data: Any,
) -> Restored:
    inside = os.path.join(path, SUBDIRECTORY)
    # Extra state comes first: it is small, and changes nothing. A model that was saved alone has none.
    state = load_extra_state(inside, process_group=comm) if everything else {}
    scaler = trainer.scaler if trainer.do_grad_scaling else None
    if everything:

        def look() -> tuple[None, bytes]:
            left_out = schedule_left_out(state, trainer.lr_scheduler, scaler, data)
            _refuse({**left_out, **({} if has_position(state) else _note_on_position(data))}, options)
            return None, b""

        comm.together(look, f"cannot resume from {path}")
    load = _load(trainer, inside, shards, everything, options, comm)
    left = left_behind(load, options.loading() if everything else replace(options.loading(), optimizer_states="ignore"))
    if left and comm.position == 0:
        logger.warning(in_words_of(dropped_warning(inside, left, bool(load.dropped)), FLAGS))
    if not everything:
        return Restored(path, True, load)

    def put_back() -> tuple[dict[str, str], bytes]:
        missing = put_back_extra_state(state, trainer.lr_scheduler, scaler, rng=False, data=data).not_restored
        if data is not None:
            return missing, b""
        samples: Any = getattr(trainer, "train_dataset", None)
        before = saved_data_ranks(state)
        length = len(samples) if hasattr(samples, "__len__") else None
        now = int(getattr(trainer.args, "dataset_world_size", before))  # a trainer without it has its own order
        return {
            **missing,
            **_note_on_sample_order(saved_world_size(state), comm.size),
            **_note_on_padding(length, before, now),
        }, b""

    missing, _ = comm.together(put_back, f"cannot resume from {path}")
    return Restored(path, True, load, state, missing)


def _note_on_position(data: Any) -> dict[str, str]:
    """Return why the sampler would begin at its first sample, for a checkpoint without a position."""
    return {} if data is None else {"data": "the checkpoint was saved without --flex_data_position"}


def _refuse(left_out: Mapping[str, str], options: TrainerOptions) -> None:
    """Raise ValidationError if a schedule, scaler or position would start anew without ``--flex_ignore_schedule``."""
    if left_out and not options.ignore_schedule:
        raise ValidationError(
            [
                f"{name}: {why}. Remedy (FC904): give the flags of the saved run; --flex_ignore_schedule 1 starts it "
                "anew"
                for name, why in left_out.items()
            ]
        )


def _load(
    trainer: Any, path: str, shards: dict[str, Any], everything: bool, options: TrainerOptions, comm: Communicator
) -> LoadReport:
    """Load the shards: with the optimizer, or of the model alone; errors name the trainer's flags."""
    alone = not everything or trainer.optimizer is None
    asked = replace(options.loading(), optimizer_states="ignore") if alone else options.loading()
    try:
        return load_state_dict(shards, path, comm, **asked.keywords(LoadOptions))
    except ValidationError as error:
        raise type(error)(in_words_of(str(error), FLAGS)) from None


def dequant_transform(model: Any, path: str | os.PathLike[str], library: str) -> Any:
    """Return the library's function that makes a model's weights from quantized ones; None if they are not quantized.

    Raises:
        ValidationError: They are quantized, and there is no such function.
    """
    config = Path(path) / "config.json"
    if not config.is_file():
        return None
    found = json.loads(config.read_text(encoding="utf-8"))
    if not (isinstance(found, dict) and found.get("quantization_config")):
        return None
    describe = getattr(model, "_gen_hf_quan_config", None)
    if not callable(describe):
        text = f"{config} says that the weights are quantized, and {type(model).__name__} has no _gen_hf_quan_config()"
        raise ValidationError(
            [
                f"{text}. Remedy (FC208): load dequantized weights, beside a config.json without quantization_config; "
                "of FP8 and MXFP4 flexckpt convert --format huggingface makes them by AOA statements with dequant"
            ]
        )
    module = importlib.import_module(f"{library}.quantization.hf_checkpoint")
    return module.build_hf_dequant_load_transform(checkpoint_path=os.fspath(path), quan_config=describe())


def _note_on_sample_order(before: int, now: int) -> dict[str, str]:
    """Return a note if the order of samples differs from that of the saved run."""
    if (before == 1) == (now == 1):
        return {}
    return {
        "order of samples": f"saved by {before} process{'es' if before > 1 else ''}, resumed by {now}: the trainer's "
        "sampler for one process and that for several draw in different orders. All tensors are as they were; losses "
        "are not comparable step by step"
    }


def _look_at_foreign(trainer: Any, path: Path, options: TrainerOptions, data: Any) -> list[tuple[str, Any, Any, str]]:
    """Return for scheduler and scaler: name, object, its state in another format, and why it cannot be set."""
    position = _note_on_position(data)
    _refuse(position, options)
    scaler = trainer.scaler if trainer.do_grad_scaling else None
    found: list[tuple[str, Any, Any, str]] = [(name, data, None, why) for name, why in position.items()]
    for name, file, target, refuse in (
        ("lr_scheduler", _SCHEDULER, trainer.lr_scheduler, plain_scheduler_problem),
        ("scaler", _SCALER, scaler, scaler_problem),
    ):
        if target is None:
            continue
        if not (path / file).is_file():
            found.append((name, target, None, f"there is no {file}"))
            continue
        state = read_plain_file(path, file)
        if not isinstance(state, Mapping):
            raise ValidationError([f"{path / file} holds a {type(state).__name__}; expected a dict"])
        found.append((name, target, dict(state), refuse(target, dict(state)) or ""))
    _refuse({name: why for name, _, state, why in found if why and state is not None}, options)
    return found


def _restore_foreign(foreign: Sequence[tuple[str, Any, Any, str]]) -> dict[str, str]:
    """Restore scheduler and scaler of another format; return what could not be restored, and why."""
    missing = {"rng": "the checkpoint is not of this library; generators are left to the trainer"}
    for name, target, state, why in foreign:
        if name == "scaler" and not why and not state:
            why = "it was disabled when it was saved"
        if why:
            missing[name] = why
        elif name == "scaler":
            target.load_state_dict(state)
        else:
            target.set_state_dict(state)
    return missing


def _note_on_padding(length: int | None, before: int, now: int) -> dict[str, str]:
    """Return a note if another number of data ranks changes the shuffle: Paddle pads before it shuffles."""
    if length is None or before == now or (length + -length % before) == (length + -length % now):
        return {}
    return {
        "order of samples over ranks": f"the dataset has {length} samples, which Paddle pads to a multiple of ranks "
        f"that divide the data, and then shuffles: saved by {before} of them, resumed by {now}, the samples of a step "
        "are others. All tensors are as they were; losses are not comparable step by step"
    }
