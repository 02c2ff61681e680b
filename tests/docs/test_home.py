"""The site's home page: what its cards print works."""

from __future__ import annotations

import shlex

import numpy as np
import pytest

from paddle_flexckpt.cli.main import main
from paddle_flexckpt.tools.tensor_reader import TensorReader
from tests.documents import code_block, shell_block
from tests.foreign import test_paddle_pickles


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_training(here):
    paddle = pytest.importorskip("paddle")
    import paddle_flexckpt as fc

    net = paddle.nn.Linear(2, 3)
    opt = paddle.optimizer.AdamW(parameters=net.parameters())
    names = {"fc": fc, "net": net, "opt": opt}
    saved = net.weight.numpy()
    save, load = code_block("docs/index.md", "fc.save").splitlines()
    exec(save, names)
    net.weight.set_value(paddle.zeros([2, 3]))
    exec(load, names)
    assert np.array_equal(net.weight.numpy(), saved)


def test_converting_and_looking(here, capsys):
    test_paddle_pickles.write(here)
    convert, look = shell_block("docs/index.md", "flexckpt convert"), shell_block("docs/index.md", "flexckpt inspect")
    for line in (convert + look).splitlines():
        program, *arguments = shlex.split(line)
        assert (program, main(arguments)) == ("flexckpt", 0), f"{line}: {capsys.readouterr().err}"
    with TensorReader(here / "hf") as reader:
        assert np.array_equal(reader.read("fc.weight"), test_paddle_pickles.W)
    assert "fc.weight" in capsys.readouterr().out
    assert "fc.weight" in (here / "map.html").read_text(encoding="utf-8")
