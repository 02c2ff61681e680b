"""The loops of the documentation run."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
import paddle

import paddle_flexckpt as fc
from tests.documents import code_block


def docstring_loop() -> str:
    text = fc.CheckpointManager.__doc__
    return "\n".join(line[8:] for line in text.split("::\n")[1].split("\n    Every")[0].splitlines())


@pytest.mark.parametrize("source", ["README.md", "docs/manager.md", "docstring"])
def test_the_loop_runs_and_goes_on(tmp_path, monkeypatch, source):
    code = docstring_loop() if source == "docstring" else code_block(source, "Manager(")
    monkeypatch.chdir(tmp_path)
    fc.install()
    try:
        seen = []
        for steps in (250, 420):
            model = paddle.nn.Linear(2, 2)
            scheduler = paddle.optimizer.lr.StepDecay(0.1, 3)
            optimizer = paddle.optimizer.AdamW(scheduler, parameters=model.parameters())
            names = {"fc": fc, "model": model, "optimizer": optimizer, "scheduler": scheduler, "steps": steps}
            exec(code, {**names, "train": lambda step: seen.append(step) or 1.0 / step})
        assert seen == [*range(1, 251), *range(201, 421)]
        assert [info.step for info in fc.list_checkpoints("run")] == [200, 300, 400]
    finally:
        fc.uninstall()
