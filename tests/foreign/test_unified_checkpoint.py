"""Unified checkpoints made by hand: names, places of ranks' parts, and what does not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory, detect_format
from paddle_flexckpt.foreign.paddle_checkpoint import read_plain_file
from paddle_flexckpt.tools.verification import verify_checkpoint
from paddle_flexckpt.tools.whole_tensors import iterate_tensors

MODEL = {
    "embed.weight": np.arange(24, dtype=np.float32).reshape(6, 4),
    "up.weight": np.arange(24, 48, dtype=np.float32).reshape(4, 6),
    "norm.weight": np.arange(4, dtype=np.float32),
}
AXES = {"embed.weight": 0, "up.weight": 1}
KINDS = {"moment1_0": 100, "moment2_0": 200}
POWER = np.asarray([0.81], dtype=np.float32)
STATES = {
    **{f"{name}/{kind}": array + add for name, array in MODEL.items() for kind, add in KINDS.items()},
    **{f"{name}/beta1_pow_acc_0": POWER for name in MODEL},
}
EXPECTED = {**MODEL, **{name.replace("/", "."): array for name, array in STATES.items()}}


def save(path, tensors):
    path.write_bytes(safetensors_numpy.save(tensors, {"format": "np"}))


def save_merged(path, stem, tensors, files=2, **settings):
    """Whole tensors in several files, and their index."""
    names, weight_map = list(tensors), {}
    for number in range(files):
        file = f"{stem}-{number + 1:05d}-of-{files:05d}.safetensors"
        mine = names[number::files]
        save(path / file, {name: tensors[name] for name in mine})
        weight_map.update(dict.fromkeys(mine, file))
    (path / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, **settings}))


def part(name, array, rank, degree):
    axis = AXES.get(name.partition("/")[0])
    if axis is None or array.size == 1:
        return array
    return np.ascontiguousarray(np.split(array, degree, axis)[rank])


def save_split(path, kind, tensors, tp=2, shard=1):
    """Each rank's own states, parameters spread over the sharding ranks."""
    for t in range(tp):
        for s in range(shard):
            suffix = f"tp{t:02d}" + (f"_shard{s:02d}" if shard > 1 else "")
            mine = {n: part(n, a, t, tp) for n, a in tensors.items() if list(MODEL).index(n.split("/")[0]) % shard == s}
            save(path / f"{kind}.{suffix}.safetensors", mine)


def write(path, split=False, masters=None, **settings):
    save_merged(path, "model", MODEL)
    if split:
        save_split(path, "optimizer", STATES)
        (path / "optimizer.safetensors.index.json").write_text(json.dumps({"quant_ckpt_resume_times": 0, **settings}))
    else:
        save_merged(path, "optimizer", STATES, master_weights=masters is not None, **settings)
    if masters is not None:
        save_merged(path, "master_weights", masters)
    return path


def contents(path):
    directory = SourceDirectory(path)
    manifest = directory.read_manifest()
    assert manifest.origin == "unified_checkpoint"
    return dict(iterate_tensors(directory.backend, manifest, names=manifest.catalog.keys))


def assert_holds(path, expected):
    got = contents(path)
    assert sorted(got) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name].reshape(array.shape), array, err_msg=name)
        assert got[name].dtype == array.dtype


@pytest.mark.parametrize("split", [False, True])
def test_states_have_the_names_of_this_library(tmp_path, split):
    write(tmp_path, split)
    assert detect_format(tmp_path) == "unified_checkpoint"
    assert_holds(tmp_path, EXPECTED)
    assert verify_checkpoint(tmp_path).ok


