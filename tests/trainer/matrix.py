"""The trainer's strategies against each other: saved under each, resumed under every other.

    python -m tests.trainer.matrix [--models llama,gpt] [--strategies tp2,pp2] [--json FILE]

For each strategy one launch trains six steps and saves after three and six; then one launch resumes at step three from
what every strategy has saved, saves at once what it has loaded, and trains on. Of every pair, all model and optimizer
tensors have to be equal bit for bit to those that were saved, and the losses of the steps that follow to those of the
run that resumes under the strategy of the save.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.tools.whole_tensors import iterate_tensors
from tests.trainer.launching import launch
from tests.trainer.models import MODELS
from tests.trainer.strategies import STRATEGIES

Launch = Callable[[str, Sequence[dict[str, Any]], Path], dict[str, Any]]
# Losses are sums over other numbers of ranks: float32 rounds them differently.
TOLERANCE = 1e-5
SAVED_STEP = 3
# With a limit on their norm, gradients are scaled otherwise in a pipeline: Paddle counts a tied parameter on each stage
# that holds it.
FLAGS = ("--max_grad_norm", "0")
# With experts spread over data-parallel ranks inside tensor parallelism, these ranks drift apart on CPUs in some runs,
# before there is a checkpoint, and the next save refuses them.
LEFT_OUT = frozenset({("qwen2_moe", "tp2_dp2")})


def tensors(directory: Path) -> dict[str, np.ndarray]:
    """All model and optimizer tensors of a checkpoint, whole; gate and up of a fused parameter one after the other."""
    manifest = SourceDirectory(directory).read_manifest(None)
    return {k: array.copy() for k, array in iterate_tensors(directory, manifest) if not k.startswith(EXTRA_STATE)}


def differences(saved: dict[str, np.ndarray], loaded: dict[str, np.ndarray]) -> list[str]:
    """Names of tensors that are not the same, bit for bit, or that only one side has.

    A tied parameter has two names in one process, and one in a pipeline whose stages hold it together.
    """
    names = sorted(saved.keys() & loaded.keys())
    different = [name for name in names if _content(saved[name]) != _content(loaded[name])]
    for side in (saved, loaded):
        known = {_content(side[name]) for name in names}
        different += [name for name in sorted(side.keys() - set(names)) if _content(side[name]) not in known]
    return different


def _content(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, array.tobytes()


def run_matrix(
    models: Sequence[str], strategies: Sequence[str], root: Path, launch: Launch = launch
) -> list[dict[str, Any]]:
    """Runs all pairs of strategies.

    Args:
        models: Names of MODELS.
        strategies: Names of STRATEGIES.
        root: For checkpoints and logs.
        launch: What runs the jobs.

    Returns:
        A dict for each pair and model: what was compared and what is wrong.
    """
    place = {model: model.replace(" ", "_") for model in models}
    for strategy in strategies:
        jobs = [
            {"name": m, "model": m, "output_dir": str(root / strategy / place[m]), "flags": list(FLAGS)}
            for m in models
            if (m, strategy) not in LEFT_OUT
        ]
        results = launch(strategy, jobs, root / "logs" / strategy)
        for model, result in results.items():
            if "error" in result:
                raise RuntimeError(f"{model} under {strategy}: {result['error']}\n{result['traceback']}")
    resumed: dict[tuple[str, str, str], dict[str, Any]] = {}
    for target in strategies:
        jobs = [
            {
                "name": f"{source}/{model}",
                "model": model,
                "output_dir": str(root / f"{source}-{target}" / place[model]),
                "resume": str(root / source / place[model] / f"checkpoint-{SAVED_STEP}"),
                "loaded": str(root / f"{source}-{target}" / place[model] / "loaded"),
                "flags": ["--save_strategy", "no", *FLAGS],
            }
            for source in strategies
            for model in models
            if not LEFT_OUT & {(model, source), (model, target)}
        ]
        for name, result in launch(target, jobs, root / "logs" / f"to {target}").items():
            source, _, model = name.partition("/")
            resumed[source, target, model] = result
    rows = []
    for (source, target, model), result in resumed.items():
        row: dict[str, Any] = {"model": model, "saved": source, "resumed": target, "error": result.get("error")}
        if row["error"] is None:
            saved = tensors(root / source / place[model] / f"checkpoint-{SAVED_STEP}/flex_checkpoint")
            loaded = tensors(root / f"{source}-{target}" / place[model] / "loaded")
            row["tensors"], row["different"] = len(saved), differences(saved, loaded)
            expected = resumed[source, source, model].get("losses", {})
            steps = sorted(expected)
            row["steps"] = steps
            row["loss difference"] = max(
                (abs(expected[step] - result["losses"].get(step, np.inf)) for step in steps), default=np.inf
            )
        row["ok"] = row["error"] is None and not row["different"] and row["loss difference"] <= TOLERANCE
        rows.append(row)
    return rows


def command_line(text: str, models: Iterable[str], strategies: Iterable[str], launch: Launch) -> int:
    """Runs a matrix as the command line says, and prints what came of it.

    Args:
        text: What the command is for.
        models: All there are.
        strategies: All there are; one process alone is left out by default.
        launch: What runs the jobs.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--models", default=",".join(models))
    parser.add_argument("--strategies", default=",".join(name for name in strategies if name != "single"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="trainer-matrix-") as directory:
        rows = run_matrix(options.models.split(","), options.strategies.split(","), Path(directory), launch)
    bad = [row for row in rows if not row["ok"]]
    for row in bad:
        print(f"FAILED {row['model']}: {row['saved']} -> {row['resumed']}: {row}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    good = [row for row in rows if row["ok"]]
    print(
        f"{len(good)} of {len(rows)} pairs ok in {time.perf_counter() - begin:.0f} s: "
        f"{sum(row['tensors'] for row in good)} tensors equal bit for bit, largest difference of losses "
        f"{max((row['loss difference'] for row in good), default=0):.1e} (bound {TOLERANCE:.0e})"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(command_line(__doc__.partition("\n")[0], MODELS, STRATEGIES, launch))
