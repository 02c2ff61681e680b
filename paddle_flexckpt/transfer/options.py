"""Options of public calls: each is listed, documented and checked once, as the field of a dataclass.

Ranks have to agree on every option, unless its field has a reason why they may differ::

    @dataclass(frozen=True)
    class SaveOptions(Options):
        step: int | None = None
        storage: str = field(default="shared", metadata=rule(choices=("shared", "per_node")))
        unique_id: int | None = field(default=None, metadata=rule(may_differ="the coordinator chooses it"))

    @takes(SaveOptions, path=PATH)
    def save(path, step=None, **options):
        asked = SaveOptions(step=step, **options)
        head = asked.encode("save")  # in a step of all ranks: an error is raised on all of them

Tested in tests/transfer/test_options.py and tests/loading/test_options.py.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args

import numpy as np

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.native.checksums import VerifyMode, verify_mode
from paddle_flexckpt.progress import Meter, ProgressCallback
from paddle_flexckpt.transfer.arguments import check_count, check_names, plain_value

if TYPE_CHECKING:
    from paddle_flexckpt.aoa import AoaConfig

Call = TypeVar("Call", bound=Callable[..., Any])
Strict = Union[bool, Literal["missing", "unexpected"]]
OptimizerStates = Literal["raise", "ignore"]
Storage = Literal["shared", "per_node"]
# The last five are Paddle's own, which name ways to send data that one rank has read.
CommMethod = Literal[
    "auto",
    "direct",
    "cooperative",
    "send_recv",
    "broadcast",
    "multi_group_broadcast",
    "grouped_send_recv",
    "parallel_broadcast",
]

_TRANSFORM = ("logical_metadata", "source_keys", "apply")
PATH = (
    "storage may have another name on another rank; the commit and the checkpoint's token tell whether it is the same"
)
GROUP = "ranks of different groups cannot meet to compare them"
SHARDS = "every rank has its own shards"
ALONE = "no other rank takes part"
UNUSED = "accepted for compatibility, without effect"
CHECKPOINT = "what is compared is the checkpoint that it stands for"


def rule(
    choices: tuple[Any, ...] = (), may_differ: str = "", compared: Callable[[Any], Any] | None = None, least: int = 0
) -> dict[str, Any]:
    """Return the metadata of an option's field.

    Args:
        choices: The possible values; () for any.
        may_differ: Why ranks may differ in it; "" if they may not.
        compared: Returns what ranks compare of a value without a text of its own; raises for an invalid value.
        least: The least value of an integer.
    """
    return {"choices": choices, "may_differ": may_differ, "compared": compared, "least": least}


def _config_digest(config: Any) -> Any:
    from paddle_flexckpt.transfer.mapping import config_digest

    return config_digest(config)


@dataclass(frozen=True)
class Options:
    """The options of one public call; each subclass adds its own as fields.

    A field of type ``int``, ``bool`` or ``float``, or one of these or None, takes nothing else.
    """

    def __post_init__(self) -> None:
        """Convert numpy's integers and booleans to Python's, and None to the default where Paddle's calls take it."""
        for each in fields(self):
            if each.name in ("coordinator_rank", "offload") and getattr(self, each.name) is None:
                object.__setattr__(self, each.name, each.default)
        for name, value in vars(self).items():
            if isinstance(value, (np.integer, np.bool_)):
                object.__setattr__(self, name, value.item())

    @classmethod
    def compared(cls) -> list[str]:
        """Return the options in which ranks may not differ."""
        return [each.name for each in fields(cls) if each.init and not each.metadata.get("may_differ")]

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have."""
        for each in fields(self):
            choices, value = each.metadata.get("choices", ()), getattr(self, each.name)
            plain_value(each.name, str(each.type), value, each.metadata.get("least", 0))
            if each.type == "float" and not (type(value) in (int, float) and value > 0):
                raise ValidationError([f"{each.name} has to be a number > 0; got {value!r}. Remedy (FC101): give one"])
            if value is None and str(each.type).endswith("| None"):
                continue
            if choices and not any(type(value) is type(choice) and value == choice for choice in choices):
                *texts, last = map(repr, choices)
                listed = f"{', '.join(texts)} or {last}"
                raise ValidationError([f"{each.name} is {listed}; got {value!r}. Remedy (FC101): give one of these"])

    def agreed(self) -> dict[str, Any]:
        """Return the values that ranks compare, by name."""
        self.check()
        rules = {each.name: each.metadata.get("compared") or (lambda value: value) for each in fields(self)}
        return {name: rules[name](getattr(self, name)) for name in self.compared()}

    def keywords(self, options: type[Options]) -> dict[str, Any]:
        """Return the options that another call has too, to pass them on."""
        return {each.name: getattr(self, each.name) for each in fields(options)}

    def encode(self, call: str, **also: Any) -> bytes:
        """Return a rank's message about its call and options, as JSON.

        Args:
            call: Name of the public call.
            **also: Other values to compare.

        Raises:
            ValidationError: An option has a value that it cannot have.
        """
        return json.dumps({"call": call, **self.agreed(), **also}, default=repr).encode()


@dataclass(frozen=True)
class ProgressOptions(Options):
    """The option of every call that may take long.

    Attributes:
        progress: Called with a :class:`~paddle_flexckpt.progress.Progress` of this rank, at most about a hundred times
            or each 64 MiB, by the thread that moves the bytes (which may be another one), one call at a time. An
            exception in it fails the call, as an error of this rank.
    """

    progress: ProgressCallback | None = field(default=None, metadata=rule(may_differ="each rank tells its own"))

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have."""
        super().check()
        if self.progress is not None and not callable(self.progress):
            raise ValidationError([f"progress has to be a function of a Progress, or None; got {self.progress!r}"])

    def meter(self, phase: str, bytes_total: int, items_total: int = 0) -> Meter:
        """Return a meter that counts bytes and reports them to ``progress``."""
        return Meter(self.progress, phase, bytes_total, items_total)


