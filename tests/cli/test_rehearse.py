"""flexckpt rehearse: its table, its JSON, its exit status, and how it says that a checkpoint does not load."""

from __future__ import annotations

import json
import re

import pytest

from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.planning.layouts import Layout, Model, ModelTensor
from paddle_flexckpt.planning.strategy import parse_strategy
from tests.pages.samples import check
from tests.tools.rehearsed import save
from tests.tools.test_models import decoder


@pytest.fixture
def checkpoint(tmp_path):
    save(tmp_path / "one", Layout(decoder(), parse_strategy("tp=2")))
    return str(tmp_path / "one")


def test_the_table_has_a_line_for_ranks_that_do_the_same(checkpoint, capsys):
    assert main(["rehearse", checkpoint, "--to", "tp=4,dp=2", "--gbps", "0.001"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ranks", "needed", "read", "amplification", "requests", "files", "memory"]
    assert [line.split("  ")[0] for line in lines[1:5]] == ["0, 4", "1, 5", "2, 6", "3, 7"]
    assert "loads under tp=4,dp=2 on 8 ranks" in lines[-1]
    assert "; direct: " in lines[-1]
    assert [line.split(":")[0] for line in lines[5:-1]] == ["maybe fused"]


def test_reading_together_is_said_beside(checkpoint, capsys):
    command = ["rehearse", checkpoint, "--to", "tp=2,dp=2", "--cooperative", "--gbps", "0.001"]
    assert main(command) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "; read together: " in last
    assert "; direct: " in last and "; cooperative: " in last
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cooperative"]
    assert set(map(len, found.values())) == {4}


@pytest.mark.parametrize("to", ["tp=4,dp=2", "tp=2,pp=2", "tp=1,sharding=v2:4"])
def test_the_page_has_what_goes_from_rank_to_rank(checkpoint, tmp_path, capsys, to):
    page = tmp_path / "a.html"
    assert main(["rehearse", checkpoint, "--to", to, "--html", str(page), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for each in report["ranks"]:
        assert sum(each["sources"].values()) == each["bytes_needed"]
    titles = {
        text for tag, text in check(page.read_text(encoding="utf-8")).texts if tag == "title" and " to rank" in text
    }
    assert titles == {
        f"rank {source} to rank {rank}: {format_bytes(count)}"
        for each in report["ranks"]
        for source, count in each["sources"].items()
        for rank in each["ranks"]
    }
    assert main(["rehearse", checkpoint, "--to", to, "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {page}"


def test_the_page_of_what_does_not_load_says_why(checkpoint, tmp_path, capsys):
    save(tmp_path / "other", Layout(decoder(5), parse_strategy("tp=2")))
    page = tmp_path / "a.html"
    command = ["rehearse", checkpoint, "--to", "tp=2", "--model", str(tmp_path / "other"), "--html", str(page)]
    assert main(command) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [f"see `flexckpt inspect {checkpoint}`", f"wrote {page}"]
    assert "the source has no such layers" in check(page.read_text(encoding="utf-8")).text()


def test_json_has_all_ranks(checkpoint, capsys):
    assert main(["rehearse", checkpoint, "--to", "tp=2,pp=2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["error"], report["world_size"]) == (True, "", 4)
    assert [each["ranks"] for each in report["ranks"]] == [[0], [1], [2], [3]]
    for each in report["ranks"]:
        assert each["bytes_read"] == each["bytes_needed"] == each["target_bytes"] > 0
        assert each["memory_bytes"] == each["target_bytes"] + each["buffer_bytes"] > each["target_bytes"]
        assert each["amplification"] == 1.0
    assert report["total_bytes"] == sum(each["bytes_needed"] for each in report["ranks"])


def test_a_model_that_lacks_something_exits_with_1(checkpoint, tmp_path, capsys):
    other = str(tmp_path / "other")
    save(other, Layout(decoder(5), parse_strategy("tp=2")))
    assert main(["rehearse", checkpoint, "--to", "tp=2", "--model", other]) == 1
    text = capsys.readouterr().out
    assert f"does not load under tp=2: cannot load from {checkpoint!r}: " in text
    assert "[ranks 0-1] the source has no such layers, nor their states (key 'model.layers.4.input_layernorm" in text
    assert text.count("model.layers.4") == 1
    assert main(["rehearse", checkpoint, "--to", "tp=2", "--model", other, "--strict", "none"]) == 0
    assert "missing: layer 4 of model.layers.*, 18 tensors, such as input_layernorm.weight\n" in capsys.readouterr().out


def test_states_that_nobody_asks_for_are_the_jobs_error(checkpoint, tmp_path, capsys):
    other = str(tmp_path / "other")
    save(other, Layout(decoder(states=()), parse_strategy("tp=2")))
    assert main(["rehearse", checkpoint, "--to", "tp=2", "--model", other]) == 1
    assert "no rank asks for" in capsys.readouterr().out
    assert main(["rehearse", checkpoint, "--to", "tp=2", "--weights"]) == 0
    assert "unexpected: " in capsys.readouterr().out


def test_a_model_may_be_that_of_a_configuration(checkpoint, tmp_path, capsys):
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}
    config.update(intermediate_size=16, vocab_size=32, torch_dtype="bfloat16")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    command = ["rehearse", checkpoint, "--to", "tp=2", "--model", str(path), "--variant", "fused"]
    assert main(command) == 1
    text = capsys.readouterr().out
    assert "note: the model is that of llama, variant fused, in bfloat16, as config.json says" in text
    assert re.search(r"the source has no such key, nor its states [\w, ]+ \(key 'model.layers.0.mlp.up_gate_proj", text)
    assert main([*command, "--save"]) == 0
    capsys.readouterr()
    assert main([*command[:5], "llama"]) == 1
    remedy = "Remedy (FC101): give the path of its config.json, or of a checkpoint"
    assert (
        f"--model llama is a family of models; a rehearsal needs the sizes of one. {remedy}" in capsys.readouterr().err
    )


def test_a_strategy_may_be_a_mesh(checkpoint, capsys):
    mesh = "mesh=2x2:dp,mp;sharding=stage1:dp;*norm.weight=R,R"
    assert main(["rehearse", checkpoint, "--to", mesh]) == 0
    assert f"loads under {mesh} on 4 ranks" in capsys.readouterr().out
    assert main(["rehearse", checkpoint, "--to", mesh, "--save"]) == 0
    assert main(["map", checkpoint, "lm_head.weight", "--to", mesh]) == 0
    capsys.readouterr()
    assert main(["rehearse", checkpoint, "--to", "mesh=2:dp;*norm.weight=Partial"]) == 2
    assert "a Partial is a term of a sum" in capsys.readouterr().err


def test_experts_that_paddle_would_mix_are_refused(tmp_path, capsys):
    model = Model(tuple(ModelTensor(f"experts.{n}.up", (4, 8), expert=(n, 4)) for n in range(4)))
    save(tmp_path, Layout(model, parse_strategy("dp=1")))
    assert main(["rehearse", str(tmp_path), "--to", "sharding=v2:4,ep=2"]) == 0
    assert "note: experts' parameters have a color of their own" in capsys.readouterr().out
    assert main(["rehearse", str(tmp_path), "--to", "sharding=v1:4,ep=2"]) == 1
    assert "Remedy (FC704): sharding=v2:4" in capsys.readouterr().err


def test_requests_to_an_object_store_are_said_beside(checkpoint, capsys):
    assert main(["rehearse", checkpoint, "--to", "tp=2,pp=2", "--object-store"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("object store: ") and " makes the most, " in line for line in lines)


def test_a_save_is_rehearsed_instead(checkpoint, tmp_path, capsys):
    command = ["rehearse", checkpoint, "--to", "tp=2,pp=2,dp=5", "--save", "--gbps", "0.001"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "held", "written", "items", "requests", "hashed", "staging"]
    assert "... and 4 more, which write less; --json has all" in lines
    assert "tp=2,pp=2,dp=5 on 20 ranks saves " in lines[-1]
    assert "; write: " in lines[-1]
    assert main([*command, "--json", "--save-replicas"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["total_bytes"] == report["held_bytes"] == sum(report["ranks"]["bytes_written"])
    assert set(map(len, report["ranks"].values())) == {20}
    page = str(tmp_path / "a.html")
    assert main([*command, "--html", page]) == 0
    assert capsys.readouterr().out.splitlines() == [*lines, f"wrote {page}"]
    with open(page, encoding="utf-8") as file:
        text = check(file.read()).text()
    assert lines[-1] in text and "Hashed bytes" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "tp=3"], "tp=3 does not fit the model"),
        (["--to", "tp=2", "--cut", "w"], "--cut takes GLOB=AXIS"),
        (["--to", "tp=2", "--gbps", "0"], "--gbps takes a positive number"),
        (["--to", "tp=2", "--id", "7"], "7"),
        (["--to", "tp=2", "--save", "--cooperative"], "--cooperative is an option of a load"),
        (["--to", "tp=2", "--save-replicas"], "--save-replicas is of a save"),
    ],
)
def test_what_cannot_be_rehearsed_is_an_error(checkpoint, capsys, arguments, words):
    assert main(["rehearse", checkpoint, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("flexckpt rehearse: ")
    assert words in captured.err


def test_one_rank_is_one_rank(checkpoint, capsys):
    assert main(["rehearse", checkpoint, "--to", "pp=1"]) == 0
    assert f"{checkpoint} (id 0) loads on 1 rank: " in capsys.readouterr().out.splitlines()[-1]


def test_a_degree_that_does_not_fit_has_a_remedy_on_its_page_too(checkpoint, tmp_path, capsys):
    page = tmp_path / "a.html"
    assert main(["rehearse", checkpoint, "--to", "tp=3", "--html", str(page)]) == 1
    text = capsys.readouterr().err
    assert "Remedy (FC704): tp can be 1, 2, 4, 8" in text
    assert len(text.splitlines()) == 3
    found = check(page.read_text(encoding="utf-8")).text()
    assert "Remedies" in found and "tp can be 1, 2, 4, 8" in found
    assert main(["rehearse", checkpoint, "--to", "tp=8"]) == 0


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("tp", "unknown entry"),
        ("tp4", "a name of tp (or mp), pp, vpp, dp, sep, ep; or sharding=KIND:DEGREE; or a mesh"),
        ("tp:4", "unknown entry (key 'tp:4')"),
        ("tp=2,sharding=v3:2", "unknown kind of sharding (key 'sharding=v3:2')"),
        ("mesh=2x2:dp", "cannot read a mesh"),
    ],
)
def test_a_strategy_that_cannot_be_read_is_wrong_usage(checkpoint, capsys, to, words):
    assert main(["rehearse", checkpoint, "--to", to]) == 2
    text = capsys.readouterr().err
    assert words in text
    assert text.endswith("see `flexckpt rehearse --help`\n")