def test_parts_of_ranks_have_their_places(tmp_path):
    catalog = SourceDirectory(write(tmp_path, split=True)).read_manifest().catalog
    rows = {
        (catalog.key_name(row), catalog.file_name(row)): catalog.unpadded(row, catalog.offset)
        for row in range(len(catalog))
    }
    assert rows["embed.weight.moment1_0", "optimizer.tp01.safetensors"] == (3, 0)
    assert rows["up.weight.moment2_0", "optimizer.tp01.safetensors"] == (0, 3)
    assert rows["norm.weight.moment1_0", "optimizer.tp01.safetensors"] == (0,)  # a replica
    assert rows["up.weight.beta1_pow_acc_0", "optimizer.tp01.safetensors"] == (0,)


def test_parts_of_tensor_parallelism_times_sharding(tmp_path):
    save_merged(tmp_path, "model", MODEL)
    save_split(tmp_path, "optimizer", STATES, tp=2, shard=3)
    assert_holds(tmp_path, EXPECTED)
    (tmp_path / "optimizer.tp01_shard01.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"optimizer\.tp01_shard01\.safetensors is missing"):
        SourceDirectory(tmp_path).read_manifest()


def test_one_file_without_a_place(tmp_path):
    """As pure data parallelism writes it."""
    save_merged(tmp_path, "model", MODEL)
    save(tmp_path / "optimizer.safetensors", STATES)
    assert_holds(tmp_path, EXPECTED)


def test_a_rank_without_its_file(tmp_path):
    write(tmp_path, split=True)
    (tmp_path / "optimizer.tp01.safetensors").unlink()
    with pytest.raises(
        ValidationError, match=r"a rank's state does not fit its parameter.*expected \[6, 4\]; got \[3, 4\]"
    ):
        SourceDirectory(tmp_path).read_manifest()
    write(tmp_path, split=True)
    (tmp_path / "optimizer.tp00.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="are missing or doubled"):
        SourceDirectory(tmp_path).read_manifest()


def test_a_part_that_a_rank_lacks(tmp_path):
    write(tmp_path, split=True)
    mine = {name: part(name, array, 1, 2) for name, array in STATES.items() if name != "up.weight/moment1_0"}
    save(tmp_path / "optimizer.tp01.safetensors", mine)
    with pytest.raises(CorruptCheckpointError, match=r"lacks parts of tensors.*'up\.weight\.moment1_0'"):
        SourceDirectory(tmp_path).read_manifest()


@pytest.mark.parametrize("name", ["mlp.gate_up_fused_proj.weight", "attn.c_attn.weight", "h.mlp.dense_h_to_4h.bias"])
def test_parts_that_are_not_consecutive_are_refused(tmp_path, name):
    """A rank has its part of the gate, then its part of up: no box of the whole."""
    save_merged(tmp_path, "model", {name: np.zeros((4, 8), dtype=np.float32)}, files=1)
    for rank in range(2):
        save(
            tmp_path / f"optimizer.tp{rank:02d}.safetensors", {f"{name}/moment1_0": np.zeros((4, 4), dtype=np.float32)}
        )
    with pytest.raises(
        ValidationError, match="fused parameter.*Remedy .FC701.: resume once in PaddleNLP .* ignore_merge_optimizer"
    ):
        SourceDirectory(tmp_path).read_manifest()
    # Whole, it is like any other.
    for rank in range(2):
        (tmp_path / f"optimizer.tp{rank:02d}.safetensors").unlink()
    save_merged(tmp_path, "optimizer", {f"{name}/moment1_0": np.ones((4, 8), dtype=np.float32)}, files=1)
    assert contents(tmp_path)[f"{name}.moment1_0"].all()


@pytest.mark.parametrize("shape", [(3, 6), (2, 3), (12,), (4, 2)])
def test_parts_that_fit_nowhere(tmp_path, shape):
    write(tmp_path, split=True)
    for rank in range(2):
        mine = {
            **{n: part(n, a, rank, 2) for n, a in STATES.items()},
            "up.weight/moment1_0": np.zeros(shape, np.float32),
        }
        save(tmp_path / f"optimizer.tp{rank:02d}.safetensors", mine)
    with pytest.raises(ValidationError, match=r"does not fit its parameter.*one of 2 equal parts of \[4, 6\]"):
        SourceDirectory(tmp_path).read_manifest()


def test_without_weights_the_place_of_a_part_is_not_known(tmp_path):
    save_split(tmp_path, "master_weights", MODEL)
    with pytest.raises(ValidationError, match="the model's weights, .* lack the parameter"):
        SourceDirectory(tmp_path).read_manifest()


def test_experts_of_several_ranks_under_one_name(tmp_path):
    save_merged(tmp_path, "model", MODEL)
    save(tmp_path / "optimizer.moe00.safetensors", STATES)
    save(tmp_path / "optimizer.moe01.safetensors", {"norm.weight/moment1_0": STATES["norm.weight/moment1_0"]})
    with pytest.raises(ValidationError, match="several ranks of expert parallelism have a state of this name"):
        SourceDirectory(tmp_path).read_manifest()


def test_names_of_several_strategies(tmp_path):
    write(tmp_path, split=True)
    save(tmp_path / "optimizer.tp00_pp00.safetensors", STATES)
    with pytest.raises(ValidationError, match="states of several strategies"):
        SourceDirectory(tmp_path).read_manifest()


def test_states_of_whole_tensors_and_of_ranks(tmp_path):
    write(tmp_path)
    save_split(tmp_path, "optimizer", STATES)
    with pytest.raises(
        ValidationError, match="states of whole tensors .* and of ranks .* Remedy .FC304.: move those away"
    ):
        SourceDirectory(tmp_path).read_manifest()


HALF = {name: array.astype(np.float32).view(np.uint32) >> 16 for name, array in MODEL.items()}


def half_model():
    """bfloat16 as PaddleNLP writes it, but for the norm."""
    return {n: MODEL[n] if n.startswith("norm") else HALF[n].astype(np.uint16) for n in MODEL}


@pytest.mark.parametrize("split", [False, True])
def test_master_weights(tmp_path, split):
    write(tmp_path, split)
    save_merged(tmp_path, "model", half_model())
    if split:
        masters = {name: array for name, array in MODEL.items() if name != "norm.weight"}
        save_split(tmp_path, "master_weights", masters)
    else:
        # PaddleNLP puts parameters of single precision among them.
        save_merged(tmp_path, "master_weights", MODEL)
    got = contents(tmp_path)
    assert sorted(name for name in got if name.endswith(".w_0")) == ["embed.weight.w_0", "up.weight.w_0"]
    assert (got["up.weight"].dtype.name, got["norm.weight"].dtype.name) == ("bfloat16", "float32")
    np.testing.assert_array_equal(got["up.weight"].view(np.uint16).reshape(4, 6), HALF["up.weight"])
    np.testing.assert_array_equal(got["up.weight.w_0"].reshape(4, 6), MODEL["up.weight"])


def test_master_weights_in_place_of_weights(tmp_path):
    """skip_save_model_weight."""
    write(tmp_path)
    save_merged(tmp_path, "optimizer", STATES, master_weights=True)
    got = contents(tmp_path)
    for name, array in MODEL.items():
        np.testing.assert_array_equal(got[f"{name}.w_0"].reshape(array.shape), array)
        np.testing.assert_array_equal(got[name].reshape(array.shape), array)
    # But weights of another type are no master weights.
    save_merged(tmp_path, "model", half_model())
    with pytest.raises(
        CorruptCheckpointError, match=r"master_weights\.safetensors\.index\.json is missing: by optimizer"
    ):
        SourceDirectory(tmp_path).read_manifest()


@pytest.mark.parametrize("stem", ["model", "optimizer", "master_weights"])
def test_an_index_that_is_missing(tmp_path, stem):
    write(tmp_path, masters=MODEL)
    (tmp_path / f"{stem}.safetensors.index.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{stem}\.safetensors\.index\.json is missing"):
        SourceDirectory(tmp_path).read_manifest()


def test_a_file_that_is_missing(tmp_path):
    write(tmp_path)
    (tmp_path / "optimizer-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CorruptCheckpointError, match=r"optimizer-00002-of-00002\.safetensors is missing; .*index\.json names it"
    ):
        detect_format(tmp_path), SourceDirectory(tmp_path).read_manifest()


@pytest.mark.parametrize(
    ("name", "shape", "fine"),
    [
        ("embed.weight", (6, 4), True),
        ("embed.weight", (6, 2), False),
        ("mlp.experts.0.weight", (6, 4), False),
        ("other", (6, 4), False),
    ],
)
def test_a_tensor_that_two_stages_of_a_pipeline_share(tmp_path, name, shape, fine):
    """Both write it, and the index has one of them. Experts of several ranks may have one name, and be others."""
    key = "embed.weight" if name == "other" else name
    save_merged(tmp_path, "model", {key: MODEL["embed.weight"], "v": MODEL["norm.weight"]})
    second = "model-00002-of-00002.safetensors"
    save(tmp_path / second, {"v": MODEL["norm.weight"], name: np.zeros(shape, dtype=np.float32)})
    if fine:
        assert_holds(tmp_path, {key: MODEL["embed.weight"], "v": MODEL["norm.weight"]})
        return
    with pytest.raises(CorruptCheckpointError, match="a file has a tensor that the index (has elsewhere|lacks)"):
        SourceDirectory(tmp_path).read_manifest()


@pytest.mark.parametrize("split", [False, True])
def test_quantised_states_are_refused(tmp_path, split):
    write(tmp_path, split, ckpt_quant_stage="O1")
    with pytest.raises(
        ValidationError, match=r"quantised \(ckpt_quant_stage 'O1'\).*Remedy .FC701.: resume once in PaddleNLP"
    ):
        SourceDirectory(tmp_path).read_manifest()


def test_adapters(tmp_path):
    save_merged(tmp_path, "peft_model", {"q.lora_A": MODEL["norm.weight"]}, files=1, type="lora")
    save_merged(tmp_path, "optimizer", {"q.lora_A/moment1_0": MODEL["norm.weight"]}, files=1)
    assert_holds(tmp_path, {"q.lora_A": MODEL["norm.weight"], "q.lora_A.moment1_0": MODEL["norm.weight"]})


def test_weights_alone(tmp_path):
    save_merged(tmp_path, "model", MODEL)
    assert detect_format(tmp_path) == "unified_checkpoint"
    assert_holds(tmp_path, MODEL)


def test_weights_under_an_index_and_in_one_file(tmp_path):
    write(tmp_path)
    save(tmp_path / "model.safetensors", MODEL)
    with pytest.raises(ValidationError, match="has several sets of safetensors files"):
        SourceDirectory(tmp_path).read_manifest()


def test_the_path_of_an_index_gives_its_own_names(tmp_path):
    write(tmp_path, masters=MODEL)
    assert_holds(tmp_path / "master_weights.safetensors.index.json", MODEL)
    with pytest.raises(ValidationError, match="has no ids"):
        SourceDirectory(tmp_path).read_manifest(3)


def test_state_of_a_scheduler(tmp_path):
    import pickle

    state = {"last_epoch": 3, "last_lr": 0.5, "milestones": [1, 2]}
    (tmp_path / "scheduler.pdparams").write_bytes(pickle.dumps({**state, "StructuredToParameterName@@": {}}, 4))
    assert read_plain_file(tmp_path, "scheduler.pdparams") == state
    (tmp_path / "scheduler.pdparams").write_bytes(pickle.dumps({"StructuredToParameterName@@": 1}, 4))
    with pytest.raises(CorruptCheckpointError, match="is not what paddle.save writes"):
        read_plain_file(tmp_path, "scheduler.pdparams")
    with pytest.raises(CorruptCheckpointError, match="leaves the checkpoint's directory"):
        read_plain_file(tmp_path, "../scheduler.pdparams")
