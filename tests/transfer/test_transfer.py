"""Transfer: its steps, what ranks tell each other in them, its errors, and what its report says."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from paddle_flexckpt.aoa import compile_program
from paddle_flexckpt.catalog import NATURAL, CatalogBuilder, CheckpointError, Order, ValidationError
from paddle_flexckpt.catalog.texts import order_warning, replica_warning
from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer import transfer
from paddle_flexckpt.transfer.agreement import check_heads
from paddle_flexckpt.transfer.options import LoadOptions
from paddle_flexckpt.transfer.source import Source
from paddle_flexckpt.transfer.transfer import Transfer, quiet_loads
from tests.remedies.following import advised
from tests.transfer.held import Shelf, targets_of

CONTEXT = "cannot load"


def numbers(*shape, dtype=np.float32, start=1):
    return np.arange(start, start + np.prod(shape, dtype=int)).astype(dtype).reshape(shape)


def zeros(values):
    return {key: np.zeros_like(value) for key, value in values.items()}


class Noted(SoloCommunicator):
    """One rank alone, which notes its collectives."""

    def __init__(self, rank=0):
        super().__init__(rank)
        self.contexts, self.said = [], []

    def together(self, work, context=""):
        self.contexts.append(context)
        result, answers = super().together(work, context)
        self.said.append(answers[0])
        return result, answers


def transfer_of(source, targets, comm=None, **options):
    return Transfer(
        Noted() if comm is None else comm, source, lambda: targets, LoadOptions(**options), "load_state_dict", CONTEXT
    )


def load(source, targets, comm=None, **options):
    return transfer_of(source, targets, comm, **options).run()


def on_ranks(job, size=2, **options):
    """What ``job(comm)``, which gives a source and targets, led to on every rank, and the communicators."""
    comms = [None] * size

    def work(comm):
        comms[comm.position] = comm
        source, targets = job(comm)
        own = {key: value(comm.rank) if callable(value) else value for key, value in options.items()}
        return load(source, targets, comm, **own)

    return SimulatedWorld(size).run_all(work), comms


def refused(outcomes):
    """The text of the one error that all ranks have."""
    assert all(isinstance(outcome, ValidationError) for outcome in outcomes), outcomes
    (text,) = {str(outcome) for outcome in outcomes}
    return text


def test_all_steps_are_taken_in_order_and_the_source_is_closed():
    values = {"a": numbers(2, 3), "b": numbers(4)}
    targets, source, comm = targets_of(zeros(values)), Shelf(values, sends=(b"mine", b"too")), Noted()
    done = targets.memory.events = source.events
    asked = []

    def describe():
        asked.append(1)
        return targets

    options = LoadOptions(strict=True)
    Transfer(comm, source, describe, options, "load_state_dict", CONTEXT).run()
    assert done == [
        "open", "prepare", ("plan", [(b"mine",), (b"too",)]), "move",
        ("open", 0, True), ("open", 1, True), ("store", 0), ("store", 1),
        ("finish", []), "close",
    ]  # fmt: skip
    assert [array.tobytes() for array in targets.memory.arrays] == [value.tobytes() for value in values.values()]
    assert asked == [1]
    first, second, third = source.tasks
    assert first is second is third
    assert comm.contexts == [CONTEXT, CONTEXT]
    head, needed, used, names, stance, tied, *sent = split(comm.said[0])
    assert comm.said[1] == b"[[40, 2, 2], 0, []]"
    assert json.loads(head) == json.loads(options.encode("load_state_dict", shelf="the first", context=CONTEXT))
    assert (json.loads(needed), json.loads(names), stance, tied) == ([], {}, b"", b"")
    assert sent == [b"mine", b"too"]
    assert np.unpackbits(np.frombuffer(used, np.uint8)).tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_powers_that_one_rank_leaves_and_another_would_load_are_an_error():
    """The first has moments, and so can tell that the source has another optimizer's."""
    values = {"w": numbers(2), "w.moment1_0": numbers(2), "w.beta1_pow_acc_0": numbers(1)}

    def loaded(*states):
        given = [{"w": numbers(2), **{f"w.{state}_0": np.zeros(1, np.float32) for state in each}} for each in states]
        held = [targets_of(each, rank) for rank, each in enumerate(given)]
        outcomes, _ = on_ranks(lambda comm: (Shelf(values), held[comm.rank]), optimizer_states="ignore", strict=False)
        return outcomes, [each.memory.arrays[-1].tolist() for each in held]

    outcomes, powers = loaded(["moment", "beta1_pow_acc"], ["beta1_pow_acc"])
    assert "ranks would differ: 0 leave their states, as the source has another" in refused(outcomes)
    assert "and 1 have powers of beta alone, and would load them" in refused(outcomes)
    advised("transfer/state_kinds.py", "leave the powers out of what these ranks load", refused(outcomes))
    assert powers == [[0], [0]]
    assert loaded(["moment", "beta1_pow_acc"], [])[1] == [[0], [1, 2]]
    assert loaded(["beta1_pow_acc"], ["beta1_pow_acc"])[1] == [[1], [1]]


