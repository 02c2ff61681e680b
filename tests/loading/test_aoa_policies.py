"""What loads make of a mapping besides moving: errors, names, tied and shared memory, reports, merged loads."""

from __future__ import annotations

import contextlib
import json
import threading

import ml_dtypes
import numpy as np
import pytest

from paddle_flexckpt import aoa
from paddle_flexckpt.aoa import AoaError, Node, Region, TensorInfo
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.merged import load_merged_state_dict
from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
from paddle_flexckpt.memory.tensors import HostTensor
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import FusedAxis, ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.property.mappings import Move, Program, Weighted, statements_of
from tests.ramdisk import memory_directory
from tests.remedies.following import advised


@pytest.fixture(params=["files", "memory"])
def move(request):
    """``move(mapping, source, target, **options)`` on one rank; returns the report."""

    def through(mapping, source, target, **options):
        def job(comm):
            if request.param == "memory":
                return reshard_sharded_state_dict(source, target, comm, aoa_config=config, **options)
            with memory_directory() as path:
                save_state_dict(source, path, comm)
                return load_state_dict(target, path, comm, aoa_config=config, **options)

        means = contextlib.nullcontext(mapping) if isinstance(mapping, dict) else statements_of(mapping)
        with means as config:
            (report,) = SimulatedWorld(1).run(job)
        return report

    return through


def state(**tensors) -> dict[str, np.ndarray]:
    return {key: np.asarray(value, dtype=np.float32) for key, value in tensors.items()}


def renames(**pairs) -> Program:
    """``target="source"``: vectors of two float32 each."""
    made = Program()
    for name, source in pairs.items():
        made.tensors[name] = TensorInfo((2,), "float32")
        made.moves[name] = [Move((0,), (2,), source, (0,), (0,))]
    return made


def weight(key, tensor, aliases=(), fused=None) -> ShardedWeight:
    made = ShardedWeight(key, tensor, tensor.shape, tensor.shape, (0,) * tensor.ndim)
    made.aliases, made.fused = aliases, fused
    return made


# --- what does not fit --------------------------------------------------------------------------------------------


def test_another_shape_or_dtype_is_an_error_that_names_the_statement(move):
    mapping = renames(w="a", v="a").mapping(provenance={"w": "AOA statement 1: a{0} -> w"})
    target = {"w": np.zeros(3, dtype=np.float32), "v": np.zeros(2, dtype=ml_dtypes.bfloat16)}
    with pytest.raises(ValidationError) as caught:
        move(mapping, state(a=[1, 2]), target)
    text = str(caught.value)
    assert "expected [3] (target); got AOA gives [2] (AOA statement 1: a{0} -> w)" in text
    assert "expected bfloat16 (target); got AOA gives float32. Remedy" in text
    assert not target["w"].any()


def test_dtypes_are_cast_where_that_is_allowed_and_keeps_their_meaning(move):
    mapping, source = renames(w="a").mapping(), state(a=[1.5, 2])
    target = {"w": np.zeros(2, dtype=ml_dtypes.bfloat16)}
    assert move(mapping, source, target, dtype="cast").cast == {"w": "float32 -> bfloat16"}
    assert target["w"].tolist() == [1.5, 2]
    with pytest.raises(ValidationError, match="a cast would lose.*AOA gives float32"):
        move(mapping, source, {"w": np.zeros(2, dtype=np.int32)}, dtype="cast")


def test_a_target_that_nothing_feeds_is_missing(move):
    mapping = renames(w="a").mapping(removed=frozenset({"a", "b"}), unfed=frozenset({"b"}))
    source, target = state(a=[1, 2], b=[3, 4]), state(w=[0, 0], b=[0, 0])
    with pytest.raises(ValidationError, match="nothing feeds a target .key 'b'.*a statement removes.*Remedy"):
        move(mapping, source, target)
    report = move(mapping, source, target, strict=False)
    assert (report.missing, report.unexpected, target["w"].tolist()) == (["b"], [], [1, 2])
    assert target["b"].tolist() == [0, 0]


