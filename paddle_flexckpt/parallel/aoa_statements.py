"""gen_aoa_statements: AOA statements from the tree of layers, for checkpoints of Hugging Face's layout.

Each class of layers defines once how its parameters differ from those of its counterpart there: Paddle's linear layers
have weights ``[in, out]``, the others' are ``[out, in]``. The names come from the model's own ``sharded_state_dict()``,
and names that differ only in numbers become one statement with placeholders. docs/aoa.md has an example of a layer with
parameters of its own. Tested in tests/parallel/test_gen_aoa_statements.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Union

from paddle_flexckpt.parallel.layers import ColumnParallelMixin, RowParallelMixin, VocabParallelMixin, own_state
from paddle_flexckpt.parallel.slices import parameter_name

Rule = Union[Mapping[str, str], Callable[[Any, str], Mapping[str, str]]]
_HOOK = "_get_aoa_rules"
_SHORT = ("copy", "transpose", "absent")
_ANY_FIELD = re.compile(r"\{(\w*)\}")
_FIELDS = ("hf", "paddle", "hf_layer", "hf_parent")
# One name for each number that differs; a model with more levels gets a statement for every parameter.
_PLACEHOLDERS = ("LAYER_ID", "EXPERT_ID", "PART_ID", "SLICE_ID")
_FIELD = re.compile(rf"\{{({'|'.join(_FIELDS)})\}}")
# Quoted texts, and names with fields in them.
_NAMES = re.compile(rf"\"[^\"]*\"|'[^']*'|[\w.$*]*(?:{_FIELD.pattern}[\w.$*]*)+")
_NUMBER = r"\$(?:[A-Z_]+|\{[A-Z_]+[-+]\d+\})"
_UNQUOTED = re.compile(rf"(?:[A-Za-z_]|{_NUMBER})(?:[A-Za-z0-9_.]|{_NUMBER})*")
# Characters that end a quoted name, or have a meaning in it.
_UNWRITABLE = re.compile(r"[\"$*\n]")
# Words of the language in places where a name could be.
_WORDS = frozenset("_ fused_qkv fused_qkv_old fused_ffn copy stack unstack sum average lora_merge optional".split())


def gen_aoa_statements(
    model: Any,
    direction: str = "from_hf",
    *,
    hf_names: Callable[[str], str] | Mapping[str, str] | None = None,
    rules: Mapping[type, Rule] | None = None,
    process_group: Any = None,
) -> list[str]:
    """Return the AOA statements between a Hugging Face checkpoint and a model, from the model's layers.

    A layer's rules are the first of these that exist: those of ``rules`` for its class; those that its method
    ``_get_aoa_rules(direction)`` returns; those of Paddle's layers that this library knows (linear layers: weight
    transposed; embeddings and convolutions: unchanged). They map names of the layer's parameters and persistable
    buffers, or dotted names of parameters in its sub-layers, to one of

    * ``"copy"``: the same in both;
    * ``"transpose"``: axes reversed;
    * ``"absent"``: there is none in the checkpoint, the model keeps its own;
    * a text of one or more statements, with ``{paddle}`` for the model's name, ``{hf}`` for the checkpoint's,
      ``{hf_layer}`` for that without its last part and ``{hf_parent}`` without its last two.

    If several layers have a rule for a parameter, the outermost counts. Without a rule, parameters of one axis or none
    are copied.
    A parameter that is tied to another comes from the other one's tensor, as checkpoints hold it once.

    The names are those of this rank's ``sharded_state_dict()``. Where ranks have different layers or experts (pipeline
    and expert parallelism), a load needs the statements for all of them on every rank: pass the ``process_group``.
    Lists of single ranks should not be joined, as ``a^T -> a`` must not be carried out twice.

    Args:
        model: The model.
        direction: ``"from_hf"`` or ``"to_hf"``.
        hf_names: The checkpoint's name for a name of the model; the same name by default. A mapping has to have all
            names of the model that statements need.
        rules: Rules for classes, and their subclasses, that cannot have a method; a mapping, or a function of layer
            and direction that returns one.
        process_group: The ranks that call this together, to get the same statements, for the layers of all of them.
            By default nothing is communicated.

    Returns:
        The statements, in the order of the model's names.

    Raises:
        ValueError: A parameter of two or more axes has no rule, a rule names no parameter or is invalid, a name is
            missing in ``hf_names``, or the model cannot be described.
    """
    if direction not in ("from_hf", "to_hf"):
        raise ValueError(f"direction is 'from_hf' or 'to_hf'; got {direction!r}")
    if not callable(getattr(model, "sharded_state_dict", None)):
        raise ValueError(
            f"{type(model).__name__} has no sharded_state_dict(). Remedy (FC804): call paddle_flexckpt.install()"
        )
    found = _renames(model, direction, _treatments(model, direction, rules or {}), hf_names)
    return _fold(found if process_group is None else _of_all_ranks(found, process_group))


# -- rules -------------------------------------------------------------------------------------------------------------


def _known_rules() -> dict[type, Rule]:
    """Return the rules for Paddle's layers."""
    import paddle
    from paddle.distributed.fleet.layers.mpu import mp_layers
    from paddle.distributed.fleet.utils import sequence_parallel_utils as sequence_parallel
    from paddle.nn.layer.conv import _ConvNd

    linear = (
        paddle.nn.Linear,
        mp_layers.ColumnParallelLinear,
        mp_layers.RowParallelLinear,
        sequence_parallel.ColumnSequenceParallelLinear,
        sequence_parallel.RowSequenceParallelLinear,
        ColumnParallelMixin,  # of a user's own layers
        RowParallelMixin,
    )
    as_is = (paddle.nn.Embedding, mp_layers.VocabParallelEmbedding, VocabParallelMixin, _ConvNd)
    return {**{cls: {"weight": "transpose"} for cls in linear}, **{cls: {"weight": "copy"} for cls in as_is}}