def test_statements_cost_one_more_collective_in_which_all_targets_are_gathered():
    values = {"a": numbers(6)}
    comm, source = Noted(), Shelf(values)
    targets = targets_of({"t": np.zeros(6, np.float32)})
    load(source, targets, comm, aoa_config={"aoa_statements": ["a -> t"]})
    assert targets.memory.arrays[0].tolist() == values["a"].tolist()
    assert comm.contexts == [CONTEXT] * 3
    head, catalog = split(comm.said[0])
    assert head == split(comm.said[1])[0]
    assert catalog == transfer.encode_catalog(targets.catalog)
    assert source.events.count("open") == source.events.count("prepare") == 1


def test_targets_may_be_what_statements_make():
    """Compiled by the caller, with no collective for them."""
    values, comm = {"a": numbers(6), "left": numbers(1)}, Noted()
    source = Shelf(values)
    source.open()
    mapping = compile_program({"aoa_statements": ["a -> t, scale=2.0"]}, source.catalog, None)
    targets = replace(targets_of({"t": np.zeros(6, np.float32)}), mapping=mapping)
    report = load(source, targets, comm)
    assert targets.memory.arrays[0].tolist() == [2, 4, 6, 8, 10, 12]
    assert (report.computed, report.unexpected, comm.contexts) == (["t"], ["left"], [CONTEXT] * 2)
    assert source.tasks[0].mapping is mapping


def test_all_that_comes_before_the_first_target_is_touched_may_be_done_alone():
    source, targets = Shelf({"a": numbers(1)}), targets_of({"a": np.zeros(1, np.float32)})
    task = transfer_of(source, targets).prepare()
    assert source.events == ["open", "prepare", ("plan", [])]
    assert (task.memory, targets.memory.events) == (targets.memory, [])


def test_the_report_says_what_was_done(monkeypatch):
    values = {"a": numbers(2, 2), "b": numbers(3), "other": numbers(1), "extra_state.common": numbers(1)}
    also = {"bytes_read": 11, "bytes_verified": 12, "reads": 13}
    targets = targets_of({"a": np.zeros((2, 2)), "tied": np.zeros(3, np.float32), "lost": np.ones(2)},
                         aliases={"tied": ("b",)})  # fmt: skip
    clock = [10.0, 11.0, 15.0]
    monkeypatch.setattr(transfer, "time", SimpleNamespace(perf_counter=lambda: clock.pop(0)))
    report = load(Shelf(values, also=also), targets, strict=False, dtype="cast")
    assert report == LoadReport(
        source="shelf", unique_id=7, keys=2, missing=["lost"], unexpected=["other"], aliases={"tied": "b"},
        cast={"a": "float32 -> float64"}, bytes_needed=28, total_bytes=28,
        seconds={"plan": 1.0, "read": 4.0, "total": 5.0}, **also,
    )  # fmt: skip
    assert targets.memory.events[-1] == ("finish", ["lost"])
    assert targets.memory.arrays[2].tolist() == [1, 1]
    clock += [11.0, 15.0]
    begun = Transfer(
        Noted(), Shelf({"a": numbers(1)}, between_ranks=True), lambda: targets_of({"a": np.zeros(1, np.float32)}),
        LoadOptions(), "reshard", CONTEXT, begin=4.0,
    ).run()  # fmt: skip
    assert begun.seconds == {"plan": 7.0, "exchange": 4.0, "total": 11.0}


