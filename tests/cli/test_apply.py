"""``flexckpt apply``, and what docs/rollout.md prints about versions of weights."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("zstandard")

import paddle_flexckpt as fc
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from tests.documents import code_block, shell_block
from tests.rollout import reference
from tests.rollout.streams import publish_stream


def test_the_example_of_the_page(tmp_path, capsys):
    model = {"w": np.zeros(100, np.float32)}

    def train_one_step():
        model["w"][3] += 1

    code = code_block("docs/rollout.md", "fc.WeightPublisher").replace("/shared", str(tmp_path))
    values = {"fc": fc, "rules": None, "steps": 12, "model": model, "train_one_step": train_one_step}
    code = code.replace("aoa_config=rules", "aoa_config=rules, process_group=comm")
    exec(code, {**values, "comm": SoloCommunicator()})
    command = shell_block("docs/rollout.md", "--version 12").partition("#")[0].split()
    assert main([word.replace("/shared", str(tmp_path)).replace("/local", str(tmp_path)) for word in command[1:]]) == 0
    assert "model has version 12, from full version 1: 1 tensors changed, 2 files written" in capsys.readouterr().out
    assert reference.tensors_of(tmp_path / "model") == {"w": model["w"].tobytes()}


def test_a_root_without_versions_leaves_no_copy(tmp_path, capsys):
    assert main(["apply", str(tmp_path / "nothing"), str(tmp_path / "local")]) == 1
    assert "has no version of weights. Remedy (FC301): correct the path" in capsys.readouterr().err
    assert not (tmp_path / "local").exists()


def test_options(tmp_path, capsys):
    history = publish_stream(tmp_path / "v", 4)
    words = ["apply", str(tmp_path / "v"), str(tmp_path / "local")]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"]["name"] == "apply"
    assert (report["version"], report["before"], report["full_version"]) == (4, None, 1)
    assert main([*words, "--version", "2", "--full"]) == 0
    assert reference.tensors_of(tmp_path / "local") == history[2]
    reference.write_delta(tmp_path / "theirs", 1, history[2], history[3], "xor", "adler32")
    theirs = ["apply", str(tmp_path / "theirs"), str(tmp_path / "other"), "--base", str(tmp_path / "local")]
    assert main(theirs) == 0
    assert reference.tensors_of(tmp_path / "other") == history[3]
    assert main([*words, "--version", "9"]) == 1
    assert "weight_v000009 cannot be used: it is missing" in capsys.readouterr().err
