"""Messages of malformed programs; and no text makes the compiler fail in another way, or hang."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.aoa import AoaError, compile_program
from paddle_flexckpt.aoa.invert import invert
from paddle_flexckpt.aoa.parser import ATTRIBUTES, MAX_NAMES, TAGS, parse, quoted
from paddle_flexckpt.aoa.statements import MAX_LINE
from tests.aoa.small import catalog, compiled, numbered, room, run
from tests.property import examples

A = numbered(4, 6)
SQUARE = numbered(4, 4)
SOURCE = {
    "a": A,
    "b": A,
    "z": numbered(),
    **{f"l.{i}.e.{j}": A for i in (0, 1) for j in (0, 2)},
    "a.moment1_0": A,
    "turned": numbered(6, 4),
}
TARGET = {"x": room(4, 6), "y": room(4, 6), "x.moment1_0": room(4, 6)}


def message(*texts: str) -> str:
    with pytest.raises(AoaError) as caught:
        compiled(texts, SOURCE, TARGET)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("a - x", 3, "unexpected character '-'. Remedy .FC602.: put names"),
        ("a => x", 4, "unexpected character '>'. Remedy .FC602.: did you mean `->`"),
        ("a > x", 3, "unexpected character '>'. Remedy .FC602.: did you mean `->`"),
        ("a → x", 3, "unexpected character '→'. Remedy .FC602.: did you mean `->`"),
        ("a --> x", 3, "unexpected character '-'. Remedy .FC602.: did you mean `->`"),
        ("a - > x", 3, "unexpected character '-'. Remedy .FC602.: did you mean `->`"),
        ("a, b -> x, fused_fnn", 12, r"'fused_fnn' may be a misspelt tag \(did you mean 'fused_ffn'\?\)"),
        ("a, b -> x, Stack, axis=0", 12, r"'Stack' may be a misspelt tag \(did you mean 'stack'\?\)"),
        ("a -> x, optinal", 9, r"'optinal' may be a misspelt tag \(did you mean 'optional'\?\)"),
        ("a -> x, copy, optinal", 15, r"'optinal' is no tag \(did you mean 'optional'\?\), and names"),
        ("a -> x, optional=True", 9, r"'optional' is a tag, which has no value"),
        ('a -> x, dytpe="float16"', 9, r"unknown attribute 'dytpe' \(did you mean 'dtype'\?\); attributes are"),
        ("a -> x, dtype='bf61'", 9, r"dtype 'bf61' is not supported \(did you mean 'bfloat16'\?\); supported"),
        ("a -> x, dtype='FP32'", 9, r"dtype 'FP32' is not supported \(did you mean 'float32'\?\); supported"),
        (
            "a -> x y",
            8,
            "a comma is missing before 'y', or '->' after it: without that comma it begins another statement",
        ),
        ("a -> x y, axis=0", 8, "a comma is missing before 'y', or '->' after it"),
        ("a -> x, axis=0 fused_qkv_old, num_heads=4", 16, "a comma is missing before 'fused_qkv_old'\\. Remedy"),
        ("a -> x, axis=0 fused_qkv_old", 16, "a comma is missing before 'fused_qkv_old'\\. Remedy"),
        ("a -> x axis=0", 8, "a comma is missing before 'axis'\\. Remedy"),
        ('a -> x, scale=2.0 states="w_0"', 19, "a comma is missing before 'states'\\. Remedy"),
        ("a -> x, fused_ffn optional", 19, "a comma is missing before 'optional'\\. Remedy"),
        ("a -> x axis=0 b -> y", 8, "a comma is missing before 'axis'\\. Remedy"),
        ("a^T b -> x, axis=0", 5, "a comma, or '->', is missing before 'b'"),
        ("a, b z -> x, axis=0", 6, "a comma, or '->', is missing before 'z'"),
        ("a -> x,", 8, "expected a name; got the end of the text"),
        ("a x", 3, "a comma, or '->', is missing before 'x'"),
        ("a", 2, "expected ',' or '->'; got the end of the text"),
        ("a axis=0", 3, "a comma, or '->', is missing before 'axis'"),
        ("-> x", 1, "expected a name; got '->'"),
        ("a -> x, axis", 6, "axis= is needed to cut"),
        ("a -> x, y, axis=first", 17, "expected a number or a quoted text after axis="),
        ("a -> x, y, axis=1.5", 17, "axis cannot be '1.5'; expected a whole number"),
        ('a -> x, y, axis="one"', 17, "axis cannot be 'one'; expected a whole number"),
        ("a -> x, color=1", 9, "unknown attribute 'color'; attributes are axis, block"),
        ("a -> x, axis=0, axis=1", 17, "attribute 'axis' is given twice"),
        ("a -> x, copy, y", 15, "'y' is no tag, and names cannot follow attributes"),
        ("a -> x^T", 6, r"x\^T cannot be assigned: it is a view. Remedy .FC602.: transpose on the left, a\^T -> x"),
        ("q[3:3] -> x", 1, r"q\[3:3\] names nothing"),
        ("q[3 4] -> x", 5, "expected ':'"),
        ("q[-1:4] -> x", 3, "expected a whole number"),
        ('"" -> x', 1, "a name cannot be empty"),
        (
            '"a -> x',
            1,
            r"unexpected character '\"'. Remedy .FC602.: .* between quotes, and in these \\x22 for a quotation mark",
        ),
        ("0.weight -> x", 1, "put names .* that begin with a digit, between quotes"),
        ("a -> x, y, axis=2", 12, r"axis 2 is out of range for shape \[4, 6\]"),
        ("a, b -> x, axis=-3", 12, "axis -3 is out of range"),
        ('a -> x, permute="[0, 0]"', 9, "permute of shape .* takes every axis from 0 to 1 once"),
        ('a -> x, slice="[0:2:1]"', 9, "slice has to be like"),
        ('a -> x, dtype="real"', 9, "dtype 'real' is not supported; supported are bool"),
        ('a -> x, states=""', 9, "states needs names"),
        ("a, b -> x, y, axis=0", 9, "2 names cannot become 2. Remedy .FC603.: join them into one first"),
        ("a, b -> x", 9, "axis= is needed to join"),
        ("a -> x, y", 6, "axis= is needed to cut"),
        ("a -> x, copy, stack", 15, "copy and stack exclude each other"),
        ("a -> x, fused_ffn, fused_qkv", 20, "a statement has one fused layout"),
        ("${L/2}.e -> x.$L", 1, r"expected \$\{NAME\+1\}"),
        ("${L//0}.e -> x.$L", 1, "division by zero"),
    ],
)
def test_the_place(text: str, column: int, words: str):
    found = message("b -> y", text)
    lines = found.split("\n")
    assert lines[0].startswith(f"AOA statement 2, column {column}: "), lines[0]
    assert lines[1] == f"    {text}"
    # The mark stands under the column.
    assert lines[2] == "    " + " " * (column - 1) + "^"
    assert re.search(words, lines[0]), lines[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "none -> x",
            "'none' is neither a source key nor assigned before; there are, for example, .*FC601.: correct the name$",
        ),
        (
            "none -> u",
            "'none' is neither a source key nor assigned before; there are, for example, .*add the tag 'optional'",
        ),
        ("l.$LAYER_ID.f.$EXPERT_ID -> m.$LAYER_ID.$EXPERT_ID", "no source key or variable matches .*'l.0.e.0'"),
        ("a -> x.$L", r"nothing on the left says which values \$L takes"),
        ("_ -> _", "means nothing"),
        ("_, a -> x", "'_' stands alone on the left"),
        ("a -> _, x, axis=0", "'_' stands alone on the right"),
        (
            "a^T -> y",
            r"gives 'y' the shape \[6, 4\]; expected \[4, 6\], as in the destination. .*FC603.: correct the statement: "
            r"leave out \^T$",
        ),
        (
            "turned -> y",
            r"shape \[6, 4\]; expected \[4, 6\], .*FC603.: correct the statement: write \^T after the name on its lef",
        ),
        ("turned -> y, scale=2", r"shape \[6, 4\]; expected \[4, 6\], .*FC603.: correct the statement$"),
        ("l.$layer_id.e -> y", r"'l.\$layer_id.e' is neither .* placeholders are written in capitals, \$LAYER_ID$"),
        (
            "l.$L.e.$x -> m.$L",
            r"no source key .*FC601.: correct the pattern, .*placeholders are written in capitals, \$X$",
        ),
        (
            "l.$L.e.0 -> y.$l",
            r"'y.\$l' lacks \$L: .*FC603.: correct the name; placeholders are written in capitals, \$L$",
        ),
        (
            "lm_head.weight^T -> y",
            "FC601.: correct the name; where the model's embeddings are tied, give the rules tied=True",
        ),
        ("_ -> l.$L.new", "no destination key matches"),
        ("a -> x, fused_qkv, num_heads=4, num_key_value_groups=2", "Remedy .FC603.: if every rank holds"),
        ("a -> x, fused_qkv_old", "fused_qkv_old needs num_heads=, a positive number; got nothing"),
        ("a -> x, fused_qkv_old, num_heads=3, num_key_value_groups=2", r"num_heads \(3\) has to be a multiple"),
        ("a, b, z -> x, fused_ffn", "fused_ffn takes"),
    ],
)
def test_what_is_wrong_with_names(text: str, words: str):
    found = message("b -> y", text)
    assert found.startswith("AOA statement 2")
    assert text in found
    assert re.search(words, found, re.MULTILINE), found


@pytest.mark.parametrize("statement", ["ww^T -> w", "l.$L.ww^T -> l.$L.w", "l.0.ww^T -> l.0.w"])
def test_no_remedy_leaves_out_a_misspelled_statement_whose_target_the_source_has(statement: str):
    """With ``optional`` the target would get the source's own tensor, not transposed."""
    tensors = {"w": SQUARE, "l.0.w": SQUARE}
    for target in (tensors, None):
        with pytest.raises(AoaError) as error:
            compiled([statement], tensors, target)
        assert re.search("Remedy .FC601.: correct the (name|pattern)$", str(error.value), re.MULTILINE)
        assert "optional" not in str(error.value)