def test_what_is_kept_and_computed_is_reported_under_the_targets_own_names():
    values = {"a": numbers(4), "b": numbers(4)}
    targets = targets_of({"z": np.full(6, 9, np.float32), "y": np.zeros(4, np.float32), "x": np.full(5, 8, np.float32)})
    statements = ['a -> z, resize="auto", fill="keep"', "b -> y, scale=2.0", 'a -> x, resize="auto", fill="keep"']
    comm = Noted()
    report = load(Shelf(values), targets, comm, aoa_config={"aoa_statements": statements})
    assert (report.kept, report.computed) == (["x", "z"], ["y"])
    assert [array.tolist() for array in targets.memory.arrays] == [
        [1, 2, 3, 4, 9, 9], [2, 4, 6, 8], [1, 2, 3, 4, 8],
    ]  # fmt: skip
    assert targets.memory.events[-1] == ("finish", ["x", "z"])
    assert report.peak_scratch_bytes == 16


def test_statements_see_the_targets_of_all_ranks():
    """Each has a target whose length a statement takes, which is carried out on all ranks alike."""
    values = {"a": numbers(8)}
    made = {0: {"x": np.zeros(3, np.float32)}, 1: {"y": np.zeros(5, np.float32)}}
    outcomes, comms = on_ranks(
        lambda comm: (Shelf(values), targets_of(made[comm.rank], comm.rank)),
        aoa_config={"aoa_statements": ['a -> x, resize="auto"', 'a -> y, resize="auto"']},
    )
    assert made[0]["x"].tolist() == [1, 2, 3]
    assert made[1]["y"].tolist() == [1, 2, 3, 4, 5]
    assert [report.unexpected for report in outcomes] == [[], []]
    assert [comm.collectives for comm in comms] == [3, 3]
    assert [(report.bytes_needed, report.total_bytes) for report in outcomes] == [(12, 32), (20, 32)]


def test_a_target_in_two_dtypes_is_refused_on_every_rank():
    kinds = (np.float32, np.float64)
    outcomes, _ = on_ranks(
        lambda comm: (Shelf({"a": numbers(4)}), targets_of({"t": np.zeros(4, kinds[comm.rank])}, comm.rank)),
        aoa_config={"aoa_statements": ["a -> t"]}, dtype="cast",
    )  # fmt: skip
    assert "ranks want a tensor that AOA statements make in different dtypes" in refused(outcomes)


def test_a_master_weight_starts_from_a_parameter_that_statements_rename():
    targets = targets_of({"b.w_0": np.zeros(4, np.float32)})
    report = load(
        Shelf({"a": numbers(4, dtype=ml_dtypes.bfloat16)}), targets, aoa_config={"aoa_statements": ["a -> b"]},
        master_weights="convert",
    )  # fmt: skip
    assert targets.memory.arrays[0].tolist() == [1, 2, 3, 4]
    assert report.masters == {"b.w_0": "a"}


# -- errors ------------------------------------------------------------------------------------------------------------


def test_malformed_targets_are_refused_before_anything_is_compiled():
    targets = targets_of({"a": np.zeros(4, np.float32)}, parts={"a": ((6,), (3,))})
    comm, source = Noted(), Shelf({"a": numbers(6)})
    with pytest.raises(ValidationError, match=rf"^{CONTEXT}: .*'a', rank 0") as caught:
        load(source, targets, comm, aoa_config={"aoa_statements": []})
    assert comm.contexts == [CONTEXT]
    (problem,) = caught.value.problems
    assert str(problem) == f"[rank 0] {transfer.validate_shards(targets.catalog)[0]}"
    assert source.events == ["open", "close"]
    assert targets.memory.events == []


