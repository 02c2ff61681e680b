"""Options: fields of a dataclass are checked, compared across ranks and documented without being listed again."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.transfer.options import (
    ALONE,
    ExportOptions,
    LoadOptions,
    Options,
    TransferOptions,
    WholeOptions,
    encode_options,
    options_of,
    rule,
    same_on_all_ranks,
    takes,
)


@dataclass(frozen=True)
class Base(Options):
    """Hold some.

    Attributes:
        step: Which step, and
            where it is.
        kind: What kind.
    """

    step: int | None = None
    kind: str | bool = field(default="one", metadata=rule(choices=("one", "two", True)))


@dataclass(frozen=True)
class More(Base):
    """Hold more.

    Attributes:
        place: Where.
        text: What is compared is its length.
    """

    place: str = field(default="", metadata=rule(may_differ="each rank has a place of its own"))
    text: str = field(default="", metadata=rule(compared=len))


def test_fields_say_what_is_compared():
    assert More.compared() == ["step", "kind", "text"]
    assert More(step=3, place="here", text="abc").agreed() == {"step": 3, "kind": "one", "text": 3}
    assert json.loads(More(text="ab").encode("save", world=2)) == {
        "call": "save", "step": None, "kind": "one", "text": 2, "world": 2,
    }  # fmt: skip
    assert json.loads(More().encode("save", also={1}))["also"] == "{1}"


def test_a_rule_says_what_a_field_may_hold_and_whose_business_it_is():
    assert rule() == {"choices": (), "may_differ": "", "compared": None, "least": 0}
    assert rule((1, 2), "why", len) == {"choices": (1, 2), "may_differ": "why", "compared": len, "least": 0}


def test_options_that_another_call_has_too_are_passed_on():
    assert More(step=3, kind="two", place="here", text="abc").keywords(Base) == {"step": 3, "kind": "two"}
    assert Base().keywords(Options) == {}


@pytest.mark.parametrize("kind", ["three", 1, None, False])
def test_a_value_that_is_no_choice_is_refused(kind):
    for refuse in (lambda o: o.check(), lambda o: o.agreed(), lambda o: o.encode("save")):
        with pytest.raises(ValidationError) as caught:
            refuse(More(kind=kind))
        assert str(caught.value) == f"kind is 'one', 'two' or True; got {kind!r}. Remedy (FC101): give one of these"
    for good in ("one", "two", True):
        More(kind=good).check()


def test_a_call_declares_its_options():
    @takes(More, path="ranks reach it by different paths")
    def call(path: str, step: int | None = None, **options: Any) -> int:
        """Do it.

        Args:
            path: Where it is.

        Returns:
            One.

        Raises:
            OSError: Never.
        """
        return 1

    assert call("x") == 1
    parameters = inspect.signature(call).parameters
    assert list(parameters) == ["path", "step", "kind", "place", "text"]
    assert [parameters[name].kind.name for name in ("path", "step", "kind")] == [
        "POSITIONAL_OR_KEYWORD", "POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY",
    ]  # fmt: skip
    assert parameters["kind"].default == "one"
    assert parameters["kind"].annotation == "str | bool"
    assert options_of(call) is More
    assert inspect.getdoc(call) == (
        "Do it.\n\nArgs:\n    path: Where it is.\n    step: Which step, and\n        where it is.\n"
        "    kind: What kind.\n    place: Where.\n    text: What is compared is its length.\n\n"
        "Returns:\n    One.\n\nRaises:\n    OSError: Never.\n\n"
        "The same on every rank, and compared: ``step``, ``kind``, ``text``."
    )


def test_options_stand_before_what_is_raised_where_nothing_is_returned():
    @takes(Base)
    def call(**options: Any) -> None:
        """Do it.

        Args:

        Raises:
            OSError: Never.
        """

    text = inspect.getdoc(call)
    assert text.index("kind: What kind.") < text.index("Raises:") < text.index("The same on every rank")
    assert list(inspect.signature(call).parameters) == ["step", "kind"]


def test_the_texts_of_options_are_those_of_their_attributes():
    @dataclass(frozen=True)
    class Most(Base):
        """Hold most.

        Attributes:
            first: One.
            made: What no caller gives.
            last: Three.
        """

        first: int = 1
        made: int = field(default=2, init=False)
        last: int = 3

    @dataclass(frozen=True)
    class Bare(Most):
        """Hold the same.

        For example:

            kind: No option.
        """

    @takes(Bare)
    def call(**options: Any) -> None:
        pass

    assert inspect.getdoc(call) == (
        "    step: Which step, and\n        where it is.\n    kind: What kind.\n    first: One.\n    last: Three.\n\n"
        "The same on every rank, and compared: ``step``, ``kind``, ``first``, ``last``."
    )


def test_an_argument_that_is_no_option_needs_a_reason():
    with pytest.raises(TypeError, match=r"call: \['path', 'other'\] are neither options nor declared a rank's own"):

        @takes(More)
        def call(path: str, other: int, kind: str = "one") -> None:
            """Do it."""

    @takes(More)
    def method(self: object, kind: str = "one") -> None:
        """Do it."""

    assert list(inspect.signature(method).parameters) == ["self", "kind", "step", "place", "text"]
    assert inspect.getdoc(method).startswith("Do it.\n    step: Which step, and\n")


def test_a_calls_own_arguments_can_be_its_options():
    @same_on_all_ranks(path="its own")
    def call(self: object, path: str, step: int = 1, kind: str = "one") -> None:
        """Do it."""

    assert options_of(call).compared() == ["step", "kind"]
    assert inspect.getdoc(call).endswith("The same on every rank, and compared: ``step``, ``kind``.")
    said = json.loads(encode_options(call, {"path": "x", "step": 2, "kind": {1}, "more": 1}, kind="text", also=3))
    assert said == {"call": "call", "step": 2, "kind": "text", "also": 3}
    assert json.loads(encode_options(call, {"step": 2, "kind": {1}}))["kind"] == "{1}"

    @same_on_all_ranks(path="its own")
    def nothing(path: str) -> None:
        """Do it."""

    assert inspect.getdoc(nothing).endswith("compared: what they stand for.")


@pytest.mark.parametrize(
    ("strict", "missing", "unexpected"),
    [("missing", True, False), ("unexpected", False, True), (True, True, True), (False, False, False)],
)
def test_strictness(strict, missing, unexpected):
    options = TransferOptions(strict=strict)
    assert (options.missing_is_an_error, options.unexpected_is_an_error) == (missing, unexpected)


@pytest.mark.parametrize("wrong", [{"verify": "never"}, {"strict": 1}, {"dtype": "round"}, {"storage": "none"}])
def test_options_of_a_load_are_checked(wrong):
    LoadOptions().check()
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        LoadOptions(**wrong).check()
    assert "unique_id" not in LoadOptions.compared()
    assert LoadOptions(aoa_config={"aoa_statements": []}).agreed()["aoa_config"] != LoadOptions().agreed()["aoa_config"]


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, "5", None])
def test_a_file_of_an_export_has_a_positive_number_of_bytes(wrong):
    for good in (1, 5 << 30):
        ExportOptions(max_file_bytes=good).check()
    with pytest.raises(ValidationError) as caught:
        ExportOptions(max_file_bytes=wrong).check()
    assert str(caught.value) == f"max_file_bytes has to be an integer >= 1; got {wrong!r}. Remedy (FC101): give an int"
    with pytest.raises(ValidationError, match="verify"):
        ExportOptions(verify="never").check()


def test_a_prefix_ends_with_a_dot():
    assert [WholeOptions(prefix=prefix).start for prefix in (None, "", "model", "a.b")] == ["", "", "model.", "a.b."]


def test_a_call_without_other_ranks_compares_nothing():
    @takes(Base, path=ALONE)
    def call(path: str, **options: Any) -> None:
        """Do it."""

    assert inspect.getdoc(call) == "Do it.\nstep: Which step, and\n    where it is.\nkind: What kind."


def test_arguments_by_position_are_told_their_names():
    with pytest.raises(
        TypeError, match=r"save\(\) takes path by position, and the rest by name, such as model=, optim"
    ):
        fc.save("ck", 1, 2)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'; the nearest are \w+, \w+, \w+$"):
        fc.save("ck", zzz=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'; did you mean 'unique_id'"):
        fc.load("ck", step=3)