@dataclass(frozen=True)
class StatementOptions(Options):
    """The options of every call that takes AOA statements.

    Attributes:
        aoa_config: AOA statements that make the targets from the source (docs/aoa.md): a dict with the key
            ``aoa_statements``, the same as a JSON text, or the path of a JSON or YAML file.
    """

    aoa_config: AoaConfig | None = field(default=None, metadata=rule(compared=_config_digest))


@dataclass(frozen=True)
class TransferOptions(StatementOptions):
    """The common options of loads and reshards.

    Attributes:
        coordinator_rank: The rank, counted within the group, that writes the log line.
        mw_name_compatibility: Whether a key that the source lacks may be found under another of Paddle's names for the
            same tensor: those in dynamic and static graph, in semi-automatic and hybrid parallel, in plain and sharded
            state dicts (docs/semi_auto.md, Names). The report lists such keys among the aliases. False: keys are found
            under their own names alone.
        raw_names: How to find the parameter of a state with a name that counts layers, such as
            ``linear_0.w_0_moment1_0``. A record in the checkpoint or in the loaded state always counts. Without one,
            ``"recorded"`` makes it an error if several parameters have the shape. ``"trusted"`` takes the name as it
            is in this process: the caller knows that the process that saved made the same networks in the same order.
        strict: The keys without a counterpart that are errors: ``"missing"`` (targets that the source lacks),
            ``"unexpected"`` (keys that no rank asks for), True (both) or False (neither).
        dtype: ``"raise"`` makes a dtype that differs an error; ``"cast"`` converts the values.
        tied_names: Whether a key that the source lacks may come from another name of the same, tied parameter; the
            report lists such keys.
        master_weights: ``"convert"`` lets a master weight (``.w_0``) that the source lacks start from its parameter,
            and takes a float32 parameter of which the source has lower precision from its master weight; the report
            lists both. ``"exact"`` does neither.
        fused: With ``"convert"``, a fused parameter (one with a :class:`FusedAxis` rule) of which the source has
            another number of tensor-parallel parts is reordered, with its states, by the AOA statement of its rule; the
            report lists such keys. A save records rule and number of parts, so a target without a rule gets natural
            order. Keys that statements of ``aoa_config`` make are not reordered. ``"exact"`` makes another number of
            parts an error.
        optimizer_states: With ``"raise"``, the source's states of loaded parameters are an error if no rank asks for
            them, whatever ``strict`` is, as the optimizer would go on without them. ``"ignore"`` loads without them,
            for inference, say, or for a model that is loaded before its optimizer. If a live optimizer has float32
            masters of loaded parameters that are not loaded too, they get the parameters' values, as they would undo
            the load at the next step; masters that are split otherwise cause a warning.
    """

    coordinator_rank: int = 0
    mw_name_compatibility: bool = field(default=True, metadata=rule(choices=(True, False)))
    raw_names: Literal["recorded", "trusted"] = field(
        default="recorded", metadata=rule(choices=("recorded", "trusted"))
    )
    strict: Strict = field(default="missing", metadata=rule(choices=(True, False, "missing", "unexpected")))
    dtype: Literal["raise", "cast"] = field(default="raise", metadata=rule(choices=("raise", "cast")))
    tied_names: bool = True
    master_weights: Literal["exact", "convert"] = field(default="exact", metadata=rule(choices=("exact", "convert")))
    fused: Literal["convert", "exact"] = field(default="convert", metadata=rule(choices=("convert", "exact")))
    optimizer_states: OptimizerStates = field(default="raise", metadata=rule(choices=("raise", "ignore")))

    @property
    def missing_is_an_error(self) -> bool:
        """Return whether missing keys are errors."""
        return self.strict in (True, "missing")

    @property
    def unexpected_is_an_error(self) -> bool:
        """Return whether unexpected keys are errors."""
        return self.strict in (True, "unexpected")