@pytest.mark.parametrize("statements", [None, {"aoa_statements": ["a -> a"]}])
@pytest.mark.parametrize("step", ["open", "describe", "prepare", "move"])
def test_an_error_on_one_rank_is_one_on_all_and_the_source_is_closed(step, statements):
    sources, touched = [None, None], []

    def job(comm):
        source = sources[comm.rank] = Shelf({"a": numbers(4)})
        targets = targets_of({"a": np.zeros(4, np.float32)}, comm.rank)

        def fail(*arguments):
            raise CheckpointError("there is smoke")

        if comm.rank and step != "describe":
            setattr(source, step, fail)
        describe = fail if comm.rank and step == "describe" else lambda: targets
        options = LoadOptions(aoa_config=statements)
        try:
            return Transfer(comm, source, describe, options, "load_state_dict", CONTEXT).run()
        finally:
            touched.append([event for event in targets.memory.events if event[0] == "open"])

    outcomes = SimulatedWorld(2).run_all(job)
    assert {str(outcome) for outcome in outcomes} == {f"{CONTEXT}: [rank 1] there is smoke"}
    assert {type(outcome) for outcome in outcomes} == {CheckpointError}
    assert [source.events[-1] for source in sources] == ["close", "close"]
    assert any(touched) == (step == "move")


def test_ranks_that_differ_are_told_by_their_numbers():
    def job(comm):
        return Shelf({"a": numbers(4)}, says=f"of {comm.rank}"), targets_of({"a": np.zeros(4, np.float32)}, comm.rank)

    def work(comm, **options):
        source, targets = job(comm)
        call = f"call {comm.rank}"
        return Transfer(comm, source, lambda: targets, LoadOptions(**options), call, CONTEXT).run()

    for statements in (None, {"aoa_statements": []}):
        outcomes, comms = on_ranks(job, aoa_config=statements)
        assert refused(outcomes).startswith(
            f'{CONTEXT}: ranks disagree: rank 0: {{"shelf": "of 0"}}; rank 1: {{"shelf": "of 1"}}. '
        )
        assert [comm.collectives for comm in comms] == [1, 1]
        world = SimulatedWorld(2)
        outcomes = world.run_all(lambda comm, said=statements: work(comm, aoa_config=said), ranks=(4, 6))
        assert refused(outcomes).startswith(
            f"{CONTEXT}: ranks do not make the same call: rank 4: call 4; rank 6: call 6. "
        )


def test_a_rank_in_a_later_step_of_another_call_is_told():
    def work(comm, options):
        if comm.rank:
            _, answers = comm.together(lambda: (None, join((b"not JSON",))), "elsewhere")
            return check_heads(answers, CONTEXT)
        return load(Shelf({"a": numbers(4)}), targets_of({"a": np.zeros(4, np.float32)}), comm, **options)

    for options in ({}, {"aoa_config": {"aoa_statements": []}}):
        outcomes = SimulatedWorld(2).run_all(lambda comm, options=options: work(comm, options))
        assert refused(outcomes).startswith(
            f"{CONTEXT}: ranks do not make the same call: rank 0: load_state_dict; rank 1: a later step of a call. "
        )


def test_the_coordinator_has_to_be_a_member():
    with pytest.raises(ValidationError, match=rf"^{CONTEXT}: \[rank 0\] coordinator_rank .* 0 to 0; got 1"):
        load(Shelf({}), targets_of({}), coordinator_rank=1)


def test_a_raw_name_has_to_mean_one_parameter_on_all_ranks():
    raw = "linear_0.w_0_moment1_0"

    def job(comm):
        key = f"layer{comm.rank}.weight.moment1_0"
        return Shelf({raw: numbers(4)}), targets_of({key: np.zeros(4, np.float32)}, comm.rank, raw_names={key: (raw,)})

    text = refused(on_ranks(job)[0])
    assert text.startswith(f"{CONTEXT}: 'linear_0.w_0' in the keys of the source would mean different parameters")
    assert "['layer0.weight'] and ['layer1.weight']" in text


