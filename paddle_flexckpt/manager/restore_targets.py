"""The objects of a run that a load fills, and the check that none of them starts anew.

Tested in tests/manager/test_restore.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.manager.step_contents import RunObjects
from paddle_flexckpt.optimizer_states import MASTER
from paddle_flexckpt.run_state.extra_state import (
    ExtraStateReport,
    check_data,
    has_constant_rate,
    has_position,
    put_back_extra_state,
    schedule_left_out,
    warned,
)
from paddle_flexckpt.run_state.schedules import ConstantRate
from paddle_flexckpt.transfer.names import is_state
from paddle_flexckpt.transfer.options import LoadOptions, Storage, rule

_NO_OPTIMIZER = "the checkpoint is of a model and its optimizer, and no optimizer was given"
_GIVE_OPTIMIZER = "give optimizer=, as in the run that saved it; for the model alone give optimizer_states='ignore'"


@dataclass(frozen=True)
class RunOptions(LoadOptions):
    """The options of a load of a run's objects: those of a load, and these.

    Attributes:
        rng: Whether to restore the random number generators, where the layout is the same.
        schedule: ``"raise"``: it is an error if a schedule (or constant rate), a scaler or a position in the data was
            saved, and this run has none or another kind, unless the model alone is wanted. ``"ignore"``: this run's
            stays as it is, with a warning.
    """

    storage: Storage = field(default="shared", init=False)
    rng: bool = True
    schedule: Literal["raise", "ignore"] = field(default="raise", metadata=rule(choices=("raise", "ignore")))


@dataclass(frozen=True, eq=False)
class RestoreTargets:
    """The objects that a restore fills on this rank; schedule, scaler and data may be None."""

    shards: Mapping[str, Any]
    lr_scheduler: Any
    scaler: Any
    rng: bool
    has_optimizer: bool
    data: Any = None
    has_model: bool = False
    optimizer: str = ""

    @classmethod
    def of(cls, objects: RunObjects, rng: bool) -> RestoreTargets:
        """Return the targets of a run's objects; ``rng``: whether the generators are restored."""
        given = objects.optimizer is not None, objects.data, objects.model is not None
        inner = objects.optimizer
        while hasattr(inner, "_inner_opt"):
            inner = inner._inner_opt
        return cls(objects.shards(), objects.schedule(), objects.scaler, rng, *given, type(inner).__name__)

    def _check_states(self, saved: Collection[str], options: RunOptions) -> None:
        """Raise ValidationError where a checkpoint of these keys has states, and this run's optimizer never has any."""
        if self.optimizer != "SGD" or options.optimizer_states == "ignore":
            return
        keys = {*saved}
        states = sorted(key for key in saved if is_state(key, keys) and not key.endswith(f".{MASTER}"))
        if states:
            raise ValidationError(
                Problem(
                    "this optimizer (SGD) has no states, and the checkpoint has another's",
                    got=f"{len(states)}, such as {listed(states, 3)}",
                    code="FC203",
                    remedy="give optimizer_states='ignore' to load all else; or make the optimizer as in the run that "
                    "saved it",
                )
            )

    def check_complete(
        self, state: Mapping[str, Any] | None, saved: Collection[str], options: RunOptions
    ) -> tuple[None, bytes]:
        """Raise ValidationError where a part of the run would not be restored from the keys, and so start anew."""
        check_data(self.data)
        self._check_states(saved, options)
        given = {"lr_scheduler": self.lr_scheduler, "scaler": self.scaler, "data": self.data}
        if state is None:
            missing = [name for name, each in given.items() if each is not None and not isinstance(each, ConstantRate)]
            if missing:
                raise ValidationError(
                    f"the checkpoint has no state of {' and '.join(missing)}: it was saved without a run's extra "
                    "state. Remedy (FC904): give schedule='ignore', and set them to the step of the checkpoint yourself"
                )
            return None, b""
        if self.data is not None and not has_position(state):
            raise ValidationError(
                "the checkpoint has no position in the data: it was saved without data=. Remedy (FC904): give "
                "schedule='ignore', and set the sampler's position to the samples that the checkpoint's run has taken"
            )
        is_alone = not self.has_optimizer and options.optimizer_states == "ignore"
        model = "" if self.has_optimizer else "; for the model alone give optimizer_states='ignore'"
        left_out = schedule_left_out(state, self.lr_scheduler, self.scaler, self.data)
        problems = []
        is_constant = has_constant_rate(state)
        if self._lacks_optimizer(is_constant, saved) and not is_alone:
            problems.append(Problem(_NO_OPTIMIZER, code="FC203", remedy=_GIVE_OPTIMIZER))
            # Its rate comes with the optimizer.
            if self.lr_scheduler is None:
                left_out.pop("lr_scheduler", None)
        for name, why in left_out.items():
            if given[name] is None and is_alone:
                continue
            remedy = f"give {name}=, built as in the run that saved it"
            if name == "lr_scheduler" and is_constant:
                remedy = (
                    "make the optimizer with a constant rate, as in the run that saved it, and give no lr_scheduler"
                )
            problems.append(
                Problem(
                    f"{name} is saved and would not be restored: {why}",
                    code="FC904",
                    remedy=f"{remedy}; with schedule='ignore' this run's stays as it is, and {name} alone starts "
                    f"over{model}",
                )
            )
        if problems:
            raise ValidationError(problems)
        return None, b""

    def _lacks_optimizer(self, is_constant: bool, saved: Collection[str]) -> bool:
        """Return whether an optimizer was saved, by its constant rate or its states, and this call does not get it."""
        if self.has_optimizer or is_constant:
            return not self.has_optimizer
        keys, own = {*saved}, {*self.shards}
        return any(is_state(key, keys) for key in saved) and not any(is_state(key, own | keys) for key in own)

    def restore(self, state: Mapping[str, Any]) -> ExtraStateReport:
        """Restore all but the shards from a checkpoint's extra state."""
        report = put_back_extra_state(state, self.lr_scheduler, self.scaler, self.rng, self.data)
        if has_constant_rate(state) and not self.has_optimizer:  # the rate is the optimizer's, which was left out
            report.not_restored.pop("lr_scheduler", None)
        return warned(report)
