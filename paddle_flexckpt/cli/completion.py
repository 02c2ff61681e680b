"""flexckpt completion: a script for completion in a shell. Tested in tests/cli/test_completion.py."""

from __future__ import annotations

import argparse
from typing import Any

_BASH = """\
_flexckpt() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="{commands} --help --version"
    else
        case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
            *) case "${{COMP_WORDS[1]}}" in
{options}
            esac;;
        esac
    fi
    local each offered=""
    for each in $words; do
        [[ $word != -* && $each == -* ]] || offered+=" $each"
    done
    COMPREPLY=($(compgen -W "$offered" -- "$word"))
}}
complete -o default -F _flexckpt flexckpt
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
SHELLS = ("bash", "zsh", "fish")


def add_command(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "completion",
        help="print a script with which a shell completes commands and options",
        description="Prints a script for a shell, which then completes commands, options and their choices, and "
        "elsewhere the names of files.",
        epilog='example: eval "$(flexckpt completion bash)"; or zsh; or for fish: flexckpt completion fish | source',
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(run=_completion)


def _completion(options: argparse.Namespace) -> str:
    """Return the script."""
    from paddle_flexckpt.cli.main import build_parser

    (action,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    helps = {each.dest: each.help or "" for each in action._choices_actions}
    if options.shell == "fish":
        return _fish(action.choices, helps)
    return (_ZSH if options.shell == "zsh" else "") + _bash(action.choices)


def _bash(parsers: dict[str, argparse.ArgumentParser]) -> str:
    choices, options = [], []
    for name, parser in parsers.items():
        words: list[str] = []
        for action in parser._actions:
            words += action.option_strings
            if action.choices and action.option_strings:
                patterns = "|".join(f'"{name} {each}"' for each in action.option_strings)
                choices.append(f'            {patterns}) words="{_words(action.choices)}";;')
            elif action.choices:
                words += map(str, action.choices)
        options.append(f'                {name}) words="{_words(words)}";;')
    return _BASH.format(commands=_words(parsers), choices="\n".join(choices), options="\n".join(options)).rstrip("\n")


def _words(words: Any) -> str:
    return " ".join(map(str, words))


def _fish(parsers: dict[str, argparse.ArgumentParser], helps: dict[str, str]) -> str:
    lines = ["complete -c flexckpt -n __fish_use_subcommand -l version -d 'print the version'"]
    for name, parser in parsers.items():
        lines.append(f"complete -c flexckpt -n __fish_use_subcommand -f -a {name} -d {_quoted(helps[name])}")
        for action in parser._actions:
            line = f"complete -c flexckpt -n '__fish_seen_subcommand_from {name}'"
            for each in action.option_strings:
                line += f" -l {each[2:]}" if each.startswith("--") else f" -s {each[1:]}"
            if action.option_strings and action.nargs != 0:
                line += " -r"
            if action.choices:
                line += f" -f -a {_quoted(_words(action.choices))}"
            if action.option_strings or action.choices:
                lines.append(f"{line} -d {_quoted((action.help or '').replace('%%', '%'))}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
