"""Codes: which tensors are quantised, and that no cast takes their bits for numbers, whoever reads or writes them."""

from __future__ import annotations

import json
import re
from functools import partial

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import NATURAL
from paddle_flexckpt.native import partitions
from paddle_flexckpt.saving import planners
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.transfer.codes import Codes
from tests.remedies.following import Advice, provoked
from tests.transfer.samples import Part, catalog

F8 = "float8_e4m3fn"
WEIGHTS = np.linspace(-0.02, 0.02, 24, dtype=np.float32).reshape(4, 6)
REMEDY = Advice("transfer/codes.py", "make numbers of codes and scales by the AOA statements")


def codes(*parts: tuple, **settings) -> Codes:
    parts = [Part(key, shape, dtype, order=NATURAL) for key, shape, dtype in parts]
    return Codes(catalog(*parts), None, lambda: settings)


@pytest.mark.parametrize(
    ("dtype", "key", "beside"),
    [
        (F8, "a.weight", "a.weight_scale_inv"),  # DeepSeek
        (F8, "a.weight", "a.weight_scale"),  # compressed-tensors, FBGEMM, modelopt
        (F8, "weight", "weight_scale_2"),
        ("float8_e5m2", "a.wq.weight", "a.wq.scale"),
        (F8, "a.w", "a.w._scale"),
        ("int8", "a.weight", "a.SCB"),  # bitsandbytes, 8 bits
        ("int8", "a.weight", "a.weight.SCB"),
        ("uint8", "a.weight", "a.weight.absmax"),  # and 4
        ("uint8", "a.weight", "a.weight.quant_map"),
        ("int8", "a.weight._data", "a.weight._scale"),  # quanto
        ("int8", "a.weight.codes", "a.weight.scale"),  # torchao
        ("int32", "a.qweight", "a.scales"),  # GPTQ, AWQ
        ("int32", "a.qweight", "a.qzeros"),
        ("int32", "a.weight_packed", "a.weight_scale"),
        ("uint8", "a.gate_up_proj_blocks", "a.gate_up_proj_scales"),  # MXFP4
        ("int32", "a.weight", "a.scales"),
        ("int32", "a.packed", "a.weight_zero_point"),
        ("int8", "a.quant_weight", "a.quant_scale"),  # Paddle
        ("int8", "a.quant_weight", "a.weight_scale"),
        ("uint8", "optim.state.w.state1", "optim.state.w.absmax1"),
        (F8, "a.weight", "a.scale_weight"),  # ComfyUI
        ("int8", "a.weight", "a.comfy_quant"),
        ("int8", "a.weight", "a.weight_s"),
        (F8, "a.weight", "a.weight_dequant_scale"),
    ],
)
def test_a_scale_beside_them_tells_codes(dtype, key, beside):
    found = codes((key, (4, 6), dtype), (beside, (1, 1), "float32"), ("b.bias", (6,), "float32"))
    assert found.scales(key) == [beside]
    problem = found.problem(key, "bfloat16", rank=3)
    assert (problem.key, problem.rank, repr(beside) in problem.got) == (key, 3, True)
    assert "cast" not in problem.remedy
    # Their bits stay as they are; and scales are numbers.
    assert found.problem(key, dtype) is found.problem(key, "int64") is found.problem(beside, "bfloat16") is None


@pytest.mark.parametrize(
    ("dtype", "key", "beside"),
    [
        ("int64", "attn.relative_position_index", "attn.logit_scale"),
        ("int32", "attn.index", "attn.logit_scale"),
        ("int64", "steps", "scale"),
        ("float32", "norm.weight", "norm.weight_scale"),
        (F8, "a.weight", "b.weight_scale"),
        (F8, "a.weight", "a.weight.bias"),
        ("bool", "a.mask", "a.scale"),
    ],
)
def test_numbers_without_a_scale_of_theirs_are_no_codes(dtype, key, beside):
    found = codes((key, (4, 6), dtype), (beside, (1,), "float32"))
    assert (found.scales(key), found.problem(key, "bfloat16")) == ([], None)


def hf_file(path, tensors):
    """Write a safetensors file as another program does."""
    path.mkdir()
    source = path.parent / f"{path.name} native"
    fc.save_state_dict(tensors, source)
    fc.export_safetensors(source, path)


