"""PaddleFormers' strategies against each other, as tests/trainer/matrix.py does for those of PaddleNLP.

python -m tests.paddleformers.matrix [--models llama,ernie] [--strategies tp2,pp2] [--json FILE]
"""

from __future__ import annotations

import sys

from tests.paddleformers.models import MODELS
from tests.paddleformers.strategies import STRATEGIES, launch
from tests.trainer.matrix import command_line

if __name__ == "__main__":
    sys.exit(command_line(__doc__.partition("\n")[0], MODELS, STRATEGIES, launch))