def _treatments(model: Any, direction: str, given: Mapping[type, Rule]) -> dict[str, str]:
    """Return treatments by the parameter's dotted name in the tree; the outermost layer's counts."""
    known = _known_rules()
    treatments: dict[str, str] = {}
    for path, layer in model.named_sublayers(include_self=True):
        rule, is_users = _rule_of(layer, given, known)
        prefix = f"{path}." if path else ""
        for name, treatment in (rule(layer, direction) if callable(rule) else rule or {}).items():
            if is_users:
                _check_rule(layer, name, treatment)
            treatments.setdefault(prefix + name, treatment)
    return treatments


def _rule_of(layer: Any, given: Mapping[type, Rule], known: Mapping[type, Rule]) -> tuple[Rule | None, bool]:
    """Return a layer's rule, and whether it is a user's."""
    classes = type(layer).__mro__
    rule = next((given[cls] for cls in classes if cls in given), None)
    if rule is not None:
        return rule, True
    hook = getattr(layer, _HOOK, None)
    if hook is not None:
        return (lambda _, direction: hook(direction) or {}), True
    return next((known[cls] for cls in classes if cls in known), None), False


def _check_rule(layer: Any, name: str, treatment: Any) -> None:
    where = f"the AOA rule of {type(layer).__name__} for {name!r}"
    *path, last = name.split(".")
    owner = layer
    for part in path:
        owner = getattr(owner, "_sub_layers", {}).get(part)
    absent = owner is not None and hasattr(owner, last) and getattr(owner, last) is None  # a bias that may not exist
    if owner is None or not (absent or last in own_state(owner)):
        names = [] if owner is None else sorted(own_state(owner))
        raise ValueError(f"{where} names no parameter; {'.'.join(path) or 'the layer'} has {names}")
    if treatment in _SHORT:
        return
    if not isinstance(treatment, str) or "->" not in treatment:
        raise ValueError(f"{where} has to be one of {', '.join(_SHORT)} or a statement; got {treatment!r}")
    unknown = [field for field in _ANY_FIELD.findall(treatment) if field not in _FIELDS and not field.isupper()]
    if unknown or "{paddle}" not in treatment:
        raise ValueError(
            f"{where} has to have {{paddle}} in it, and no other fields than {', '.join(_FIELDS)}; got {treatment!r}"
        )


def _without_rule(key: str, owner: _Owner, weight: Any) -> str:
    return (
        f"parameter {key!r} {list(weight.global_shape)} is {owner.name!r} of a {owner.cls}, for which there is no AOA "
        f"rule: it may be transposed or not. Remedy (FC606): give {owner.cls} a method {_HOOK}(self, direction) that "
        f"returns {{{owner.name!r}: 'copy'}} (or 'transpose', or a statement), or pass rules={{{owner.cls}: ...}}"
    )


