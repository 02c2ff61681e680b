"""docs/weight_sync.md prints what it says. The job: its code, as printed."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from tests.distributed.test_readme import run
from tests.documents import code_block, output_block

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


def test_weights_go_from_training_to_generation_after_each_update(world, tmp_path):
    code = code_block("docs/weight_sync.md", "# sync.py")
    expected = output_block("docs/weight_sync.md", "update 0:").splitlines()
    for printed in world(2).run(run, code=code, directory=str(tmp_path)):
        assert [line for line in printed.splitlines() if line.startswith("update")] == expected