def test_what_nobody_asks_for_is_told_with_the_context():
    outcomes, _ = on_ranks(
        lambda comm: (Shelf({"a": numbers(1), "b": numbers(1), "c": numbers(1)}),
                      targets_of({"ab"[comm.rank]: np.zeros(1, np.float32)}, comm.rank)),
        strict=True,
    )  # fmt: skip
    assert refused(outcomes) == (
        f"{CONTEXT}: no rank asks for key 'c', which the source has. Remedy (FC203): load it too, or allow it with "
        "strict='missing'"
    )


def test_what_a_statement_removes_may_be_left():
    targets = targets_of({"a": np.zeros(1, np.float32)})
    options = {"aoa_config": {"aoa_statements": ["b -> _"]}, "strict": True}
    assert load(Shelf({"a": numbers(1), "b": numbers(1)}), targets, **options).unexpected == []


# -- fused parameters --------------------------------------------------------------------------------------------------

FUSED = Order(2, 1, "fused_ffn")
TURNED = [0, 1, 4, 5, 2, 3, 6, 7]


def fused_case(between_ranks):
    values = {"w": numbers(2, 8), "b": numbers(3)}
    return Shelf(values, between_ranks=between_ranks, orders={"w": FUSED}), values["w"][:, TURNED]


@pytest.mark.parametrize("statements", [None, {"aoa_statements": ["b -> c"]}])
@pytest.mark.parametrize("between_ranks", [False, True])
def test_fused_parameters_are_put_right(between_ranks, statements):
    source, expected = fused_case(between_ranks)
    other = "b" if statements is None else "c"
    targets = targets_of({"w": np.zeros((2, 8), np.float32), other: np.zeros(3, np.float32)}, orders={"w": NATURAL})
    comm = Noted()
    report = load(source, targets, comm, aoa_config=statements)
    assert targets.memory.arrays[0].tolist() == expected.tolist()
    assert targets.memory.arrays[1].tolist() == [1, 2, 3]
    assert report.fused == {"w": "2 parts -> 1 parts"}
    # Those that send have to know what is sent: the targets are gathered once, and resolved again.
    assert len(comm.said) == 2 + between_ranks + (between_ranks or statements is not None)
    assert source.events.count("prepare") == 1 + between_ranks
    assert source.events.count("open") == 1


@pytest.mark.parametrize("statements", [None, {"aoa_statements": ["b -> c"]}])
@pytest.mark.parametrize("between_ranks", [False, True])
def test_fused_parameters_are_cut_as_the_targets_are(between_ranks, statements):
    source, other = Shelf({"w": numbers(2, 8), "b": numbers(3)}, between_ranks=between_ranks,
                          orders={"w": NATURAL}), "b" if statements is None else "c"  # fmt: skip
    targets = targets_of({"w": np.zeros((2, 8), np.float32), other: np.zeros(3, np.float32)}, orders={"w": FUSED})
    report = load(source, targets, aoa_config=statements)
    assert targets.memory.arrays[0].tolist() == numbers(2, 8)[:, TURNED].tolist()
    assert report.fused == {"w": "1 parts -> 2 parts"}


@pytest.mark.parametrize("between_ranks", [False, True])
def test_the_rank_that_has_no_fused_parameter_takes_part(between_ranks):
    made = {0: {"b": np.zeros(3, np.float32)}, 1: {"w": np.zeros((2, 8), np.float32)}}
    values, sources = {"w": numbers(2, 8), "b": numbers(3)}, {}

    def job(comm):
        source = sources[comm.rank] = Shelf(values, between_ranks=between_ranks, orders={"w": NATURAL})
        return source, targets_of(made[comm.rank], comm.rank, orders={"w": FUSED})

    outcomes, comms = on_ranks(job)
    mappings = [sources[rank].tasks[-1].mapping for rank in (0, 1)]
    if between_ranks:
        # Whoever sends knows what is sent.
        first, second = (mapping.maps for mapping in mappings)
        assert first.targets == second.targets == ("w",)
        assert first.target_offset.tolist() == second.target_offset.tolist()
        assert first.source_offset.tolist() == second.source_offset.tolist()
    else:
        assert mappings[0] is None
    assert [report.fused for report in outcomes] == [{}, {"w": "1 parts -> 2 parts"}]
    assert [report.unexpected for report in outcomes] == [[], []]
    assert made[1]["w"].tolist() == values["w"][:, TURNED].tolist()
    assert [comm.collectives for comm in comms] == [4 if between_ranks else 2] * 2