def test_what_statements_use_or_remove_is_not_unexpected(move):
    made = renames(w="a", u="#x")
    made.moves["u"] = []
    made.regions["u"] = [Region((0,), (2,), 0, (0,), (0,))]
    made.tensors["#x"], made.moves["#x"] = TensorInfo((2,), "float32"), [Move((0,), (2,), "x", (0,), (0,))]
    made.nodes.append(Node(Weighted((1.0,)), TensorInfo((2,), "float32"), ("#x",)))
    mapping = made.mapping(removed=frozenset({"gone"}))
    source = state(a=[1, 2], x=[3, 4], gone=[5], plain=[6])
    report = move(mapping, source, state(w=[0, 0], u=[0, 0], plain=[0]), strict=True)
    assert report.unexpected == []
    with pytest.raises(ValidationError, match="no rank asks for key 'x'"):
        move(mapping, source, state(w=[0, 0], plain=[0]), strict=True)
    with pytest.raises(ValidationError, match="no rank asks for key 'w'"):
        move(mapping, {**source, **state(w=[7])}, state(w=[0, 0], u=[0, 0], plain=[0]), strict=True)


def test_a_fused_parameter_that_statements_make_is_not_refused(move):
    made = renames(w="a")
    made.moves["w"] = [Move((i,), (1,), "a", (i,), (0,)) for i in range(2)]
    target = np.zeros(1, dtype=np.float32)
    part = ShardedWeight("w", target, (1,), (2,), (1,))
    part.fused = FusedAxis(0, "fused_ffn")
    move(made.mapping(), state(a=[1, 2]), {"w": part})
    assert target.tolist() == [2]


# --- names --------------------------------------------------------------------------------------------------------


def test_a_tied_name_that_statements_define_serves_where_the_own_name_is_unknown(move):
    mapping = renames(embed="a").mapping()
    source = state(a=[1, 2], other=[3, 4])
    target = np.zeros(2, dtype=np.float32)
    report = move(mapping, source, {"head": weight("head", target, ("embed",))})
    assert (target.tolist(), report.aliases, report.unexpected) == ([1, 2], {"head": "embed"}, ["other"])
    # What the source has under the own name, or under an earlier one, comes first.
    for names in (("other", ("embed",)), ("head", ("other", "embed"))):
        move(mapping, source, {names[0]: weight(names[0], target, names[1])})
        assert target.tolist() == [3, 4]
    with pytest.raises(ValidationError, match="no such key.*'head'"):
        move(mapping, source, {"head": weight("head", target, ("embed",))}, tied_names=False)


def test_a_name_that_statements_define_or_remove_is_not_the_source_of_that_name(move):
    target = np.zeros(2, dtype=np.float32)
    move(renames(embed="a").mapping(), state(a=[1, 2], embed=[3, 4]), {"head": weight("head", target, ("embed",))})
    assert target.tolist() == [1, 2]
    mapping = renames(w="a").mapping(removed=frozenset({"embed"}))
    with pytest.raises(ValidationError, match="no such key.*'head'"):
        move(mapping, state(a=[1, 2], embed=[3, 4]), {"head": weight("head", target, ("embed",))})


def test_a_name_that_nothing_feeds_is_looked_for_under_the_names_that_statements_feed(move):
    """The states of a tied parameter stand under one of its names only."""
    made = renames(embed="a")
    unfed = {"head": "AOA statement 2: other -> head: the source has no key 'x'"}
    source = state(a=[1, 2], head=[3, 4], other=[5, 6])
    target = np.zeros(2, dtype=np.float32)
    # "other" is the source's own, which the statements do not speak of.
    tied = weight("head", target, ("other", "gone", "embed"))
    mapping = made.mapping(unfed=frozenset({"head", "gone"}), provenance=unfed)
    report = move(mapping, source, {"head": tied})
    assert (report.aliases, target.tolist()) == ({"head": "embed"}, [1, 2])
    for options in ({"tied_names": False}, {}):
        aliases = ("embed",) if options else ("other", "gone")
        with pytest.raises(ValidationError, match="nothing feeds.*'head'.*got AOA statement 2: other -> head: the sou"):
            move(mapping, source, {"head": weight("head", target, aliases)}, **options)