def test_a_fill_needs_a_destination_that_says_how_large_it_is():
    with pytest.raises(AoaError, match="shape and dtype of 'new' come from a destination, and none is given. Remedy"):
        compiled(["_ -> new, fill=0"], SOURCE, None)
    assert "new" not in compiled(["_ -> new, fill=0, optional"], SOURCE, None).outputs


def test_the_expansion_is_shown():
    found = message("l.$LAYER_ID.e.$EXPERT_ID -> m.$LAYER_ID.$EXPERT_ID.x, m.$LAYER_ID.$EXPERT_ID.y, axis=1, "
                    'sizes="[1, 2]"')  # fmt: skip
    assert "    expanded to: l.0.e.0 -> m.0.0.x, m.0.0.y, axis=1, sizes" in found
    # One mistake is told once, whatever the number of layers.
    assert found.count("AOA statement") == 1
    found = message("a -> q, k, v, fused_qkv, num_heads=5, num_key_value_groups=5")
    assert "    expanded to: a -> q0,k0,v0,q1,k1,v1," in found
    found = message("l.0.e.* -> x, stack, axis=5")
    assert "    expanded to: l.0.e.0,l.0.e.2->x,stack,axis=5" in found
    found = message("a, b^T -> x, axis=0")
    assert "    expanded to: a,b_transpose_tmp->x,axis=0" in found


