"""The end of a command's error: the command that helps; and the page of a refusal."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest

from paddle_flexckpt.cli.errors import _line
from paddle_flexckpt.cli.main import main
from tests.pages.samples import check
from tests.pages.test_report_pages import cells
from tests.saved import data_file
from tests.transfer.samples import save


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with one checkpoint, from whose directory commands are given."""
    save(
        tmp_path / "run" / "step 1",
        {"model.w": np.ones((8, 8), np.float32), "model.b": np.ones(8, np.float32)},
        world=1,
    )
    (tmp_path / "run" / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def helped(capsys, line: str) -> str:
    """Return the command that helps, of a command that fails."""
    assert main(shlex.split(line)) == (2 if "--to tq=2" in line else 1)
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    return last[len("see `") : -1] if last.startswith("see `") else ""


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("inspect run/step2", "flexckpt ls run"),
        ("inspect run/deep/er", "flexckpt ls run"),
        ("verify nowhere", "flexckpt ls ."),
        ("inspect run/empty", "flexckpt ls run/empty"),
        ("inspect /no-such-directory/step", "flexckpt inspect --help"),
        ("inspect 'run/step 1' --id 3", "flexckpt ls 'run/step 1'"),
        ("diff 'run/step 1' run/other", "flexckpt ls run"),
        ("ls nowhere", "flexckpt ls ."),
        ("ls run/empty", "flexckpt ls --help"),
        ("inspect 'run/step 1' --key model.v", "flexckpt inspect 'run/step 1'"),
        ("show 'run/step 1' model.v", "flexckpt inspect 'run/step 1'"),
        ("export 'run/step 1' out --aoa '[\"v -> w\"]'", "flexckpt inspect 'run/step 1'"),
        ("rehearse 'run/step 1' --to tq=2", "flexckpt rehearse --help"),
        ("rehearse 'run/step 1' --to tp=2", "flexckpt rehearse --help"),
        ("rehearse 'run/step 1' --to dp=2 --gbps -1", "flexckpt rehearse --help"),
        ("diff 'run/step 1' 'run/step 1' --rtol -1", "flexckpt diff --help"),
        ("patch --apply none --package-dir nowhere", ""),
        ("rules nothing", "flexckpt rules --help"),
    ],
)
def test_an_error_ends_with_the_command_that_helps(run, capsys, line, command):
    assert helped(capsys, line) == command
    if command:
        code = main(shlex.split(command)[1:]) if "--help" not in command else 0
        assert code == (1 if "empty" in command else 0)
        capsys.readouterr()


def test_damage_is_what_verify_lists(run, capsys):
    data = run / "step 1" / data_file(run / "step 1")
    data.write_bytes(data.read_bytes()[:-1])
    assert helped(capsys, "show 'run/step 1' model.w") == "flexckpt verify 'run/step 1'"
    assert main(["verify", str(run / "step 1")]) == 1


def test_a_text_that_names_a_command_gets_no_other(run, capsys):
    (run / "step 1" / "0.manifest").unlink()
    assert main(["inspect", "run/step 1"]) == 1
    text = capsys.readouterr().err
    assert "flexckpt repair" in text
    assert "see `" not in text


def test_an_error_of_the_system_names_none(run, capsys, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paddle_flexckpt.tools.export.OutputDirectory.make", full)
    assert helped(capsys, "export 'run/step 1' out") == ""


@pytest.mark.parametrize(("line", "program"), [("difff a b", "flexckpt"), ("diff a", "flexckpt diff")])
def test_wrong_usage_ends_with_the_help(capsys, line, program):
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(line))
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"\nsee `{program} --help`\n")


PAGES = "these commands have --html: diff, map, rehearse"