# -- parameters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Owner:
    """A parameter or buffer in the tree of layers."""

    path: str  # of its layer in the tree, with the dot
    name: str  # in the layer
    cls: str
    identity: int  # the same for all names of one tensor


def _owners(model: Any) -> dict[Any, list[_Owner]]:
    """Return parameters and buffers of the tree, by identity and by the tensor's name."""
    found: dict[Any, list[_Owner]] = {}
    for path, layer in model.named_sublayers(include_self=True):
        for name, tensor in own_state(layer).items():
            owner = _Owner(f"{path}." if path else "", name, type(layer).__name__, id(tensor))
            found.setdefault(id(tensor), []).append(owner)
            found.setdefault(tensor.name, []).append(owner)
    return found


def _owner_of(key: str, weight: Any, owners: Mapping[Any, list[_Owner]]) -> _Owner:
    """Return the place of a key's tensor in the tree; of a tied one, the place whose name ends as the key does."""
    tensor = weight.local_tensor
    # The tensor of a slice of a parameter (stage 3) is another one, named after the parameter.
    candidates = owners.get(id(tensor)) or owners.get(parameter_name(str(tensor.name)))
    if not candidates:
        raise ValueError(
            f"key {key!r} of sharded_state_dict() is no parameter or persistable buffer of the model's layers, so no "
            f"layer can say what it is in the checkpoint. Remedy (FC606): write its statement by hand"
        )
    return max(candidates, key=lambda owner: _common_end(key, f"{owner.path}{owner.name}"))


def _common_end(one: str, other: str) -> int:
    """Return the number of last components that two dotted names have in common."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(one.count("."), other.count(".")) + 1)


# -- statements --------------------------------------------------------------------------------------------------------


def _renames(model: Any, direction: str, treatments: Mapping[str, str], hf_names: Any) -> list[_Rename]:
    """Return the statement of each parameter that this rank describes."""
    owners, weights = _owners(model), model.sharded_state_dict()
    places = {key: _owner_of(key, weight, owners) for key, weight in weights.items()}
    own = {key: treatments.get(f"{place.path}{place.name}") for key, place in places.items()}
    first: dict[int, str] = {}  # of the names of one tensor, the first that a rule is about, or else the first
    for key, place in places.items():
        if place.identity not in first or (own[first[place.identity]] is None and own[key] is not None):
            first[place.identity] = key
    found = []
    for key, weight in weights.items():
        main = first[places[key].identity]
        if own[main] is None and len(weight.global_shape) > 1:
            raise ValueError(_without_rule(main, places[main], weight))
        found.append(_rename(key, main, own[main] or "copy", direction, hf_names))
    return found


def _rename(key: str, main: str, treatment: str, direction: str, hf_names: Any) -> _Rename:
    """Return the statement of a parameter; ``main`` is its name, or for a tied one, the name in the checkpoint."""
    from_hf = direction == "from_hf"
    if treatment == "absent" or (key != main and not from_hf):
        return _Rename(key, "", "_ -> {paddle}" if from_hf else "{paddle} -> _", from_hf)
    template = treatment
    if treatment in _SHORT:
        mark = "^T" if treatment == "transpose" else ""
        template = f"{{hf}}{mark} -> {{paddle}}" if from_hf else f"{{paddle}}{mark} -> {{hf}}"
    return _Rename(key, _hf_name(main, hf_names), template, from_hf, folds=key == main)


def _of_all_ranks(mine: list[_Rename], process_group: Any) -> list[_Rename]:
    """Return the statements of all ranks, each parameter's once."""
    from paddle_flexckpt.communication.group_communicators import communicator_for

    described = json.dumps([astuple(rename) for rename in mine]).encode()
    _, answers = communicator_for(process_group).together(lambda: (None, described), "cannot generate AOA statements")
    found: dict[str, _Rename] = {}
    for rank, renames in enumerate(answers):
        for rename in (_Rename(*fields) for fields in json.loads(renames)):
            if found.setdefault(rename.key, rename) != rename:
                raise ValueError(
                    f"ranks have different AOA rules or checkpoint's names for {rename.key!r}: {found[rename.key]} on "
                    f"an earlier rank, {rename} on rank {rank} of the group. Remedy (FC502): give all ranks the same "
                    "rules"
                )
    return list(found.values())


