"""Extra state: the state that a run needs besides tensors to continue, saved like tensors.

A checkpoint's extra state is a few tensors among the others, all under the prefix ``extra_state.``:

- ``extra_state.common``: what is the same on every rank (layout, step, LR scheduler, GradScaler, whatever else the
  caller adds), as one uint8 tensor of JSON text; tensors that the caller adds are ``extra_state.common.more.{name}``.
- ``extra_state.rng.rank{r}``: the random number generators of rank r, likewise.
- ``extra_state.dataloader.rank{r}``: its position in the data, likewise.
- ``extra_state.data.split{i}``: the state of split i of an ElasticStream, likewise, by the ranks that read it.

::

    fc.save_state_dict({**model, **optimizer, **collect_extra_state(scheduler, scaler, step=step)}, path)
    ...
    fc.load_state_dict({**model, **optimizer}, path)
    report = restore_extra_state(load_extra_state(path), scheduler, scaler)
    step = report.step

Under another layout than that of the save, what belongs to ranks has no meaning. Generators stay as they are, so that
ranks that have to draw alike still do. The caller gets the positions of all ranks, to divide them anew. The report
names both.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, ValidationError
from paddle_flexckpt.catalog.portable import decode, encode
from paddle_flexckpt.catalog.short_reprs import ShortRepr
from paddle_flexckpt.catalog.wire import join
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.merged import empty_tensors
from paddle_flexckpt.media.backend import Location, reading
from paddle_flexckpt.media.opening import shown
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.run_state.random_state import collect_random_state, restore_random_state
from paddle_flexckpt.run_state.schedules import (
    NOT_PASSED,
    ConstantRate,
    left_out,
    restore_scheduler,
    scheduler_state,
)
from paddle_flexckpt.transfer.agreement import check_heads
from paddle_flexckpt.transfer.arguments import plain_arguments
from paddle_flexckpt.transfer.options import GROUP, PATH, Storage, same_on_all_ranks
from paddle_flexckpt.transfer.transfer import quiet_loads

logger = logging.getLogger("paddle_flexckpt")

_PREFIX = EXTRA_STATE
_COMMON = f"{_PREFIX}common"
_OF_RANK = re.compile(re.escape(_PREFIX) + r"(rng|dataloader)\.rank(\d+)(\.|$)")
_OF_SPLIT = re.compile(re.escape(_PREFIX) + r"data\.split(\d+)(\.|$)")
_VERSION = 1
_METHODS_OF_DATA = ("state_dict", "load_state_dict", "refuse")


@dataclass(frozen=True)
class ExtraStateReport(ShortRepr):
    """The result of :func:`restore_extra_state`.

    Attributes:
        step: Training step, if one was saved.
        dataloader: This rank's position in the data; None if there is none, or the layout is another.
        dataloaders: Positions by the rank that saved them: this rank's, or under another layout all of them.
        more: The caller's own saved values.
        restored: Names of the values that were restored.
        not_restored: Names of the values that were not restored, and why.
    """

    step: int | None
    dataloader: Any
    dataloaders: dict[int, Any]
    more: dict[str, Any]
    restored: list[str]
    not_restored: dict[str, str]

    @classmethod
    def of_none(cls) -> ExtraStateReport:
        """Return the report of a checkpoint without extra state."""
        return cls(None, None, {}, {}, [], {"extra_state": "the checkpoint has none"})


@plain_arguments
def collect_extra_state(
    lr_scheduler: Any = None,
    scaler: Any = None,
    step: int | None = None,
    rng: bool = True,
    dataloader: Any = None,
    data: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the extra state of a run, to be saved with the rest by ``save_state_dict``.

    Args:
        lr_scheduler: A ``paddle.optimizer.lr.LRScheduler``; schedulers inside it are saved as well.
        scaler: A ``paddle.amp.GradScaler``, also one of fleet.
        step: Training step.
        rng: Whether to save the random number generators of Python, numpy, Paddle and fleet's model-parallel tracker.
        dataloader: This rank's position in the data: a portable value, or an object with ``state_dict()``.
        data: An :class:`~paddle_flexckpt.data.ElasticBatchSampler`, whose position is the same on every rank; or an
            :class:`~paddle_flexckpt.data.ElasticStream`.
        **more: Portable values and tensors that are the same on every rank.

    Returns:
        Names to CPU tensors (those in ``more`` as they are).

    Raises:
        ValidationError: A value is not portable (see :mod:`~paddle_flexckpt.catalog.portable`), ``step`` is no step, or
            ``data`` no such sampler.
    """
    check_data(data)
    tensors: dict[str, Any] = {}
    rank = _rank()
    position: Any = None if data is None else data.state_dict()
    splits = position.pop("states") if hasattr(data, "own_splits") else {}
    common = {
        "version": _VERSION,
        "layout": _layout(),
        "step": step,
        "lr_scheduler": None if lr_scheduler is None else scheduler_state(lr_scheduler),
        "scaler": None if scaler is None else scaler.state_dict(),
        "data": position,
        "more": more,
    }
    state = {_COMMON: encode(common, _COMMON, tensors)}
    if rng:
        state[f"{_PREFIX}rng.rank{rank}"] = encode(collect_random_state(), "extra_state.rng")
    if dataloader is not None:
        name = f"{_PREFIX}dataloader.rank{rank}"
        place = dataloader.state_dict() if callable(getattr(dataloader, "state_dict", None)) else dataloader
        state[name] = encode(place, name, tensors)
    for split, each in splits.items():
        name, inside = f"{_PREFIX}data.split{split}", dict[str, Any]()
        state[name] = encode(each, name, inside)
        # A save in slices copies later, when the reader has gone on.
        tensors.update({key: tensor.clone() for key, tensor in inside.items()})
    return {**{name: _as_tensor(text) for name, text in state.items()}, **tensors}


