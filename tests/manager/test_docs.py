"""The loops of the documentation run."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt import manager
from tests.documents import code_block, docstring_block

LOOPS = {
    "README": code_block("README.md", "Manager("),
    "page": code_block("docs/manager.md", "Manager("),
    "docstring": docstring_block("paddle_flexckpt/manager/manager.py", "Manager("),
}


class Run:
    """What the loops are given: a model that trains, which nobody has called ``install()`` for."""

    def __init__(self, code: str, steps: int) -> None:
        self.seen: list[int] = []
        paddle.seed(1)
        with paddle.utils.unique_name.guard():
            self.model = paddle.nn.Linear(2, 2)
        scheduler = paddle.optimizer.lr.StepDecay(0.1, 3)
        optimizer = paddle.optimizer.AdamW(scheduler, parameters=self.model.parameters())

        def train(step: int) -> float:
            self.seen.append(step)
            loss = (self.model(paddle.full([1, 2], float(step % 7))) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            scheduler.step()
            return 1.0 / step  # the newest is the best

        names = {**vars(manager), "model": self.model, "optimizer": optimizer, "scheduler": scheduler, "steps": steps}
        exec(code, {**names, "train": train})


@pytest.mark.parametrize("source", LOOPS)
def test_the_loop_goes_on_to_the_bit_without_install(tmp_path, monkeypatch, source):
    code = LOOPS[source]
    monkeypatch.chdir(tmp_path)
    fc.uninstall()
    try:
        first = Run(code, 250)
        fc.uninstall()
        second = Run(code, 420)
        assert [*first.seen, *second.seen] == [*range(1, 421)]  # the last step is saved too
        assert [info.step for info in fc.list_checkpoints("run")] == [300, 400, 420]
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        uninterrupted = Run(code, 420)
        assert uninterrupted.seen == [*range(1, 421)]
        assert uninterrupted.model.weight.numpy().tobytes() == second.model.weight.numpy().tobytes()
    finally:
        fc.uninstall()


def test_the_loop_with_a_memory_tier_goes_on_from_memory(tmp_path, monkeypatch, capsys):
    """On one node there is one copy."""
    code = code_block("docs/survive.md", "MemoryTier(").replace("/dev/shm/run", str(tmp_path / "shm"))
    code = code.replace("copies=2", "copies=1")
    monkeypatch.chdir(tmp_path)
    try:
        first = Run(code, 250)
        second = Run(code, 1000)
        assert [*first.seen, *second.seen] == [*range(1, 251), *range(241, 1001)]
        assert "restored step 240 from the memory of 1 of 1 nodes; 0 bytes from storage: " in capsys.readouterr().out
        assert [info.step for info in fc.list_checkpoints("run")] == [1000]
        assert not (tmp_path / "shm").exists()
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        uninterrupted = Run(code, 1000)
        assert uninterrupted.model.weight.numpy().tobytes() == second.model.weight.numpy().tobytes()
    finally:
        fc.uninstall()