@pytest.mark.parametrize(
    ("first", "second", "end", "begin"),
    [
        ("e.0,e.1 -> model.layers.3.w1, axis=0", "model.layers.3.e.0 -> y", "axis=0", "model.layers.3.e.0"),
        ("a -> x, fused_ffn", "model.g^T, model.u^T -> y, fused_ffn", "fused_ffn", "model.g"),
        ("a -> x, axis=1, fused_qkv_old", "model.q -> y", "fused_qkv_old", "model.q"),
        ("a -> x, fused_qkv, num_heads=8, num_key_value_groups=12", "$L.w -> y.$L", "num_key_value_groups=12", "$L.w"),
        ("a -> x, scale=-0.5", "b -> y", "scale=-0.5", "b"),
        ("a -> x, axis=1", "e5.w -> y", "axis=1", "e5.w"),
    ],
)
def test_two_statements_with_nothing_between_them_are_told_where_to_cut(first: str, second: str, end: str, begin: str):
    found = message(first + second)
    column = len(first) + 1
    assert found.startswith(
        f"AOA statement 1, column {column}: two statements with nothing between them: {end!r} ends one, and {begin!r} "
        f"begins another. Remedy (FC602): cut before column {column}; in a list of Python, put a comma between the two "
        "texts"
    )
    assert found.split("\n")[2] == " " * (column + 3) + "^"
    # Cut there, these are two statements.
    assert [statement.place.text for statement in parse(f"{first} {second}")] == [first, second]


