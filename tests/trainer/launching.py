"""Starts the training script under a strategy, and reads what it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.trainer.strategies import STRATEGIES, Strategy

SCRIPT = Path(__file__).with_name("train_script.py")
TIMEOUT = 1200


def launch(
    strategy: str,
    jobs: Sequence[dict[str, Any]],
    directory: Path,
    script: Path = SCRIPT,
    strategies: Mapping[str, Strategy] = STRATEGIES,
    launcher: str = "paddle.distributed.launch",
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Runs jobs under a strategy with ``paddle.distributed.launch``.

    Args:
        strategy: One of the strategies.
        jobs: See train_script.py.
        directory: For logs, jobs and results.
        script: What is started.
        strategies: By name.
        launcher: The module that starts it.
        variables: Of the environment, besides those of this process.

    Returns:
        What each job did, by its name.

    Raises:
        RuntimeError: The launch failed; the end of every rank's log is in the text.
    """
    directory.mkdir(parents=True, exist_ok=True)
    jobs_file, results_file, logs = directory / "jobs.json", directory / "results.json", directory / "log"
    jobs_file.write_text(json.dumps(list(jobs)), encoding="utf-8")
    command = [
        sys.executable, "-m", launcher, "--nproc_per_node", str(strategies[strategy].ranks),
        "--log_dir", str(logs), str(script), strategy, str(jobs_file), str(results_file),
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment.update(variables)
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    results = json.loads(results_file.read_text(encoding="utf-8")) if results_file.exists() else {}
    if done.returncode or len(results) < len(jobs):
        ends = [
            f"{path.name}:\n{path.read_text(errors='replace')[-4000:]}" for path in sorted(logs.glob("workerlog.*"))
        ]
        raise RuntimeError(f"{strategy}: exit status {done.returncode}\n{done.stderr[-2000:]}\n" + "\n".join(ends))
    return results