def test_why_nothing_feeds_a_target_is_said(move):
    config = {"aoa_statements": ["a -> w, scale=2.0"]}
    source = state(**{"a": [1, 2], "a.moment1_0": [3, 4], "w.moment1_0": [5, 6]})
    target = state(**{"w": [0, 0], "w.moment1_0": [7, 8]})
    with pytest.raises(ValidationError) as caught:
        move(config, source, target)
    text = str(caught.value)
    assert "nothing feeds a target (key 'w.moment1_0', rank 0)" in text
    assert "got AOA statement 1: a -> w, scale=2.0: the parameter is computed element by element" in text
    assert text.count("Remedy (") == 1
    assert 'states="moment1_0"' in text
    assert not target["w"].any()
    assert move(config, source, target, strict=False, optimizer_states="ignore").missing == ["w.moment1_0"]
    assert (target["w"].tolist(), target["w.moment1_0"].tolist()) == ([2, 4], [7, 8])


def test_masters_are_reported_cast_and_leave_nothing_over(move):
    mapping = renames(w="a.w_0").mapping(masters={"w": "a.w_0"})
    source = {"a": np.zeros(2, dtype=ml_dtypes.bfloat16), **state(**{"a.w_0": [1, 2]})}
    target = state(w=[0, 0])
    report = move(mapping, source, target, master_weights="convert", strict=True)
    assert (report.masters, target["w"].tolist()) == ({"w": "a.w_0"}, [1, 2])


# --- memory -------------------------------------------------------------------------------------------------------


def test_tied_targets_that_are_made_alike_are_filled_once(move):
    memory = np.zeros(2, dtype=np.float32)
    made = renames(t="a", u="a")
    made.moves["t"] = made.moves["u"] = [Move((0,), (1,), "a", (0,), (0,))]
    made.regions["t"] = made.regions["u"] = [Region((1,), (1,))]
    report = move(made.mapping(), state(a=[1, 2]), {"t": memory, "u": memory}, strict=True)
    assert (memory.tolist(), report.bytes_needed, report.keys) == ([1, 0], 4, 1)


def test_tied_targets_that_are_made_differently_are_compared(move):
    memory = np.zeros(2, dtype=np.float32)
    mapping = renames(t="a", u="b").mapping()
    move(mapping, state(a=[1, 2], b=[1, 2]), {"t": memory, "u": memory})
    with pytest.raises(CheckpointError, match="'t' and 'u' are one tied parameter"):
        move(mapping, state(a=[1, 2], b=[1, 3]), {"t": memory, "u": memory})
    made = renames(t="a", u="b")
    made.moves["u"], made.regions["u"] = [Move((0,), (1,), "b", (0,), (0,))], [Region((1,), (1,))]
    move(made.mapping(), state(a=[5, 6], b=[5, 9]), {"t": memory, "u": memory})
    assert memory.tolist() == [5, 6]


def test_tied_targets_of_which_one_keeps_what_the_other_computes_are_not_alike(move):
    made = renames(t="a", u="a")
    made.tensors["#0"], made.moves["#0"] = TensorInfo((1,), "float32"), [Move((0,), (1,), "a", (1,), (0,))]
    made.nodes.append(Node(Weighted((2.0,)), TensorInfo((1,), "float32"), ("#0",)))
    made.moves["t"] = made.moves["u"] = [Move((0,), (1,), "a", (0,), (0,))]
    made.regions["t"], made.regions["u"] = [Region((1,), (1,))], [Region((1,), (1,), 0, (0,), (0,))]
    for names, expected in (("ut", [1, 6.5]), ("tu", None)):
        memory = np.zeros(2, dtype=np.float32)
        target = {name: memory for name in names}
        if expected is not None:
            move(made.mapping(), state(a=[1, 3]), target)
            assert memory.tolist() == expected
            continue
        # What u computes would be lost.
        with pytest.raises(CheckpointError, match="'t' and 'u' are one tied parameter"):
            move(made.mapping(), state(a=[1, 3]), target)


def test_a_swap_in_place_is_refused():
    """Each target is the very source shard of its name, but its values come from the other."""
    tensors, config = state(a=[1, 2], b=[3, 4], c=[5, 6]), {"aoa_statements": ["a, b -> b, a"]}

    def job(target, comm):
        return reshard_sharded_state_dict(tensors, target, comm, aoa_config=config)

    with pytest.raises(ValidationError, match="'a as AOA makes it'.*memory of source a.*clone"):
        SimulatedWorld(1).run(lambda comm: job(tensors, comm))
    assert tensors["a"].tolist() == [1, 2]
    target = {**state(a=[0, 0], b=[0, 0]), "c": tensors["c"]}
    SimulatedWorld(1).run(lambda comm: job(target, comm))
    assert [target[key].tolist() for key in "abc"] == [[3, 4], [1, 2], [5, 6]]