@pytest.mark.parametrize("beside", ["", "a.factor", "a.scale_b", "scaled_fp8", "b.weight_scale", "a.weight_amax"])
def test_float8_of_another_program_is_codes_whatever_stands_beside_it(tmp_path, beside):
    hf, native = tmp_path / "hf", tmp_path / "native"
    bits = WEIGHTS.astype(ml_dtypes.float8_e4m3fn)
    hf_file(hf, {"a.weight": bits} | ({beside: np.float32([0.5])} if beside else {}))
    convert_checkpoint(hf, native)
    convert_checkpoint(native, tmp_path / "turned", aoa_config=["a.weight^T -> a.weight"])
    target = {"a.weight": np.full((4, 6), 7, np.float32)}
    for source in (hf, native):
        for dtype in ("raise", "cast"):
            with pytest.raises(fc.ValidationError, match="FC208"):
                fc.load_state_dict(target, source, dtype=dtype)
    for number, source in enumerate((hf, native, tmp_path / "turned")):
        with pytest.raises(fc.ValidationError, match="FC208"):
            convert_checkpoint(source, tmp_path / f"out{number}", dtype="bfloat16")
    assert (target["a.weight"] == 7).all()
    fc.load_state_dict(target, hf, aoa_config=['a.weight -> a.weight, scale=1, dtype="float32"'])
    assert target["a.weight"].tolist() == bits.astype(np.float32).tolist()


def test_a_configuration_tells_codes_without_scales():
    parts = ("a.weight", (4, 6), "int8"), ("a.norm", (6,), "int8"), ("a.ids", (4, 6), "int64")
    assert codes(*parts).problem("a.weight", "float32") is None
    for name in ("quantization_config", "compression_config"):
        found = codes(*parts, **{name: {"quant_method": "eetq"}})
        problem = found.problem("a.weight", "float32")
        assert "'quantization_config'" in problem.got
        assert "library that quantised them (eetq) write them dequantized" in problem.remedy
        assert [found.problem(key, "float32") for key in ("a.norm", "a.ids")] == [None, None]


