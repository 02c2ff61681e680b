"""Unified diffs: what is made is read back, and what does not fit exactly is refused."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.patching import PatchError, compose, format_diff, parse_diff

lines = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"c\r\n", b"\x0c\n", b"\n", b"--- a/x\n", b"@@ -1 +1 @@\n"]), max_size=40
)
contents = st.builds(lambda body, end: b"".join(body) + end, lines, st.sampled_from([b"", b"end", b"+"]))


@given(contents, contents)
def test_what_is_formatted_is_applied_to_the_byte(before, after):
    text = format_diff("p/x.py", before, after)
    if before == after:
        assert text == b""
        return
    (diff,) = parse_diff(b"A comment\n\n" + text, "name")
    assert diff.path == "p/x.py"
    assert compose(before, [("name", diff)]) == after


@given(st.lists(st.booleans(), min_size=30, max_size=30), st.lists(st.booleans(), min_size=30, max_size=30))
def test_patches_compose_in_any_order_or_are_refused(mine, theirs):
    before = b"".join(b"line %d\n" % number for number in range(30))

    def changed(choices, mark):
        return b"".join(b"line %d%s\n" % (n, mark if choice else b"") for n, choice in enumerate(choices))

    pairs = [("x", mine, b"x"), ("y", theirs, b"y")]
    diffs = [(name, parse_diff(format_diff("p", before, changed(c, m)), name)[0]) for name, c, m in pairs if any(c)]
    touching = len(diffs) == 2 and any(mine[i] and any(theirs[max(0, i - 1) : i + 2]) for i in range(30))
    if touching:
        with pytest.raises(PatchError, match="change the same lines"):
            compose(before, diffs)
        return
    wanted = b"".join(b"line %d%s\n" % (n, b"x" if mine[n] else b"y" if theirs[n] else b"") for n in range(30))
    assert compose(before, diffs) == compose(before, diffs[::-1]) == wanted


@pytest.mark.skipif(shutil.which("patch") is None, reason="patch(1) is not installed")
def test_patch_reads_it_too(tmp_path):
    before, after = b"1\n2\n3\n4\n5\n6\n7\n8\nlast", b"0\n1\n2\n3\n4\n5\n6\n7\nEIGHT\nlast\n"
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "x.py").write_bytes(before)
    subprocess.run(["patch", "-p1", "-s"], input=format_diff("p/x.py", before, after), cwd=tmp_path, check=True)
    assert (tmp_path / "p" / "x.py").read_bytes() == after


def test_a_hunk_in_another_place_or_context_is_refused():
    before = b"".join(b"%d\n" % number for number in range(20))
    (diff,) = parse_diff(format_diff("p/x.py", before, before.replace(b"10\n", b"ten\n")), "mine")
    with pytest.raises(
        PatchError, match=r"'mine' does not fit \(file 'p/x.py', line 8\); expected b'7\\n'; got b'6\\n'"
    ):
        compose(b"moved\n" + before, [("mine", diff)])
    with pytest.raises(PatchError, match=r"line 13\); expected b'12\\n'; got b'twelve\\n'"):
        compose(before.replace(b"12\n", b"twelve\n"), [("mine", diff)])


GOOD = b"--- a/p/x.py\n+++ b/p/x.py\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"nothing\n", "changes no file"),
        (GOOD[:-3], "not complete"),
        (GOOD.replace(b" one", b"one"), "not complete"),
        (GOOD.replace(b"-1,2", b"-1,9"), "not complete"),
        (GOOD.replace(b"-1,2", b"-1,1"), "longer than its head"),
        (GOOD.replace(b"+1,2", b"+2,2"), "contradict"),
        (GOOD.replace(b"@@ -1,2", b"@@ -x,2"), "not the head of a hunk"),
        (GOOD + b"more\n", "expected '--- a/PATH'"),
        (GOOD + GOOD, "names a file twice"),
        (GOOD.replace(b"b/p/x.py", b"b/p/y.py"), "renames"),
        (GOOD.replace(b"p/x.py", b"../x.py"), "not a path inside a package"),
        (GOOD.replace(b"p/x.py", b"/x.py"), "not a path inside a package"),
        (GOOD.replace(b"a/p/x.py", b"/dev/null"), r"expected '--- a/'"),
        (GOOD + b"@@ -2,1 +2,1 @@\n-two\n+3\n", "overlaps"),
        (b"--- a/p/x.py\n+++ b/p/x.py\n", "nothing changes"),
    ],
)
def test_malformed_patches_are_refused(text, message):
    parse_diff(GOOD, "mine")
    with pytest.raises(PatchError, match=message):
        parse_diff(text, "mine")
