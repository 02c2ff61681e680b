"""Files beside a model's tensors: the table of those that a conversion copies, and what is said of the others."""

from __future__ import annotations

import os

import pytest

from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.tools.companion_files import find_companions

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


def test_a_link_out_of_the_source_is_left(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    os.symlink(tmp_path / "secret.txt", tmp_path / "from" / "vocab.txt")
    found = find_companions(open_backend(tmp_path / "from"), (), True)
    assert not found.copied
    assert "is a link out of the checkpoint's directory" in found.left["vocab.txt"]
    assert "Remedy" not in found.left["vocab.txt"]
