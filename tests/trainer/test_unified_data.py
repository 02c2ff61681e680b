"""What PaddleNLP 3.0.0b4 itself has written (make_unified.py) holds what its ranks held, bit for bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory, detect_format
from paddle_flexckpt.foreign.paddle_checkpoint import read_plain_file
from paddle_flexckpt.tools.whole_tensors import iterate_tensors
from tests.trainer.make_unified import CASES

DATA = Path(__file__).parent / "data"


def contents(path):
    directory = SourceDirectory(path)
    manifest = directory.read_manifest()
    return {
        name: [array.dtype.name, list(array.shape), hashlib.sha256(array).hexdigest()[:16]]
        for name, array in iterate_tensors(directory.backend, manifest, names=manifest.catalog.keys)
    }


def expected(case):
    found = json.loads((DATA / case / "expected.json").read_text())
    if case == "half_tp2_removed":
        return {name: value for name, value in found.items() if not name.endswith(".w_0")}
    if case == "single_tied":
        # One process writes a tied parameter's states under the last of its names.
        return {name: value for name, value in found.items() if not name.startswith("llama.embed_tokens.weight.")}
    if case == "half_tp2_skip":
        # Master weights stand for weights; those of single precision are among them, as what they are.
        masters = {name[: -len(".w_0")]: value for name, value in found.items() if name.endswith(".w_0")}
        single = {f"{name}.w_0": value for name, value in found.items() if name.endswith("norm.weight")}
        single |= {f"{name}.w_0": value for name, value in found.items() if name.endswith("layernorm.weight")}
        return {**found, **masters, **single}
    return found


@pytest.mark.parametrize("case", sorted(CASES))
def test_holds_what_the_ranks_held(case):
    path = DATA / case
    assert detect_format(path) == "unified_checkpoint"
    if case == "tp2_split_fused":
        with pytest.raises(ValidationError, match="ranks' parts of a fused parameter .*gate_up_fused_proj"):
            contents(path)
        return
    assert contents(path) == expected(case)


def test_states_of_the_scheduler():
    state = read_plain_file(DATA / "single", "scheduler.pdparams")
    assert state["last_epoch"] == json.loads((DATA / "single" / "trainer_state.json").read_text())["global_step"] == 2
