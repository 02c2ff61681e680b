"""docs/site.py and docs/pictures.py: documents find each other in the site, and drawings are those of their command."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

import paddle_flexckpt as fc
from tests.docs.scripts import script
from tests.documents import ROOT

IMAGES = ROOT / "docs" / "images"


def test_links_hold_where_a_document_moves(tmp_path):
    site = script("site")
    site.META, page = {}, site.page
    text = "[a](guide.md#x) ![b](images/b.png) [c](https://d/e.md)"
    there = "[a](docs/guide.md#x) ![b](docs/images/b.png) [c](https://d/e.md)"
    assert page(text, "docs/index.md", tmp_path) == there
    assert page("[a](../README.md#x) [b](b.md)", "docs/manager.md", tmp_path) == "[a](../overview.md#x) [b](b.md)"
    assert page("[a](../README.md)", "docs/sub/a.md", tmp_path) == "[a](../README.md)"
    assert page("[a](docs/guide.md)", "README.md", tmp_path) == "[a](docs/guide.md)"


def test_drawings_become_part_of_their_page(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.svg").write_text(script("pictures").svg(10, 10, "<g/>"))
    made = script("site").page('before\n\n![One & "two"](images/a.svg)\n\nafter', "a.md", tmp_path)
    figure = re.search(r"<figure.*</figure>", made, re.S)[0]
    (drawn,) = ElementTree.fromstring(figure)
    assert drawn.get("aria-label") == 'One & "two"' and drawn.get("role") == "img"
    # A blank line would end the block, and a colour of its own would hide it on the other ground.
    assert "\n\n" not in figure and "<style>" not in figure and 'fill="currentColor"' in figure


def test_a_bar_in_the_code_of_a_table_has_no_backslash(tmp_path):
    page = script("site").page
    assert page("| `a\\|b` | c \\| d |\n`e\\|f`", "a.md", tmp_path) == "| `a|b` | c \\| d |\n`e\\|f`"


def test_names_and_commands_in_texts_lead_to_the_reference(tmp_path):
    page = script("site").page
    made = page("# A\n\n`fc.load(x, y=1)`, `fc.none`, `flexckpt ls run`, `flexckpt no`, `a`\n", "docs/a.md", tmp_path)
    assert made == (
        "# A\n\n[`fc.load(x, y=1)`][paddle_flexckpt.load], `fc.none`, [`flexckpt ls run`](commands.md#ls), "
        "`flexckpt no`, `a`\n"
    )
    assert "(docs/commands.md#ls)" in page("`flexckpt ls`", "README.md", tmp_path)
    same = "# `fc.load`\n\n[the\n`fc.load`](a.md)\n\n```python\n`fc.load`\n```\n\n  ```text\n`flexckpt ls`\n  ```\n"
    assert page(same, "docs/a.md", tmp_path) == same


def test_docstrings_become_markdown():
    made = script("site").markdown(
        "As :func:`save` and :meth:`CheckpointManager.save`, not :meth:`save` or :data:`~a.B`.\n\n    ::\n\n        x\n"
        "More::\n\n    y = z[::]\n"
    )
    assert made == (
        "As [`save`][paddle_flexckpt.manager.whole_run.save] and [`save`][paddle_flexckpt.manager.CheckpointManager], "
        "not `save` or `B`.\n\n        x\nMore:\n\n    y = z[::]\n"
    )


def test_sections_of_troubles_have_the_texts_of_their_errors(tmp_path):
    site = script("site")
    (tmp_path / "a.py").write_text(
        'raise E(f"{x} is quite wrong: {y}. Remedy (FC101): mend it")\n'
        'Problem("one, <two> three", key="k", code="FC102")\n'
    )
    texts = site.texts_of_errors(tmp_path)
    assert texts == {"FC101": ["is quite wrong"], "FC102": ["one, <two> three"]}
    page = '# T\n\n## FC101 A\n\na\n\n<a id="fc102"></a>\n\n## FC102 B\n\nb\n\n## Other\n\nc\n'
    made = site.with_texts(page, texts)
    parts = ["is quite wrong", '<a id="fc102">', "one, &lt;two&gt; three", "## Other"]
    assert sorted(parts, key=made.index) == parts
    assert made.count("<details>") == 2
    found = site.texts_of_errors(ROOT / "paddle_flexckpt")
    assert "replicas of one shard differ" in found["FC106"] and set(found) > {"FC201", "FC402", "FC604"}


def test_documents_that_docstrings_name_are_links():
    made = script("site").markdown("As it says (docs/aoa.md), not ``docs/aoa.md``.")
    assert made == "As it says ([AOA](../aoa.md)), not ``docs/aoa.md``."


def test_the_reference_has_each_name_on_the_page_of_its_subject_and_in_the_list():
    made = script("site").reference(ROOT)
    listed = made.pop("index.md")
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.findall(r"docs/api/(.*)", navigation) == ["index.md", *made]
    for name in fc._HOME:
        (file,) = (file for file, text in made.items() if f"::: paddle_flexckpt.{name}\n" in text)
        assert f"({file}#paddle_flexckpt.{name}) | " in listed
    assert "::: paddle_flexckpt.report.SaveReport\n" in made["reports.md"]
    # The first sentence, also of a function with overloads, of a name that another module has too, and of two names.
    for line in (
        "[`save`](the-state-of-a-run.md#paddle_flexckpt.save) | Save the objects of a run in one checkpoint. |",
        "| Save a distributed state to a directory that all ranks share, or to one on each node. |",
        "(the-state-of-a-run.md#paddle_flexckpt.KeepLatest) | Retention of the ``count`` highest steps. |",
        "| `ShardedWeight`, by another name. |",
    ):
        assert line in listed


def test_the_page_of_commands_has_arguments_in_tables_and_examples_to_copy():
    made = script("site").commands()
    for line in (
        "| [`ls`](#ls) | list the checkpoints of a directory: step, age, size, whether each is complete |",
        "| `CHECKPOINT` | directory or URL of the checkpoint |",
        "| `--dtype {raise,cast}` | as in load_state_dict |",
        r"| `KEY` | a key, or a pattern with \*; by default all keys |",
        "```bash\nflexckpt inspect run/step_00000100 --key model.norm\n```",
        "The AOA statements that undo others, as JSON.",
    ):
        assert f"\n{line}\n" in made
    assert r"up to A + R \* \|value of SECOND\|;" in made
    assert "example:" not in made and "--help`" not in made.partition("## ")[2]


def test_nodes_of_the_search_end():
    worker = script("search_worker")
    program = "for(;i<n;i++){var s=r[i],o=this.edges[s];e=e+s+o.id}return e"
    made = worker.mended(program)
    assert made.startswith('addEventListener("message"')
    assert made.partition("});\n")[2] == program.replace("o.id", 'o.id+";"')
    with pytest.raises(ValueError, match="0 places, not 1"):
        worker.mended("e=e+s")


@pytest.mark.parametrize("name", ["key", "shard", "layout", "manifest", "survive"])
def test_drawings_are_those_of_their_command(name):
    """Remedy: python docs/pictures.py."""
    assert (IMAGES / f"{name}.svg").read_text(encoding="utf-8") == getattr(script("pictures"), name)()


def test_the_demo_is_drawn_from_its_results(tmp_path):
    pictures = script("pictures")
    whole = {str(step): 5.0 - step / 10 for step in range(20)}
    for name in ("tp2", "tp2_resumed", "tp4_resumed", "tp1_resumed"):
        found = whole if name == "tp2" else {step: loss for step, loss in whole.items() if int(step) >= 10}
        (tmp_path / f"{name}.json").write_text(json.dumps({"losses": found}))
    for layout in pictures.LAYOUTS:
        for rank in (0, 2):
            half = {"global_shape": [4, 8], "local_shape": [4, 4], "global_offset": [0, 4]}
            shards = dict.fromkeys(pictures.MAPPED, half)
            (tmp_path / f"{layout}.layout.rank{rank}.json").write_text(json.dumps(shards))
    space = "{http://www.w3.org/2000/svg}"
    losses = ElementTree.fromstring(pictures.losses(tmp_path))
    assert [len(line.get("points").split()) for line in losses.iter(f"{space}polyline")] == [20, 10, 10, 10]
    drawn = pictures.layouts(tmp_path)
    parts = [each for each in ElementTree.fromstring(drawn).iter(f"{space}rect") if each.get("fill") == "url(#r02)"]
    assert len(parts) == 2 * len(pictures.LAYOUTS)
    assert {(part.get("width"), part.get("height")) for part in parts} == {("41", "98")}


def test_each_picture_is_small():
    sizes = {path.name: path.stat().st_size for path in IMAGES.iterdir()}
    assert len(sizes) >= 6 and max(sizes.values()) < 20_000, sizes
