"""The examples of ``docs/aoa.md`` print what the page says, and every tag and attribute has one."""

from __future__ import annotations

import doctest
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.aoa.model_rules import describe_model_rules, rule_names
from paddle_flexckpt.aoa.parser import ATTRIBUTES, TAGS
from tests.aoa.doctest_world import apply, catalog, load, numbers
from tests.documents import every_block

PAGE = Path(__file__).resolve().parents[2] / "docs" / "aoa.md"
TEXT = PAGE.read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^##+ (.*)$", re.MULTILINE)


def _sections() -> dict[str, tuple[str, int]]:
    """Text and first line of every section that has examples."""
    starts = [found.start() for found in _HEADING.finditer(TEXT)]
    bounds = zip(starts, [*starts[1:], len(TEXT)])
    sections = {TEXT[a : TEXT.index("\n", a)].lstrip("# "): (TEXT[a:b], TEXT.count("\n", 0, a)) for a, b in bounds}
    return {name: (text, line) for name, (text, line) in sections.items() if ">>> " in text}


def _examples(text: str, line: int) -> list[doctest.Example]:
    """The examples of a section; the line that ends a block is no part of what is expected."""
    found = []
    for block in _BLOCK.finditer(text):
        first = line + text.count("\n", 0, block.start(1))
        for example in doctest.DocTestParser().get_examples(block.group(1)):
            example.lineno += first
            found.append(example)
    return found


SECTIONS = _sections()


@pytest.fixture
def installed_as_before() -> Iterator[None]:
    """An example may call ``fc.install()``."""
    if importlib.util.find_spec("paddle") is None:
        yield
        return
    from paddle_flexckpt.parallel.install import is_installed

    before = is_installed()
    yield
    if not before and is_installed():
        fc.uninstall()


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.usefixtures("installed_as_before")
def test_examples_print_what_the_page_says(section: str) -> None:
    text, line = SECTIONS[section]
    examples = _examples(text, line)
    assert text.count("\n>>> ") == len(examples)
    if any(example.source == "import paddle\n" for example in examples):
        pytest.importorskip("paddle")
    names = {"apply": apply, "load": load, "numbers": numbers, "catalog": catalog, "np": np, "fc": fc}
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(doctest.DocTest(examples, names, section, str(PAGE), 0, TEXT), out=report.append)
    assert not runner.failures, "".join(report)


def test_no_example_is_left_out() -> None:
    blocks = [block for block in every_block("docs/aoa.md", "python") if ">>> " in block]
    found = sum(len(_examples(*section)) for section in SECTIONS.values())
    assert found == sum(len(doctest.DocTestParser().get_examples(block)) for block in blocks)


@pytest.mark.parametrize("name", sorted(ATTRIBUTES | TAGS))
def test_every_tag_and_attribute_has_an_example(name: str) -> None:
    sources = "".join(example.source for section in SECTIONS.values() for example in _examples(*section))
    mark = f", {name}=" if name in ATTRIBUTES else f", {name}"
    assert mark in sources


@pytest.mark.parametrize("family", rule_names())
def test_every_family_of_rules_is_described(family: str) -> None:
    rules = describe_model_rules(family)
    (row,) = [line for line in TEXT.splitlines() if line.startswith("| `") and f"`{family}`" in line.split("|")[1]]
    assert row.split("|")[2].strip() == ", ".join(rules["variants"])
    table = TEXT[TEXT.index("| parameter | default | needed by |") :]
    for name, spec in rules["parameters"].items():
        (row,) = [line for line in table.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1]]
        assert f"`{spec['default']}`" in row if "default" in spec else row.split("|")[2].strip() == ""