def test_a_target_that_statements_leave_in_place_may_be_its_source():
    """Identities share memory with their sources, as without statements; nothing else does."""
    rng = np.random.default_rng(0)

    def run(*statements, **change):
        tensors = {key: rng.standard_normal((2, 3)).astype(np.float32) for key in ("a", "b", "c")}
        tensors["unit"] = rng.standard_normal((1, 3, 1)).astype(np.float32)
        tensors["scalar"] = np.asarray(rng.standard_normal(), dtype=np.float32)
        before = {key: value.copy() for key, value in tensors.items()}
        target = {**tensors, **{key: np.zeros_like(tensors[key]) for key in change}}
        config = {"aoa_statements": list(statements)}
        SimulatedWorld(1).run(lambda comm: reshard_sharded_state_dict(tensors, target, comm, aoa_config=config))
        return before, target

    before, after = run("a -> a", "scalar -> scalar", 'unit -> unit, permute="[2, 1, 0]"', "b, c -> c, b", b=1, c=1)
    for key, source in {"a": "a", "unit": "unit", "scalar": "scalar", "b": "c", "c": "b"}.items():
        assert after[key].tobytes() == before[source].tobytes()
    for statement in (
        "b -> a",
        "a -> a, scale=2.0",
        'a -> a, permute="[1, 0]", reshape="[2, 3]"',
        'a -> a, slice="[0:1]", pad="[[0, 1], [0, 0]]", fill=0',
        'a -> a, slice="[1:2]", pad="[[0, 1], [0, 0]]", fill="keep"',
        'a -> x, dtype="bfloat16"\nx -> a, dtype="float32"',
    ):
        with pytest.raises(ValidationError, match="'a as AOA makes it'.*memory of source a "):
            run(statement)


def test_a_tied_target_in_the_memory_of_a_source_that_it_does_not_come_from_is_refused():
    """Its own name is no statement's target, but what is moved into it is another tensor."""
    tensors, fresh = state(head=[1, 2], a=[3, 4]), np.zeros(2, dtype=np.float32)
    mapping = renames(embed="a", x="head").mapping(unfed=frozenset({"head"}))
    for memory in (tensors["head"], fresh):
        target = {"head": weight("head", memory, ("embed",)), **state(x=[0, 0])}

        def job(comm, target=target):
            with statements_of(mapping) as config:
                return reshard_sharded_state_dict(tensors, target, comm, aoa_config=config)

        if memory is fresh:
            SimulatedWorld(1).run(job)
            continue
        with pytest.raises(ValidationError, match="'head as AOA makes it'.*memory of source head"):
            SimulatedWorld(1).run(job)
    assert (fresh.tolist(), tensors["head"].tolist()) == ([3, 4], [1, 2])


def test_kept_elements_are_not_written_and_are_reported(move):
    made = renames(t="a")
    made.moves["t"] = [Move((1,), (1,), "a", (1,), (0,))]
    made.regions["t"] = [Region((0,), (1,))]
    made.tensors["whole"], made.regions["whole"] = TensorInfo((), "float32"), [Region((), ())]
    target = state(t=[8, 9], whole=7)
    report = move(made.mapping(), state(a=[1, 2]), target, strict=True)
    assert (target["t"].tolist(), target["whole"].item()) == ([8, 2], 7)
    assert (report.kept, report.computed, report.bytes_needed, report.keys) == (["t", "whole"], [], 4, 2)
    assert "2 kept in part or whole" in report.summary()


# --- several ranks ------------------------------------------------------------------------------------------------


def refusals(configs, compile_program=None):
    """The texts of :func:`errors`."""
    return [str(error) for error in errors(configs, compile_program)]


