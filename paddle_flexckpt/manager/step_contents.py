"""The contents of a manager's save: shards of model, optimizer and caller, the run's extra state, the step's record.

Tested in tests/manager/test_manager.py and tests/manager/test_check.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE, Problem, ValidationError, may_be_fused
from paddle_flexckpt.catalog.dtypes import check_integer
from paddle_flexckpt.catalog.texts import order_warning
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.memory.sources import check_state
from paddle_flexckpt.memory.state import flatten_state_dict
from paddle_flexckpt.optimizer_states import split_state
from paddle_flexckpt.parallel.install import install, optimizer_sharded_state_dict
from paddle_flexckpt.parallel.optimizers import optimizer_inside
from paddle_flexckpt.parallel.state_creation import no_new_states
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.run_state.extra_state import collect_extra_state
from paddle_flexckpt.run_state.schedules import ConstantRate
from paddle_flexckpt.saving.replica_remedies import drift_warning
from paddle_flexckpt.tools.step_record import RECORD, StepRecord
from paddle_flexckpt.transfer.agreement import by_rank, check_heads, check_same
from paddle_flexckpt.transfer.options import GROUP, SHARDS, encode_options, same_on_all_ranks

logger = logging.getLogger("paddle_flexckpt")

_COMMON = f"{EXTRA_STATE}common"
# The most characters of a value that an error shows.
_LONGEST = 40
_TAKEN = ("lr_scheduler", "scaler", "step", "rng", "dataloader", "data")
OWN_OBJECTS = {
    **dict.fromkeys(("model", "optimizer", "state"), SHARDS),
    **dict.fromkeys(("lr_scheduler", "scaler", "data"), "every rank has its own; whether there is one is compared"),
}


@dataclass(frozen=True, eq=False)
class RunObjects:
    """The objects of a run on this rank, as a caller gives them; any may be None."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    scaler: Any
    state: Mapping[str, Any] | None
    data: Any = None

    def shards(self) -> dict[str, Any]:
        """Return the shards of :func:`collect_shards`; errors also as of :func:`check_kinds`."""
        check_kinds(self)
        return collect_shards(self.model, self.optimizer, self.state)

    def describe(self) -> dict[str, Any]:
        """Return shards and extra state, for a description of them; no state of the optimizer is created."""
        with no_new_states():
            shards = self.shards()
        return {**shards, **collect_extra_state(self.schedule(), self.scaler)}

    def schedule(self) -> Any:
        """Return the object with the rate, of :func:`schedule_of`."""
        return schedule_of(self.lr_scheduler, self.optimizer)

    def extra_state(
        self, step: int | None, rng: bool, dataloader: Any, extra: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the extra state of :func:`collect_extra_state`, with the caller's own values."""
        more = check_extra(extra)
        return collect_extra_state(self.schedule(), self.scaler, step, rng, dataloader, self.data, **more)

    def given(self) -> dict[str, bool]:
        """Return which of schedule, scaler and data there are. Ranks compare this: one without would save none."""
        return {name: getattr(self, name) is not None for name in ("lr_scheduler", "scaler", "data")}


def note_without_optimizer(given: RunObjects, shards: Mapping[str, Any], path: str, comm: Communicator) -> None:
    """Log, on the first rank, that a save has no optimizer's states, if the model's parameters are trained."""
    is_alone = given.model is not None and given.optimizer is None and comm.position == 0
    tensors = [getattr(each, "local_tensor", None) for each in shards.values()] if is_alone else []
    is_trained = any(not getattr(each, "stop_gradient", True) for each in tensors)
    if is_trained and not any(split_state(key, shards)[1] for key in shards):
        logger.info(f"{path} is saved without an optimizer: none was given, though parameters of the model are trained")


def check_kinds(given: RunObjects) -> None:
    """Raise ValidationError if an object is given for another: a model given as the optimizer would save no states."""
    import paddle

    problems = []
    for name in ("model", "optimizer", "lr_scheduler", "scaler"):
        value, is_state = getattr(given, name), name in ("lr_scheduler", "scaler")
        is_optimizer = hasattr(value, "_parameter_list") and not isinstance(value, paddle.nn.Layer)
        is_wrong = isinstance(value, (type, paddle.nn.Layer) if name != "model" else type)
        is_wrong |= is_optimizer and name != "optimizer"
        is_wrong |= is_state and not callable(getattr(value, "state_dict", None))
        if value is not None and is_wrong and not isinstance(value, (list, tuple)):
            kind = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
            text = f"{name}= is of another kind; got {kind}"
            problems.append(Problem(text, code="FC101", remedy=f"give the run's {name}, or leave it out"))
    if problems:
        raise ValidationError(problems)


@dataclass(frozen=True)
class StepContents:
    """The contents of a step on one rank: shards and extra state by name, and metrics.

    Metrics are the same on every rank. ``run``, the identity of the run, is that of the coordinator.
    """

    shards: dict[str, Any]
    metrics: dict[str, float]
    run: str

    def describe(self) -> bytes:
        """Return this rank's message to the others: its metrics, in exact text, its clock and the run's identity."""
        metrics = {name: repr(number) for name, number in self.metrics.items()}
        values = digest_values(self.shards)
        return json.dumps({"time": time.time(), "metrics": metrics, "run": self.run, "values": values}).encode()

    def add_record(self, step: int, answers: list[bytes], comm: Communicator, context: str) -> str:
        """Add the record of the step, with the coordinator's time, if ranks agree; return the run's identity."""
        gathered = agree_and_collect(answers, context, comm.ranks)
        check_same_metrics(comm.ranks, [each["metrics"] for each in gathered], context)
        check_same_values(comm, self.shards, [each["values"] for each in gathered], context)
        run = str(gathered[0]["run"])
        self.shards[RECORD] = StepRecord(step, gathered[0]["time"], self.metrics, run).encode()
        return run


def collect_shards(model: Any, optimizer: Any, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the shards of this rank, one level deep. With a model, ``install()`` is in effect from then on."""
    if model is None and state is None:
        raise ValidationError(["there is nothing to do: give model=, state=, or both"])
    if optimizer is not None and model is None:
        raise ValidationError(
            ["an optimizer's state is named after the model's parameters. Remedy (FC101): give model= as well"]
        )
    if isinstance(optimizer, (list, tuple)):
        raise ValidationError(
            Problem(
                f"optimizer= takes one optimizer; got a {type(optimizer).__name__} of {len(optimizer)}",
                code="FC101",
                remedy="leave it out, and give state={**fc.optimizer_sharded_state_dict(a, shards), "
                "**fc.optimizer_sharded_state_dict(b, shards)}, where shards is model.sharded_state_dict()",
            )
        )
    shards: dict[str, Any] = {}
    if model is not None:
        install()
        if not callable(getattr(model, "sharded_state_dict", None)):
            raise ValidationError(
                f"model= has no sharded_state_dict(); got a {type(model).__name__}. Remedy (FC101): give a "
                "paddle.nn.Layer, or describe the shards yourself and give state="
            )
        shards.update(model.sharded_state_dict())
    if optimizer is not None:
        # The optimizer looks parameters up in the model's shards; some optimizers return these as well.
        shards.update(optimizer_sharded_state_dict(optimizer, dict(shards)))
    for key, value in flatten_state_dict(state or {})[0].items():
        if key in shards or key.startswith(EXTRA_STATE):
            raise ValidationError(
                Problem(
                    "state= has a name of the model's, the optimizer's or the run's extra state",
                    key=key,
                    code="FC108",
                    remedy="rename it, or leave it out: the manager saves all of these itself",
                )
            )
        shards[key] = value
    return shards


def schedule_of(lr_scheduler: Any, optimizer: Any) -> Any:
    """Return the object with the rate: the given scheduler, else the optimizer's own scheduler or constant rate."""
    from paddle.optimizer.lr import LRScheduler

    inside: list[Any] = []
    while lr_scheduler is None and optimizer is not None and not any(optimizer is each for each in inside):
        inside.append(optimizer)
        # LookAhead has a rate of its own, which is not that of the optimizer in it, which steps.
        optimizer = getattr(optimizer, "inner_optimizer", None) or optimizer_inside(optimizer)
    for each in reversed(inside):
        rate = getattr(each, "_learning_rate", None)
        if isinstance(rate, LRScheduler):
            return rate
        if isinstance(rate, (int, float)):
            return ConstantRate(each)
    return lr_scheduler


def check_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the caller's own values, after a check that their names are free, or raise ValidationError."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise ValidationError([f"extra has to be a dict of portable values; got a {type(extra).__name__}"])
    bad = [name for name in extra if not isinstance(name, str) or name in _TAKEN]
    if bad:
        raise ValidationError([f"extra: {name!r} is not a free name. Remedy (FC108): rename it" for name in bad])
    return dict(extra)


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as plain numbers, or raise ValidationError."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ValidationError([f"metrics has to be a dict of names to numbers; got a {type(metrics).__name__}"])
    found, problems = {}, []
    for name, value in metrics.items():
        try:
            # Tensors and arrays of one element.
            number = value.item() if hasattr(value, "item") else value
            if not isinstance(name, str) or isinstance(number, (str, bytes, bool)):
                raise TypeError("not a name and a number")
            found[name] = float(number)
        except (TypeError, ValueError, RuntimeError) as error:
            problems.append(f"metrics: {name!r} has the value {value!r}: {error}. Remedy (FC101): give a number")
    if problems:
        raise ValidationError(problems)
    return found


def check_same_metrics(ranks: Sequence[int], metrics: Sequence[Mapping[str, str]], context: str) -> None:
    """Raise ValidationError, the same on every rank, unless all ranks were given the same metrics."""
    problems = []
    for name in sorted({name for each in metrics for name in each}):
        seen: dict[str, list[int]] = {}
        for rank, each in zip(ranks, metrics):
            seen.setdefault(each.get(name, "none"), []).append(rank)
        if len(seen) > 1:
            problems.append(
                f"metrics: {name!r} differs between ranks ({by_rank(seen)}). Remedy (FC502): make it one number "
                "first, with paddle.distributed.all_reduce"
            )
    if problems:
        raise ValidationError(problems, context)


def digest_values(shards: Mapping[str, Any]) -> str:
    """Return the digest of the extra state that has to be the same on every rank."""
    return hashlib.sha256(shards[_COMMON].numpy().tobytes()).hexdigest()[:16]


def check_same_values(comm: Communicator, shards: Mapping[str, Any], digests: Sequence[str], context: str) -> None:
    """Raise ValidationError if ranks' extra states differ; one collective, for their values, if their digests do."""
    if len({*digests}) == 1:
        return

    def describe() -> tuple[None, bytes]:
        common = json.loads(shards[_COMMON].numpy().tobytes())
        common["extra"] = common.pop("more")
        values = {name: _shortened(json.dumps(value)) for name, value in _leaves(common, "")}
        return None, json.dumps({"call": "save", **values}).encode()

    _, answers = comm.together(describe, context)
    check_same(answers, context, comm.ranks)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a dict, and of dicts inside it, with their paths."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    else:
        yield path, value


def _shortened(text: str) -> str:
    """Return a value's text; a long one by its beginning and its digest."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... (digest {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def check_step(step: object, words: str = "") -> None:
    """Raise ValidationError where this is not the number of a step; ``words`` are those that the caller allows."""
    if words and isinstance(step, str):
        raise ValidationError([f"step has to be an integer >= 0{words}; got {step!r}"])
    check_integer("step", step)


def agree_and_collect(answers: list[bytes], context: str, ranks: Sequence[int]) -> list[Any]:
    """Return the decoded JSON of each rank's message; the heads of the messages have to be the same on all ranks."""
    return [json.loads(text) for text in check_heads(answers, context, ranks)[0]]


@same_on_all_ranks(**OWN_OBJECTS, process_group=GROUP)
def check(
    model: Any = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    scaler: Any = None,
    state: Mapping[str, Any] | None = None,
    process_group: Any = None,
) -> None:
    """Raise the error that a save would raise: call this before the training starts.

    ::

        fc.check(model, optimizer)  # as fc.save(path, model=model, optimizer=optimizer)
        fc.check({**shards, **optimizer.sharded_state_dict(shards)})  # as fc.save_state_dict(that, path)

    Everything is described once, and the ranks compare the descriptions in one collective. No tensor is read or moved,
    so replicas are not compared; a layout whose replicas Paddle lets drift apart is warned of. No state of the
    optimizer is created: states that only the first step creates are not checked.

    Args:
        model: A ``paddle.nn.Layer``. Or the dict that :func:`save_state_dict` will be given, and nothing else.
        optimizer: Wrapped as for the training.
        lr_scheduler: None: the optimizer's own scheduler, or its constant rate.
        scaler: A ``paddle.amp.GradScaler``.
        state: Shards or tensors besides, or instead of, those of model and optimizer.
        process_group: The ranks that take part, as in :func:`save_state_dict`.

    Raises:
        ValidationError: It cannot be saved; on every rank, with the text of the save.
        CheckpointError: Likewise, where a description fails in another way.
    """
    options = locals()
    objects = RunObjects(model, optimizer, lr_scheduler, scaler, state)

    def describe() -> Mapping[str, Any]:
        if isinstance(model, Mapping):
            if any(each is not None for each in (optimizer, lr_scheduler, scaler, state)):
                raise ValidationError(
                    "the first argument is the dict of a save, which has all that is saved. Remedy (FC101): give the "
                    "dict alone, or the model in its place"
                )
            return model
        return objects.describe()

    head, comm = encode_options(check, options, **objects.given()), communicator_for(process_group)
    catalog = check_state(describe, comm, "cannot save", head)
    fused, keys = np.asarray(catalog.keys)[may_be_fused(catalog)].tolist(), {*catalog.keys}
    unordered = [key for key in fused if not split_state(key, keys)[1]]
    if unordered and not comm.position:
        logger.warning(order_warning("the model", unordered))
    drift = "" if optimizer is None or comm.position else drift_warning(comm.ranks)
    if drift:
        logger.warning(drift)
