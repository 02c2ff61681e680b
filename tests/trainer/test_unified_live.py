"""Unified checkpoints load into a live model of PaddleNLP's and its optimizer, whatever they were saved under."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.make_unified import CASES, CONFIG

paddle = pytest.importorskip("paddle")
pytest.importorskip("paddlenlp")
pytestmark = pytest.mark.paddle

DATA = Path(__file__).parent / "data"
# What one process with float32 weights can hold; the others' states are compared in test_unified_data.
LIVE = [name for name, (_, _, half, _, _) in CASES.items() if not half and name not in ("lora", "tp2_split_fused")]


@pytest.mark.parametrize("case", LIVE)
def test_model_and_optimizer_are_filled(case):
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM

    from paddle_flexckpt.loading.loader import load_state_dict
    from paddle_flexckpt.parallel.install import install, optimizer_sharded_state_dict
    from paddle_flexckpt.trainer.model_rules import describe_model

    install()
    config = LlamaConfig(**CONFIG)
    for name, value in CASES[case][1].items():
        setattr(config, name, value)
    model = LlamaForCausalLM._from_config(config, dtype="float32")
    shards = dict(describe_model(model))
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    shards.update(optimizer_sharded_state_dict(optimizer, dict(shards)))
    report = load_state_dict(shards, DATA / case, "self", strict="missing")
    assert report.bytes_verified == 0
    expected = json.loads((DATA / case / "expected.json").read_text())
    assert set(shards) <= set(expected) | set(report.aliases)
    for key, weight in shards.items():
        array = np.asarray(weight.local_tensor.numpy())
        got = [str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()[:16]]
        assert got == expected[key], key
    tied = bool(CASES[case][1].get("tie_word_embeddings"))
    assert tied or not report.unexpected
