"""The list of Paddle's flags is that of the tests' own tables, and of what the trainers' arguments refuse."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("paddle")

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.trainer import flags as trainer_flags
from paddle_flexckpt.trainer import options_of
from tests.distributed.matrix.strategies import BY_NAME
from tests.distributed.test_sharding import FUSED_V1
from tests.paddleformers.strategies import STRATEGIES as OF_PADDLEFORMERS
from tests.trainer.strategies import AUTO, ON_DEVICE, STRATEGIES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "flags.md"
OWN = {each.name for each in fields(trainer_flags.FlexTrainingArguments)}
# What the fields of a strategy of the matrix set.
FIELDS = {
    "dp": "dp_degree", "mp": "mp_degree", "pp": "pp_degree", "sharding": "sharding_degree", "sep": "sep_degree",
    "cp": "cp_degree", "split": "split_param", "chunks": "num_virtual_pipeline_stages", "level": "level",
    "exclude": "exclude_layer",
}  # fmt: skip
_SHARDING, _REFUSED = "distributed/test_sharding.py", "test_what_cannot_be_described_is_refused"
_STATIC = "semi_auto/test_dist_model.py::test_one_process_to_a_static_graph_with_tensor_fusion_and_back"
_UPSTREAM = "semi_auto/test_upstream_defects.py"
# Flags of no table, and the test that shows each.
SHOWN = {
    "enable_fuse_optimizer_states": f"{_SHARDING}::test_fused_states_of_v2",
    "offload": f"{_SHARDING}::test_offload_of_stage3",
    "segment_size": f"{_SHARDING}::test_stage3_slices_parameters_and_some_ranks_have_only_padding",
    "dp_group": "distributed/test_matrix.py::test_what_one_strategy_saved_another_loads",
    "enable_tensor_fusion": _STATIC,
    "save_unbalanced_param": _STATIC,
    "enable_tensor_fusion_and_overlap": f"{_UPSTREAM}::test_s10_a_fused_fully_shard_model_is_saved",
}
# Rows with a condition: their outcome, and the test. Paddle's failures are named at the table that leaves them out.
CONDITIONS = {
    "`num_virtual_pipeline_stages`, two stages": ("Paddle fails", "distributed/matrix/strategies.py"),
    "`p_g_os`, tied weights": ("Paddle fails", "distributed/matrix/strategies.py"),
    "`parameters=[{...}, ...]` under sharding": ("FC807", f"{_SHARDING}::{_REFUSED}"),
    "`split_param` beside `dp_degree` or `sep_degree`": (
        "FC106",
        f"{_SHARDING}::test_ranks_that_paddle_lets_drift_are_told_so",
    ),
    "`moe_group` among the ranks of V1": (
        "FC807",
        "distributed/test_experts.py::test_experts_among_sharding_ranks_are_refused_by_key",
    ),
    "`offload` of stage 3, between `backward()` and `clear_grad()`": ("FC806", f"{_SHARDING}::{_REFUSED}"),
    "`enable_tensor_fusion_and_overlap`, a mesh of several axes": ("FC802", "semi_auto/test_fully_shard.py"),
    "`FLAGS_enable_fused_ffn_qkv_pass`": ("FC802", "semi_auto/test_dist_model.py"),
    "`--zcc_save_ema_coef` with `--save_hf_steps`": (
        "FC905",
        "paddlefleet/test_trainer.py::test_flags_that_are_not_served_are_refused_by_name",
    ),
}


def rows() -> list[tuple[str, str]]:
    """The first cell of each row, and its outcome."""
    found = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "| " in line]
    return [(cells[0], cells[1].strip(" |")) for cells in found if cells[0] not in ("flag", "---|---|---")]


def named(outcome: str) -> set[str]:
    """The flags of the rows with an outcome and no condition."""
    cells = [cell for cell, found in rows() if found.startswith(outcome) and cell not in CONDITIONS]
    return {flag for cell in cells for flag in re.findall(r"`([^`]+)`", cell)}


def of_fleet() -> set[str]:
    """What the matrix and the tests of sharding switch on."""
    found = {name for each in BY_NAME.values() for name, _ in (*each.switches, *each.pp_switches)}
    found |= {flag for flags in FUSED_V1.values() for flag in flags}
    plain = vars(BY_NAME["single"])
    found |= {
        flag for name, flag in FIELDS.items() if any(vars(each)[name] != plain[name] for each in BY_NAME.values())
    }
    return found | {each.level for each in BY_NAME.values() if each.level}


def of_trainers() -> set[str]:
    tables = (STRATEGIES, AUTO, ON_DEVICE, OF_PADDLEFORMERS)
    found = {flag for table in tables for each in table.values() for flag in re.findall(r"--\w+", each.flags)}
    return found - {"--per_device_train_batch_size", "--max_grad_norm"}


def refused() -> dict[str, str]:
    """The flags that the arguments refuse one by one, or with the semi-automatic trainer: their codes, in brackets."""
    names = {
        node.value
        for node in ast.walk(ast.parse(Path(trainer_flags.__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "_" in node.value
    }
    formats = dict.fromkeys(("save_checkpoint_format", "load_checkpoint_format"), trainer_flags.FLEX)
    found = {}
    for library in trainer_flags.LIBRARIES:
        arguments = type("Arguments", (SimpleNamespace,), {"__module__": f"{library}.trainer"})
        for name in sorted(filter(str.isidentifier, names - OWN)):
            for more in ({}, {"enable_auto_parallel": True}) if library == "paddlenlp" else ({},):
                try:
                    options_of(arguments(**formats, **{**more, name: True}))
                except ValidationError as error:
                    if re.search(rf"\b{name}\b", str(error)):
                        found[f"--{name}"] = error_code(error)
    return found


def error_code(error: ValidationError) -> str:
    (code,) = {*re.findall(r"Remedy \((FC\d+)\)", str(error))} or {""}
    return f" ({code})" if code else ""


def exists(proof: str) -> bool:
    file, _, test = proof.partition("::")
    return (
        f"def {test}" in (ROOT / "tests" / file).read_text(encoding="utf-8")
        if test
        else (ROOT / "tests" / file).exists()
    )


def test_what_works_is_what_tests_switch_on():
    works = named("works")
    where = {"stage1", "stage2", "stage3", "sharding_configs", "pp_configs", "Strategy.sharding", "fully_shard"}
    assert works - where == of_fleet() | {*SHOWN} | of_trainers() | {"--enable_auto_parallel"}


def test_what_is_refused_is_what_arguments_refuse():
    codes = refused()
    # Only PaddleNLP's semi-automatic trainer is served.
    codes.pop("--enable_auto_parallel")
    assert named("refused") == {*codes}
    for cell, outcome in rows():
        for flag in re.findall(r"`(--\w+)`", cell) if outcome.startswith("refused") and cell not in CONDITIONS else ():
            assert outcome == f"refused{codes[flag]}", flag


def test_conditions_have_their_outcome_and_a_test():
    outcomes = dict(rows())
    for cell, (outcome, proof) in CONDITIONS.items():
        assert outcome in outcomes[cell], cell
        assert exists(proof), proof
    assert all(map(exists, SHOWN.values()))
    assert {outcome.split(" (")[0] for outcome in outcomes.values()} == {"works", "refused", "Paddle fails"}
    assert len(PAGE.read_text(encoding="utf-8").split()) < 700