def errors(configs, compile_program=None):
    """What both ways give on ranks with these configurations; every rank has to end with the same error."""
    found = []
    with pytest.MonkeyPatch.context() as patch, memory_directory() as path:
        if compile_program is not None:
            patch.setattr(aoa, "compile_program", compile_program, raising=False)
        SimulatedWorld(len(configs)).run(lambda comm: save_state_dict(state(w=[1, 2]), path, comm))

        def load(comm):
            return load_state_dict(state(w=[0, 0]), path, comm, aoa_config=configs[comm.position])

        def reshard(comm):
            config = configs[comm.position]
            return reshard_sharded_state_dict(state(w=[1, 2]), state(w=[0, 0]), comm, aoa_config=config)

        for job in (load, reshard):
            outcomes = SimulatedWorld(len(configs)).run_all(job)
            assert all(isinstance(outcome, ValidationError) for outcome in outcomes), outcomes
            assert len({id(outcome) for outcome in outcomes}) == len(configs), "a rank was left waiting"
            assert len({(type(outcome), str(outcome)) for outcome in outcomes}) == 1
            found.append(outcomes[0])
    return found


def test_ranks_have_to_be_given_the_same_statements():
    one, other = ({"aoa_statements": [f"w -> {name}"]} for name in "wv")
    for configs in ((one, other), (one, None), (None, one), (one, {**one, "aoa_config_reverse": True})):
        for text in refusals(configs):
            assert "ranks disagree" in text
            assert "aoa_config" in text


def test_the_same_statements_may_be_given_in_several_forms():
    config, compiled = {"aoa_statements": ["w -> w"]}, []
    lock = threading.Lock()

    def compile_program(aoa_config, source, target, *, master_weights, completion):
        assert not completion
        with lock:
            compiled.append((source.keys, target.keys, len(target), master_weights))
        return renames(w="w").mapping()

    with pytest.MonkeyPatch.context() as patch, memory_directory() as path:
        patch.setattr(aoa, "compile_program", compile_program, raising=False)
        file = path / "aoa.json"
        file.write_text(json.dumps(config))
        configs = [config, json.dumps(config), str(file), file]

        def job(comm):
            save_state_dict(state(w=[1, 2]), path / "checkpoint", comm)
            target = state(w=[0, 0])
            config = configs[comm.position]
            load_state_dict(target, path / "checkpoint", comm, aoa_config=config, master_weights="convert")
            return target["w"].tolist()

        assert SimulatedWorld(4).run(job) == [[1, 2]] * 4
    assert compiled == [(("w",), ("w",), 4, "convert")] * 4


def test_a_program_that_does_not_fit_is_the_same_error_on_every_rank():
    def compile_program(*_args, **_options):
        raise ValidationError(["statement 1 does not fit"])

    for text in refusals([{"aoa_statements": ["w -> w"]}] * 3, compile_program):
        assert text.endswith("[ranks 0-2] statement 1 does not fit")


def test_a_malformed_program_is_an_aoa_error_on_every_rank():
    for outcome in errors([{"aoa_statements": ["w -> -> w"]}] * 2):
        assert type(outcome) is AoaError
        assert "[ranks 0-1] AOA statement 1, column" in str(outcome)


def test_ranks_have_to_want_one_dtype_of_what_statements_make():
    def job(comm):
        dtype = ml_dtypes.bfloat16 if comm.position else np.float32
        target = {"v": np.zeros(2, dtype=dtype), "w": np.zeros(2, dtype=dtype)}
        config = {"aoa_statements": ["w -> v"]}
        return reshard_sharded_state_dict(state(w=[1, 2]), target, comm, aoa_config=config, dtype="cast")

    outcomes = SimulatedWorld(2).run_all(job)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert "different dtypes (key 'v'); expected one dtype; got ['bfloat16', 'float32']" in str(outcomes[0])
    assert "'w'" not in str(outcomes[0])  # which is the source's own


def test_a_configuration_that_is_none_is_an_error_on_every_rank():
    for text in refusals([{"aoa_statements": ["w -> w"]}, {"statements": []}]):
        assert "[rank 1] aoa_config has unknown keys ['statements']" in text