@same_on_all_ranks(
    path=PATH,
    process_group=GROUP,
    unique_id="what is compared is the checkpoint that it stands for",
    splits="every rank reads those of its own stream",
)
def load_extra_state(
    path: Location,
    unique_id: int | None = None,
    process_group: Any = None,
    splits: Collection[int] | None = None,
) -> dict[str, Any]:
    """Read the extra state that concerns this rank. Every rank of the group calls this.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        unique_id: The checkpoint's id; None takes the highest.
        process_group: The ranks that take part; all ranks of the job by default.
        splits: The splits of an ElasticStream whose states are read, ``stream.own_splits``; all by default.

    Returns:
        As of :func:`collect_extra_state`; under another layout than that of the save without generators, and with the
        positions of all ranks.

    Raises:
        ValidationError: There is no such checkpoint, or it has no extra state.
        CorruptCheckpointError: It is damaged.
    """
    comm = communicator_for(process_group)
    context = f"cannot load extra state from {shown(path)}"

    def look() -> tuple[tuple[int, Catalog], bytes]:
        directory = SourceDirectory(path)
        with reading(directory.path), LockedManifest(directory, unique_id) as manifest:
            pass
        if not has_extra_state(manifest.catalog):
            raise ValidationError(
                f"id {manifest.unique_id} has no extra state. Remedy (FC108): leave load_extra_state() out for this "
                "checkpoint, and save {**state, **collect_extra_state()} from the next save on"
            )
        checkpoint = f"id {manifest.unique_id} ({manifest.save_token})"
        head = json.dumps({"call": "load_extra_state", "checkpoint": checkpoint}).encode()
        return (manifest.unique_id, manifest.catalog), join((head,))

    (chosen, catalog), answers = comm.together(look, context)
    check_heads(answers, context, comm.ranks)
    return read_extra_state(catalog, path, comm, chosen, splits) or {}


def read_extra_state(
    catalog: Catalog,
    path: Location,
    comm: Communicator,
    unique_id: int | None,
    splits: Collection[int] | None,
    storage: Storage = "shared",
) -> dict[str, Any] | None:
    """Read the extra state that concerns this rank from the checkpoint of an id; None if it has none."""
    if not has_extra_state(catalog):
        return None
    state: dict[str, Any] = {}

    def read(names: list[str]) -> None:
        tensors = empty_tensors(catalog, names)
        with quiet_loads():
            load_state_dict(tensors, path, comm, unique_id=unique_id, storage=storage)
        state.update(tensors)

    # The common part has the layout, which decides what else is needed.
    read([key for key in catalog.keys if key == _COMMON or key.startswith(f"{_COMMON}.")])
    same = _common(state)["layout"] == _layout()
    of_ranks = [match for match in map(_OF_RANK.match, catalog.keys) if match]
    of_splits = [match for match in map(_OF_SPLIT.match, catalog.keys) if match]
    read(
        [m.string for m in of_ranks if (int(m[2]) == _rank() if same else m[1] == "dataloader")]
        + [m.string for m in of_splits if splits is None or int(m[1]) in splits]
    )
    return state


