"""Statements as PaddleFleet's generators write them: there and back, bit for bit, for tiny models of every form.

What they have to make is made by hand in :mod:`tests.aoa.fleet_models`, and again by the oracle.
"""

from __future__ import annotations

import numpy as np
import pytest

from paddle_flexckpt.aoa import AoaError, compile_program
from paddle_flexckpt.aoa.invert import invert
from tests.aoa.fleet_models import EXPERTS, GROUPS, HEADS_TEXT, HIDDEN, MODELS, WIDTH, FleetModel
from tests.aoa.oracle import Oracle, Source, Target
from tests.aoa.small import Arrays, Cuts, assert_equal, catalog, compiled, numbered, room, run

DEGREES = (1, 2)
CASES = [pytest.param(name, parts, id=f"{name}, {parts}") for name in MODELS for parts in DEGREES]


def rooms(arrays: Arrays, kept: list[str]) -> dict[str, np.ndarray]:
    """Targets of these shapes; those of ``kept`` have their values already."""
    return {
        key: np.ascontiguousarray(array) if key in kept else room(*array.shape, dtype=array.dtype.name)
        for key, array in arrays.items()
    }


def by_oracle(texts: list[str], source: Arrays, target: Arrays, source_cuts: Cuts, target_cuts: Cuts) -> Arrays:
    oracle = Oracle(
        {key: Source(array, source_cuts.get(key, (0, 1))[1]) for key, array in source.items()},
        {key: Target(a.shape, a.dtype.name, target_cuts.get(key, (0, 1))[1]) for key, a in target.items()},
    )
    for text in texts:
        oracle.run(text.replace("'", '"'))
    found = oracle.results()
    return {key: array if found[key].keep is not None else found[key].array for key, array in target.items()}


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, int], FleetModel]:
    return {(name, parts): make(parts) for name, make in MODELS.items() for parts in DEGREES}


@pytest.mark.parametrize(("name", "parts"), CASES)
def test_from_the_checkpoint_to_the_model(models, name: str, parts: int):
    model = models[name, parts]
    target = rooms(model.paddle, model.kept)
    assert_equal(run(model.forward, model.hf, target, None, model.cuts), model.paddle)
    assert_equal(by_oracle(model.forward, model.hf, target, {}, model.cuts), model.paddle)


@pytest.mark.parametrize(("name", "parts"), CASES)
def test_from_the_model_to_the_checkpoint(models, name: str, parts: int):
    model = models[name, parts]
    target = rooms(model.hf, [])
    assert_equal(run(model.inverse, model.paddle, target, model.cuts), model.hf)
    assert_equal(by_oracle(model.inverse, model.paddle, target, model.cuts, {}), model.hf)


@pytest.mark.parametrize(("name", "parts"), CASES)
def test_the_forward_statements_reversed(models, name: str, parts: int):
    """What PaddleFleet does with a model that has no inverse: ``aoa_config_reverse``."""
    model = models[name, parts]
    config = {"aoa_statements": model.forward, "aoa_config_reverse": True}
    assert_equal(run((), model.paddle, rooms(model.hf, []), model.cuts, config=config), model.hf)


@pytest.mark.parametrize(("name", "parts"), CASES)
def test_an_export_has_the_checkpoints_names_and_no_temporaries(models, name: str, parts: int):
    model = models[name, parts]
    mapping = compile_program(model.inverse, catalog(model.paddle, model.cuts), None)
    assert set(mapping.outputs) == set(model.hf)
    assert {key: mapping.tensors[key].shape for key in mapping.outputs} == {k: a.shape for k, a in model.hf.items()}


@pytest.mark.parametrize("name", MODELS)
def test_optimizer_states_take_the_same_way(models, name: str):
    """Moments and master weights of a checkpoint under the checkpoint's names."""
    model = models[name, 1]

    def with_moments(arrays: Arrays, kept: list[str]) -> dict[str, np.ndarray]:
        states = {f"{key}.moment1_0": array.astype("float32") + 0.5 for key, array in arrays.items()}
        return {**arrays, **{key: state for key, state in states.items() if key[: -len(".moment1_0")] not in kept}}

    source, expected = with_moments(model.hf, []), with_moments(model.paddle, model.kept)
    assert_equal(run(model.forward, source, rooms(expected, model.kept)), expected)


