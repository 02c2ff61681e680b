"""Adding the mixin's methods and the flags to a library's own classes, and removing them."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any, get_type_hints

from paddle_flexckpt.trainer.directories import is_flex, is_usable, latest_checkpoint
from paddle_flexckpt.trainer.flags import SHARED, FlexTrainingArguments, options_of
from paddle_flexckpt.trainer.mixin import UPSTREAM, FlexTrainerMixin, PaddleFleetMixin, PaddleFormersMixin
from paddle_flexckpt.trainer.model_rules.library_models import check_library, install_model_rules, uninstall_model_rules
from paddle_flexckpt.undo import Undo

_MIXINS: dict[str, tuple[type, ...]] = {
    "paddlenlp": (FlexTrainerMixin,),
    "paddleformers": (FlexTrainerMixin, PaddleFormersMixin),
    "paddlefleet": (FlexTrainerMixin, PaddleFormersMixin, PaddleFleetMixin),
}
_installed: dict[str, Undo] = {}
# The trainer of --enable_auto_parallel.
_SEMI_AUTOMATIC = "AutoTrainer"
# Methods that some versions of a library lack, or that only its semi-automatic trainer has.
_OPTIONAL = frozenset({"_load_best_model_from_peft_checkpoint", "_wrap_for_auto", "_wrap_for_dist_loader"})
_OPTIONAL |= {"_get_train_sampler", "get_train_dataloader"}


def install(library: str = "paddlenlp") -> None:
    """Add FlexCheckpoint to a library's Trainer, and the flags to its TrainingArguments. A second call does nothing.

    All classes derived from them have these too. Without the flags nothing changes. It calls
    ``paddle_flexckpt.install()`` and ``install_model_rules()``. The launcher calls it for scripts.

    Args:
        library: ``"paddlenlp"``, ``"paddleformers"`` or ``"paddlefleet"``.

    Raises:
        ValueError: There is no such library.
        ImportError: It is not installed.
        RuntimeError: Its trainer lacks a method that has to be wrapped: the version is not supported.
    """
    check_library(library)
    if library in _installed:
        return
    trainer = importlib.import_module(f"{library}.trainer.trainer").Trainer
    arguments = importlib.import_module(f"{library}.trainer.training_args").TrainingArguments
    every = {
        name: method
        for mixin in _MIXINS[library]
        for name, method in vars(mixin).items()
        if isinstance(method, FunctionType)
    }
    methods = {name: method for name, method in every.items() if name not in _OPTIONAL or hasattr(trainer, name)}
    missing = sorted(name for name in methods if not hasattr(trainer, name))
    if missing:
        raise RuntimeError(
            f"{library} {getattr(importlib.import_module(library), '__version__', '')}: its Trainer has no "
            f"{', '.join(missing)}: this version is not supported. Remedy (FC808): use PaddleNLP 3.0.0b4, "
            "PaddleFormers 1.2.0 or the PaddleFleet that docs/trainer.md names"
        )
    install_model_rules(library)
    undo = Undo()
    if library == "paddlenlp":
        _name_former_modules(undo)
    for name, method in methods.items():
        undo.set(trainer, UPSTREAM + name, getattr(trainer, name))
        undo.set(trainer, name, method)
    _install_in_auto_trainer(trainer, every, undo)
    for name in ("_flex_instance", "_flex_resuming"):
        undo.set(trainer, name, None)
    _add_fields(arguments, undo)
    _wrap_check(arguments, undo)
    _wrap_last_checkpoint(library, undo)
    _installed[library] = undo


def uninstall(library: str = "paddlenlp") -> None:
    """Undo :func:`install`; the library is as before. Without it, do nothing."""
    if library in _installed:
        _installed.pop(library).put_back()
        uninstall_model_rules(library)


def is_installed(library: str = "paddlenlp") -> bool:
    """Return whether :func:`install` is in effect for a library."""
    return library in _installed


def _install_in_auto_trainer(trainer: Any, methods: dict[str, FunctionType], undo: Undo) -> None:
    """Add the methods to the trainer of ``--enable_auto_parallel`` too, whose own methods would hide them."""

    def serve(cls: Any) -> None:
        for name in methods.keys() & vars(cls).keys():
            undo.set(cls, UPSTREAM + name, vars(cls)[name])
            undo.set(cls, name, methods[name])

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        super(trainer, cls).__init_subclass__(**kwargs)
        if cls.__name__ == _SEMI_AUTOMATIC:
            serve(cls)

    for cls in trainer.__subclasses__():
        if cls.__name__ == _SEMI_AUTOMATIC:
            serve(cls)
    # Scripts may import that trainer later.
    undo.set(trainer, "__init_subclass__", classmethod(__init_subclass__))


def _name_former_modules(undo: Undo) -> None:
    """Provide modules that Paddle 3.2 has renamed: PaddleNLP 3.0.0b4's semi-automatic trainer imports them."""
    before, now = "paddle.distributed.checkpoint", "paddle.distributed.flex_checkpoint.dcp"
    if importlib.util.find_spec(before) is not None:
        return
    names = ("", ".load_state_dict", ".metadata", ".utils")
    sys.modules.update({before + name: importlib.import_module(now + name) for name in names})
    undo.call(lambda: [sys.modules.pop(before + name, None) for name in names])