def check_data(data: Any) -> None:
    """Raise ValidationError unless an object is of :mod:`paddle_flexckpt.data`, or has its methods, or is None."""
    if data is not None and not all(callable(getattr(data, name, None)) for name in _METHODS_OF_DATA):
        raise ValidationError(
            f"data= takes a sampler or stream of paddle_flexckpt.data; got a {type(data).__name__}. Remedy (FC101): "
            "give a loader or a position of another kind as dataloader=, and values of your own under another name"
        )


def has_extra_state(catalog: Catalog) -> bool:
    """Return whether a checkpoint has a run's extra state, given all its shards."""
    return _COMMON in catalog.keys


def has_position(state: Mapping[str, Any]) -> bool:
    """Return whether a state has the position of a sampler; errors of :func:`restore_extra_state`."""
    return bool(_common(state).get("data"))


def has_constant_rate(state: Mapping[str, Any]) -> bool:
    """Return whether the saved run had an optimizer without a scheduler; errors of :func:`restore_extra_state`."""
    return ((_common(state)["lr_scheduler"] or {}).get("class")) == ConstantRate.__name__


def saved_world_size(state: Mapping[str, Any]) -> int:
    """Return the number of ranks that saved a state; errors of :func:`restore_extra_state`."""
    return int(_common(state)["layout"]["world_size"])


def saved_data_ranks(state: Mapping[str, Any]) -> int:
    """Return the number of ranks that divided the samples of a step of the saved run; without fleet, all ranks."""
    layout = _common(state)["layout"]
    return int(layout["data"] * layout["sharding"] if "data" in layout else layout["world_size"])


@plain_arguments
def restore_extra_state(
    state: Mapping[str, Any], lr_scheduler: Any = None, scaler: Any = None, rng: bool = True, data: Any = None
) -> ExtraStateReport:
    """Restore scheduler, scaler and generators in place. Rank 0 logs one warning of what could not be restored.

    Args:
        state: Of :func:`load_extra_state` or :func:`collect_extra_state`.
        lr_scheduler: A scheduler built like the saved one.
        scaler: A scaler; its settings become the saved ones.
        rng: Whether to restore the random number generators.
        data: A sampler or stream of :mod:`paddle_flexckpt.data`, made like the saved one.

    Returns:
        Step, positions, the caller's own values, and the names of what was restored and what was not.

    Raises:
        ValidationError: This is no extra state.
        CorruptCheckpointError: It is damaged.
    """
    return warned(put_back_extra_state(state, lr_scheduler, scaler, rng, data))


def warned(report: ExtraStateReport) -> ExtraStateReport:
    """Return a report, after rank 0 has logged a warning of what was not restored."""
    if report.not_restored and _rank() == 0:
        absent = ", ".join(f"{name}=" for name, why in report.not_restored.items() if why == NOT_PASSED)
        logger.warning(
            "not restored: "
            + "; ".join(f"{name}: {why}" for name, why in report.not_restored.items())
            + (f". Remedy (FC904): give {absent} to restore it too" if absent else "")
        )
    return report