def test_the_shorter_inverse_of_attention_gives_weights_as_linear_layers_have_them():
    """The newest generator that was read writes no transposes behind ``fused_qkv``: q, k and v are [in, out] then."""
    model = FleetModel()
    model.qkv("hf", "model")
    shorter = [text for text in model.inverse if "fused_qkv" in text]
    names = [f"hf.{x}_proj.weight" for x in "qkv"]
    expected = {name: model.hf[name].T for name in names}
    assert_equal(run(shorter, model.paddle, rooms(expected, [])), expected)


def test_casts_of_both_dtypes_come_back():
    """As the older protocol writes them."""
    there, back = (", ".join(f"{x}_dtype='{y}'" for x, y in pair) for pair in (
        (("src", "bfloat16"), ("dst", "float32")),
        (("src", "float32"), ("dst", "bfloat16")),
    ))  # fmt: skip
    hf = {"hf.w": numbered(3, 2, dtype="bfloat16")}
    model = {"w": numbered(3, 2)}
    assert_equal(run([f"hf.w -> w, {there}"], hf, rooms(model, [])), model)
    assert_equal(run([f"w -> hf.w, {back}"], model, rooms(hf, [])), hf)
    assert invert([f"hf.w -> w, {there}"])["aoa_statements"][0].replace('"', "'") == f"w -> hf.w, {back}"


# -- what cannot be reversed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a -> b, dtype='float32'", 'dtype="float32" does not tell the dtype that there was'),
        ("a -> _", "it is removed"),
        ("a -> b, permute='[1, 0]', reshape='[4, 6]'", "reshape does not tell the shape that there was"),
    ],
)
def test_forms_without_an_inverse_text_are_refused_by_name(text: str, why: str):
    with pytest.raises(AoaError, match="AOA statement 2: has no exact inverse: 'a' cannot be restored, as ") as caught:
        invert(["x^T -> y", text])
    assert why in str(caught.value)


def test_a_join_of_experts_without_sizes_cannot_be_reversed_without_a_destination():
    """An export has none: the reverse statement is named, and says what it lacks."""
    config = {"aoa_statements": ["e.0,e.1 -> grouped_gemm_experts.weight1, axis=0"], "aoa_config_reverse": True}
    with pytest.raises(AoaError, match='sizes="auto" takes the extents from the destination') as caught:
        compile_program(config, catalog({"grouped_gemm_experts.weight1": room(4, 2)}), None)
    assert "grouped_gemm_experts.weight1 -> e.0, e.1" in str(caught.value)


def test_a_model_without_a_tensor_that_the_checkpoint_wants_is_named():
    model = FleetModel()
    model.grouped_experts("hf", "model")
    del model.paddle["model.grouped_gemm_experts.weight2"]
    config = {"aoa_statements": model.forward, "aoa_config_reverse": True}
    with pytest.raises(AoaError) as caught:
        run((), model.paddle, rooms(model.hf, []), config=config)
    lost = [str(problem) for problem in caught.value.problems]
    assert len(lost) == EXPERTS
    assert all("has no exact inverse: 'hf.experts." in text and ".down_proj.weight' cannot" in text for text in lost)


def test_heads_that_do_not_fit_are_told_with_the_statement():
    rows = {"q": 3 * WIDTH, "k": GROUPS * WIDTH, "v": GROUPS * WIDTH}
    source = {f"hf.{x}": room(count, HIDDEN) for x, count in rows.items()}
    text = f"hf.q^T, hf.k^T, hf.v^T -> model.qkv, fused_qkv, {HEADS_TEXT}"
    with pytest.raises(AoaError, match="AOA statement 1: q has 6 elements along axis 1, 1.5 for each of 4 heads"):
        compiled([text], source, {"model.qkv": room(HIDDEN, sum(rows.values()))})
