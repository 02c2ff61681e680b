"""Unified checkpoints of the real trainer: resumed by flag, under their own strategy as PaddleNLP does, and under others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("paddlenlp")

from paddle_flexckpt.storage import detect_format
from tests.trainer.launching import launch
from tests.trainer.matrix import SAVED_STEP, TOLERANCE, degree_of, tensors

MODELS = ["llama", "llama tied", "llama fused", "gpt"]
UNIFIED = [
    "--unified_checkpoint", "1", "--save_checkpoint_format", "unified_checkpoint",
    "--load_checkpoint_format", "unified_checkpoint",
]  # fmt: skip


_TIED = "gpt.embeddings.word_embeddings.weight"


def _statements(source: str, model: str) -> list[str]:
    """PaddleNLP writes one rank's part of GPT's head as if it were the whole; it is tied, so the rest is there."""
    if model != "gpt" or source != "tp2":
        return []
    return ["--aoa_config", json.dumps([f"{_TIED} -> lm_head.weight", f"{_TIED} -> {_TIED}"])]


def checkpoint(root: Path, strategy: str, model: str) -> Path:
    return root / strategy / model.replace(" ", "_") / f"checkpoint-{SAVED_STEP}"


def save(root: Path, strategy: str, *flags: str) -> None:
    jobs = [
        {"name": m, "model": m, "output_dir": str(checkpoint(root, strategy, m).parent), "flags": [*UNIFIED, *flags]}
        for m in MODELS
    ]
    for name, result in launch(strategy, jobs, root / "logs" / strategy).items():
        assert "error" not in result, (name, result)


def resume(root: Path, source: str, target: str, own: bool = False) -> dict[str, dict]:
    """Every model resumed under the target strategy, by this library or by PaddleNLP's own code."""
    name = f"{source}-{target}-{'own' if own else 'flex'}"
    jobs = [
        {
            "name": model,
            "model": model,
            "output_dir": str(root / name / model.replace(" ", "_")),
            "resume": str(checkpoint(root, source, model)),
            "loaded": None if own else str(root / name / model.replace(" ", "_") / "loaded"),
            "flags": ["--save_strategy", "no", *(UNIFIED if own else _statements(source, model))],
        }
        for model in MODELS
    ]
    results = launch(target, jobs, root / "logs" / name)
    for model, result in results.items():
        assert "error" not in result, (model, result)
        if own:
            continue
        assert detect_format(checkpoint(root, source, model)) == "unified_checkpoint"
        saved = tensors(checkpoint(root, source, model), 1)
        loaded = tensors(root / name / model.replace(" ", "_") / "loaded", degree_of(target))
        if _statements(source, model):
            saved["lm_head.weight"] = saved[_TIED]
        different = [key for key in loaded if key in saved and saved[key].tobytes() != loaded[key].tobytes()]
        assert different == []
        # A tied parameter's states may have another one of its names.
        assert "tied" in model or model == "gpt" or loaded.keys() == saved.keys()
        assert len(loaded.keys() & saved.keys()) > 0.9 * len(loaded)
    return results


@pytest.mark.parametrize("strategy", ["tp2", "sharding2", "pp2"])
def test_resumed_as_paddlenlp_does(tmp_path, strategy):
    save(tmp_path, strategy)
    own, flex = resume(tmp_path, strategy, strategy, own=True), resume(tmp_path, strategy, strategy)
    for model in MODELS:
        assert own[model]["losses"].keys() == {str(step) for step in range(SAVED_STEP + 1, 7)}
        assert flex[model]["losses"] == own[model]["losses"], model
    other = "sharding2" if strategy == "tp2" else "tp2"
    moved = resume(tmp_path, strategy, other)
    for model in MODELS:
        for step, loss in flex[model]["losses"].items():
            assert abs(moved[model]["losses"][step] - loss) <= TOLERANCE, (model, step)


def test_states_of_ranks(tmp_path):
    """Which PaddleNLP resumes under the strategy of the save alone."""
    models = [model for model in MODELS if "fused" not in model]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.trainer.test_unified_resume.MODELS", models)
        save(tmp_path, "tp2", "--unified_checkpoint_config", "ignore_merge_optimizer")
        assert list(checkpoint(tmp_path, "tp2", "llama").glob("optimizer.tp01.safetensors"))
        resume(tmp_path, "tp2", "pp2")
