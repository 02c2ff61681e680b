"""The part of a training script that has nothing to do with training: jobs in, results out."""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Callable
from typing import Any

import paddle.distributed as dist


def run_jobs(jobs_file: str, results_file: str, run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Runs jobs one after the other; one that fails does not keep the next from running.

    Args:
        jobs_file: A JSON list of dicts with a ``name`` each. With ``may_fail`` a failure is not printed.
        results_file: Where rank 0 writes, after each job, a JSON dict of what they returned, or ``error`` and
            ``traceback``, by name.
        run: Runs one.
    """
    with open(jobs_file, encoding="utf-8") as file:
        jobs = json.load(file)
    results = {}
    gc.freeze()  # what is imported is no garbage of a job
    for job in jobs:
        try:
            results[job["name"]] = run(job)
        except Exception as error:
            results[job["name"]] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            if not job.get("may_fail"):
                print(traceback.format_exc(), flush=True)
        gc.collect()
        if int(os.environ.get("PADDLE_TRAINER_ID", "0")) == 0:
            with open(results_file, "w", encoding="utf-8") as file:
                json.dump(results, file)
    if dist.is_initialized():
        dist.barrier()
