"""Names that documents print: of the package, of commands and of the trainers' flags."""

from __future__ import annotations

import argparse
import re

import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.cli.main import build_parser
from tests.documents import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_names_of_the_package_and_its_commands_are_there(document):
    text = document.read_text(encoding="utf-8")
    names = set(re.findall(r"\bfc\.([a-zA-Z_]+)", text))
    assert sorted(name for name in names if name not in fc._HOME) == []
    (action,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    assert sorted(set(re.findall(r"\bflexckpt ([a-z]+)\b", text)) - set(action.choices)) == []
