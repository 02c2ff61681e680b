"""Mistakes in calls: options on which ranks differ, swapped arguments, the wrong checkpoint."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np

from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.silence.judge import Case
from tests.silence.mistakes import mistake
from tests.silence.models import (
    Model,
    Side,
    State,
    build,
    random_model,
    random_strategy,
)

# -- options ---------------------------------------------------------------------------------------------------------


def _differ(case: Case, options: list[dict[str, Any]], name: str, *values: Any) -> str | None:
    if len(options) < 2 or case.way == "merged":
        return None
    for each in options:
        each[name] = values[0]
    options[case.pick.integer(0, len(options) - 1)][name] = values[1]
    return "error"


def _saves(name: str, *values: Any) -> None:
    @mistake(f"ranks differ in {name} at the save")
    def _(case: Case) -> str | None:
        return None if case.way == "memory" else _differ(case, case.save, name, *values)


def _loads(name: str, *values: Any, files_only: bool = False) -> None:
    @mistake(f"ranks differ in {name} at the load")
    def _(case: Case) -> str | None:
        return None if case.way == "memory" and files_only else _differ(case, case.load, name, *values)


_saves("unique_id", 3, 4)
_saves("step", 10, 11)
_saves("save_replicas", True, False)
_saves("check_replicas", True, False)
_saves("coordinator_rank", 0, 1)
_loads("strict", "missing", True)
_loads("dtype", "raise", "cast")
_loads("fused", "convert", "exact")
_loads("tied_names", True, False)
_loads("master_weights", "exact", "convert")
_loads("mw_name_compatibility", True, False)
_loads("coordinator_rank", 0, 1)
_loads("verify", "read", "full", files_only=True)
_loads("use_replicas", True, False, files_only=True)
_loads("aoa_config", None, ["a -> b"])


@mistake("ranks differ in the path at the save")
def _save_path(case: Case) -> str | None:
    return None if case.way == "memory" else _differ(case, case.save, "path", case.path, case.root / "elsewhere")


@mistake("ranks differ in the path at the load")
def _load_path(case: Case) -> str | None:
    _second_save(case, "elsewhere", "other")
    return None if case.way == "memory" else _differ(case, case.load, "path", case.path, case.root / "elsewhere")


@mistake("an unknown value of an option")
def _unknown(case: Case) -> str | None:
    if case.way == "merged":
        return None
    name, wrong = case.pick.choice((("strict", "all"), ("dtype", "float32"), ("fused", True), ("master_weights", "on"),
                                    ("coordinator_rank", 99), ("mw_name_compatibility", "yes")))  # fmt: skip
    for each in case.load:
        each[name] = wrong
    return "error"


@mistake("an unknown value of unique_id")
def _unknown_id(case: Case) -> str | None:
    if case.way == "memory":
        return None
    wrong = case.pick.choice((-1, "0", 1.5, case.root))
    for each in case.load if case.pick.integer(0, 1) or case.way == "merged" else case.save:
        each["unique_id"] = wrong
    return "error"


# -- swapped arguments -------------------------------------------------------------------------------------------------


@mistake("path and state swapped at the load")
def _swapped_load(case: Case) -> str | None:
    if case.way != "files":
        return None
    case.call = lambda comm, state, options: load_state_dict(case.path, state, comm)  # type: ignore[arg-type]
    return "error"


@mistake("path and state swapped at the save")
def _swapped_save(case: Case) -> str | None:
    if case.way == "memory":
        return None
    case.save_call = lambda comm, state, options: save_state_dict(case.path, state, comm)  # type: ignore[arg-type]
    return "error"


@mistake("source and target swapped in a reshard")
def _swapped_reshard(case: Case) -> str | None:
    if case.way != "memory":
        return None
    first, second = case.source, case.target
    # Nobody can know: what was to be filled is taken for the source, whatever it holds.
    for state in second.states:
        for weight in state.values():
            weight.local_tensor[...] = 1
    case.source, case.target = second, first
    return "either"


@mistake("path and id swapped at the load")
def _id_for_path(case: Case) -> str | None:
    if case.way == "memory":
        return None
    for each in case.load:
        each.update(path=0, unique_id=str(case.path))
    return "error"


@mistake("a path that is none")
def _no_path(case: Case) -> str | None:
    if case.way == "memory":
        return None
    options = case.pick.choice((case.load, case.save)) if case.way == "files" else case.load
    wrong = case.pick.choice((None, b"checkpoint", 3, "", case.root / "no" / "such"))
    if options is case.save and wrong == case.root / "no" / "such":
        wrong = None
    for each in options:
        each["path"] = wrong
    return "error"


@mistake("a path that is none on one rank")
def _no_path_here(case: Case) -> str | None:
    if case.way != "files":
        return None
    options = case.pick.choice((case.load, case.save))
    if len(options) < 2:
        return None
    options[case.pick.integer(0, len(options) - 1)]["path"] = case.pick.choice((None, b"checkpoint", 3))
    return "error"


# -- the wrong checkpoint ----------------------------------------------------------------------------------------------


def _saved(side: Side, path: Any, **options: Any) -> None:
    SimulatedWorld(len(side.states)).run(lambda c: save_state_dict(side.states[c.position], path, c, **options))


def _second_save(case: Case, name: str, salt: str, unique_id: int | None = None, model: Model | None = None) -> Side:
    """Another checkpoint of the same model, or of another, once the first is there."""
    side = build(model or case.model, random_strategy(case.pick), salt)
    case.after_save = lambda: _saved(side, case.root / name, unique_id=unique_id)
    return side


@mistake("the path of another run of the same model")
def _other_run(case: Case) -> str | None:
    if case.way == "memory":
        return None
    case.truth = _second_save(case, "elsewhere", "other")
    for each in case.load:
        each["path"] = case.root / "elsewhere"
    return "equal"  # nobody can know: it is that run's state


@mistake("the checkpoint was overwritten meanwhile")
def _overwritten(case: Case) -> str | None:
    if case.way == "memory":
        return None
    for each in case.save:
        each["unique_id"] = 0
    case.truth = _second_save(case, "checkpoint", "later", unique_id=0)
    return "equal"


@mistake("a later checkpoint is in the directory")
def _later(case: Case) -> str | None:
    if case.way == "memory":
        return None
    case.truth = _second_save(case, "checkpoint", "later")
    return "equal"


@mistake("an earlier id is asked for by one rank")
def _earlier_id(case: Case) -> str | None:
    if case.way != "files" or len(case.load) < 2:
        return None
    _second_save(case, "checkpoint", "later")
    return _differ(case, case.load, "unique_id", 1, 0)


@mistake("an id that is not there")
def _no_id(case: Case) -> str | None:
    if case.way == "memory":
        return None
    for each in case.load:
        each["unique_id"] = 17
    return "error"


@mistake("a save that fails over an earlier checkpoint")
def _failed_over(case: Case) -> str | None:
    if case.way == "memory":
        return None
    earlier = build(case.model, random_strategy(case.pick), "earlier")
    case.before = lambda: _saved(earlier, case.path, unique_id=0)

    def save(comm: Any, state: State, options: dict[str, Any]) -> None:
        save_state_dict(state, case.path, comm, unique_id=0)
        broken = {**state, "broken": 3 if comm.position == 0 else np.zeros(2)}
        try:
            save_state_dict(broken, case.path, comm, unique_id=0)
        except ValueError:
            return
        raise AssertionError("a state with a number in it was saved")

    case.save_call = save
    return "equal"


@mistake("another model's checkpoint")
def _other_model(case: Case) -> str | None:
    if case.way != "files":
        return None
    other = random_model(case.pick)
    if other.tensors() == case.model.tensors():
        return None
    case.truth = _second_save(case, "elsewhere", "other", model=other)
    for each in case.load:
        each["path"] = case.root / "elsewhere"
    asked = {key for state in case.target.states for key in state}
    there = other.tensors()
    same = asked <= set(there) and all(
        there[key][1:] == case.model.tensors()[key][1:]
        and there[key][0].statement == case.model.tensors()[key][0].statement
        for key in asked
    )
    case.model = other
    return "either" if same else "error"


# -- directories of nodes that share no storage ------------------------------------------------------------------------


def _on_nodes(case: Case, options: list[dict[str, Any]], **further: Any) -> bool:
    """Whether ranks could be spread over two nodes, each with a directory of its own."""
    if case.way != "files" or len(options) < 2:
        return False
    for rank, each in enumerate(options):
        each.update(path=case.root / ("a" if 2 * rank < len(options) else "b"), **further)
    return True


@mistake("two nodes: none")
def _nodes(case: Case) -> str | None:
    if len(case.load) < 2 or not _on_nodes(case, case.save, storage="per_node"):
        return None
    for each in case.save:
        each["save_replicas"] = False
    _on_nodes(case, case.load, storage="per_node")
    case.load[:] = case.load[:: case.pick.choice((1, -1))]
    return "equal"


@mistake("two nodes: the option forgotten at the save")
def _nodes_forgotten(case: Case) -> str | None:
    return "error" if _on_nodes(case, case.save) else None


@mistake("two nodes: the option forgotten at the load")
def _nodes_forgotten_at_load(case: Case) -> str | None:
    outcome = _nodes(case)
    for each in case.load if outcome else []:
        each.pop("storage")
    return outcome and "either"


@mistake("two nodes: the directory of one is gone")
def _node_gone(case: Case) -> str | None:
    outcome = _nodes(case)
    if outcome is not None:
        case.after_save = lambda: shutil.rmtree(case.root / case.pick.choice(("a", "b")))
    return outcome and "either"


@mistake("two nodes: the directories of two runs")
def _nodes_of_two_runs(case: Case) -> str | None:
    if _nodes(case) is None:
        return None
    other = build(case.model, random_strategy(case.pick), "other")
    case.after_save = lambda: (shutil.rmtree(case.root / "b"), _saved(other, case.root / "b"))[0]
    case.instead = other  # of several saves of one id, the newest that is whole
    return "either"
