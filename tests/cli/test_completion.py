"""Completion, help, exit statuses, and what a command imports."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from paddle_flexckpt.cli.main import SHELLS, build_parser, main
from tests.transfer.samples import save


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    return dict(action.choices)


def script(capsys, shell: str) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in ("flexckpt", *words))
    code = f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _flexckpt; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_choices(capsys):
    text = script(capsys, "bash")
    assert completed(text, "") == list(commands())
    assert completed(text, "-") == ["--help", "--version"]
    assert completed(text, "di") == ["digest", "diff"]
    assert completed(text, "verify", "--j") == ["--json"]
    assert completed(text, "du", "run", "--by", "") == ["layer", "role", "dtype", "rank"]
    assert completed(text, "export", "--verify", "o") == ["off"]
    assert completed(text, "completion", "") == list(SHELLS)
    for name, parser in commands().items():
        options = [each for action in parser._actions for each in action.option_strings]
        assert completed(text, name, "-") == options


def test_zsh_takes_the_same_script(capsys):
    text = script(capsys, "zsh")
    assert "bashcompinit" in text
    assert text.endswith(script(capsys, "bash"))
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=text, text=True, check=True)


def test_fish_knows_each_option_and_what_it_is_for(capsys):
    text = script(capsys, "fish")
    for name, parser in commands().items():
        assert f"-n __fish_use_subcommand -f -a {name} -d '" in text
        for action in parser._actions:
            for option in action.option_strings:
                if option.startswith("--"):
                    assert re.search(rf"__fish_seen_subcommand_from {name}' .*-l {option[2:]} .*-d '", text), option
    assert "-l by -r -f -a 'layer role dtype rank' -d '" in text
    if shutil.which("fish"):
        subprocess.run(["fish", "--no-execute"], input=text, text=True, check=True)


def test_a_shell_that_is_not_known_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["completion", "cmd"])
    assert caught.value.code == 2
    assert "invalid choice: 'cmd'" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_help_of_each_command_has_an_example_that_parses(name, capsys):
    text = " ".join(commands()[name].format_help().split())
    _, found, example = text.rpartition("example: ")
    assert found, f"flexckpt {name} --help has no example: give its parser an epilog"
    assert f"flexckpt {name}" in example


def test_exit_statuses_are_in_the_help():
    text = " ".join(build_parser().format_help().split())
    assert "exit status: 0 on success; 1 if the command failed" in text
    assert "2 for wrong usage; 130 after Ctrl-C" in text


def modules_of(*words: str) -> set[str]:
    """What a command imports, of this package and others."""
    code = f"import sys; from paddle_flexckpt.cli.main import main; main({list(words)!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_inspect_imports_no_more_than_it_needs(tmp_path):
    """A command that a person waits for; a bar, a server or a plot would cost more than the work."""
    save(str(tmp_path), {"w": np.ones(3)}, world=1)
    found = modules_of("inspect", str(tmp_path))
    tops = {name.split(".")[0] for name in found}
    assert not {"paddle", "torch", "tqdm", "fsspec", "matplotlib", "yaml", "asyncio"} & tops
    for room in ("loading", "transfer", "aoa", "planning", "background"):
        assert not any(name.startswith(f"paddle_flexckpt.{room}") for name in found), room
