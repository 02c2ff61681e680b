"""docs/migration.md: every command, as printed, does what it says."""

from __future__ import annotations

import json
import re
import shlex

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddle_flexckpt.aoa.model_rules import model_rules
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.tools.tensor_reader import TensorReader
from tests.cli.llama import CONFIG, llama
from tests.documents import ROOT, every_block
from tests.foreign import test_paddle_checkpoint, test_paddle_pickles, test_torch_dcp, test_unified_checkpoint

PAGE = (ROOT / "docs" / "migration.md").read_text()
COMMANDS = [line for block in every_block("docs/migration.md", "bash") for line in block.splitlines()]


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """What the page names."""
    monkeypatch.chdir(tmp_path)
    test_paddle_pickles.write(tmp_path)
    for name in ("unified", "dist_checkpoint", "hf"):
        (tmp_path / name).mkdir()
    weights = {"model.norm.weight": np.ones(4, np.float32), "model.q_proj.weight": np.ones((4, 6), np.float32)}
    test_unified_checkpoint.save_merged(tmp_path / "unified", "model", weights)
    test_paddle_checkpoint.write(tmp_path / "dist_checkpoint")
    test_torch_dcp.write(tmp_path / "with_codes")  # whose float8 is refused where it would be cast
    without = {"aoa_statements": ["model.eighth -> _"]}
    convert_checkpoint("with_codes", "torch_dcp", aoa_config=without, format="torch_dcp")
    save_file(llama(), tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    for folder in (tmp_path, tmp_path / "hf"):
        (folder / "config.json").write_text(json.dumps(CONFIG))
    rules = model_rules("llama")
    cuts = [("*norm.weight", None), ("*.weight", 1)]
    convert_checkpoint("hf", "checkpoint", rules, strategy="tp=2", cuts=cuts)
    return tmp_path


def test_every_command_of_the_page_runs(sources, capsys):
    assert len(COMMANDS) >= 12
    for command in COMMANDS:
        program, *arguments = shlex.split(command)
        assert program == "flexckpt"
        assert main(arguments) == 0, f"{command}: {capsys.readouterr().err}"
    origins = {name: SourceDirectory(sources / name).origin() for name in ("unified", "dist_checkpoint", "torch_dcp")}
    assert origins == {"unified": "unified_checkpoint", "dist_checkpoint": "paddle", "torch_dcp": "torch_dcp"}
    for name in ("for_torch", "for_torch_ranks"):
        assert SourceDirectory(sources / name).origin() == "torch_dcp"
    catalog = SourceDirectory(sources / "from_unified").read_manifest().catalog
    found = {(catalog.key_name(row), catalog.unpadded(row, catalog.shape)) for row in range(len(catalog))}
    assert ("model.q_proj.weight", (4, 3)) in found
    with TensorReader(sources / "renamed") as reader:
        assert "model.final_norm.weight" in reader
    assert (sources / "back" / "config.json").read_text() == json.dumps(CONFIG)


def test_options_that_the_page_names_are_there(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    text = capsys.readouterr().out
    named = set(re.findall(r"(--[a-z][a-z-]+)", PAGE))
    assert named and sorted(option for option in named if option not in text) == []