def _hf_name(key: str, hf_names: Any) -> str:
    if hf_names is None:
        return key
    name = hf_names(key) if callable(hf_names) else hf_names.get(key)
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"hf_names has no name for {key!r}; got {name!r}. Remedy (FC606): add one, or give the parameter the AOA "
            "rule 'absent' if the checkpoint has none"
        )
    return name


# -- folding -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rename:
    """The statement of one parameter."""

    key: str  # the model's name
    hf: str  # the checkpoint's name; empty if the template does not use it
    template: str  # the statement, with fields for both
    from_hf: bool  # whether the checkpoint's name is read and the model's assigned
    folds: bool = True  # whether it may be joined with similar ones into one statement


def _fold(renames: Sequence[_Rename]) -> list[str]:
    """Return statements, one for all parameters treated alike whose names differ in numbers alone.

    The first number that differs becomes ``$LAYER_ID``, the second ``$EXPERT_ID``. Where the numbers of model and
    checkpoint differ by a constant, it is added to those that are assigned: ``${LAYER_ID+1}``.
    """
    families: dict[str, list[_Rename]] = {}
    for rename in renames:
        for name in (rename.key, rename.hf):
            if _UNWRITABLE.search(name):
                raise ValueError(f"{name!r} cannot be written as a name in an AOA statement: no quotes can hold it")
        families.setdefault(_pattern(rename.key), []).append(rename)
    folded = {pattern: _folded(members) for pattern, members in families.items()}
    statements: dict[str, None] = {}  # in order, each once
    for rename in renames:
        one = folded[_pattern(rename.key)]
        statements[_filled(rename.template, rename.key, rename.hf) if one is None else one] = None
    return list(statements)


def _quoted(name: str) -> str:
    """Return a name as written in a statement, in quotes if it needs them."""
    return name if _UNQUOTED.fullmatch(name) and name not in _WORDS else f'"{name}"'


def _pattern(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _folded(members: list[_Rename]) -> str | None:
    """Return one statement for several parameters, or None if there is none."""
    first = members[0]
    if len(members) < 2 or not first.folds:
        return None
    if {(m.template, _pattern(m.hf), m.from_hf, m.folds) for m in members} != {
        (first.template, _pattern(first.hf), first.from_hf, True)
    }:
        return None
    keys, names = _varying([m.key for m in members]), _varying([m.hf for m in members])
    if len(keys) > len(_PLACEHOLDERS) or (first.hf and len(keys) != len(names)):
        return None
    key_parts, hf_parts = first.key.split("."), first.hf.split(".")
    for placeholder, at, there in zip(_PLACEHOLDERS, keys, names or keys):
        # Shifts of assigned numbers against those that are read, which are plain.
        shifts = {_shift(m, at, there) for m in members} if first.hf else {0}
        if len(shifts) > 1:
            return None
        plain, shifted = f"${placeholder}", _shifted(placeholder, shifts.pop())
        key_parts[at] = shifted if first.from_hf and first.hf else plain
        if first.hf:
            hf_parts[there] = plain if first.from_hf else shifted
    return _filled(first.template, ".".join(key_parts), ".".join(hf_parts))


def _varying(names: list[str]) -> list[int]:
    """Return the positions of the parts, all numbers, that differ between names of one pattern."""
    parts = [name.split(".") for name in names]
    return [at for at, column in enumerate(zip(*parts)) if len(set(column)) > 1]


def _shift(rename: _Rename, at: int, there: int) -> int:
    shift = int(rename.key.split(".")[at]) - int(rename.hf.split(".")[there])
    return shift if rename.from_hf else -shift


def _shifted(placeholder: str, shift: int) -> str:
    return f"${{{placeholder}{shift:+d}}}" if shift else f"${placeholder}"


def _filled(template: str, key: str, hf: str) -> str:
    """Return the statement of a template, its names quoted where needed."""
    parts = hf.split(".")
    values = {"paddle": key, "hf": hf, "hf_layer": ".".join(parts[:-1]), "hf_parent": ".".join(parts[:-2])}

    def value(field: re.Match[str]) -> str:
        text = values[field.group(1)]
        if not text:
            raise ValueError(
                f"the AOA rule {template!r} asks for {field.group()}, but the checkpoint's name of {key!r} is {hf!r}"
            )
        return text

    def name(found: re.Match[str]) -> str:
        text = _FIELD.sub(value, found.group())
        return text if found.group()[0] in "\"'" else _quoted(text)

    return _NAMES.sub(name, template)
