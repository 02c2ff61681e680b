"""Files beside a model's tensors: the table of those that a conversion copies, and what is said of the others."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

from paddle_flexckpt import export_safetensors
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.tools import export
from paddle_flexckpt.tools.companion_files import find_companions
from tests.transfer.samples import save

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "my_tokeniser.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "qwen.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "adapter_config.json",
)
OF_FORMAT = ("model.safetensors.index.json", ".metadata", "0.metadata", "0.manifest", "1_0.distcp", "config.json")


@pytest.mark.parametrize("name", COPIED)
def test_what_a_model_is_used_with_is_copied(tmp_path, name):
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / name).write_bytes(b"\x00 content")
    found = find_companions(open_backend(tmp_path / "from"), (), True)
    assert (list(found.copied), found.left) == ([name], {})
    found.copy(open_backend(tmp_path / "from"), open_backend(tmp_path / "to"))
    assert {each.name: each.read_bytes() for each in (tmp_path / "to").iterdir()} == {name: b"\x00 content"}


def test_what_is_left_is_named_with_a_reason(tmp_path, monkeypatch):
    for name in (*OF_FORMAT, "README.md", "training_args.bin", "modeling_x.py", "tokenization_x.py", "weights.bin"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "vocab.txt").write_bytes(b"1234")
    found = find_companions(open_backend(tmp_path), ["weights.bin"], True)
    assert list(found.copied) == ["vocab.txt"]
    assert list(found.notes()) == [
        "left in the source, as tensors do not need them: README.md, training_args.bin",
        "left in the source, as code, which whoever loads the model runs: modeling_x.py, tokenization_x.py",
    ]
    # Beside a file that is a checkpoint by itself there may be anything.
    of_file = find_companions(open_backend(tmp_path), ["weights.bin"], False)
    assert [list(of_file.copied), list(of_file.left)] == [["vocab.txt"], []]
    monkeypatch.setattr("paddle_flexckpt.tools.companion_files._MOST_BYTES", 3)
    large = find_companions(open_backend(tmp_path), ["weights.bin"], True)
    assert large.left["vocab.txt"] == "as larger than 3 B"
    assert not large.copied


def test_an_export_copies_them_too(tmp_path):
    """And the configuration, with a note if it says that weights are quantized which statements dequantize."""
    source, config = tmp_path / "from", b'{"quantization_config": {"quant_method": "fp8"}}'
    values = {"w": np.ones((4, 4), ml_dtypes.float8_e4m3fn), "w_scale_inv": np.full((1, 1), 2, np.float32)}
    save(source, values, world=1)
    for name, content in (("config.json", config), ("vocab.txt", b"a b"), ("README.md", b""), ("modeling_x.py", b"")):
        (source / name).write_bytes(content)
    report = export_safetensors(source, tmp_path / "codes")
    assert report.copied == ["config.json", "vocab.txt"]
    assert report.notes == [
        "left in the source, as tensors do not need them: README.md",
        "left in the source, as code, which whoever loads the model runs: modeling_x.py",
    ]
    assert "; copied config.json, vocab.txt; note: left in the source, as tensors" in report.summary()
    assert sorted(os.listdir(tmp_path / "codes")) == ["config.json", "model.safetensors", "vocab.txt"]
    assert (tmp_path / "codes" / "config.json").read_bytes() == config
    again = export_safetensors(tmp_path / "codes", tmp_path / "again")
    assert (again.copied, again.notes) == (report.copied, [])
    assert export_safetensors(tmp_path / "codes" / "model.safetensors", tmp_path / "of_file").copied == report.copied
    statements = ['w, w_scale_inv -> w, dequant="fp8", block="[4, 4]", dtype="float32"']
    numbers = export_safetensors(source, tmp_path / "numbers", {"aoa_statements": statements})
    assert "has a quantization_config; statements dequantize" in numbers.notes[0]


def test_an_export_that_fails_leaves_none_of_them(tmp_path, monkeypatch):
    save(tmp_path / "from", {"w": np.ones(4, np.float32)}, world=1)
    (tmp_path / "from" / "vocab.txt").write_bytes(b"a b")

    def fail(*arguments):
        assert os.listdir(tmp_path / "out") == ["vocab.txt"]
        raise OSError("no space left")

    monkeypatch.setattr(export, "_write_files", fail)
    with pytest.raises(OSError, match="no space left"):
        export_safetensors(tmp_path / "from", tmp_path / "out")
    assert os.listdir(tmp_path) == ["from"]


def test_a_link_out_of_the_source_is_left(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    os.symlink(tmp_path / "secret.txt", tmp_path / "from" / "vocab.txt")
    found = find_companions(open_backend(tmp_path / "from"), (), True)
    assert not found.copied
    assert "is a link out of the checkpoint's directory" in found.left["vocab.txt"]
    assert "Remedy" not in found.left["vocab.txt"]
