"""Mend the program that searches the site, in the reader's browser: a hook of mkdocs.

Lunr, which the theme brings along, keeps the words of all pages in a tree, and has each two nodes with the same text as
one (`TokenSet.toString`). The text has letters and numbers of the nodes that they lead to, with nothing between them:
"3" to node 12 reads like "3" to node 1 and "2" to no other. So where words have digits, nodes of different words can
become one, and the tree has words that no page has ("312"). A query that begins such a word raises an error, and finds
nothing: "S3", "stage 3". Which words these are changes with each page (https://github.com/olivernn/lunr.js/issues/503).

A minus excludes a word; here it begins an option ("--model"), and is taken off.

A reader may paste the text of an error. Its code alone is searched for; of a text without a code only the words, as
paths, keys and numbers are those of the reader's job, and as punctuation has a meaning to Lunr.

Tested in tests/docs/test_sources.py and tests/docs/test_site.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# str = str + label + node.id
_NODE = re.compile(r"\b(\w+)=\1\+\w+\+\w+\.id\b")
# Type 2 is a query. The theme has added "*" to its words, for those that begin so.
_OF_ERRORS = r"""addEventListener("message", ({data}) => {
  if (data.type !== 2) return;
  const code = /\bFC\d{3}\b/.exec(data.data);
  data.data = data.data.replace(/(^|\s)-+(?=\w)/g, "$1");
  if (code) data.data = code[0];
  else if (data.data.length > 30 && /[:;'"(\[]|Error/.test(data.data)) {
    const words = data.data.replace(/'[^']*'|"[^"]*"|\([^)]*\)?|\[[^\]]*\]?|\S*[\/\d_]\S*|\w+Error\b/g, " ");
    data.data = words.replace(/[^A-Za-z]+/g, " ").trim() || data.data;
  }
});
"""


def on_post_build(config: Mapping[str, Any]) -> None:
    """Mend the program in the site that has been made."""
    (path,) = Path(config["site_dir"]).glob("assets/javascripts/workers/search.*.min.js")
    path.write_text(mended(path.read_text(encoding="utf-8")), encoding="utf-8")


def mended(program: str) -> str:
    """Return the program with an end after the number of each node, and with a listener before its own."""
    text, count = _NODE.subn(r'\g<0>+";"', program)
    if count != 1:
        raise ValueError(f"the search has {count} places, not 1, where it writes the number of a node: look at lunr")
    return _OF_ERRORS + text