@pytest.mark.parametrize(
    ("scale", "block", "statements"),
    [
        ((1, 1), None, ['block="[4, 6]"']),
        ((4, 1), None, ['block="[1, 6]"']),
        ((1, 1), [128, 128], ['block="[128, 128]"']),
        ((2, 2), [2, 4], ['block="[2, 4]"']),
        ((), None, ['w_scale -> w_scale, reshape="[1, 1]"', 'block="[4, 6]"']),
        ((1,), None, ['w_scale -> w_scale, reshape="[1, 1]"', 'block="[4, 6]"']),
        ((4,), None, ['w_scale -> w_scale, reshape="[4, 1]"', 'block="[1, 6]"']),
    ],
)
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_the_statements_that_the_error_names_give_the_numbers(tmp_path, scale, block, statements, kind):
    scales = np.linspace(0.01, 0.02, int(np.prod(scale)), dtype=np.float32).reshape(scale)
    bits = np.arange(24, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(4, 6)
    factor = scales if scales.ndim == 2 else scales.reshape(-1, 1)
    rows, columns = block or (4 // factor.shape[0], 6 // factor.shape[1])
    whole = np.kron(factor, np.ones((rows, columns), np.float32))[:4, :6]
    fc.save_state_dict({"w": bits, "w_scale": scales}, tmp_path)
    if block:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": block}}))
    target = {"w": np.zeros((4, 6), kind)}
    with provoked(*REMEDY) as caught:
        fc.load_state_dict(target, tmp_path)
    named = re.findall(r"'([^']+ -> [^']+)'", str(caught.value).partition("Remedy")[2])
    assert [wanted in text for wanted, text in zip(statements, named)] == [True] * len(named), named
    fc.load_state_dict(target, tmp_path, aoa_config={"aoa_statements": named})
    assert target["w"].tolist() == (bits.astype(np.float32) * whole).astype(kind).tolist()


def test_where_shapes_leave_the_block_open_it_is_asked_for():
    found = codes(("w", (256, 256), F8), ("w_scale_inv", (2, 2), "float32"))
    assert 'block="[rows, columns]"\', with the extents of a block' in found.problem("w", "float32").remedy
    found = codes(("a_blocks", (4, 2, 16), "uint8"), ("a_scales", (4, 2), "uint8"))
    assert """'a_blocks, a_scales -> a, dequant="mxfp4"'""" in found.problem("a_blocks", "float32").remedy
    # No scales of floats, or none of these codes.
    for kind, shape in (("uint8", (2, 2)), ("float32", (3, 5, 2))):
        found = codes(("w", (256, 256), F8), ("w_scale", shape, kind))
        assert "library" in found.problem("w", "float32").remedy


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    bits = (WEIGHTS / 0.02 * 448).astype(ml_dtypes.float8_e4m3fn)
    state = {"lin.weight": bits, "lin.weight_scale_inv": np.float32([[0.02 / 448]]), "norm": WEIGHTS[0]}
    fc.save_state_dict(state, path)
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    return path


MADE = 'lin.weight, lin.weight_scale_inv -> lin.weight, dequant="fp8", block="[4, 6]"'
CASTS = (None, ["lin.weight^T -> x", "x^T -> lin.weight"], ['lin.weight -> lin.weight, dtype="float32"'])


@pytest.mark.parametrize("statements", CASTS)
@pytest.mark.parametrize("size", [1, 2])
def test_no_load_and_no_reshard_takes_codes_for_numbers(source, size, statements):
    target = [{"lin.weight": np.full((4, 6), 7, np.float32), "norm": np.full(6, 7, np.float32)} for _ in range(size)]
    asked = {} if statements is None else {"aoa_config": {"aoa_statements": statements}}
    made = {"aoa_config": {"aoa_statements": [MADE]}}

    def reshard(comm, **options):
        stored = fc.load_merged_state_dict(source)
        fc.reshard_sharded_state_dict(stored, target[comm.rank], comm, **options)

    def load(comm, **options):
        fc.load_state_dict(target[comm.rank], source, comm, **options)

    for call in (load, reshard):
        for dtype in ("raise", "cast"):
            with provoked(*REMEDY):
                SimulatedWorld(size).run(partial(call, dtype=dtype, **asked))
            assert [float(each["norm"][0]) for each in target] == [7] * size, "nothing is touched"
        SimulatedWorld(size).run(partial(call, **made))
        for each in target:
            np.testing.assert_allclose(each["lin.weight"], WEIGHTS, atol=0.02 / 16)
            each["lin.weight"][:] = each["norm"][:] = 7


def test_conversions_exports_and_merges_take_no_codes_for_numbers(source, tmp_path):
    cast = {"aoa_statements": ['lin.weight -> lin.weight, dtype="bfloat16"']}
    made = {"aoa_statements": [MADE]}
    calls = (
        lambda out, **more: convert_checkpoint(source, out, format="huggingface", **more),
        lambda out, **more: fc.export_safetensors(source, out, **more),
        lambda out, **more: fc.merge_sharded_state_dict(source, out, process_group="self", **more),
    )
    for number, call in enumerate(calls):
        out = tmp_path / f"out{number}"
        with provoked(*REMEDY):
            call(out, aoa_config=cast)
        assert not out.exists(), "nothing is written"
        call(out, aoa_config=made)
        np.testing.assert_allclose(fc.load_merged_state_dict(out)["lin.weight"].numpy(), WEIGHTS, atol=0.02 / 16)
    with provoked(*REMEDY):
        convert_checkpoint(source, tmp_path / "bf16", dtype="bfloat16")
    assert not (tmp_path / "bf16").exists()
    convert_checkpoint(source, tmp_path / "bf16", dtype="bfloat16", aoa_config=made)
    assert str(fc.load_merged_state_dict(tmp_path / "bf16")["lin.weight"].dtype) == "paddle.bfloat16"
    # What stays codes keeps its scales as they are.
    convert_checkpoint(source, tmp_path / "same")
    assert fc.load_merged_state_dict(tmp_path / "same")["lin.weight_scale_inv"].numpy().item() == np.float32(0.02 / 448)


def test_a_conversion_keeps_the_scales_of_codes_that_it_keeps(tmp_path):
    bits = np.arange(24, dtype=np.int8).reshape(4, 6)
    state = {"lin.weight": bits, "lin.SCB": WEIGHTS[:, 0], "lin.bias": WEIGHTS[:, 1]}
    fc.save_state_dict(state, tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "bf16", dtype="bfloat16")
    found = fc.load_merged_state_dict(tmp_path / "bf16")
    kinds = {key: str(value.dtype) for key, value in found.items()}
    assert kinds == {"lin.weight": "paddle.int8", "lin.SCB": "paddle.float32", "lin.bias": "paddle.bfloat16"}
    assert found["lin.SCB"].numpy().tolist() == WEIGHTS[:, 0].tolist()
    # Nothing here knows how these codes become numbers.
    target = {"lin.weight": np.zeros((4, 6), np.float32)}
    with provoked("transfer/codes.py", "into targets of the saved dtypes"):
        fc.load_state_dict(target, tmp_path / "bf16", dtype="cast")
    saved = {"lin.weight": np.zeros((4, 6), np.int8), "lin.SCB": np.zeros(4, np.float32)}
    fc.load_state_dict(saved, tmp_path / "bf16")
    assert (saved["lin.weight"].tolist(), saved["lin.SCB"].tolist()) == (bits.tolist(), WEIGHTS[:, 0].tolist())


def test_ranks_that_read_a_part_of_the_manifest_see_the_scales(tmp_path, monkeypatch):
    monkeypatch.setattr(planners, "SPREAD_ROWS", -1)
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", 1)
    state = {f"l{i}.weight": WEIGHTS.astype(ml_dtypes.float8_e4m3fn) for i in range(9)}
    state |= {f"l{i}.weight_scale": np.float32([[2]]) for i in range(9)}
    SimulatedWorld(2).run(lambda comm: fc.save_state_dict(state, tmp_path, comm))
    target = {"l3.weight": np.zeros((4, 6), np.float32)}
    with provoked(*REMEDY):
        SimulatedWorld(2).run(lambda comm: fc.load_state_dict(target, tmp_path, comm, dtype="cast"))