@pytest.mark.parametrize(
    ("line", "program", "words"),
    [
        ("inspect ck --jsn", "flexckpt inspect", "unrecognized arguments: --jsn; did you mean --json?"),
        ("inspect ck --jsn=3", "flexckpt inspect", "unrecognized arguments: --jsn=3; did you mean --json?"),
        ("inspect ck more", "flexckpt inspect", "unrecognized arguments: more"),
        (
            "inspect ck --html",
            "flexckpt inspect",
            f"unrecognized arguments: --html; {PAGES}",
        ),
        (
            "inspect ck --html=x",
            "flexckpt inspect",
            f"unrecognized arguments: --html=x; {PAGES}",
        ),
        ("insepct ck", "flexckpt", "there is no command 'insepct'; did you mean inspect?"),
        ("zzz", "flexckpt", "there is no command 'zzz'"),
    ],
)
def test_a_typing_error_gets_the_usage_of_its_command_and_the_nearest_name(capsys, line, program, words):
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(line))
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith(f"usage: {program} [-h]")
    assert f"\n{program}: error: {words}\nsee `{program} --help`\n" in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rehearse 'run/step 1' --to tp=2", "nothing says how tensor parallelism cuts the model"),
        ("rehearse 'run/step 1' --to tp=2 --json", "nothing says how tensor parallelism cuts the model"),
        ("rehearse 'run/step 1' --to pp=9 --save", "too few layers for the pipeline"),
        ("map 'run/step 1' --to tp=2", "nothing says how tensor parallelism cuts the model"),
        ("map 'run/step 1' model.v", "model.v"),
        ("diff 'run/step 1' run/other", "does not exist"),
    ],
)
def test_a_refusal_has_a_page(run, capsys, line, words):
    assert main([*shlex.split(line), "--html", "page.html"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    command = line.split()[0]
    assert captured.err.endswith(f"\nflexckpt {command}: wrote page.html\n")
    found = check((run.parent / "page.html").read_text(encoding="utf-8"))
    assert words in found.text()
    assert f"flexckpt {command}: refused" in found.text()
    if "Remedy" in captured.err:
        assert "Remedies" in found.text()
    assert "See also" in found.text()


def test_the_page_of_a_refused_layout_has_what_was_asked_and_commands_that_work(run, capsys):
    save(run / "deep", {f"layers.{layer}.w": np.ones((8, 8), np.float32) for layer in range(4)}, world=1)
    line = "rehearse run/deep --to pp=6,dp=2 --html page.html"
    assert main(shlex.split(line)) == 1
    found = check((run.parent / "page.html").read_text(encoding="utf-8"))
    assert ("pre", f"flexckpt {line}") in found.texts
    row = ["layers cannot be spread evenly over the stages of the pipeline", "a multiple of pp x vpp = 6", "4 layers"]
    assert cells(found)[3:6] == row
    commands = [text for tag, text in found.texts if tag == "code"]
    assert commands == ["flexckpt rehearse run/deep --to pp=4,dp=3 --html page.html"]
    assert cells(found)[9:11] == ["pp=4,dp=3", "12"]
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
    # Nothing is proposed where the layout fits, where it is no strategy, or where none helps.
    for line in (
        "rehearse run/deep --to dp=2 --gbps -1",
        "rehearse run/deep --to mesh=2:dp;x=R --html page.html",
        "rehearse run/none --to pp=2",
        "rehearse run/deep --to pp=2 --aoa -",
    ):
        assert main([*shlex.split(line), "--html", "other.html"]) in (1, 2)
        text = (run.parent / "other.html").read_text(encoding="utf-8")
        assert "Layouts that fit" not in text


def test_the_command_of_a_page_has_no_secrets_and_another_strategy():
    words = ["rehearse", "s3://key:secret@bucket/a b", "--to=tp=3", "--cut", "*.w=1"]
    assert _line(words, "tp=2") == "flexckpt rehearse 's3://key:***@bucket/a b' --to=tp=2 --cut '*.w=1'"
    assert _line(["map", "run", "--to", "tp=3"]) == "flexckpt map run --to tp=3"


def test_a_page_that_cannot_be_written_is_an_error_beside_the_other(run, capsys):
    assert main(["rehearse", "run/step 1", "--to", "tp=2", "--html", "no/page.html"]) == 1
    text = capsys.readouterr().err
    assert "nothing says how tensor parallelism cuts the model" in text
    assert "cannot write the page" in text
    assert main(["map", "run/step 1", "--html", "no/page.html"]) == 1
    assert capsys.readouterr().err.count("cannot write the page") == 1


def test_the_page_of_a_refusal_shows_names_as_text(run, capsys):
    key = "<script>window.owned = 1</script>"
    assert main(["map", "run/step 1", key, "--html", "page.html"]) == 1
    assert json.dumps(key)[1:-1] in check((run.parent / "page.html").read_text(encoding="utf-8")).text()
