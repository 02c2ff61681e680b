"""Grammar of the AOA language: from texts to tokens and statements.

    PROGRAM   ::= { STATEMENT }
    STATEMENT ::= VARIABLE { ',' VARIABLE } '->' VARIABLE { ',' VARIABLE } { ',' ATTRIBUTE }
    VARIABLE  ::= ( NAME | STRING ) [ '[' NUMBER ':' NUMBER ']' ] [ '^T' ]
    ATTRIBUTE ::= NAME '=' ( NUMBER | STRING ) | TAG

The list of right variables ends where ``, NAME =`` or ``, TAG`` is seen. Tested in tests/aoa/test_compile_errors.py.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from paddle_flexckpt.aoa.statements import (
    ARROW,
    UNREADABLE,
    AoaError,
    Place,
    StatementError,
    describe_problem,
    shorten,
)
from paddle_flexckpt.catalog.texts import meant

# Attributes without a value: a tensor of such a name has to be quoted.
TAGS = frozenset(
    {"fused_qkv", "fused_qkv_old", "fused_ffn", "copy", "stack", "unstack", "sum", "average", "lora_merge", "optional"}
)
# The first pattern that fits wins. Names may hold placeholders with arithmetic, ${LAYER_ID+1}.
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
# The escape of a character in a quoted name, and the characters that need one.
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})")
_TO_ESCAPE = re.compile(r'["\n]|\\(?=x[0-9a-f]{2})')
_PLAIN_NAME = re.compile(rf"(?:{_NAME_START})(?:{_NAME_NEXT})*")
# An attribute's value with a name right behind it: two texts with nothing between them.
_GLUED = re.compile(rf"(?P<value>[-+]?\d+(?:\.\d+)?)(?P<name>{_PLAIN_NAME.pattern})")
_INTEGERS = frozenset({"axis", "num_heads", "num_key_value_groups", "repeat"})
_FLOATS = frozenset({"scale"})
_LISTS = frozenset({"permute", "sizes", "weights", "block", "pad", "resize", "reshape"})
_STRINGS = frozenset({"dtype", "src_dtype", "dst_dtype", "slice", "dequant", "states", "fill"})
ATTRIBUTES = _INTEGERS | _FLOATS | _LISTS | _STRINGS
_MAY_BE_AUTO = frozenset({"sizes", "resize", "reshape"})
# No tensor has more elements, no statement more names: larger numbers are mistakes that would take memory or time.
MAX_NUMBER = 2**48
MAX_NAMES = 65_536


class Token(NamedTuple):
    """A token: its group in the pattern, its text (``$`` for ``\\$``), its column (from 1) and the column behind it."""

    kind: str
    text: str
    column: int
    end: int


def tokenize(text: str) -> list[Token]:
    """Split a text into tokens; blanks, comments and line breaks are left out."""
    tokens: list[Token] = []
    position = 0
    while position < len(text):
        found = _TOKENS.match(text, position)
        if found is None:
            _check_glued(text, position, tokens)
            if ARROW.match(text, position):
                raise StatementError(
                    f"unexpected character {text[position]!r}. Remedy (FC602): did you mean `->`? It stands between "
                    "the two sides of a statement",
                    position + 1,
                )
            raise StatementError(
                f"unexpected character {text[position]!r}. Remedy (FC602): put names with other characters than "
                "letters, digits, '_' and '.', or that begin with a digit, between quotes, and in these \\x22 for a "
                "quotation mark and \\x0a for a line break",
                position + 1,
            )
        kind = str(found.lastgroup)
        if kind not in ("SKIP", "COMMENT", "NEWLINE"):
            tokens.append(Token(kind, found.group().replace("\\$", "$"), position + 1, found.end() + 1))
        position = found.end()
    return tokens


def _check_glued(text: str, position: int, tokens: Sequence[Token]) -> None:
    """Raise the error of two statements with nothing between them, where a name follows the number of an attribute."""
    glued = _GLUED.match(text, position)
    if glued is not None and [token.kind for token in tokens[-2:]] == ["NAME", "EQUAL"]:
        raise _glued(f"{tokens[-2].text}={glued['value']}", glued["name"], glued.start("name") + 1)


def _check_glued_tag(name: str, column: int) -> None:
    """Raise the error of two statements with nothing between them, where a name follows a tag."""
    tag = max((tag for tag in TAGS if name.startswith(tag)), key=len, default="")
    rest = name[len(tag) :]
    if tag and _PLAIN_NAME.fullmatch(rest) and not rest.startswith("_"):
        raise _glued(tag, rest, column + len(tag))


def _glued(end: str, begin: str, column: int) -> StatementError:
    """Return the error of two statements with nothing between them: where the first ends, and the second begins."""
    return StatementError(
        f"two statements with nothing between them: {shorten(end)!r} ends one, and {shorten(begin)!r} begins another. "
        f"Remedy (FC602): cut before column {column}; in a list of Python, put a comma between the two texts, which it "
        "joins otherwise",
        column,
    )


@lru_cache(maxsize=1024)
def _meant_tag(name: str) -> str:
    """Return the question for the tag that a name of letters may be meant for; "" if it begins with one."""
    is_own = not name.replace("_", "").isalpha() or name.startswith(tuple(TAGS))
    return "" if is_own else meant(name, TAGS, 0.8)


def quoted(name: str) -> str:
    """Write a name for a statement: in quotes if it is a tag, or near one, or has other characters than names."""
    if _PLAIN_NAME.fullmatch(name) and name not in TAGS and not _meant_tag(name):
        return name
    return '"' + _TO_ESCAPE.sub(lambda found: f"\\x{ord(found.group()):02x}", name) + '"'


@dataclass(frozen=True)
class Variable:
    """A name in a statement, without quotes and ``^T``; ``items`` is (start, stop) of ``name[start:stop]``."""

    name: str
    transposed: bool
    items: tuple[int, int] | None
    column: int


@dataclass(frozen=True)
class Attribute:
    """An attribute, whose value is a number, a text or a tuple of numbers; or a tag, whose value is True."""

    key: str
    value: Any
    column: int


@dataclass(frozen=True)
class Statement:
    """One statement: the variables on the right are assigned from those on the left."""

    left: tuple[Variable, ...]
    right: tuple[Variable, ...]
    attributes: tuple[Attribute, ...]
    place: Place
    tokens: tuple[Token, ...]

    def get(self, key: str) -> Attribute | None:
        """Return the attribute of that name, or None."""
        return next((attribute for attribute in self.attributes if attribute.key == key), None)

    def has(self, tag: str) -> bool:
        """Return whether the tag or attribute is there."""
        return self.get(tag) is not None


def parse(text: str, number: int = 1) -> list[Statement]:
    """Parse the statements of one text.

    Raises:
        StatementError: It is not a statement; the column says where.
    """
    parser = _Parser(text, number)
    statements = []
    while not parser.at_end():
        statements.append(parser.statement())
    return statements


def written(attribute: Attribute) -> str:
    """Write an attribute in the form of a statement."""
    value = attribute.value
    if value is True:
        return attribute.key
    if isinstance(value, tuple):
        items = [list(item) if isinstance(item, tuple) else item for item in value]
        return f'{attribute.key}="{items}"'
    return f'{attribute.key}="{value}"' if isinstance(value, str) else f"{attribute.key}={value}"


def parse_program(texts: Sequence[str], first: int = 1) -> list[Statement]:
    """Parse all statements of a program; ``first`` is the number of the first text.

    Raises:
        AoaError: Some are malformed; all of them are listed.
    """
    statements: list[Statement] = []
    problems = []
    for number, text in enumerate(texts, start=first):
        try:
            statements += parse(text, number)
        except StatementError as error:
            problems.append(describe_problem(str(error), Place(number, text, error.column), (), UNREADABLE))
    if problems:
        raise AoaError(problems)
    return statements


class _Parser:
    def __init__(self, text: str, number: int) -> None:
        self._text = text
        self._number = number
        self._tokens = tokenize(text)
        self._position = 0

    def at_end(self) -> bool:
        return self._position >= len(self._tokens)

    def _kind(self, ahead: int = 0) -> str:
        position = self._position + ahead
        return self._tokens[position].kind if position < len(self._tokens) else "END"

    def _expect(self, kind: str, what: str) -> Token:
        if self._kind() != kind:
            got = "the end of the text" if self.at_end() else repr(self._tokens[self._position].text)
            column = len(self._text) + 1 if self.at_end() else self._tokens[self._position].column
            raise StatementError(f"expected {what}; got {got}", column)
        self._position += 1
        return self._tokens[self._position - 1]

    def statement(self) -> Statement:
        start = self._position
        left = [self._variable()]
        while self._kind() == "COMMA":
            self._position += 1
            left.append(self._variable())
        if self._kind() != "RARROW":
            self._check_commas(start)
        self._expect("RARROW", "',' or '->'")
        right = [self._variable()]
        while self._kind() == "COMMA" and not self._attribute_follows():
            self._position += 1
            right.append(self._variable())
        attributes: list[Attribute] = []
        while self._kind() == "COMMA":
            self._position += 1
            attribute = self._attribute()
            if any(attribute.key == other.key for other in attributes):
                raise StatementError(f"attribute {attribute.key!r} is given twice", attribute.column)
            attributes.append(attribute)
        if self._kind() == "RARROW":
            raise self._second_arrow(right)
        for variable in right[1:]:
            if self._text[variable.column - 1] not in "\"'" and (tag := _meant_tag(variable.name)):
                raise StatementError(
                    f"{variable.name!r} may be a misspelt tag{tag}. Remedy (FC602): correct it; if it is a tensor's "
                    "name, put it between quotes",
                    variable.column,
                )
        tokens = tuple(self._tokens[start : self._position])
        first = tokens[0].column - 1
        last = tokens[-1].end - 1
        whole = start == 0 and self.at_end()
        text = self._text.strip() if whole else self._text[first:last]
        shift = self._text.index(text) if whole else first
        place = Place(self._number, text)
        for variable in right:
            if variable.transposed:
                raise StatementError(
                    f"{variable.name}^T cannot be assigned: it is a view. Remedy (FC602): transpose on the left, "
                    f"{left[0].name}^T -> {variable.name}",
                    variable.column,
                )
        if not shift:
            return Statement(tuple(left), tuple(right), tuple(attributes), place, tokens)
        return Statement(
            tuple(replace(variable, column=variable.column - shift) for variable in left),
            tuple(replace(variable, column=variable.column - shift) for variable in right),
            tuple(Attribute(a.key, a.value, a.column - shift) for a in attributes),
            place,
            tuple(Token(t.kind, t.text, t.column - shift, t.end - shift) for t in tokens),
        )

    def _check_commas(self, start: int) -> None:
        """Raise the error of a missing comma, where a statement that began at ``start`` has no arrow."""
        first = self._tokens[start]
        if self._kind() in ("NAME", "STRING"):
            token = self._tokens[self._position]
            raise StatementError(f"a comma, or '->', is missing before {token.text!r}", token.column)
        if start and (first.text in TAGS or [token.kind for token in self._tokens[start + 1 : start + 2]] == ["EQUAL"]):
            raise StatementError(f"a comma is missing before {first.text!r}", first.column)
        if start:
            raise StatementError(
                f"a comma is missing before {first.text!r}, or '->' after it: without that comma it begins another "
                "statement",
                first.column,
            )

    def _second_arrow(self, right: Sequence[Variable]) -> StatementError:
        """Return the error of a statement that has an arrow behind its right names."""
        for variable in right:
            _check_glued_tag(variable.name, variable.column)
        return StatementError(
            f"a second '->' in one statement: two statements stand here with nothing between them, and one of "
            f"{shorten(str([variable.name for variable in right]))} holds the end of the first and the begin of the "
            "second. Remedy (FC602): put a line break between them; in a list of Python, a comma between the two texts",
            self._tokens[self._position].column,
        )

    def _attribute_follows(self) -> bool:
        if self._kind(1) != "NAME":
            return False
        return self._kind(2) == "EQUAL" or self._tokens[self._position + 1].text in TAGS

    def _variable(self) -> Variable:
        if self._kind() == "STRING":
            token = self._expect("STRING", "a name")
            name = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), token.text[1:-1])
            if not name:
                raise StatementError("a name cannot be empty", token.column)
        else:
            token = self._expect("NAME", "a name")
            name = token.text
        items = None
        if self._kind() == "LBRACKET":
            self._position += 1
            start = self._whole_number()
            self._expect("COLON", "':' (NAME[START:STOP])")
            stop = self._whole_number()
            self._expect("RBRACKET", "']'")
            if not 0 < stop - start <= MAX_NAMES:
                count = "nothing" if start >= stop else f"{stop - start:,} tensors; at most {MAX_NAMES:,} are supported"
                raise StatementError(f"{name}[{start}:{stop}] names {count}", token.column)
            items = (start, stop)
        transposed = self._kind() == "TRANSPOSE"
        if transposed:
            self._position += 1
        return Variable(name, transposed, items, token.column)

    def _whole_number(self) -> int:
        token = self._expect("NUMBER", "a number")
        if not token.text.isdigit() or len(token.text) > len(str(MAX_NUMBER)):
            raise StatementError(f"expected a whole number of at most 15 digits; got {token.text!r}", token.column)
        return int(token.text)

    def _attribute(self) -> Attribute:
        token = self._expect("NAME", "an attribute")
        key = token.text
        if self._kind() != "EQUAL":
            if key not in TAGS:
                _check_glued_tag(key, token.column)
                raise StatementError(
                    f"{key!r} is no tag{meant(key, TAGS)}, and names cannot follow attributes; tags are "
                    f"{', '.join(sorted(TAGS))}",
                    token.column,
                )
            return Attribute(key, True, token.column)
        self._position += 1
        if key in TAGS:
            raise StatementError(f"{key!r} is a tag, which has no value: write it alone", token.column)
        if key not in ATTRIBUTES:
            known = ", ".join(sorted(ATTRIBUTES))
            raise StatementError(
                f"unknown attribute {key!r}{meant(key, ATTRIBUTES)}; attributes are {known}", token.column
            )
        if self._kind() not in ("NUMBER", "STRING"):
            self._expect("STRING", f"a number or a quoted text after {key}=")
        value = self._tokens[self._position]
        self._position += 1
        text = value.text[1:-1] if value.kind == "STRING" else value.text
        return Attribute(key, _attribute_value(key, text, value.column), token.column)


def _attribute_value(key: str, text: str, column: int) -> Any:
    if key in _STRINGS:
        return text
    if (key in _MAY_BE_AUTO and text == "auto") or (key == "sizes" and text == "equal"):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise StatementError(f"{key} cannot be {shorten(text)!r}; expected {_expected(key)}", column) from error
    most = MAX_NAMES if key.startswith("num_") else MAX_NUMBER
    if (key in _INTEGERS or key == "block") and _is_number(value, most):
        return int(value)
    if key in _FLOATS and _is_number(value, math.inf, (int, float)):
        return float(value)
    if key == "pad" and isinstance(value, list):
        if all(isinstance(p, (list, tuple)) and len(p) == 2 and all(_is_number(x, most) for x in p) for p in value):
            return tuple((int(a), int(b)) for a, b in value)
    elif key == "weights" and isinstance(value, (list, tuple)):
        if all(_is_number(x, math.inf, (int, float)) for x in value):
            return tuple(value)
    elif key in _LISTS and isinstance(value, (list, tuple)) and all(_is_number(x, most) for x in value):
        return tuple(value)
    raise StatementError(f"{key} cannot be {shorten(text)!r}; expected {_expected(key)}", column)


def _is_number(value: Any, most: float, kinds: tuple[type, ...] = (int,)) -> bool:
    """Return whether a value is a finite number of one of the types, and at most so large."""
    if type(value) not in kinds:
        return False
    try:
        return abs(float(value)) <= most and math.isfinite(value)
    except OverflowError:
        return False


def _expected(key: str) -> str:
    if key in _INTEGERS:
        return f"a whole number of at most {MAX_NAMES if key.startswith('num_') else MAX_NUMBER:,}"
    if key in _FLOATS:
        return "a finite number"
    if key == "pad":
        return 'a list of pairs, one per axis, "[[0, 2], [0, 0]]"'
    return "a list of numbers" + (' or "auto"' if key in _MAY_BE_AUTO else "")