def _add_fields(arguments: Any, undo: Undo) -> None:
    """Add the flags to a dataclass and to all derived from it that exist already.

    A dataclass collects its bases' fields when it is made. So each derived class is made anew, bases first.
    """
    has = arguments.__dataclass_fields__
    flags = sorted(dataclasses.fields(FlexTrainingArguments), key=lambda each: each.name in SHARED)
    added = [each for each in flags if each.name not in SHARED or each.name not in has]
    types = get_type_hints(FlexTrainingArguments)  # argument parsers want types, not their names
    undo.set(arguments, "__annotations__", {**arguments.__annotations__, **{f.name: types[f.name] for f in added}})
    for each in added:
        undo.set(arguments, each.name, dataclasses.field(default=each.default, metadata=each.metadata))
    for cls in _with_derived(arguments):
        _remake(cls, undo)


def _with_derived(cls: type) -> Iterator[type]:
    """Yield a class and all dataclasses derived from it, bases first."""
    found: list[type] = [cls]
    for each in found:
        below: list[type] = each.__subclasses__()
        found.extend(derived for derived in below if derived not in found)
    own = [each for each in found if "__dataclass_fields__" in vars(each)]
    yield from sorted(own, key=lambda each: len(each.__mro__))


def _remake(cls: Any, undo: Undo) -> None:
    """Make a dataclass anew, with the present fields of its bases.

    ``dataclass()`` does not replace methods that the class defines, so the generated ones are deleted first.
    """
    undo.record_all(cls)
    parameters = cls.__dataclass_params__
    own = vars(cls).get("__annotations__", {})
    # Class attributes that were fields are the fields' defaults since the class was made.
    for name, each in cls.__dataclass_fields__.items():
        if name in own and not isinstance(vars(cls).get(name), dataclasses.Field):
            setattr(cls, name, each)
    written = vars(cls).get("__repr__")
    for name in ("__init__", "__eq__"):
        if name in vars(cls):
            delattr(cls, name)
    dataclasses.dataclass(
        init=parameters.init, repr=parameters.repr, eq=parameters.eq, order=parameters.order,
        unsafe_hash=parameters.unsafe_hash, frozen=parameters.frozen,
    )(cls)  # fmt: skip
    if written is not None:
        cls.__repr__ = written


def _wrap_check(arguments: Any, undo: Undo) -> None:
    """Check the flags for contradictions when the arguments are made, not at the first save."""
    before = arguments.__post_init__

    def __post_init__(self: Any) -> None:
        before(self)
        options_of(self)

    undo.set(arguments, "__post_init__", __post_init__)


def _wrap_last_checkpoint(library: str, undo: Undo) -> None:
    """Hide leftovers of dead saves from scripts that look for the last checkpoint themselves."""
    name = "get_last_checkpoint"
    before = getattr(importlib.import_module(f"{library}.trainer.trainer_utils"), name)

    def get_last_checkpoint(folder: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the library's result, but skip directories of interrupted saves of paddle_flexckpt."""
        found = before(folder, *args, **kwargs)
        return latest_checkpoint(folder) if found is not None and not _is_whole(found) else found

    undo.replace_everywhere(name, before, get_last_checkpoint, library)


def _is_whole(directory: Any) -> bool:
    return not is_flex(directory) or is_usable(directory)