@dataclass(frozen=True)
class FileOptions(ProgressOptions):
    """The options of every call that reads a checkpoint's files.

    Attributes:
        unique_id: The checkpoint's id; None takes the highest.
        verify: ``"read"`` compares every block of which anything is used with its checksum. A block that is needed in
            part is hashed in the page cache, once for all ranks of the host; on an object store it is read whole.
            ``"full"`` reads blocks whole everywhere, so that a disk's read error is an error and not the end of the
            process, and refuses a checkpoint without checksums. ``"off"`` compares none. True and False mean
            ``"read"`` and ``"off"``.
        use_replicas: Whether a replica (of a save with ``save_replicas=True``; of a load with ``storage="per_node"``
            another node's copy, too) is read in place of a damaged file or block; the report and a warning list them.
            With ``verify="off"`` no block is found to be damaged.
    """

    unique_id: int | None = field(default=None, metadata=rule(may_differ=CHECKPOINT))
    verify: bool | VerifyMode = "read"
    use_replicas: bool = True

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have."""
        super().check()
        verify_mode(self.verify)


@dataclass(frozen=True)
class LoadOptions(FileOptions, TransferOptions):
    """The options of a load.

    Attributes:
        storage: ``"shared"``: every rank sees all files. ``"per_node"``: a rank may see only some of them, or none (see
            :func:`save_state_dict`), and receives the rest from ranks that see it. The default id is the highest that
            any rank sees.
        comm_method: ``"direct"``: every rank reads the bytes that it needs. ``"cooperative"``: one rank reads bytes
            that several ranks need from storage, and sends them to the others through host memory; ranks read about the
            same number of bytes. The short runs of a column cut are read like this too. ``"auto"`` chooses
            ``"cooperative"`` on object stores, if ranks alone would fetch twice the bytes that they need together and
            compute no values; on file systems of the host it reads directly. Paddle's own names (``"broadcast"``,
            ``"send_recv"``, ``"multi_group_broadcast"``, ``"grouped_send_recv"``, ``"parallel_broadcast"``) mean
            ``"cooperative"``. The report has the choice and the reason. With ``storage="per_node"``, ranks that need
            the same bytes and see them each read them, unless this is ``"cooperative"``.
        load_transform: A transform from the checkpoint's tensors to logical tensors to load in their place: an object
            with ``logical_metadata()``, ``source_keys(name)`` and ``apply(name, source_tensors, output_dtype)``, as
            Paddle's develop branch takes it (docs/guide.md). Statements are about the logical names. Each rank makes
            the tensors that it needs, whole, and reads for itself, whatever ``comm_method`` is.
    """

    storage: Storage = field(default="shared", metadata=rule(choices=("shared", "per_node")))
    comm_method: CommMethod = field(default="auto", metadata=rule(choices=get_args(CommMethod)))
    load_transform: Any = field(default=None, metadata=rule(may_differ="what it makes is compared in its place"))

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have."""
        super().check()
        if self.load_transform is None:
            return
        lacks = [name for name in _TRANSFORM if not callable(getattr(self.load_transform, name, None))]
        if lacks:
            raise ValidationError(
                [
                    f"load_transform has to have the methods {', '.join(_TRANSFORM)}; a "
                    f"{type(self.load_transform).__name__} lacks {', '.join(lacks)}"
                ]
            )
        if self.storage == "per_node":
            raise ValidationError(
                [
                    "load_transform: a rank makes tensors of whole ones, of which storage='per_node' may have parts on "
                    "other nodes. Remedy (FC504): load from shared storage, or copy the nodes' directories into one"
                ]
            )

    @property
    def reads(self) -> Literal["auto", "direct", "cooperative"]:
        """Return the way of reading for ``comm_method``."""
        return self.comm_method if self.comm_method in ("auto", "direct") else "cooperative"


@dataclass(frozen=True)
class WholeOptions(FileOptions, StatementOptions):
    """The options of a call that reads whole tensors in one process.

    Attributes:
        prefix: Only keys that start with this and a dot, after the statements; the prefix is removed.
    """

    prefix: str | None = None

    @property
    def start(self) -> str:
        """Return the beginning of the chosen keys."""
        return f"{self.prefix}." if self.prefix else ""