def test_a_malformed_target_is_found_before_statements_are_compiled():
    def job(comm):
        broken = ShardedWeight("w", np.zeros(2, dtype=np.float32), (2,), (2,), (comm.position,))
        return reshard_sharded_state_dict(state(w=[1, 2]), {"w": broken}, comm, aoa_config={"aoa_statements": []})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aoa, "compile_program", None, raising=False)
        outcomes = SimulatedWorld(2).run_all(job)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert "[rank 1] shard outside its global shape" in str(outcomes[0])


# --- merged -------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint():
    with memory_directory() as path:
        tensors = state(**{"a": [1, 2], "b": [3, 4], "gone": [5, 6], "plain": [7], "extra_state.common": [8]})
        SimulatedWorld(1).run(lambda comm: save_state_dict(tensors, path, comm))
        yield path


def merged(path, *statements, **options):
    pytest.importorskip("paddle")
    found = load_merged_state_dict(path, aoa_config={"aoa_statements": list(statements)}, **options)
    return {key: HostTensor(tensor).array.tolist() for key, tensor in found.items()}


@pytest.mark.paddle
def test_a_merged_load_gives_what_statements_define_and_what_they_do_not_touch(checkpoint):
    program = ("a -> m.t", "b -> m.u, scale=2.0", "a -> b", "gone -> _")
    assert merged(checkpoint, *program) == {"b": [1, 2], "m.t": [1, 2], "m.u": [6, 8], "plain": [7]}
    assert merged(checkpoint, *program, prefix="m") == {"t": [1, 2], "u": [6, 8]}
    with pytest.raises(ValidationError, match="no key starts with 'extra_state"):
        merged(checkpoint, *program, prefix="extra_state")
    assert merged(checkpoint, "a -> _", "b -> _", "gone -> _", "plain -> _") == {}


@pytest.mark.paddle
def test_a_merged_load_has_nothing_to_keep(checkpoint):
    with pytest.raises(ValidationError, match="keep what a target has.*'b'.*AOA statement 1.*Remedy.*fill=0"):
        merged(checkpoint, 'b -> b, resize="[3]", fill="keep"')


SQUARE = np.arange(9, dtype=np.float32).reshape(3, 3)


def loaded_with(path, *statements, key="0.weight", shape=(3, 3)):
    target = {key: np.zeros(shape, np.float32)}
    load_state_dict(target, path, SoloCommunicator(), aoa_config={"aoa_statements": [*statements]})
    return target[key]


def test_a_statement_that_makes_a_name_that_no_target_has_is_a_warning(tmp_path, caplog):
    """Else a misspelt name leaves a square tensor as it is stored, without a word."""
    save_state_dict({"0.weight": SQUARE, "0.bias": SQUARE[0]}, tmp_path, SoloCommunicator())
    assert np.array_equal(loaded_with(tmp_path, '"0.weight"^T -> "0.wieght"'), SQUARE)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "1 AOA statement made names that no target has, and changed nothing, such as '0.wieght'" in warning
    assert '(AOA statement 1: "0.weight"^T -> "0.wieght"); there is \'0.weight\'' in warning
    advised("catalog/texts.py", "correct the name on the right, and load again; or leave the statement out", warning)
    caplog.clear()
    assert np.array_equal(loaded_with(tmp_path, '"0.weight"^T -> "0.weight"'), SQUARE.T)
    assert np.array_equal(loaded_with(tmp_path), SQUARE)
    # A name that a later statement reads, and statements of a family of which a part is loaded.
    assert np.array_equal(loaded_with(tmp_path, '"0.weight"^T -> t', 't -> "0.weight"'), SQUARE.T)
    save_state_dict({"l.0.w": SQUARE, "l.1.w": SQUARE}, tmp_path / "family", SoloCommunicator())
    assert np.array_equal(loaded_with(tmp_path / "family", "l.$N.w^T -> l.$N.w", key="l.1.w"), SQUARE.T)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_the_statements_of_a_reverse_load_may_be_for_more_than_is_loaded(tmp_path, caplog):
    save_state_dict({"a": SQUARE, "b": SQUARE}, tmp_path, SoloCommunicator())
    config = {"aoa_statements": ["x^T -> a", "y -> b"], "aoa_config_reverse": True}
    target = {"x": np.zeros((3, 3), np.float32)}
    load_state_dict(target, tmp_path, SoloCommunicator(), aoa_config=config)
    assert np.array_equal(target["x"], SQUARE.T)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
