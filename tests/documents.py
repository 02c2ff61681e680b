"""What the documentation prints: code, and its output."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


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


def _block(file: str, language: str, part: str) -> str:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / file).read_text(), re.S | re.M)
    (found,) = [text for kind, text in blocks if kind == language and part in text]
    return found
