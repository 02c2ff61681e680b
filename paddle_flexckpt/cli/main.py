"""The command line: each module of this package adds commands, this one ``completion``.

Tested in tests/cli/test_cli.py and tests/cli/test_completion.py.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from paddle_flexckpt._version import __version__

# Only the given command's module is imported: `flexckpt --version` needs no numpy.
_COMMANDS = {
    "inspection": ("inspect",),
    "checkpoints": ("show", "digest", "diff", "verify", "repair", "export"),
    "convert": ("convert",),
    "overview": ("ls", "du", "clean"),
    "rehearse": ("rehearse", "map", "bench"),
    "aoa": ("explain", "expand", "invert", "rules"),
    "doctor": ("doctor", "patch"),
    "engines": ("apply", "receive"),
    "main": ("completion",),
}
_WITH_PAGES = {"--html": "; these commands have --html: diff, map, rehearse"}
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


class _Parser(argparse.ArgumentParser):
    """A parser whose errors end with the command that helps."""

    def error(self, message: str) -> NoReturn:
        """Print usage and error, and exit with status 2."""
        super().error(f"{message}\nsee `{self.prog} --help`")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and exit with the error of this parser, and so of its command, if an argument is unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [each for action in self._actions for each in action.option_strings]
            words = [each.partition("=")[0] for each in unknown if each.startswith("-")]
            hints = filter(None, (_WITH_PAGES.get(each) or _meant(each, options) for each in words))
            self.error(f"unrecognized arguments: {' '.join(unknown)}{next(hints, '')}")
        return found, unknown


def _meant(word: str, known: Sequence[str]) -> str:
    """Return a question for the known word that is like another; "" if none is."""
    import difflib

    alike = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {alike[0]}?" if alike else ""


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all commands, or of the command in ``words``.

    Args:
        words: The command line without the program's name.
    """
    parser = _Parser(
        prog="flexckpt",
        description="Inspect and transform flexible checkpoints.",
        epilog="exit status: 0 on success; 1 if the command failed, or found a problem or a difference; 2 for wrong "
        "usage; 130 after Ctrl-C. Example: flexckpt inspect run/step_00000100",
    )
    parser.add_argument("--version", action="version", version=f"flexckpt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = [module for module, names in _COMMANDS.items() if words and words[0] in names] or [*_COMMANDS]
    if list(words) == ["--version"]:
        modules = []
    for module in modules:
        importlib.import_module(f"paddle_flexckpt.cli.{module}").add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line without the program's name; by default the process's own.

    Returns:
        0, or 1 with a message on stderr if the command failed or found a problem; 130 after Ctrl-C. Wrong usage exits
        with 2, as argparse does.
    """
    words = sys.argv[1:] if arguments is None else arguments
    parser = build_parser(words)
    commands = [name for names in _COMMANDS.values() for name in names]
    if words and not words[0].startswith("-") and words[0] not in commands:
        parser.error(f"there is no command {words[0]!r}{_meant(words[0], commands)}")
    options = parser.parse_args(words)
    from paddle_flexckpt.catalog import CheckpointError
    from paddle_flexckpt.catalog.texts import printable_lines
    from paddle_flexckpt.cli.common import Outcome, newest_taken

    try:
        with newest_taken(options):
            result = options.run(options)
        outcome = result if isinstance(result, Outcome) else Outcome(result)
        print(printable_lines(outcome.text))
    except BrokenPipeError:
        # The reader closed the pipe (`flexckpt explain ... | head`).
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print(f"flexckpt {options.command}: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells have it
    except (CheckpointError, OSError, *getattr(options, "errors", ())) as error:
        from paddle_flexckpt.cli.errors import report

        return report(options, error, words)
    return outcome.code


def add_command(commands: Any) -> None:
    """Add the parser of ``flexckpt completion``."""
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