def test_a_name_behind_a_name_has_no_place_to_cut():
    found = message("a -> x.weightmodel.b -> y")
    assert found.startswith("AOA statement 1, column 22: a second '->' in one statement")
    assert (
        "one of ['x.weightmodel.b'] holds the end of the first and the begin of the second. Remedy (FC602): put"
        in found
    )


@pytest.mark.parametrize("text", ["0.weight -> x", "a -> 0.x", "a -> x, axis=10.5.b -> y", "a -> x, axis=0^T"])
def test_other_numbers_are_not_taken_for_glued_statements(text: str):
    assert "with nothing between them" not in message(text)


def test_names_that_begin_as_tags_do_stay_names():
    texts = ["a -> copy_of_a, stacked, axis=1", "a -> optional_x"]
    assert [[v.name for v in parse(text)[0].right] for text in texts] == [["copy_of_a", "stacked"], ["optional_x"]]


def test_all_problems_are_told_at_once():
    with pytest.raises(AoaError) as caught:
        compiled(["a -", "b -> y", "q[2:1] -> x", "a -> x, axis=z"], SOURCE, TARGET)
    assert [str(problem).split(":")[0] for problem in caught.value.problems] == [
        "AOA statement 1, column 3",
        "AOA statement 3, column 1",
        "AOA statement 4, column 14",
    ]
    assert "3 problems" in str(caught.value)
    with pytest.raises(AoaError) as caught:
        compiled(["c -> x", "d -> y", "l.$L.v -> m.$L", "a, b -> y, axis=9"], SOURCE, TARGET)
    assert len(caught.value.problems) == 4


def test_what_follows_from_another_problem_is_not_told():
    with pytest.raises(AoaError) as caught:
        compiled(
            ["c -> t", "t -> x", "x^T -> y", "l.$L.e.0 -> t.$L, axis=0, slice='[9]'", "t.$L -> u.$L"], SOURCE, TARGET
        )
    assert [str(problem).split(":")[0] for problem in caught.value.problems] == [
        "AOA statement 1",
        "AOA statement 4, column 27",
    ]


def test_thousands_of_problems_are_bounded():
    with pytest.raises(AoaError) as caught:
        compiled([f"c{i} -> x" for i in range(3000)], SOURCE, TARGET)
    assert len(caught.value.problems) <= 100
    assert len(str(caught.value)) < 20_000


def test_long_lines_are_shortened():
    names = ", ".join(f"name_{i}" for i in range(10_000))
    found = message(f"{names} -> x, axis=0")
    assert all(len(line) < MAX_LINE + 100 for line in found.split("\n"))
    assert "name_9999 -> x, axis=0" in found


def test_the_second_statement_of_a_text_has_its_own_columns():
    found = message("a -> x b -> y, axis=0, permute='[5]'")
    assert found.split("\n")[:3] == [
        "AOA statement 1, column 17: " + found.split(": ", 1)[1].split("\n")[0],
        "    b -> y, axis=0, permute='[5]'",
        " " * 20 + "^",
    ]


