"""PaddleNLP's semi-automatic trainer: saved under each layout, dynamic and static, and resumed under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddlenlp")

from tests.trainer.launching import launch
from tests.trainer.matrix import TOLERANCE, differences, tensors
from tests.trainer.strategies import AUTO

SCRIPT = Path(__file__).with_name("auto_script.py")
#: Each resumes from what the one before it has saved.
RING = ("dp2", "mp2", "stage1", "static_mp2", "stage3", "static_stage1", "stage2")


def run(strategy: str, jobs: list[dict[str, Any]], directory: Path) -> dict[str, Any]:
    results = launch(strategy, jobs, directory, SCRIPT, AUTO)
    assert {name: result["traceback"] for name, result in results.items() if "error" in result} == {}
    return results


def job(name: str, root: Path, resume: Path | None = None, *flags: str, **more: Any) -> dict[str, Any]:
    made = {"name": name, "model": "llama", "output_dir": str(root / name), "flags": list(flags), **more}
    if resume is not None:
        made.update(resume=str(resume), loaded=str(root / name / "loaded"))
    return made


def assert_resumed(result: dict[str, Any], expected: dict[str, float], saved: Path, loaded: Path, step: int) -> None:
    losses = result["losses"]
    assert sorted(losses) == [str(each) for each in range(step + 1, 7)]
    assert all(abs(losses[step] - expected[step]) <= TOLERANCE for step in losses)
    before, after = tensors(saved / "flex_checkpoint", 1), tensors(loaded, 1)
    assert len(before) > 80
    assert differences(before, after) == []


def test_each_layout_resumes_what_another_has_saved(tmp_path):
    pairs = list(zip((RING[-1], *RING), RING))
    jobs = [job(name, tmp_path, strategy=name) for name in RING]
    never = ("--save_strategy", "no")
    jobs += [job(f"{a}-{b}", tmp_path, tmp_path / a / "checkpoint-3", *never, strategy=b) for a, b in pairs]
    results = run("dp2", jobs, tmp_path / "logs 2")
    expected = results["dp2"]["losses"]
    for name in RING:
        assert all(abs(results[name]["losses"][step] - expected[step]) <= TOLERANCE for step in expected)
    for a, b in pairs:
        assert_resumed(results[f"{a}-{b}"], expected, tmp_path / a / "checkpoint-3", tmp_path / f"{a}-{b}/loaded", 3)
    assert sorted(path.name for path in (tmp_path / "dp2/checkpoint-6").iterdir()) == [
        "config.json", "flex_checkpoint", "flex_checkpoint.json", "generation_config.json", "rng_state_2.pth",
        "trainer_state.json", "training_args.bin",
    ]  # fmt: skip
    # A mesh of two axes, and one process.
    saved = tmp_path / "stage3/checkpoint-3"
    result = run("dp2_mp2", [job("four", tmp_path, saved, "--save_steps", "4")], tmp_path / "logs 4")["four"]
    assert_resumed(result, expected, saved, tmp_path / "four/loaded", 3)
    saved = tmp_path / "four/checkpoint-4"
    alone = [job("one", tmp_path, saved, *never), job("epochs", tmp_path, samples=12)]
    alone.append(job("epochs again", tmp_path, tmp_path / "epochs/checkpoint-3", *never, samples=12))
    results = run("single", alone, tmp_path / "logs 1")
    assert_resumed(results["one"], expected, saved, tmp_path / "one/loaded", 4)
    # The trainer's own begins each resumed run with the shuffle of the first epoch.
    saved = tmp_path / "epochs/checkpoint-3"
    assert_resumed(results["epochs again"], results["epochs"]["losses"], saved, tmp_path / "epochs again/loaded", 3)