@dataclass(frozen=True)
class OutputOptions(Options):
    """The options of every call that writes files of whole tensors.

    Attributes:
        max_file_bytes: Bytes of tensors in one file, where they are whole; a larger tensor has a file for itself.
    """

    max_file_bytes: int = field(default=5 << 30, metadata=rule(least=1))


@dataclass(frozen=True)
class ExportOptions(OutputOptions, WholeOptions):
    """The options of an export.

    Attributes:
        states: Whether optimizer states and a run's extra state are written too.
    """

    states: bool = False


_OPTIONS = "options_of_the_call"
_OF_OPTIONS = re.compile(r"\n    \*\*options: .*(\n        .*)*")
_ATTRIBUTE = re.compile(r"^    (\w+): ", re.MULTILINE)


def takes(options: type[Options], **may_differ: str) -> Callable[[Call], Call]:
    """Declare the options of a public call.

    The docstring of the call gets the texts of all options. The signature gets those that it takes as ``**options``.

    Args:
        options: The options.
        **may_differ: Other arguments, each with the reason why ranks may differ in it; ALONE: there are no other ranks.
    """

    def declare(call: Call) -> Call:
        signature = inspect.signature(call)
        given = {name: each for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
        known = {each.name: each for each in fields(options) if each.init}
        unknown = [name for name in given if name not in known and name not in may_differ and name != "self"]
        if unknown:
            raise TypeError(f"{call.__qualname__}: {unknown} are neither options nor declared a rank's own")
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for name, each in known.items()
            if name not in given
        ]
        every = [*given, *(each.name for each in more)]
        positional = [
            name for name, each in given.items() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        takes_any = any(each.kind is each.VAR_POSITIONAL for each in given.values())

        @functools.wraps(call)
        def checked(*arguments: Any, **named: Any) -> Any:
            check_names(call, named, every)
            if not takes_any:
                check_count(call, len(arguments), positional, every)
            return call(*arguments, **named)

        checked.__signature__ = signature.replace(parameters=[*given.values(), *more])  # type: ignore[attr-defined]
        setattr(checked, _OPTIONS, options)
        names = ", ".join(f"``{name}``" for name in options.compared()) or "what they stand for"
        doc = _with_options(inspect.getdoc(call) or "", options, known)
        checked.__doc__ = (
            doc if ALONE in may_differ.values() else f"{doc}\n\nThe same on every rank, and compared: {names}."
        )
        return cast("Call", checked)

    return declare


def _with_options(doc: str, options: type[Options], names: Collection[str]) -> str:
    """Return a docstring with the dataclass's options in its section ``Args``, in place of ``**options``."""
    doc, texts = _OF_OPTIONS.sub("", doc, count=1), []
    for cls in reversed(options.__mro__):
        text = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")[2] if issubclass(cls, Options) else ""
        starts = [*_ATTRIBUTE.finditer(text)]
        ends = [*(each.start() for each in starts[1:]), len(text)]
        texts += [text[each.start() : end].rstrip() for each, end in zip(starts, ends) if each[1] in names]
    head, blank, tail = doc.partition("\n\nReturns:" if "\n\nReturns:" in doc else "\n\nRaises:")
    return "\n".join([head, *texts]) + blank + tail


def same_on_all_ranks(**may_differ: str) -> Callable[[Call], Call]:
    """Declare that the arguments of a public call are its options, which ranks compare, except those in ``may_differ``.

    Args:
        **may_differ: Arguments in which ranks may differ, each with the reason.
    """

    def declare(call: Call) -> Call:
        names = [name for name in inspect.signature(call).parameters if name != "self" and name not in may_differ]
        made = make_dataclass(call.__qualname__, [(name, Any) for name in names], bases=(Options,), frozen=True)
        return takes(made, **may_differ)(call)

    return declare


def options_of(call: Callable[..., Any]) -> type[Options]:
    """Return the options of a public call."""
    options: type[Options] = getattr(call, _OPTIONS)
    return options


def encode_options(call: Callable[..., Any], arguments: Mapping[str, Any], **also: Any) -> bytes:
    """Return a rank's message about its call and options, as JSON.

    Args:
        call: The public call, declared by :func:`same_on_all_ranks`.
        arguments: Its arguments by name: ``locals()`` in its first line.
        **also: Values for arguments without a text of their own, and other values to compare.
    """
    values = {name: arguments[name] for name in options_of(call).compared()}
    return json.dumps({"call": call.__name__, **values, **also}, default=repr).encode()