HUGE = "9" * 30
DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        "q[0:1000000000] -> x, axis=0",
        f"q[0:{HUGE}] -> x, axis=0",
        f"q[{DIGITS}:{DIGITS}1] -> x, axis=0",
        f"a -> x, axis={HUGE}, repeat=2",
        f"a -> x, y, axis={DIGITS}",
        "a -> x, repeat=1000000000, axis=0",
        f"a -> x, repeat={HUGE}, axis=0",
        "a -> x, repeat=1000000000, axis=0, block=1",
        "a -> t, repeat=30000, axis=0 t -> x, repeat=30000, axis=0",
        f'a -> x, resize="[{HUGE}, -1]", fill=0',
        f'a -> x, pad="[[{HUGE}, 0], [0, 0]]", fill=0',
        'a -> x, pad="[[0, 99999999999], [0, 99999999999]]", fill=0',
        f'a -> x, reshape="[{HUGE}, -1]"',
        f'a -> x, permute="[{HUGE}, 0]"',
        f'a -> x, slice="[{HUGE}:]"',
        f'a -> x, slice="[{DIGITS}:]"',
        f'a -> x, y, axis=0, sizes="[{HUGE}, -{HUGE}]"',
        'a -> x, resize="[99999999, 60000]", fill=0, reshape="[60000, 99999999]"',
        'a -> x, resize="[2000000011, 6]", fill=0, reshape="[6, 2000000011]"',
        f'a, b -> x, dequant="fp8", block="[{HUGE}, {HUGE}]"',
        f"a -> x, scale=1{'0' * 400}",
        "a -> x, scale=1e999",
        f'a, b -> x, sum, weights="[1{"0" * 400}, 1]"',
        'a, b -> x, sum, weights="[1e999, 1]"',
        f"_ -> x, fill=1{'0' * 400}",
        f"_ -> x, fill={DIGITS}",
        'a -> x, scale="{[]: 1}"',
        'a -> x, scale="{{}}"',
        'a -> x, scale="__import__(\'os\')"',
        'a -> x, y, axis=0, sizes="' + "[" * 3000 + "]" * 3000 + '"',
        'a -> x, scale="' + "-" * 100_000 + '1"',
        "a -> q, k, v, fused_qkv, num_heads=1000000000, num_key_value_groups=1000000000",
        f"a -> x, fused_qkv_old, num_heads={HUGE}, num_key_value_groups=1",
        f"a -> q, k, v, fused_qkv, num_heads={MAX_NAMES}, num_key_value_groups={MAX_NAMES}",
        f"l.$L.e.0 -> x.${{L+{DIGITS}}}",
        f"l.${{L*{HUGE}}}.e.0 -> x.$L",
        f"q[0:{MAX_NAMES}] -> x, axis=0",
        "(" * 100_000,
        "a, " * 50_000 + "-> x, axis=0",
        "a -> x, " * 50_000,
        "${" + "L" * 100_000,
        "${L" + " " * 5_000 + "!}.w -> x",
        "$" * 100_000,
        "*" * 5_000 + " -> x",
    ],
)  # fmt: skip
def test_huge_numbers_and_texts_are_refused_quickly(text: str):
    started = time.process_time()
    message(text)
    # Far from what it takes (milliseconds, at most a second), and far from what a missing guard takes.
    assert time.process_time() - started < 10


PIECES = r"""
a b x y z t _ * l q [ ] : -> -> -> , , , = ^T " ' # 0 1 -1 2.5 1e3 ${ } $L \$ $LAYER_ID_OFFSET "a" "a.b
l.$L.e.* l.$L.e.$E m.$L.$E l.${L+1}.e.0 a.moment1_0 x.moment1_0 l.0.e.* q[0:2]
axis=0 axis=1 axis=-1 repeat=2 block=2 fill=0 fill="keep" scale=2.0 num_heads=2 num_key_value_groups=1
permute="[]" permute="[1,0]" reshape="[2,-1]" reshape="auto" slice="[0:2]" slice="[1]" pad="[[0,1],[1,0]]"
resize="[5,5]" resize="auto" sizes="[1,-1]" sizes="auto" weights="[1,2]" dequant="fp8"
dtype="bfloat16" src_dtype="float32" dst_dtype="float16" states="moment1_0" states="model"
""".split()
WORDS = st.sampled_from([*PIECES, "\n", " ", "-> x", "a ->", *sorted(TAGS), *sorted(ATTRIBUTES)])


def survives(text: str) -> None:
    for target in (TARGET, None):
        catalogs = catalog(SOURCE), None if target is None else catalog(target)
        for reverse in (False, True):
            try:
                compile_program({"aoa_statements": [text], "aoa_config_reverse": reverse}, *catalogs)
            except AoaError as error:
                assert str(error)
    try:
        invert([text])
    except AoaError as error:
        assert str(error)


