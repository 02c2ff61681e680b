"""Tokens of the AOA language. Tested in tests/aoa/test_compile_errors.py."""

from __future__ import annotations

import re
from typing import NamedTuple

from paddle_flexckpt.aoa.errors import StatementError

# Attributes without a value: a tensor of such a name has to be quoted.
TAGS = frozenset(
    {
        "fused_qkv",
        "fused_qkv_old",
        "fused_ffn",
        "copy",
        "stack",
        "unstack",
        "sum",
        "average",
        "lora_merge",
        "optional",
    }
)
# Order matters: the first pattern that fits wins. Names may hold placeholders with arithmetic, ${LAYER_ID+1}.
_NAME_START = r"[A-Za-z_*]|\\?\$(?:\{[^}\n]*\}|[A-Za-z_])"
_NAME_NEXT = r"[A-Za-z0-9_.*]|\\?\$(?:\{[^}\n]*\}|[A-Za-z_])"
_TOKENS = re.compile(
    r"(?P<COMMENT>\#[^\n]*)"
    r"|(?P<RARROW>->)"
    r"|(?P<EQUAL>=)"
    r"|(?P<COLON>:)"
    r"|(?P<LBRACKET>\[)"
    r"|(?P<RBRACKET>\])"
    r"|(?P<COMMA>,)"
    r"|(?P<NUMBER>[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?![A-Za-z0-9_.$])"
    r"|(?P<STRING>\"[^\"\n]*\"|'[^'\n]*')"
    rf"|(?P<NAME>(?:{_NAME_START})(?:{_NAME_NEXT})*)"
    r"|(?P<TRANSPOSE>\^T)"
    r"|(?P<SKIP>[ \t]+)"
    r"|(?P<NEWLINE>[\r\n]+)"
)
_PLAIN_NAME = re.compile(rf"(?:{_NAME_START})(?:{_NAME_NEXT})*")
_DOLLAR = re.compile(r"\\\$")


class Token(NamedTuple):
    """One token.

    Attributes:
        kind: RARROW, EQUAL, COLON, LBRACKET, RBRACKET, COMMA, NUMBER, STRING, NAME or TRANSPOSE.
        text: As it was written (but ``\\$``, which is ``$``).
        column: From 1.
        end: Column after its last character.
    """

    kind: str
    text: str
    column: int
    end: int


def tokenize(text: str) -> list[Token]:
    """Split a text into tokens; blanks, comments and line breaks are left out.

    Raises:
        StatementError: A character has no meaning here.
    """
    tokens = []
    position = 0
    while position < len(text):
        found = _TOKENS.match(text, position)
        if found is None:
            raise StatementError(
                f"unexpected character {text[position]!r}. Remedy: put names with other characters than letters, "
                "digits, '_' and '.', or that begin with a digit, between quotes",
                position + 1,
            )
        kind = str(found.lastgroup)
        if kind not in ("SKIP", "COMMENT", "NEWLINE"):
            tokens.append(Token(kind, _DOLLAR.sub("$", found.group()), position + 1, found.end() + 1))
        position = found.end()
    return tokens


def quoted(name: str) -> str:
    """Write a name for a statement: in quotes if it is a tag, or has other characters than names."""
    return name if _PLAIN_NAME.fullmatch(name) and name not in TAGS else f'"{name}"'
