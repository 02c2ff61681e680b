"""Orders of fused parameters: a save records them, and every way out of a checkpoint goes by what was recorded."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.catalog.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.loading.resharder import _load_state_dict
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.whole_tensors import iterate_tensors
from tests.loading.test_fused_degrees import FUSED, STATES, components, layout, part, shard

GATE_UP, QKV = "mlp.gate_up.weight", "attn.qkv.weight"
KEYS = [name + state for name in FUSED for state in STATES]


def natural(key: str) -> np.ndarray:
    """The whole tensor: all of q, then all of k, then all of v."""
    name = next(name for name in FUSED if key.startswith(name))
    return np.concatenate(components(name, key[len(name) :]), axis=FUSED[name][2])


def save(path, degree, mark=lambda weight: weight, keys=KEYS):
    def job(comm):
        state = {key: mark(weight) for key, weight in layout(degree, "", comm.rank).items() if key in keys}
        fc.save_state_dict(state, path, comm)

    SimulatedWorld(degree).run(job)


def without_rule(weight):
    weight.fused = None
    return weight


def targets(degree, rank, keys=KEYS, dist=False):
    """Shards of the whole in natural order, as a model has them that knows no rule; or as a DistTensor has them."""
    made = {}
    for key in keys:
        whole, name = natural(key), next(name for name in FUSED if key.startswith(name))
        axis = FUSED[name][2] % whole.ndim
        values = np.full_like(np.split(whole, degree, axis=axis)[rank], -1)
        offset = [0] * whole.ndim
        offset[axis] = values.shape[axis] * rank
        made[key] = fc.ShardedWeight(key, values, values.shape, whole.shape, offset)
        if dist:
            made[key].dist_tensor = object()  # whose local value it is
    return made


def fill_natural(weights, degree, rank):
    for key, weight in weights.items():
        name = next(name for name in FUSED if key.startswith(name))
        weight.local_tensor[...] = np.split(natural(key), degree, axis=FUSED[name][2])[rank]
    return weights


def check_natural(weights, degree, rank):
    for key, weight in fill_natural(targets(degree, rank, list(weights)), degree, rank).items():
        np.testing.assert_array_equal(weights[key].local_tensor, weight.local_tensor, err_msg=f"{key} on rank {rank}")


def of_gate_up(degree, rank, empty=False):
    """A marked parameter and its states."""
    return {k: w for k, w in layout(degree, "", rank, empty=empty).items() if k in KEYS and k.startswith(GATE_UP)}


def make_old(path):
    """Makes a checkpoint as it was before orders were recorded."""
    directory = open_to_save(path)
    manifest = directory.read_manifest()
    old = Manifest(**{**vars(manifest), "catalog": manifest.catalog.with_orders({})})
    directory.write_manifest(old, directory.manifest_bytes(manifest.unique_id))


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def solo():
    return SimulatedWorld(1).run(lambda comm: comm)[0]


# -- every way out ----------------------------------------------------------------------------------------------------


def test_merged_tensors_are_in_natural_order(tmp_path):
    save(tmp_path, 2)
    merged = fc.load_merged_state_dict(tmp_path)
    for key in KEYS:
        np.testing.assert_array_equal(merged[key].numpy(), natural(key), err_msg=key)


def test_merged_tensors_that_statements_leave_alone_or_rename_are_too(tmp_path):
    save(tmp_path, 2)
    config = {"aoa_statements": [f"{QKV} -> other.qkv", f"{GATE_UP} -> {GATE_UP}"]}
    merged = fc.load_merged_state_dict(tmp_path, aoa_config=config)
    np.testing.assert_array_equal(merged["mlp.gate_up.bias.w_0"].numpy(), natural("mlp.gate_up.bias.w_0"))
    for state in STATES:
        np.testing.assert_array_equal(merged["other.qkv" + state].numpy(), natural(QKV + state))
    # A statement that makes a key of itself takes it as it is stored.
    stored = np.concatenate([part(GATE_UP, "", 2, rank) for rank in range(2)], axis=1)
    np.testing.assert_array_equal(merged[GATE_UP].numpy(), stored)


def test_exported_tensors_are_in_natural_order_without_rules_too(tmp_path, capsys):
    from safetensors.numpy import load_file

    save(tmp_path / "run", 4)
    fc.export_safetensors(tmp_path / "run", tmp_path / "hf", states=True)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "by_cli")]) == 0
    exported, by_cli = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "by_cli"))
    for key in KEYS:
        np.testing.assert_array_equal(exported[key], natural(key), err_msg=key)
    for name in FUSED:
        np.testing.assert_array_equal(by_cli[name], natural(name), err_msg=name)


def test_tensors_one_by_one_are_in_natural_order(tmp_path):
    save(tmp_path, 2)
    directory = CheckpointDirectory(tmp_path)
    found = dict(iterate_tensors(directory.backend, directory.read_manifest()))
    for key in KEYS:
        np.testing.assert_array_equal(found[key], natural(key), err_msg=key)


def test_a_model_without_the_rule_gets_natural_order(tmp_path):
    save(tmp_path, 2)
    wanted = targets(1, 0)
    report = fc.load_state_dict(wanted, tmp_path, solo())
    check_natural(wanted, 1, 0)
    assert set(report.fused) == set(KEYS)
    assert report.fused[QKV] == "2 parts -> 1 parts"
    with pytest.raises(fc.ValidationError, match="another cut would permute them.*" + QKV.replace(".", r"\.")):
        fc.load_state_dict(targets(1, 0, [QKV]), tmp_path, solo(), fused="exact")


@pytest.mark.parametrize("degree", [2, 4])
def test_between_semi_automatic_and_tensor_parallel_shards(tmp_path, degree):
    save(tmp_path / "fleet", 2)

    def job(comm):
        wanted = targets(degree, comm.rank, dist=True)
        report = fc.load_state_dict(wanted, tmp_path / "fleet", comm)
        check_natural(wanted, degree, comm.rank)
        assert set(report.fused) == set(KEYS)
        fc.save_state_dict(wanted, tmp_path / "semi", comm)
        back = {key: weight for key, weight in layout(degree, "", comm.rank, empty=True).items() if key in KEYS}
        assert set(fc.load_state_dict(back, tmp_path / "semi", comm, strict=True).fused) == set(KEYS)
        live = {key: weight for key, weight in layout(degree, "", comm.rank, empty=True).items() if key in KEYS}
        assert set(fc.reshard_sharded_state_dict(wanted, live, comm).fused) == set(KEYS)
        for key, weight in layout(degree, "", comm.rank).items():
            if key in KEYS:
                np.testing.assert_array_equal(back[key].local_tensor, weight.local_tensor, err_msg=key)
                np.testing.assert_array_equal(live[key].local_tensor, weight.local_tensor, err_msg=key)
        again = targets(degree, comm.rank, dist=True)
        fc.reshard_sharded_state_dict(live, again, comm)
        check_natural(again, degree, comm.rank)

    SimulatedWorld(degree).run(job)


def test_a_renamed_parameter_is_put_right_too(tmp_path):
    save(tmp_path, 2, keys=[QKV, QKV + ".w_0"])

    def job(comm):
        wanted = {"other.qkv" + state: shard(QKV, 4, comm.rank, True) for state in ("", ".w_0")}
        config = {"aoa_statements": [f"{QKV} -> other.qkv"]}
        report = fc.load_state_dict(wanted, tmp_path, comm, aoa_config=config)
        for state in ("", ".w_0"):
            np.testing.assert_array_equal(wanted["other.qkv" + state].local_tensor, part(QKV, state, 4, comm.rank))
        assert set(report.fused) == {"other.qkv", "other.qkv.w_0"}

    SimulatedWorld(4).run(job)


def test_virtual_files_have_the_orders_of_their_shards():
    whole = natural(GATE_UP)
    half = (whole.shape[0], whole.shape[1] // 2)
    shards, storage = [], {}
    for rank in range(2):
        shards.append(LocalTensorMetadata((0, half[1] * rank), half, "float32", whole.shape))
        storage[LocalTensorIndex(GATE_UP, (0, half[1] * rank), local_shape=half)] = f"vfile_{rank}"

    def job(comm):
        held = {f"vfile_{comm.rank}": {GATE_UP: shard(GATE_UP, 2, comm.rank, False)}}
        wanted = targets(1, 0, [GATE_UP])
        _load_state_dict(wanted, held, [Metadata({GATE_UP: shards}, storage, {})], process_group=comm)
        np.testing.assert_array_equal(wanted[GATE_UP].local_tensor, whole)

    SimulatedWorld(2).run(job)


# -- what nobody says -------------------------------------------------------------------------------------------------


def test_an_old_checkpoint_is_told_of_and_not_guessed_about(tmp_path, caplog):
    save(tmp_path / "run", 2)
    make_old(tmp_path / "run")
    stored = np.concatenate([part(GATE_UP, "", 2, rank) for rank in range(2)], axis=1)
    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        merged = fc.load_merged_state_dict(tmp_path / "run")
    np.testing.assert_array_equal(merged[GATE_UP].numpy(), stored)  # as it lies
    (warning,) = warnings(caplog)
    assert "does not say in which order" in warning and GATE_UP in warning and QKV in warning
    caplog.clear()
    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        report = fc.export_safetensors(tmp_path / "run", tmp_path / "hf")
    assert GATE_UP in warnings(caplog)[0] and GATE_UP in report.maybe_fused
    caplog.clear()
    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        report = fc.load_state_dict(of_gate_up(1, 0, empty=True), tmp_path / "run", solo())
    assert report.maybe_fused == sorted(report.fused) == sorted(of_gate_up(1, 0))
    assert GATE_UP in warnings(caplog)[0]


def test_an_old_checkpoint_that_is_cut_as_here_loads_in_silence(tmp_path, caplog):
    save(tmp_path, 2)
    make_old(tmp_path)

    def job(comm):
        wanted = of_gate_up(2, comm.rank, empty=True)
        assert fc.load_state_dict(wanted, tmp_path, comm).maybe_fused == []
        for key, weight in of_gate_up(2, comm.rank).items():
            np.testing.assert_array_equal(wanted[key].local_tensor, weight.local_tensor)

    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        SimulatedWorld(2).run(job)
    assert warnings(caplog) == []


@pytest.mark.parametrize("forgets", ["save", "load"])
def test_a_rule_that_one_side_forgot_is_an_error(tmp_path, forgets):
    """Cut alike, and one side says that it is fused: nobody can tell whether the other is in natural order."""
    save(tmp_path, 2, without_rule if forgets == "save" else lambda weight: weight)

    def job(comm):
        wanted = {k: w for k, w in layout(2, "", comm.rank, empty=True).items() if k in KEYS}
        if forgets == "load":
            wanted = {key: without_rule(weight) for key, weight in wanted.items()}
        try:
            fc.load_state_dict(wanted, tmp_path, comm)
        finally:
            assert (wanted[QKV].local_tensor == -1).all()

    outcomes = SimulatedWorld(2).run_all(job)
    assert all(isinstance(outcome, fc.ValidationError) for outcome in outcomes)
    texts = {str(outcome) for outcome in outcomes}
    assert len(texts) == 1
    text = texts.pop()
    assert QKV in text and "expected a FusedAxis" in text and "Remedy (FC207): mark it" in text
    if forgets == "save":
        # Both remedies of the text: as they are, and every shard for a part.
        for tags, degree in (("", 2), (", fused_ffn", 4)):
            config = {"aoa_statements": [f"{GATE_UP} -> {GATE_UP}{tags}"]}

            def again(comm, config=config, degree=degree):
                wanted = of_gate_up(degree, comm.rank, empty=True)
                fc.load_state_dict(wanted, tmp_path, comm, aoa_config=config)
                for key, weight in of_gate_up(degree, comm.rank).items():
                    np.testing.assert_array_equal(wanted[key].local_tensor, weight.local_tensor)

            SimulatedWorld(degree).run(again)


def test_shards_in_natural_order_can_be_marked(tmp_path):
    save(tmp_path, 2, keys=[GATE_UP])

    def job(comm):
        wanted = targets(4, comm.rank, [GATE_UP])
        wanted[GATE_UP].fused = fc.FusedAxis(1, "fused_ffn", parts=1)
        fc.load_state_dict(wanted, tmp_path, comm)
        check_natural(wanted, 4, comm.rank)

    SimulatedWorld(4).run(job)


def test_states_of_an_optimizer_that_knows_no_rules_lie_like_their_parameters(tmp_path):
    def mark(weight):
        return weight if weight.key in FUSED else without_rule(weight)

    save(tmp_path, 2, mark)
    wanted = targets(1, 0)
    fc.load_state_dict(wanted, tmp_path, solo())
    check_natural(wanted, 1, 0)


def test_a_state_in_another_order_than_its_parameter_is_an_error(tmp_path):
    save(tmp_path, 2)
    wanted = targets(1, 0, [GATE_UP, GATE_UP + ".w_0"])
    wanted[GATE_UP + ".w_0"].fused = fc.FusedAxis(1, "fused_ffn", parts=2)
    with pytest.raises(fc.ValidationError, match="a fused parameter and its states are not in the same order"):
        fc.load_state_dict(wanted, tmp_path, solo())


def test_without_a_statement_natural_order_is_refused(tmp_path):
    def mark(weight):
        weight.fused = weight.fused and fc.FusedAxis(weight.fused.axis, None)
        return weight

    save(tmp_path / "run", 2, mark)
    for attempt in (
        lambda: fc.load_merged_state_dict(tmp_path / "run"),
        lambda: fc.export_safetensors(tmp_path / "run", tmp_path / "hf"),
    ):
        with pytest.raises(fc.ValidationError, match=r"Remedy .FC207.: .*-> .*gate_up"):
            attempt()
    # The remedy of the text.
    statements = [f"{name} -> {name}" for name in FUSED]
    fc.export_safetensors(tmp_path / "run", tmp_path / "hf", {"aoa_statements": statements})


@pytest.mark.parametrize(
    ("axis", "parts", "said"),
    [
        (2, None, "has an axis that the tensor has not"),
        (1, 3, "the parts of a fused parameter have to be equal"),
        (1, 0, "the parts of a fused parameter have to be equal"),
    ],
)
def test_a_rule_that_does_not_fit_is_an_error(tmp_path, axis, parts, said):
    def mark(weight):
        weight.fused = fc.FusedAxis(axis, "fused_ffn", parts)
        return weight

    with pytest.raises(fc.ValidationError, match=said):
        save(tmp_path, 2, mark)


def test_ranks_that_mark_one_parameter_differently_are_told(tmp_path):
    def job(comm):
        weight = shard(GATE_UP, 2, comm.rank, False)
        weight.fused = weight.fused if comm.rank else fc.FusedAxis(1, "fused_qkv_old, num_heads=4")
        fc.save_state_dict({GATE_UP: weight}, tmp_path, comm)

    outcomes = SimulatedWorld(2).run_all(job)
    assert {type(outcome) for outcome in outcomes} == {fc.ValidationError}
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert "ranks disagree about how a fused parameter is cut" in str(outcomes[0])
    assert CheckpointDirectory(tmp_path).list_ids() == []


def test_another_statement_at_the_target_is_an_error(tmp_path):
    save(tmp_path, 2, keys=[GATE_UP])
    wanted = {GATE_UP: shard(GATE_UP, 1, 0, True)}
    wanted[GATE_UP].fused = fc.FusedAxis(1, "fused_qkv_old, num_heads=4, num_key_value_groups=2")
    with pytest.raises(fc.ValidationError, match="source and target say different things"):
        fc.load_state_dict(wanted, tmp_path, solo())
    wanted[GATE_UP].fused = fc.FusedAxis(-1, "axis = 1 , fused_ffn")  # the same in other words
    fc.load_state_dict(wanted, tmp_path, solo())
    np.testing.assert_array_equal(wanted[GATE_UP].local_tensor, natural(GATE_UP))


# -- the format -------------------------------------------------------------------------------------------------------


def test_only_what_older_readers_would_get_wrong_has_a_newer_version(tmp_path):
    versions = {}
    for name, degree, mark in (("tp", 2, lambda w: w), ("whole", 1, lambda w: w), ("unmarked", 2, without_rule)):
        save(tmp_path / name, degree, mark)
        versions[name] = CheckpointDirectory(tmp_path / name).read_manifest().format_version
        for file in (*(tmp_path / name).glob("*.safetensors"), tmp_path / name / "0.manifest"):
            version = b'"format_version":"' + versions[name].encode() + b'"'
            assert version in file.read_bytes()
    assert versions == {"tp": "2", "whole": "1", "unmarked": "1"}


def test_a_changed_digit_of_the_version_is_damage(tmp_path):
    save(tmp_path, 2)
    data = CheckpointDirectory(tmp_path).read_manifest().encode()
    for digit in (b"1", b"3"):
        with pytest.raises(CorruptCheckpointError, match="is damaged"):
            Manifest.decode(data.replace(b'"format_version":"2"', b'"format_version":"' + digit + b'"'), "f")


@pytest.mark.parametrize(
    "order", [[0, 1, None], [2, None, "x"], [2, 7, None], [3, 1, None], ["2", 1, None], [1 << 20, 1, None], 5, None]
)
def test_orders_that_are_none_are_refused(tmp_path, order, monkeypatch):
    from paddle_flexckpt.catalog.orders import Order

    save(tmp_path, 2)
    manifest = CheckpointDirectory(tmp_path).read_manifest()
    monkeypatch.setattr(Order, "encode", lambda self: order)
    data = manifest.encode()
    monkeypatch.undo()
    with pytest.raises(CorruptCheckpointError, match="not a usable manifest"):
        Manifest.decode(data, "f")


def test_a_rebuilt_manifest_has_the_orders(tmp_path):
    save(tmp_path, 2)
    assert fc.verify_checkpoint(tmp_path).ok
    (tmp_path / "0.manifest").unlink()
    fc.repair_manifest(tmp_path, 0)
    assert fc.verify_checkpoint(tmp_path).ok
    wanted = targets(1, 0)
    fc.load_state_dict(wanted, tmp_path, solo())
    check_natural(wanted, 1, 0)


def test_inspect_shows_the_order(tmp_path, capsys):
    save(tmp_path, 2)
    assert main(["inspect", str(tmp_path), "--key", GATE_UP]) == 0
    assert f"{GATE_UP}: fused_ffn, along axis 1, 2 parts" in capsys.readouterr().out


def test_a_rule_that_the_load_forgot_is_an_error_also_where_the_source_is_whole(tmp_path):
    """Its shards may be natural or each a part: the source, saved by one process, does not tell."""
    save(tmp_path, 1)

    def job(comm):
        wanted = {k: without_rule(w) for k, w in layout(2, "", comm.rank, empty=True).items() if k in KEYS}
        fc.load_state_dict(wanted, tmp_path, comm)

    outcomes = SimulatedWorld(2).run_all(job)
    assert all(isinstance(outcome, fc.ValidationError) for outcome in outcomes), outcomes
    (text,) = {str(outcome) for outcome in outcomes}
    assert "a parameter is fused in the source" in text and "Remedy (FC207): mark it" in text


# -- what a name says -------------------------------------------------------------------------------------------------


def plain(key, degree, rank, order="cut"):
    """A part of a column-parallel weight, or all of it."""
    whole = np.arange(24, dtype=np.float32).reshape(2, 12)
    values = np.ascontiguousarray(np.split(whole, degree, axis=1)[rank])
    fused = {"cut": None, "natural": fc.FusedAxis(1, None, parts=1)}[order]
    return fc.ShardedWeight(key, values, values.shape, (2, 12), (0, rank * 12 // degree), fused=fused)


@pytest.mark.parametrize(("key", "degrees", "told"), [
    ("h.0.attn.qkv.weight", (2, 3), True), ("h.0.query_key_value.weight", (2, 1), True),
    ("c_attn.weight", (1, 2), True), ("mlp.gate_up_fused_proj.weight", (2, 3), True),
    ("mlp.up_gate_proj.weight.moment1_0", (2, 1), True), ("h.0.attn.qkv.weight", (2, 2), False),
    ("h.0.attn.q.weight", (2, 3), False), ("vec_attn.weight", (2, 1), False),
])  # fmt: skip
def test_a_name_of_a_fused_parameter_is_told_of_where_the_degree_changes(tmp_path, caplog, key, degrees, told):
    before, after = degrees
    SimulatedWorld(before).run(lambda comm: fc.save_state_dict({key: plain(key, before, comm.rank)}, tmp_path, comm))

    def load(comm, **options):
        target = plain(key, after, comm.rank)
        target.local_tensor[:] = -1
        report = fc.load_state_dict({key: target}, tmp_path, comm, optimizer_states="ignore", **options)
        return report.maybe_fused, target.local_tensor.tolist()

    expected = [([key] * told, plain(key, after, rank).local_tensor.tolist()) for rank in range(after)]
    assert SimulatedWorld(after).run(load) == expected
    assert (key in "".join(warnings(caplog))) == told
    if told and not key.endswith("_0"):  # and not where a statement says it
        caplog.clear()
        SimulatedWorld(after).run(lambda comm: load(comm, aoa_config=[f"{key} -> {key}, fused_ffn"]))
        assert warnings(caplog) == []


def test_in_natural_order_by_a_rule_nothing_is_told(tmp_path, caplog):
    key = "attn.qkv.weight"
    SimulatedWorld(2).run(lambda comm: fc.save_state_dict({key: plain(key, 2, comm.rank, "natural")}, tmp_path, comm))
    target = {key: plain(key, 1, 0)}
    assert fc.load_state_dict(target, tmp_path, solo()).maybe_fused == warnings(caplog) == []


def test_a_check_tells_of_a_name_of_a_fused_parameter_without_a_rule(caplog):
    for order, told in (("cut", ["attn.qkv.weight"]), ("natural", [])):
        caplog.clear()

        def check(comm, order=order):
            state = {key: plain(key, 2, comm.rank, order) for key in ("attn.qkv.weight", "attn.qkv.weight.moment1_0")}
            fc.check({**state, "up.weight": plain("up.weight", 2, comm.rank)}, process_group=comm)

        SimulatedWorld(2).run(check)
        assert [text.partition("These are: ")[2] for text in warnings(caplog)] == told
