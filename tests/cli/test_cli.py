"""The command line: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from paddle_flexckpt.aoa.statements import read_config
from paddle_flexckpt.cli.common import byte_count
from paddle_flexckpt.cli.main import main
from tests.pages.samples import check
from tests.remedies.following import advised
from tests.transfer.samples import save, values_of

KINDS = {
    "model.layers.0.w": ("float32", (4, 6)),
    "model.layers.1.w": ("float32", (4, 6)),
    "model.layers.0.w.moment1_0": ("float32", (4, 6)),
    "model.norm": ("float32", (5,)),
}
CONFIG = json.dumps({"aoa_statements": ["model.layers.$LAYER_ID.w^T -> l.$LAYER_ID.weight"]})


@pytest.fixture
def checkpoint(tmp_path):
    values = values_of(KINDS)
    path = tmp_path / "checkpoint"
    save(str(path), values)
    return str(path), values


def printed(capsys, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def failed(capsys, *arguments: str) -> str:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.filterwarnings("error")
def test_show_says_nothing_but_the_values_of_signalling_nans(tmp_path, capsys):
    bits = np.asarray([0x3F80, 0x7F81, 0xFF81], dtype=np.uint16)
    save(str(tmp_path / "checkpoint"), {"w": bits.view(ml_dtypes.bfloat16)})
    lines = printed(capsys, "show", str(tmp_path / "checkpoint"), "w").splitlines()
    assert lines == ["w: bfloat16 [3], from 1 to 1, mean 1, deviation 0, 0 zeros, 2 not finite", "[ 1. nan nan]"]


def test_show_prints_values_and_statistics(checkpoint, tmp_path, capsys):
    path, _ = checkpoint
    values = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "odd[0]": np.asarray([np.nan, 0], dtype=np.float16)}
    save(path, values)
    lines = printed(capsys, "show", path, "w[1:, -1]", "w[...]", "odd[0]").splitlines()
    assert lines[0] == "w[1:, -1]: float32 [2], from 7 to 11, mean 9, deviation 2, 0 zeros, 0 not finite"
    assert lines[1] == "[ 7. 11.]"
    assert lines[2].startswith("w[...]: float32 [3, 4], from 0 to 11, mean 5.5")
    # A key that looks like a slice is a key.
    assert lines[6] == "odd[0]: float16 [2], from 0 to 0, mean 0, deviation 0, 1 zeros, 1 not finite"
    for wrong, words in (
        ("w[9]", "9 is not in a tensor"),
        ("w[a]", "cannot read a slice"),
        ("w[1:2:3:4]", "cannot read a slice"),
        ("w[0:2", "the bracket of a slice is not closed (key 'w[0:2'); expected w[0:2]"),
        ("v[0]", "flexckpt show: there is no such key (key 'v')"),
    ):
        assert words in failed(capsys, "show", path, wrong)


def test_inspect_prints_json(checkpoint, capsys):
    path, _ = checkpoint
    report = json.loads(printed(capsys, "inspect", path, "--json"))
    assert (report["path"], report["unique_id"], report["world_size"], report["format"]) == (path, 0, 3, "flexckpt")
    assert len(report["tensors"]) == 4
    tensor = report["tensors"]["model.layers.0.w"]
    assert (tensor["dtype"], tensor["shape"], tensor["order"]) == ("float32", [4, 6], None)
    assert [shard["global_offset"] for shard in tensor["shards"]] == [[0, 0], [0, 2], [0, 4]]
    assert [(shard["local_shape"], shard["bytes"], shard["rank"]) for shard in tensor["shards"]] == [
        ([4, 2], 32, rank) for rank in range(3)
    ]
    assert list(json.loads(printed(capsys, "inspect", path, "--json", "--key", "model.norm"))["tensors"]) == [
        "model.norm"
    ]
    assert "such as ['model.layers.1.w'" in failed(capsys, "inspect", path, "--json", "--key", "model.layer.1.w")


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("5GB", 5 * 10**9), ("5 GiB", 5 << 30), ("1.5mib", 3 << 19), ("2K", 2000)]
)
def test_sizes_are_written_as_people_write_them(text, count):
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "5XB", "GiB", "1e3", "5 Gib per s"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="number of bytes such as 5GiB"):
        byte_count(text)


def test_digest_prints_a_line_for_each_tensor(checkpoint, tmp_path, capsys):
    path, values = checkpoint
    text = printed(capsys, "digest", path)
    assert [line.split("  ")[1] for line in text.splitlines()] == sorted(values)
    save(tmp_path / "other", values, world=2)
    assert printed(capsys, "digest", str(tmp_path / "other")) == text


def test_diff_lists_what_differs_and_exits_with_1(checkpoint, tmp_path, capsys):
    path, values = checkpoint
    other = str(tmp_path / "other")
    save(other, values, world=2)
    assert "are equal: 4 tensors" in printed(capsys, "diff", path, other)
    values["model.norm"][3] += 1
    del values["model.layers.1.w"]
    save(other, values, world=2)
    assert main(["diff", path, other]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "- model.layers.1.w: only in the first"
    assert lines[1].startswith("~ model.norm: float32 [5]: 1 elements differ (20.00%)")
    assert lines[1].endswith("first at [3]")
    assert len(lines) == 3
    assert main(["diff", path, other, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["only_in_first"] == ["model.layers.1.w"]
    assert report["differing"]["model.norm"]["first_index"] == [3]
    assert "cannot write the page" in failed(capsys, "diff", path, path, "--html", str(tmp_path / "no" / "a.html"))
    page = tmp_path / "a.html"
    assert main(["diff", path, other, "--html", str(page)]) == 1
    assert capsys.readouterr().out.splitlines() == [*lines, f"wrote {page}"]
    assert "20.00%" in check(page.read_text(encoding="utf-8")).text()
    assert "nowhere does not exist" in failed(capsys, "diff", path, str(tmp_path / "nowhere"))


def test_diff_of_weights_leaves_optimizer_states_out(checkpoint, tmp_path, capsys):
    path, values = checkpoint
    other = str(tmp_path / "other")
    save(other, {**values, "model.norm.moment1_0": values["model.norm"]})
    assert main(["diff", path, other]) == 1
    assert capsys.readouterr().out.startswith("+ model.norm.moment1_0: only in the second\n")
    text = printed(capsys, "diff", path, other, "--weights")
    assert "are equal: 3 tensors" in text
    assert "3 states left out" in text


def test_diff_with_tolerances_exits_with_0_where_they_allow_all(checkpoint, tmp_path, capsys):
    path, values = checkpoint
    other = str(tmp_path / "other")
    save(other, {**values, "model.norm": values["model.norm"] * np.float32(1 + 1e-6)})
    assert main(["diff", path, other]) == 1
    assert capsys.readouterr().out.startswith("~ model.norm: ")
    within = printed(capsys, "diff", path, other, "--rtol", "1e-5")
    assert within.startswith("= model.norm: ")
    assert "within the tolerances" in within
    report = json.loads(printed(capsys, "diff", path, other, "--rtol", "1e-5", "--json"))
    assert (report["equal"], report["within_tolerance"], report["rtol"]) == (False, True, 1e-5)
    assert report["differing"]["model.norm"]["within_tolerance"] is True
    assert main(["diff", path, other, "--rtol", "1e-9", "--atol", "1e-12"]) == 1
    assert capsys.readouterr().out.startswith("~ model.norm: ")
    assert "rtol has to be a finite number of at least 0; got -1" in failed(capsys, "diff", path, other, "--rtol", "-1")


def test_explain_tells_where_each_target_comes_from(checkpoint, capsys):
    path, _ = checkpoint
    text = printed(capsys, "explain", path, "--aoa", CONFIG, "--key", "l.1.weight")
    assert text.splitlines() == [
        "l.1.weight  float32 [6, 4]",
        "  by AOA statement 1: model.layers.1.w^T -> l.1.weight",
        "  [0:6, 0:4] <- model.layers.1.w [0:4, 0:6], axes (1, 0)",
    ]
    assert "model.norm" in printed(capsys, "explain", path, "--aoa", CONFIG)


def test_a_diff_says_that_the_statements_fit_the_other_checkpoint(tmp_path, capsys):
    path, other = str(tmp_path / "path"), str(tmp_path / "other")
    save(path, values_of({"v": ("float32", (6, 4))}))
    save(other, values_of({"n": ("float32", (6, 4))}))
    text = failed(capsys, "diff", other, path, "--aoa", "v -> n")
    advised("cli/checkpoints.py", "give the two in the other order", text.partition("SECOND")[2])
    assert "the statements fit SECOND, and --aoa is about FIRST" in text
    printed(capsys, "diff", path, other, "--aoa", "v -> n")
    assert "SECOND" not in failed(capsys, "diff", path, other, "--aoa", "none -> n")


def test_explain_against_a_destination_lists_what_nothing_feeds(checkpoint, tmp_path, capsys):
    path, _ = checkpoint
    other = str(tmp_path / "other")
    save(other, values_of({"l.0.weight": ("float32", (6, 4)), "new": ("float32", (3,))}))
    assert main(["explain", path, other, "--aoa", CONFIG]) == 1
    text = capsys.readouterr().out
    assert "nothing feeds new: no such source key" in text
    assert "nothing uses source key model.norm" in text
    assert main(["explain", path, other, "--aoa", CONFIG, "--key", "new"]) == 1
    assert capsys.readouterr().out == "nothing feeds new: no such source key\n"
    printed(capsys, "explain", path, other, "--aoa", CONFIG, "--key", "l.0.weight")


def test_explain_refuses_the_shapes_that_a_load_refuses(tmp_path, capsys):
    """The statement for w was left out."""
    path, other = str(tmp_path / "path"), str(tmp_path / "other")
    save(path, values_of({"v": ("float32", (6, 4)), "w": ("float32", (6, 4))}))
    save(other, values_of({"n": ("float32", (6, 4)), "w": ("float32", (4, 6))}))
    text = failed(capsys, "explain", path, other, "--aoa", "v -> n")
    assert "global shapes differ (key 'w'" in text and "expected [4, 6] (target); got [6, 4] (source)" in text
    assert "Remedy (FC205)" in text and "'w^T -> w'" in text
    printed(capsys, "explain", path, other, "--aoa", "v -> n", "--key", "n")
    printed(capsys, "explain", path, other, "--aoa", '["v -> n", "w^T -> w"]')


def test_a_statement_may_be_given_as_it_is(checkpoint, capsys):
    path, _ = checkpoint
    text = printed(capsys, "explain", path, "--aoa", "model.norm -> norm", "--key", "norm")
    assert text.splitlines()[:2] == ["norm  float32 [5]", "  by AOA statement 1: model.norm -> norm"]
    assert (read_config("a -> b").statements, read_config("a -> b\nc -> d").statements) == (
        ("a -> b",), ("a -> b\nc -> d",)
    )  # fmt: skip
    assert "expected a name; got the end of the text" in failed(capsys, "explain", path, "--aoa", "a ->")


def test_states_stand_with_their_parameter(tmp_path, capsys):
    values = values_of(
        {key: ("float32", (2,)) for key in ("a.w", "a.w.moment1_0", "a.w.w_0", "a.w2", "b.w", "b.w.moment1_0")}
    )
    save(str(tmp_path / "one"), values)
    names = [line.split()[0] for line in printed(capsys, "inspect", str(tmp_path / "one")).splitlines()[2:-2]]
    assert names == ["a.w", ".moment1_0", ".w_0", "a.w2", "b.w", ".moment1_0"]
    del values["a.w"], values["a.w.moment1_0"], values["a.w.w_0"], values["b.w.moment1_0"]
    save(str(tmp_path / "two"), values)
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    assert capsys.readouterr().out.splitlines()[:2] == [
        "- a.w with its states moment1_0, w_0: only in the first",
        "- b.w.moment1_0: only in the first",
    ]


def test_expand_writes_macros_out(checkpoint, capsys):
    path, _ = checkpoint
    lines = printed(capsys, "expand", path, "--aoa", CONFIG).splitlines()
    assert lines[:3] == [
        "# statement 1: model.layers.0.w^T->l.0.weight",
        'model.layers.0.w -> model.layers.0.w_transpose_tmp, permute = "[]"',
        "model.layers.0.w_transpose_tmp->l.0.weight",
    ]


def test_invert_prints_a_config(capsys):
    text = printed(capsys, "invert", "--aoa", CONFIG)
    assert json.loads(text) == {"aoa_statements": ["l.$LAYER_ID.weight^T -> model.layers.$LAYER_ID.w"]}


def test_invert_refuses_what_statements_alone_do_not_tell(capsys):
    config = json.dumps({"aoa_statements": ['model.norm -> n, resize="[8]", fill=0']})
    assert "resize does not tell the shape that there was" in failed(capsys, "invert", "--aoa", config)


def test_a_config_is_a_file_or_standard_input(checkpoint, tmp_path, capsys, monkeypatch):
    pytest.importorskip("yaml")
    path, _ = checkpoint
    file = tmp_path / "aoa.yaml"
    file.write_text("aoa_statements:\n  - model.norm -> n\n")
    assert "n  float32 [5]" in printed(capsys, "explain", path, "--aoa", str(file), "--key", "n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(CONFIG))
    assert "l.0.weight" in printed(capsys, "explain", path, "--aoa", "-")


def test_rules_lists_describes_and_prints(capsys):
    assert "llama" in printed(capsys, "rules")
    assert "variants" in json.loads(printed(capsys, "rules", "llama"))
    fused = printed(
        capsys, "rules", "llama", "--variant", "fused", "--set", "num_heads=8", "--set", "num_key_value_groups=2"
    )
    assert any("num_heads=8" in text for text in json.loads(fused)["aoa_statements"])


def test_export_writes_what_the_statements_make(checkpoint, tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.numpy")
    path, values = checkpoint
    output = str(tmp_path / "out")
    assert "exported 3 tensors" in printed(capsys, "export", path, output, "--aoa", CONFIG)
    written = safetensors.load_file(f"{output}/model.safetensors")
    assert set(written) == {"l.0.weight", "l.1.weight", "model.norm"}
    for i in range(2):
        assert written[f"l.{i}.weight"].tobytes() == np.ascontiguousarray(values[f"model.layers.{i}.w"].T).tobytes()


def test_rules_of_a_direction_are_those_of_the_plain_variant(capsys):
    """A direction is of statements: it is not ignored where no variant is named."""
    plain = printed(capsys, "rules", "llama", "--variant", "plain", "--direction", "to_hf")
    assert printed(capsys, "rules", "llama", "--direction", "to_hf") == plain
    prefixed = printed(capsys, "rules", "gpt2", "--variant", "plain", "--set", "prefix=model.")
    assert printed(capsys, "rules", "gpt2", "--set", "prefix=model.") == prefixed


def test_what_is_about_a_family_needs_one(capsys):
    for option, value in (("--direction", "to_hf"), ("--variant", "plain"), ("--set", "num_heads=8")):
        assert f"{option} is about the rules of a family. Remedy (FC101): give FAMILY too" in failed(
            capsys, "rules", option, value
        )


def test_rules_feed_an_export(tmp_path, capsys, monkeypatch):
    safetensors = pytest.importorskip("safetensors.numpy")
    layer = "model.layers.0."
    linear = {f"self_attn.{name}_proj.weight": (4, 6) for name in "qkvo"}
    linear.update({f"mlp.{name}_proj.weight": (4, 6) for name in ("gate", "up", "down")})
    norms = {name: (4,) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
    shapes = {f"{layer}{name}": shape for name, shape in {**linear, **norms}.items()}
    shapes.update({"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,), "lm_head.weight": (4, 8)})
    values = values_of({key: ("bfloat16", shape) for key, shape in shapes.items()})
    path, output = str(tmp_path / "checkpoint"), str(tmp_path / "out")
    save(path, values)
    rules = printed(capsys, "rules", "llama", "--variant", "plain", "--direction", "to_hf")
    monkeypatch.setattr(sys, "stdin", io.StringIO(rules))
    printed(capsys, "export", path, output, "--aoa", "-")
    written = safetensors.load_file(f"{output}/model.safetensors")
    assert set(written) == set(values)
    for name in linear:
        key = f"{layer}{name}"
        assert written[key].view(np.uint16).tobytes() == np.ascontiguousarray(values[key].T).tobytes()
    key = "model.embed_tokens.weight"
    assert written[key].view(np.uint16).tobytes() == values[key].tobytes()


def test_failures_are_one_message_on_stderr(checkpoint, tmp_path, capsys):
    path, _ = checkpoint
    assert "flexckpt explain: " in failed(capsys, "explain", str(tmp_path / "none"), "--aoa", CONFIG)
    bad = json.dumps(["model.layers.$LAYER_ID.x -> y.$LAYER_ID"])
    assert "no source key or variable matches" in failed(capsys, "explain", path, "--aoa", bad)
    assert "neither JSON nor a file" in failed(capsys, "explain", path, "--aoa", "nowhere.json")
    assert "NAME=VALUE" in failed(capsys, "rules", "llama", "--variant", "plain", "--set", "num_heads")
    assert "there is no target key 'x'" in failed(capsys, "explain", path, "--aoa", CONFIG, "--key", "x")
    with pytest.raises(SystemExit) as usage:
        main(["nonsense"])
    assert usage.value.code == 2


def test_it_starts_without_paddle():
    code = "import sys, paddle_flexckpt.cli.main; print('paddle' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_python_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "paddle_flexckpt", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("flexckpt ")


EVIL = "w\x1b[2J\nnorm\u202e"
SHOWN = "w\\u001b[2J\\u000anorm\\u202e"


@pytest.mark.parametrize(
    "words",
    [
        ["inspect"],
        ["inspect", "--key", EVIL],
        ["show", EVIL],
        ["map"],
        ["map", "--to", "tp=1"],
        ["digest"],
        ["explain", "--aoa", "[]"],
        ["du", "--by", "layer"],
    ],
)
def test_what_a_terminal_would_carry_out_is_escaped(tmp_path, capsys, words):
    path = str(tmp_path / "run\x1b[0m")
    save(path, {EVIL: np.ones(3, np.float32)}, world=1)
    text = printed(capsys, words[0], path, *words[1:])
    assert text.replace("\n", "").isprintable()
    assert words[0] in ("du", "explain") or SHOWN in text
    if words[0] not in ("du", "explain"):
        assert json.dumps(EVIL) in printed(capsys, words[0], path, *words[1:], "--json")


def test_errors_escape_what_a_terminal_would_carry_out(tmp_path, capsys):
    path = str(tmp_path / "run")
    save(path, {EVIL: np.ones(3, np.float32)}, world=1)
    for words in (["show", path, "v"], ["inspect", path, "--key", f"{EVIL}1"], ["ls", str(tmp_path / "\x9b")]):
        text = failed(capsys, *words)
        assert text.replace("\n", "").isprintable()


def test_ls_escapes_names_of_directories(tmp_path, capsys):
    save(str(tmp_path / "step_1\x1b[2J"), {"w": np.ones(3, np.float32)}, world=1)
    assert "step_1\\u001b[2J" in printed(capsys, "ls", str(tmp_path))
