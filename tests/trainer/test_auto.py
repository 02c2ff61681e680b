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
NEVER = ("--save_strategy", "no")
#: Each resumes from what the one before it has saved.
RING = ("dp2", "mp2", "stage1", "static_mp2", "stage3", "static_stage1", "stage2")
PAIRS = list(zip((RING[-1], *RING), RING))


def run(strategy: str, jobs: list[dict[str, Any]], directory: Path) -> dict[str, Any]:
    results = launch(strategy, jobs, directory, SCRIPT, AUTO)
    assert {name: result["traceback"] for name, result in results.items() if "error" in result} == {}
    return results


def job(name: str, root: Path, resume: Path | None = None, *flags: str, **more: Any) -> dict[str, Any]:
    made = {"name": name, "model": "llama", "output_dir": str(root / name), "flags": list(flags), **more}
    if resume is not None:
        made.update(resume=str(resume), loaded=str(root / name / "loaded"))
    return made


def assert_resumed(result: dict[str, Any], expected: dict[str, float], saved: Path, loaded: Path) -> None:
    losses = result["losses"]
    assert sorted(losses) == ["4", "5", "6"]
    assert all(abs(losses[step] - expected[step]) <= TOLERANCE for step in losses)
    before, after = tensors(saved / "flex_checkpoint"), tensors(loaded)
    assert len(before) > 80
    assert differences(before, after) == []


@pytest.fixture(scope="module")
def ring(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """What the layouts of two ranks have saved, and all that was trained."""
    root = tmp_path_factory.mktemp("ring")
    jobs = [job(name, root, strategy=name) for name in RING]
    jobs += [job(f"{a}-{b}", root, root / a / "checkpoint-3", *NEVER, strategy=b) for a, b in PAIRS]
    return root, run("dp2", jobs, root / "logs")


def test_each_layout_resumes_what_another_has_saved(ring):
    root, results = ring
    expected = results["dp2"]["losses"]
    for name in RING:
        assert all(abs(results[name]["losses"][step] - expected[step]) <= TOLERANCE for step in expected)
    for a, b in PAIRS:
        assert_resumed(results[f"{a}-{b}"], expected, root / a / "checkpoint-3", root / f"{a}-{b}/loaded")
    assert sorted(path.name for path in (root / "dp2/checkpoint-6").iterdir()) == [
        "config.json", "flex_checkpoint", "flex_checkpoint.json", "generation_config.json", "rng_state_2.pth",
        "trainer_state.json",
    ]  # fmt: skip


def test_one_process_resumes_and_an_epoch_has_its_shuffle(ring, tmp_path):
    root, results = ring
    jobs = [job("one", tmp_path, root / "stage3/checkpoint-3", *NEVER), job("epochs", tmp_path, samples=12)]
    jobs.append(job("again", tmp_path, tmp_path / "epochs/checkpoint-3", *NEVER, samples=12))
    jobs.append(job("unruled", tmp_path, unruled=True))
    alone = run("single", jobs, tmp_path / "logs")
    assert_resumed(alone["one"], results["dp2"]["losses"], root / "stage3/checkpoint-3", tmp_path / "one/loaded")
    # The trainer's own begins each resumed run with the shuffle of the first epoch.
    saved = tmp_path / "epochs/checkpoint-3"
    assert_resumed(alone["again"], alone["epochs"]["losses"], saved, tmp_path / "again/loaded")
    # What the first save would refuse is refused before the first step.
    assert "is marked is_distributed, but no rule says along which axis it is split" in alone["unruled"]["refused"]
    assert alone["unruled"]["step"] == 0


@pytest.mark.slow
def test_a_mesh_of_two_axes_resumes(ring, tmp_path):
    root, results = ring
    saved = root / "static_stage1/checkpoint-3"
    result = run("dp2_mp2", [job("four", tmp_path, saved, *NEVER)], tmp_path / "logs")["four"]
    assert_resumed(result, results["dp2"]["losses"], saved, tmp_path / "four/loaded")
