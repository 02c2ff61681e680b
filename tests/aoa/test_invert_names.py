"""Inverses of statements that are taken apart: what stands between the parts is told from the user's names."""

from __future__ import annotations

import pytest

from paddle_flexckpt.aoa import invert
from tests.aoa.small import catalog, numbered


@pytest.mark.parametrize("name", ["my_step_x", "step_1", "global_step_count", "_step_2.w"])
def test_a_name_that_looks_like_a_temporary(name: str) -> None:
    found = invert({"aoa_statements": [f'a^T -> {name}, src_dtype="float16", dst_dtype="float32"']})
    assert found["aoa_statements"][0].startswith(f"{name} -> ")
    assert found["aoa_statements"][-1].endswith(" -> a")


@pytest.mark.parametrize(
    ("given", "expected"), [('reshape="auto"', 'reshape="[2, 3]"'), ('resize="auto", fill=0', 'resize="[2, 3]"')]
)
def test_auto_before_another_attribute(given: str, expected: str) -> None:
    target = numbered(6, dtype="float64") if "reshape" in given else numbered(4, 3, dtype="float64")
    statement = f'a -> b, {given}, src_dtype="float32", dst_dtype="float64"'
    found = invert({"aoa_statements": [statement]}, catalog({"a": numbered(2, 3)}), catalog({"b": target}))
    cast, back = found["aoa_statements"]
    assert cast.endswith('src_dtype="float64", dst_dtype="float32"')
    assert back.endswith(f"-> a, {expected}")
