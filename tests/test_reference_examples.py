"""The examples in the entries of the main calls run, one after the other."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

paddle = pytest.importorskip("paddle")

import paddle_flexckpt as fc  # noqa: E402
from tests.documents import docstring_block  # noqa: E402


def test_the_examples_of_the_main_calls_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model, other = paddle.nn.Linear(4, 2), paddle.nn.Linear(4, 2)
    scheduler = paddle.optimizer.lr.StepDecay(0.1, 3)
    optimizer = paddle.optimizer.AdamW(scheduler, parameters=model.parameters())
    names: dict[str, Any] = {"paddle": paddle, "fc": fc, "step": 7, **locals()}
    for text in (
        docstring_block("paddle_flexckpt/manager/whole_run.py", 'fc.save("run/last"'),
        docstring_block("paddle_flexckpt/manager/whole_run.py", "first_step"),
        docstring_block("paddle_flexckpt/saving/saver.py", '"run/shards"'),
        docstring_block("paddle_flexckpt/loading/loader.py", '"run/shards"'),
        docstring_block("paddle_flexckpt/loading/resharder.py", "other.sharded_state_dict"),
        docstring_block("paddle_flexckpt/loading/publishing.py", '"published"'),
        docstring_block("paddle_flexckpt/tools/conversion.py", '"converted"'),
        docstring_block("paddle_flexckpt/tools/export.py", '"exported"'),
        docstring_block("paddle_flexckpt/tools/verification.py", "report.ok"),
        docstring_block("paddle_flexckpt/tools/comparison.py", "report.equal"),
        docstring_block("paddle_flexckpt/memory/state_statements.py", "fc.explain"),
    ):
        exec(textwrap.dedent(text), names)
    fc.uninstall()
    assert names["first_step"] == 8
    assert (names["state"]["weight"] == model.weight).all()
    assert (other.weight == model.weight).all()
    assert (tmp_path / "published" / "model.safetensors").exists()
    assert "[0:2, 0:4] <- weight [0:4, 0:2], axes (1, 0)" in capsys.readouterr().out
