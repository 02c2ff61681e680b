"""What the documentation prints: code and its output, in fenced blocks of documents and in examples of docstrings.

A test takes a block by :func:`code_block` or its like, with the document's name written out: so tests/test_documents.py
finds which test runs which block.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.S | re.M)
_INDENTED = re.compile(r"::\n\n((?: +\S.*\n|\n)+)")


@dataclass(frozen=True)
class Block:
    """Describe a block.

    Attributes:
        file: Its document, or the module whose docstring it stands in, from the repository's root.
        line: Of its first line; of an example in a docstring, that where the docstring's owner begins.
        language: As it says; ``""``: it does not; ``"docstring"``.
        text: All of it.
    """

    file: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.text.strip().splitlines()[0]!r}"


@cache
def blocks(file: str) -> list[Block]:
    """Return all blocks of a document or a module."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file.endswith(".py"):
        return _examples(file, text) if "::\n\n" in text or ">>> " in text else []
    return [
        Block(file, text.count("\n", 0, found.start(3)) + 1, found[2], textwrap.dedent(found[3]))
        for found in _FENCED.finditer(text)
    ]


def _examples(file: str, text: str) -> list[Block]:
    """Return what stands indented after a double colon, or begins with ``>>>``, in docstrings."""
    made = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            doc = (ast.get_docstring(node) or "") + "\n"
            line = getattr(node, "lineno", 1)
            made += [Block(file, line, "docstring", textwrap.dedent(found[1])) for found in _INDENTED.finditer(doc)]
            made += [Block(file, line, "docstring", doc)] * (">>> " in doc)
    return made


def code_block(file: str, part: str) -> str:
    """Return the one Python block of a document that has a part in it.

    Args:
        file: The document, from the repository's root.
        part: Some of its code.
    """
    return _block(file, "python", part)


def output_block(file: str, part: str) -> str:
    """Return the one block without a language that has a part in it; arguments of :func:`code_block`."""
    return _block(file, "", part)


def shell_block(file: str, part: str) -> str:
    """Return the one block of commands that has a part in it; arguments of :func:`code_block`."""
    return _block(file, "bash", part)


def text_block(file: str, part: str) -> str:
    """Return the one block of text that has a part in it; arguments of :func:`code_block`."""
    return _block(file, "text", part)


def json_block(file: str, part: str) -> str:
    """Return the one block of JSON that has a part in it; arguments of :func:`code_block`."""
    return _block(file, "json", part)


def diff_block(file: str, part: str) -> str:
    """Return the one diff of a document that has a part in it; arguments of :func:`code_block`."""
    return _block(file, "diff", part)


def docstring_block(file: str, part: str) -> str:
    """Return the one example of a module's docstrings that has a part in it; arguments of :func:`code_block`."""
    return _block(file, "docstring", part)


def every_block(file: str, language: str) -> list[str]:
    """Return all blocks of a language of a document."""
    return [block.text for block in blocks(file) if block.language == language]


def _block(file: str, language: str, part: str) -> str:
    (found,) = [block.text for block in blocks(file) if block.language == language and part in block.text]
    return found
