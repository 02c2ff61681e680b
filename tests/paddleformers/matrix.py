"""PaddleFormers' strategies against each other, as tests/trainer/matrix.py does for those of PaddleNLP.

python -m tests.paddleformers.matrix [--models llama,qwen2] [--strategies tp2,pp2]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.paddleformers.models import MODELS
from tests.paddleformers.strategies import STRATEGIES, launch
from tests.trainer.matrix import run_matrix


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--strategies", default=",".join(name for name in STRATEGIES if name != "single"))
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="paddleformers-matrix-") as directory:
        rows = run_matrix(options.models.split(","), options.strategies.split(","), Path(directory), launch)
    bad = [row for row in rows if not row["ok"]]
    for row in bad:
        print(f"FAILED {row['model']}: {row['saved']} -> {row['resumed']}: {row}")
    good = [row for row in rows if row["ok"]]
    print(
        f"{len(good)} of {len(rows)} pairs ok in {time.perf_counter() - begin:.0f} s: "
        f"{sum(row['tensors'] for row in good)} tensors equal bit for bit, largest difference of losses "
        f"{max((row['loss difference'] for row in good), default=0):.1e}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
