"""Describe mixtures of experts: every expert under its number in the whole layer, whichever rank holds it.

Under expert parallelism every rank's list of experts starts at 0, so that ``experts.0.weight`` is another tensor on
every rank. Used unchanged, such names would make different experts look like replicas.

Of the marks on experts' parameters, Paddle itself (3.0 to 3.3) sets none in ``MoELayer``; users and model libraries set
``no_sync``, ``expert``, ``color`` (all three mean: not a replica), ``mp_moe`` and ``is_distributed``. Only the last one
matters here: on a parameter of a tensor-parallel layer it means "split", on an expert's it may also mean "another
expert on every rank". The groups decide which it is; see :func:`_is_whole`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from paddle_flexckpt.parallel.layers import LayerMixin, link_tied_names, own_state, shard_rules
from paddle_flexckpt.sharded_weight import ShardedStateDict, ShardedWeight, is_sharded_weight

_GROUP_NAMES = ("moe_group", "expert_parallel_group", "ep_group")
_CORRECTION_BIAS = "e_score_correction_bias"


class ExpertParallelMixin:
    """A layer whose experts are spread over a process group. ``install()`` adds this to Paddle's ``MoELayer`` too.

    A layer of your own adopts it as its first base class::

        class MyMoE(ExpertParallelMixin, paddle.nn.Layer):
            def __init__(self, num_experts, moe_group):
                super().__init__()
                self.moe_group = moe_group      # None: this rank holds all experts
                self.num_experts = num_experts  # of the whole layer; optional, the lists are checked against it
                self.gate = Gate(num_experts)
                self.experts = paddle.nn.LayerList([Expert() for _ in range(num_experts // moe_group.nranks)])

    Its state is then named ``experts.{number in the whole layer}.{...}``, with the number
    ``rank in the group * experts per rank + index in the list``. A list with a slot for every expert of the whole
    layer, in which those of other ranks are None, works too. The layers inside an expert describe themselves (as
    tensor-parallel layers do). Parameters outside the lists, such as the gate and ``e_score_correction_bias``, are the
    same on every rank of the group.

    For other names of lists or group, override :meth:`_get_expert_lists` and :meth:`_get_expert_group`. Experts
    that are one stacked parameter ``[experts on this rank, ...]`` need no mixin but a rule: ``_get_shard_rules()``
    returns ``{"weight": 0}`` and ``_get_shard_group()`` the group.
    """

    def sharded_state_dict(self: Any, structured_name_prefix: str = "") -> ShardedStateDict:
        """Describe the layer like :class:`LayerMixin`, with the experts' numbers in the whole layer.

        Raises:
            ValueError: Number of experts, lists and group do not fit together, or an expert's parameter is marked
                ``is_distributed`` and it is not known whether it is split.
        """
        place, size, ranks = _place_in_group(self)
        numbers = {name: _numbers(self, name, place, size) for name in self._get_expert_lists()}
        total = sum(map(len, numbers.values())) * size
        whole = _wrongly_marked(self, structured_name_prefix, list(numbers), ranks, total)
        with _unmarked(whole):
            sharded = LayerMixin.sharded_state_dict(self, structured_name_prefix)
        return _renumbered(sharded, structured_name_prefix, numbers, ranks)

    def _get_expert_lists(self) -> tuple[str, ...]:
        """Return the names of the attributes that hold the lists of this rank's experts."""
        return ("experts",)

    def _get_expert_group(self) -> Any:
        """Return the process group whose ranks hold different experts; None where this rank has all of them."""
        for name in _GROUP_NAMES:
            if hasattr(self, name):
                return getattr(self, name)
        raise ValueError(
            f"{type(self).__name__} does not say over which process group its experts are spread: it has none of "
            f"{', '.join(_GROUP_NAMES)}. Remedy (FC803): set moe_group (None for one rank), or override "
            "_get_expert_group()"
        )

    def _get_expert_count(self) -> int | None:
        """Return the number of experts of the whole layer, per list; None if it is not known."""
        count = getattr(self, "num_experts", None)
        return count if isinstance(count, int) else None


class MoELayerMixin:
    """The description of ``paddle.incubate``'s MoELayer, on top of :class:`ExpertParallelMixin`."""

    def _get_expert_group(self: Any) -> Any:
        return self.group

    def _get_expert_count(self: Any) -> int | None:
        # num_expert is this rank's number; the gate chooses among the experts of all ranks.
        count = getattr(self.gate, "tot_expert", None)
        return count if isinstance(count, int) else None


def _place_in_group(layer: Any) -> tuple[int, int, frozenset[int]]:
    """Return this rank's place in the expert-parallel group, the group's size, and its global ranks."""
    group = layer._get_expert_group()
    if group is None or group.nranks == 1:  # Paddle gives the rank of a group of one as -1, member or not
        from paddle.distributed import get_rank

        return 0, 1, frozenset([get_rank()])
    if not 0 <= group.rank < group.nranks:
        raise ValueError(f"{type(layer).__name__}: this rank is not in the group that its experts are spread over")
    return group.rank, group.nranks, frozenset(group.ranks)


def _numbers(layer: Any, name: str, place: int, size: int) -> dict[str, int]:
    """Return the numbers in the whole layer of a list's experts, by their names in the list."""
    where = f"{type(layer).__name__}.{name}"
    experts = getattr(layer, name, None)
    slots = list(getattr(experts, "_sub_layers", {}).items())
    if [slot for slot, _ in slots] != [str(index) for index in range(len(slots))] or not slots:
        raise ValueError(
            f"{where} has to be a paddle.nn.LayerList of at least one expert; got {type(experts).__name__}"
            f" with {[slot for slot, _ in slots][:5]}. Remedy (FC803): override _get_expert_lists()"
        )
    own = [int(slot) for slot, expert in slots if expert is not None]
    total = layer._get_expert_count()
    if total is not None and total % size:
        raise ValueError(
            f"{where}: the number of experts has to be a multiple of the {size} ranks that they are spread over; got "
            f"{total}. Remedy (FC803): change the number of experts or the degree of expert parallelism"
        )
    if total is not None and len(own) * size != total:
        raise ValueError(
            f"{where}: expected {total // size} experts on each of {size} ranks, {total} in all; got {len(own)} on "
            "this rank. Remedy (FC803): give every rank the same number of experts"
        )
    first = place * len(own)
    if len(own) == len(slots):
        return {slot: first + index for index, (slot, _) in enumerate(slots)}
    # A slot for every expert of the whole layer, None where another rank has it: the index is the number.
    if len(slots) != len(own) * size or own != list(range(first, first + len(own))):
        raise ValueError(
            f"{where}: a list with a slot for every expert has to hold those from {first} to {first + len(own) - 1} "
            f"of {len(own) * size} on rank {place} of the group; got {own} of {len(slots)}. Remedy (FC803): spread the "
            "experts evenly, in the order of the ranks"
        )
    return {str(index): index for index in own}


def _wrongly_marked(layer: Any, prefix: str, lists: list[str], ranks: frozenset[int], total: int) -> list[Any]:
    """Return the tensors that are marked is_distributed, although this rank has all of them."""
    found = []
    for path, owner in layer.named_sublayers(include_self=True):
        in_expert = path.split(".", 1)[0] in lists
        rules = shard_rules(owner)
        for name, tensor in own_state(owner).items():
            if name in rules or not getattr(tensor, "is_distributed", False):
                continue
            if in_expert and _is_whole(tensor, ranks):
                found.append(tensor)
            elif in_expert:
                raise ValueError(
                    f"parameter {prefix}{path}.{name} of an expert is marked is_distributed, but no rule says along "
                    "which axis it is split. Remedy (FC801): give its layer a _get_shard_rules() that returns {name: "
                    "axis}; or if the mark only says that every rank has another expert, set parameter.mp_moe = True"
                )
            # The correction bias has one number per expert of the whole layer: then this rank has all of it.
            elif name == _CORRECTION_BIAS and int(tensor.shape[-1]) == total:
                found.append(tensor)
    return found


def _is_whole(tensor: Any, expert_ranks: frozenset[int]) -> bool:
    """Return whether an expert's tensor that is marked is_distributed cannot be a part of a larger one.

    It cannot if all ranks that could have the other parts hold other experts.
    """
    if getattr(tensor, "mp_moe", False):
        return True
    from paddle.distributed import get_world_size
    from paddle.distributed.fleet.base import topology

    hcg = topology._HYBRID_PARALLEL_GROUP
    cutters = range(get_world_size()) if hcg is None else hcg.get_model_parallel_group().ranks
    return len(cutters) == 1 or expert_ranks.issuperset(cutters)


@contextlib.contextmanager
def _unmarked(tensors: list[Any]) -> Iterator[None]:
    """Remove the mark is_distributed for the time of a with statement.

    The experts describe themselves, by methods that their classes may override, so there is no other way.
    """
    try:
        for tensor in tensors:
            tensor.is_distributed = False
        yield
    finally:
        for tensor in tensors:
            tensor.is_distributed = True


def _renumbered(
    sharded: ShardedStateDict, prefix: str, numbers: dict[str, dict[str, int]], ranks: frozenset[int]
) -> ShardedStateDict:
    """Return the experts' keys with their numbers in the whole layer."""
    renamed: ShardedStateDict = {}
    for key, weight in sharded.items():
        name, _, rest = key[len(prefix) :].partition(".")
        if name in numbers:
            slot, dot, rest = rest.partition(".")
            key = f"{prefix}{name}.{numbers[name][slot]}{dot}{rest}"
            if is_sharded_weight(weight):
                weight.key = key
            if isinstance(weight, ShardedWeight):
                weight.expert_ranks = ranks
                weight.expert = numbers[name][slot], len(numbers[name]) * len(ranks)
        renamed[key] = weight
    link_tied_names(renamed)
    return renamed


def check_experts(groups: Mapping[str, Any], model: ShardedStateDict, names: Mapping[str, list[str]]) -> None:
    """Refuse experts that are sharded among ranks which hold other experts under the same parameter's name.

    Paddle sums the gradients of these experts, keeps one state for all of them, and sends the owner's values to the
    others. So the experts become equal, and a checkpoint lacks the state of all experts except the owner's. ``groups``
    has, by name of parameter, the group that it is sharded over.

    Raises:
        ValueError: There are such experts; the text has their keys.
    """
    mixed = []
    for name, keys in names.items():
        others: frozenset[int] = getattr(model[keys[0]], "expert_ranks", frozenset())
        if name in groups and len(others.intersection(groups[name].ranks)) > 1:
            mixed.append(keys[0])
    if mixed:
        raise ValueError(
            f"{len(mixed)} parameters of experts, such as {', '.join(map(repr, mixed[:5]))}, are sharded among ranks "
            "of which each holds other experts. Paddle trains them as if they were one, and only one of them has a "
            "state. Remedy (FC807): use sharding V2 (split_param=True), and give the experts' parameters a color whose "
            "group has the ranks that hold the same experts; to keep what was trained, save the model without its "
            "optimizer"
        )