@examples(300)
@given(st.lists(WORDS, max_size=14), st.sampled_from(["", " ", ", "]))
def test_any_words(words: list[str], glue: str):
    survives(glue.join(words))


LEFTS = ["a", "b", "z", "a^T", "l.0.e.*", "l.$L.e.0", "l.$L.e.$E", "_", "a.moment1_0", "q[0:2]", "l.$L.e.*^T"]
RIGHTS = ["x", "y", "t", "m.$L", "m.$L.$E", "_", "x.moment1_0", "t.${L-1}", "x[0:2]", "*"]
LEFT = st.lists(st.sampled_from(LEFTS), min_size=1, max_size=3)
RIGHT = st.lists(st.sampled_from(RIGHTS), min_size=1, max_size=3)
FURTHER = st.lists(WORDS.filter(lambda word: word[0].isalpha() and ("=" in word or word in TAGS)), max_size=4)


@examples(500)
@given(st.lists(st.tuples(LEFT, RIGHT, FURTHER), min_size=1, max_size=3))
def test_any_statements(statements: list[tuple[list[str], list[str], list[str]]]):
    survives("\n".join(f"{', '.join(left)} -> {', '.join([*right, *more])}" for left, right, more in statements))


@examples(200)
@given(st.one_of(st.text(max_size=60), st.binary(max_size=60).map(lambda raw: raw.decode("latin-1"))))
def test_any_characters(text: str):
    survives(text)


@examples(100)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=9)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.one_of(st.sampled_from(["aoa_statements", "aoa_config_reverse"]), st.integers()), inner, max_size=3
            ),
        ),
        max_leaves=6,
    )
)
def test_any_configuration(config: object):
    try:
        compile_program(config, catalog(SOURCE), catalog(TARGET))  # type: ignore[arg-type]
    except AoaError as error:
        assert str(error)


@pytest.mark.parametrize("name", ['a"b', "a'b", "a\"b'c", "a\nb", "a\\x22b", "a\\b", "copy", "0.w", 'l.$L."w"'])
def test_every_name_can_be_written(name: str):
    text = f"{quoted(name)}^T -> {quoted(name)}"
    (statement,) = parse(text)
    assert (statement.left[0].name, statement.right[0].name) == (name, name)
    key = name.replace("$L", "3")
    turned = run([text, *invert([text])["aoa_statements"], text], {key: SQUARE}, {key: room(4, 4)})
    assert (turned[key] == SQUARE.T).all()


@pytest.mark.parametrize(("source", "target"), [((2, 3, 2, 2), (6, 4)), ((6, 4), (2, 3, 2, 2)), ((2, 3, 2, 2), (24,)),
                                                ((2, 3, 2, 2), (2, 6, 2)), ((2, 3, 2, 2), (2, 3, 2, 2))])  # fmt: skip
@pytest.mark.parametrize("more", ["", ', dtype="float64"'])
def test_a_reshape_goes_either_way_between_split_and_merged_axes(source, target, more):
    """One statement serves a load and the way back: the destination's shape tells which it is."""
    given, dtype = numbered(*source), "float64" if more else "float32"
    texts = [f'a -> x, reshape="[2, 3, 2, 2]"{more}']
    found = run(
        texts, {"a": given, "a.moment1_0": given + 1}, {"x": room(*target, dtype=dtype), "x.moment1_0": room(*target)}
    )
    assert (found["x"] == given.reshape(target)).all()
    assert (found["x.moment1_0"] == given.reshape(target) + 1).all()


@pytest.mark.parametrize(("text", "target"), [
    ('a -> x, reshape="[2, 3, 2, 2]"', (2, 2, 3, 2)),
    ('a -> x, reshape="[2, 3, 2, 2]"', (4, 6)),
    ('a -> x, reshape="[2, 3, 2, 2]"', (6, 5)),
    ('a -> x, reshape="[2, 3, 2, 2]", permute="[]"', (6, 4)),
    ('a -> x, reshape="[2, 3, -1, 2]"', (6, 4)),
])  # fmt: skip
def test_a_reshape_that_is_no_merge_stays_what_it_says(text, target):
    with pytest.raises(AoaError, match="expected"):
        compiled([text], {"a": numbered(2, 3, 2, 2)}, {"x": room(*target)})