def put_back_extra_state(
    state: Mapping[str, Any], lr_scheduler: Any = None, scaler: Any = None, rng: bool = True, data: Any = None
) -> ExtraStateReport:
    """Do the same as :func:`restore_extra_state`, but log no warning."""
    common = _with_splits(state)
    not_restored = schedule_left_out(state, lr_scheduler, scaler, data)
    restored: list[str] = []
    for name, target in (("lr_scheduler", lr_scheduler), ("scaler", scaler), ("data", data)):
        if target is None or name in not_restored:
            continue
        if common.get(name):
            if name == "lr_scheduler":
                restore_scheduler(target, common[name])
            else:
                target.load_state_dict(common[name])
            restored.append(name)
        elif name == "lr_scheduler" and not isinstance(target, ConstantRate):  # else the rate is the caller's own
            not_restored[name] = "the checkpoint has none"
        elif name == "scaler" and target.state_dict():
            not_restored[name] = (
                "the checkpoint has none" if common[name] is None else "it was disabled when it was saved"
            )
        elif name == "data":
            not_restored[name] = "the checkpoint has none"
    layout = _layout()
    same = common["layout"] == layout
    other = f"saved under {_describe(common['layout'])}, this run has {_describe(layout)}"
    if rng:
        why = _restore_generators(state, restored, not_restored) if same else other
        if why is not None:
            not_restored["rng"] = why
    positions = _positions(state)
    if same and _rank() in positions:
        restored.append("dataloader")
    elif positions and not same:
        not_restored["dataloader"] = f"{other}; the positions of all ranks are in dataloaders"
    return ExtraStateReport(
        step=common["step"],
        dataloader=positions.get(_rank()) if same else None,
        dataloaders=positions,
        more=common["more"],
        restored=restored,
        not_restored=not_restored,
    )


def schedule_left_out(state: Mapping[str, Any], lr_scheduler: Any, scaler: Any, data: Any = None) -> dict[str, str]:
    """Return what of a saved schedule, scaler and position in the data would not be restored, by name, and why."""
    return left_out(_with_splits(state), lr_scheduler, scaler, data)


def _restore_generators(state: Mapping[str, Any], restored: list[str], not_restored: dict[str, str]) -> str | None:
    """Restore this rank's generators and note which; or return why there are none."""
    name = f"{_PREFIX}rng.rank{_rank()}"
    if name not in state:
        return "the checkpoint has none of this rank"
    generators = decode(_text(state[name]), name)
    failed = restore_random_state(generators)
    of_paddle = [f"{kind}.{each}" for kind in ("paddle", "tracker") for each in generators[kind]]
    restored.extend(f"rng.{each}" for each in ("python", "numpy", *of_paddle) if each not in failed)
    not_restored.update({f"rng.{each}": why for each, why in failed.items()})
    return None


def _positions(state: Mapping[str, Any]) -> dict[int, Any]:
    """Return positions in the data by the rank that saved them."""
    found = (match for match in map(_OF_RANK.fullmatch, state) if match and match[1] == "dataloader")
    return {int(match[2]): decode(_text(state[match.string]), match.string, state) for match in found}


def _with_splits(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common part, in which a stream's position has the states of the splits that were read."""
    common = _common(state)
    if "splits" in (common.get("data") or {}):
        found = [match for match in map(_OF_SPLIT.fullmatch, state) if match]
        states = {int(match[1]): decode(_text(state[match.string]), match.string, state) for match in found}
        common["data"] = {**common["data"], "states": states}
    return common


def _layout() -> dict[str, int]:
    """Return world size and, if fleet is initialised, the degrees of parallelism."""
    import paddle.distributed as dist
    from paddle.distributed.fleet.base import topology

    layout = {"world_size": int(dist.get_world_size())}
    hcg = topology._HYBRID_PARALLEL_GROUP
    if hcg is not None:
        for name in ("data", "model", "pipe", "sharding", "sep"):
            degree = getattr(hcg, f"get_{name}_parallel_world_size", None)
            layout[name] = int(degree()) if degree else 1
    return layout


def _describe(layout: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {degree}" for name, degree in layout.items() if name == "world_size" or degree > 1)


def _common(state: Mapping[str, Any]) -> dict[str, Any]:
    if _COMMON not in state:
        raise ValidationError(
            [f"there is no {_COMMON!r} in the state. Remedy (FC108): pass what load_extra_state() returned"]
        )
    common = decode(_text(state[_COMMON]), _COMMON, state)
    if common.get("version") != _VERSION:
        raise ValidationError(
            [
                f"extra state of version {common.get('version')!r}; this library reads {_VERSION}. Remedy (FC307): "
                "update it"
            ]
        )
    return common


def _rank() -> int:
    import paddle.distributed as dist

    return int(dist.get_rank())


def _as_tensor(text: bytes) -> Any:
    import paddle

    return paddle.to_tensor(np.frombuffer(text, dtype=np.uint8).copy(), place=paddle.CPUPlace())


def _text(tensor: Any) -> bytes:
    return np.asarray(tensor.numpy(), dtype=np.uint8).tobytes()