def test_targets_that_share_memory_are_compared():
    """Each is made of another key, so the second is only compared with the first."""
    memory = np.zeros(3, np.float32)

    def attempt(second):
        targets = targets_of({"a": memory, "b": memory})
        return load(Shelf({"a": numbers(3), "b": second}), targets)

    assert attempt(numbers(3)).keys == 2
    with pytest.raises(CheckpointError, match="targets 'a' and 'b' are one tied parameter"):
        attempt(numbers(3, start=2))
    assert memory.tolist() == [1, 2, 3]


# -- logging -----------------------------------------------------------------------------------------------------------


def records(caplog):
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_the_coordinator_logs_one_line(caplog):
    caplog.set_level(logging.DEBUG, logger="paddle_flexckpt")

    def job(comm):
        return Shelf({"a": numbers(1)}), targets_of({"a": np.zeros(1, np.float32)}, comm.rank)

    for coordinator in (0, 1):
        caplog.clear()
        outcomes, _ = on_ranks(job, coordinator_rank=coordinator)
        assert records(caplog) == [(logging.INFO, outcomes[coordinator].summary())]


def test_quiet_loads_report_for_those_who_look_closer(caplog):
    caplog.set_level(logging.DEBUG, logger="paddle_flexckpt")

    def levels():
        caplog.clear()
        load(Shelf({}), targets_of({}))
        return [record.levelno for record in caplog.records]

    with quiet_loads():
        assert levels() == [logging.DEBUG]
        with quiet_loads():
            assert levels() == [logging.DEBUG]
        assert levels() == [logging.DEBUG]
    assert levels() == [logging.INFO]
    with pytest.raises(KeyError), quiet_loads():
        raise KeyError
    assert levels() == [logging.INFO]


def test_damage_and_unknown_orders_are_warned_of_on_each_rank(caplog):
    """The source does not say in which order ``w`` lies, and it is cut otherwise here."""
    used = {"w": "0_0.safetensors is missing: 1_0.safetensors served"}

    class Cut(Shelf):
        def open(self):
            said = super().open()
            builder = CatalogBuilder(0)
            for first in (0, 4):
                builder.add("w", "float32", (2, 8), (0, first), (2, 4))
            self.catalog = builder.build()
            self._values = {"left": numbers(2, 4), "right": numbers(2, 4, start=9)}
            return said

    comm = Noted(rank=5)
    target = np.zeros((2, 8), np.float32)
    report = load(Cut({}, also={"replicas_used": used}), targets_of({"w": target}), comm)
    assert target[:, 4:].tolist() == [[9, 10, 11, 12], [13, 14, 15, 16]]
    assert (report.maybe_fused, report.replicas_used) == (["w"], used)
    assert records(caplog)[:2] == [
        (logging.WARNING, f"rank 5: {order_warning('shelf', ['w'])}"),
        (logging.WARNING, f"rank 5: {replica_warning('shelf', used)}"),
    ]


# -- what nobody asks for ----------------------------------------------------------------------------------------------


def test_a_source_says_nothing_and_has_to_be_able_to_fill():
    source = Source()
    assert (source.open(), source.plan(None, []), source.unique_id, source.between_ranks) == ({}, None, None, False)
    for call in (source.prepare, source.move):
        with pytest.raises(NotImplementedError):
            call(None)
    with source.closing:
        closed = []
        source.closing.callback(closed.append, 1)
    assert closed == [1]


def test_a_call_without_a_name_has_none():
    comm = Noted()
    Transfer(comm, Shelf({}), lambda: targets_of({}), LoadOptions()).run()
    head = json.loads(split(comm.said[0])[0])
    assert (head["call"], head["context"], comm.contexts) == ("", "", ["", ""])
