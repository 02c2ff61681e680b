"""PaddleFormers' trainer on several ranks: one strategy's checkpoints resumed under others, by every way in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddleformers")

import numpy as np
from safetensors.numpy import load_file

from tests.paddleformers.strategies import launch, launch_stock
from tests.trainer.matrix import TOLERANCE, run_matrix, tensors

FUSED = ("ernie", "phi3", "gpt oss")


def job(name: str, root: Path, resume: Path | None = None, model: str = "llama", **more: Any) -> dict[str, Any]:
    """A training; with ``resume`` one that goes on at the third step of another."""
    start = {} if resume is None else {"resume": str(resume / "checkpoint-3")}
    return {"name": name, "model": model, "output_dir": str(root / name), **start, **more}


def check_goes_on(result: dict[str, Any], before: dict[str, Any]) -> None:
    """The losses of steps 4 to 6 are those of the training that saved."""
    assert "error" not in result, result["traceback"]
    assert sorted(result["losses"]) == ["4", "5", "6"]
    for step, loss in result["losses"].items():
        assert abs(loss - before["losses"][step]) <= TOLERANCE, step


def test_each_strategy_resumes_from_each_other(tmp_path):
    rows = run_matrix(["llama", "llama tied"], ["tp2", "pp2", "sharding2"], tmp_path, launch)
    assert len(rows) == 18
    assert all(row["ok"] for row in rows), [row for row in rows if not row["ok"]]
    assert all(row["tensors"] >= 101 for row in rows)


def test_all_ranks_take_part_where_data_parallelism_is_one_of_two(tmp_path):
    # PaddleFormers' own save leaves one rank of each pair out, and waits for it for ever.
    saved = launch("tp2_dp2", [job("saved", tmp_path)], tmp_path / "a")["saved"]
    flags = ["--flex_async_save", "1", "--save_total_limit", "1", "--flex_export_hf", "1"]
    jobs = [job("same", tmp_path, tmp_path / "saved", flags=flags)]
    check_goes_on(launch("tp2_dp2", jobs, tmp_path / "b")["same"], saved)
    assert [path.name for path in (tmp_path / "same").glob("checkpoint-*")] == ["checkpoint-6"]
    assert (tmp_path / "same/checkpoint-6/huggingface/model.safetensors").is_file()


def test_the_export_of_paddleformers_goes_on_working_beside_ours(tmp_path):
    flags = ["--max_steps", "3", "--save_hf_steps", "3", "--flex_export_hf", "1"]
    alone = tmp_path / "model"
    jobs = [job("both", tmp_path, flags=flags, cuda_stays=True, save_model=str(alone))]
    result = launch("tp2", jobs, tmp_path / "log")["both"]
    assert "error" not in result, result["traceback"]
    theirs: dict[str, np.ndarray] = {}
    for path in (tmp_path / "both/hf_checkpoint-3").glob("*.safetensors"):
        theirs.update(load_file(path))
    ours = load_file(tmp_path / "both/checkpoint-3/huggingface/model.safetensors")
    assert len(ours) == 21
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert np.array_equal(array, theirs[name]), name
    assert len(tensors(alone / "flex_checkpoint")) == 21


def test_fused_parameters_are_right_under_another_degree(tmp_path):
    names = {model: model.replace(" ", "_") for model in FUSED}
    alone = launch("single", [job(n, tmp_path / "1", model=m) for m, n in names.items()], tmp_path / "log1")
    from_one = [job(f"{n} from 1", tmp_path / "2", tmp_path / "1" / n, m) for m, n in names.items()]
    anew = [job(n, tmp_path / "2", model=m) for m, n in names.items()]
    cut = launch("tp2", from_one + anew, tmp_path / "log2")
    back = launch(
        "single", [job(n, tmp_path / "3", tmp_path / "2" / n, m) for m, n in names.items()], tmp_path / "log3"
    )
    for name in names.values():
        check_goes_on(cut[f"{name} from 1"], alone[name])
        check_goes_on(back[name], cut[name])


def test_checkpoints_of_paddleformers_itself_are_resumed(tmp_path):
    saved = launch_stock("tp2", [job("stock", tmp_path)], tmp_path / "a")["stock"]
    names = {path.name for path in (tmp_path / "stock/checkpoint-3").iterdir()}
    assert {"model_state", "optimizer_state", "master_weight"} <= names
    for strategy in ("sharding2", "tp2"):
        done = launch(strategy, [job(strategy, tmp_path, tmp_path / "stock")], tmp_path / strategy)
        check_goes_on(done[strategy], saved)


def test_paddleformers_unchanged_saves_and_resumes_through_replaced_functions(tmp_path, monkeypatch):
    stock = launch_stock("sharding2", [job("stock", tmp_path)], tmp_path / "a")["stock"]
    monkeypatch.setenv("REPLACE_IN_TREE", "1")
    jobs = [
        job("saved", tmp_path),
        job("resumed", tmp_path, tmp_path / "saved"),
        job("of stock", tmp_path, tmp_path / "stock"),
    ]
    done = launch_stock("tp2", jobs, tmp_path / "b")
    check_goes_on(done["resumed"], done["saved"])
    check_goes_on(done["of stock"], stock)
    for part in ("model_state", "optimizer_state", "master_weight"):
        names = {path.name for path in (tmp_path / "saved/checkpoint-3" / part).iterdir()}
        assert {"0.manifest", "flex-ckpt.auto_generated.metadata"} <= names
        assert not [name for name in names if name.endswith(".distcp")]
    other = launch_stock("sharding2", [job("other", tmp_path, tmp_path / "saved")], tmp_path / "c")
    check_goes_on(other["other"], done["saved"])
