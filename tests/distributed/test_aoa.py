"""AOA statements between real processes: names, fused parameters and degrees change, bit for bit as in numpy."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("paddle")
from tests.distributed import jobs_aoa as jobs
from tests.distributed.matrix.assembly import assemble, differing

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

STATES = ("", ".moment1_0", ".moment2_0", ".beta1_pow_acc_0", ".beta2_pow_acc_0")
HALVED = f"{jobs.TARGET}.0.mlp.down.bias"
KEYS = jobs.LAYERS * len(jobs.PARTS) * 2 * len(STATES)


def ranks_of(layout):
    degree, sharding = jobs.LAYOUTS[layout]
    return degree * sharding


def relaid(whole, axis, sizes, source_degree, target_degree):
    """Parts that lie side by side on every rank of one degree, side by side on every rank of another."""
    pieces = [[] for _ in sizes]
    for part in np.split(whole, source_degree, axis):
        ends = np.cumsum([size // source_degree for size in sizes])[:-1]
        for piece, found in zip(pieces, np.split(part, ends, axis)):
            piece.append(found)
    joined = [np.split(np.concatenate(piece, axis), target_degree, axis) for piece in pieces]
    return np.concatenate([np.concatenate(parts, axis) for parts in zip(*joined)], axis)


def oracle(saved, source, target):
    """What the other code base has to have, from the whole arrays of the one."""
    degrees = [jobs.LAYOUTS[layout][0] for layout in (source, target)]
    head = jobs.HEAD_SIZE
    sizes = {
        "qkv": [jobs.HEADS * head, jobs.GROUPS * head, jobs.GROUPS * head],
        "gate_up": [jobs.INNER, jobs.INNER],
    }
    expected = {}
    for key, array in saved.items():
        root, layer, part, rest = key.split(".", 3)
        assert root == jobs.SOURCE
        if part in sizes and array.size > 1:
            array = relaid(array, array.ndim - 1, sizes[part], *degrees)
        expected[f"{jobs.TARGET}.{layer}.{jobs.PARTS[part]}.{rest}"] = array
    return expected


def check_moved(reports, folder, source, target, computed=()):
    saved = assemble(folder / "saved", ranks_of(source))
    expected = oracle(saved, source, target)
    assert len(expected) == KEYS
    for key in computed:
        expected[key] = expected[key] * np.float32(0.5)
    loaded = assemble(folder / "loaded", ranks_of(target))
    assert differing(loaded, expected) == []
    # Too much alike would show no mistake.
    assert len({array.tobytes() for array in saved.values()}) > KEYS // 2
    for report in reports:
        assert report["computed"] == list(computed)
        assert report["missing"] == report["unexpected"] == []
        assert report["needed"] == report["local"] == report["read"] + report["copied"] + report["received"]


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    done = {}

    def save(layout):
        if layout not in done:
            done[layout] = tmp_path_factory.mktemp("aoa") / layout.replace(" ", "-")
            for report in world(ranks_of(layout)).run(jobs.save, layout=layout, folder=str(done[layout])):
                flattened = jobs.LAYOUTS[layout][1] > 1
                assert (report["flattened"] > 0) == flattened
                assert len(report["keys"]) == KEYS or flattened
        return done[layout]

    return save


def test_the_oracle_moves_something():
    """Parts of one degree are not those of another, and back again is the identity."""
    whole = np.arange(48)
    other = relaid(whole, 0, [24, 12, 12], 2, 4)
    assert other.tolist() == [
        *range(6), *range(12, 15), *range(18, 21), *range(6, 12), *range(15, 18), *range(21, 24),
        *range(24, 30), *range(36, 39), *range(42, 45), *range(30, 36), *range(39, 42), *range(45, 48),
    ]  # fmt: skip
    assert relaid(other, 0, [24, 12, 12], 4, 2).tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("source", "target"),
    [("tp2", "tp4"), ("tp4", "tp2"), ("tp2", "v2"), ("tp2 v2", "tp4"), ("tp4", "tp2 v2"), ("tp2 v2", "v2")],
)
def test_a_load_into_other_names_and_another_degree(world, saved, source, target):
    folder = saved(source)
    texts = jobs.statements()
    reports = world(ranks_of(target)).run(jobs.load, layout=target, folder=str(folder), texts=texts)
    check_moved(reports, folder, source, target)


@pytest.mark.parametrize(("source", "target"), [("tp2", "tp4"), ("tp2 v2", "tp2")])
def test_a_load_that_computes(world, saved, source, target):
    folder = saved(source)
    texts = jobs.computing_statements()
    reports = world(ranks_of(target)).run(jobs.load, layout=target, folder=str(folder), texts=texts)
    check_moved(reports, folder, source, target, [HALVED])


@pytest.mark.parametrize("layout", ["tp4", "tp2 v2"])
def test_the_inverse_gives_back_what_was_saved(world, saved, layout):
    folder, texts = saved("tp2"), jobs.statements()
    world(4).run(jobs.again, layout=layout, folder=str(folder), texts=texts)
    there = str(folder / "there")
    arguments = {"layout": "tp2", "texts": texts, "root": jobs.SOURCE, "reverse": True}
    world(2).run(jobs.load, folder=there, **arguments)
    assert differing(assemble(folder / "there" / "loaded", 2), assemble(folder / "saved", 2)) == []


@pytest.mark.parametrize("texts", [jobs.statements, jobs.computing_statements])
@pytest.mark.parametrize(("source", "target"), [("tp2 v2", "tp4"), ("tp4", "tp2 v2"), ("tp4", "dp1 tp1 v4")])
def test_a_live_reshard(world4, tmp_path, source, target, texts):
    folder, texts = str(tmp_path), texts()
    reports = world4.run(jobs.reshard, source=source, target=target, folder=folder, texts=texts)
    computed = [HALVED] if "scale" in texts[-1] else []
    check_moved(reports, tmp_path, source, target, computed)
    assert sum(report["sent"] for report in reports) == sum(report["received"] for report in reports) > 0
    assert all(report["source_untouched"] and report["read"] == 0 for report in reports)


REFUSED = {
    "malformed": (["w -> w, axis="], ["AOA statement 1, column"]),
    "no such source": (["b -> b", "nowhere -> w"], ["AOA statement 2", "'nowhere'", "nowhere -> w", "Remedy"]),
    "another shape": (["w^T -> w"], ["AOA statement 1: w^T -> w", "expected [8, 3]", "Remedy"]),
    "joined with another dtype": (['b -> x, dtype="bfloat16"', "x, b -> w, axis=0"], ["AOA statement 2", "dtype"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_program_that_does_not_fit_is_one_aoa_error_on_every_rank(world2, tmp_path, case):
    texts, fragments = REFUSED[case]
    reports = world2.run(jobs.refused, folder=str(tmp_path), config={"aoa_statements": texts})
    for way in ("load", "reshard"):
        kind, text = reports[0][way]
        assert reports[1][way] == [kind, text]
        assert kind == "AoaError"
        assert "[rank 0, 1] " in text
        for fragment in fragments:
            assert fragment in text
    assert all(report["unchanged"] and report["afterwards"] for report in reports)


@pytest.mark.parametrize("other", [{"aoa_statements": ["b -> b"]}, None, {"aoa_statements": ["w -> w", "b -> _"]}])
def test_ranks_have_to_be_given_the_same_statements(world2, tmp_path, other):
    config = [{"aoa_statements": ["w -> w"]}, other]
    reports = world2.run(jobs.refused, folder=str(tmp_path), config=config)
    for way in ("load", "reshard"):
        kind, text = reports[0][way]
        assert reports[1][way] == [kind, text]
        assert kind == "ValidationError"
        assert "ranks disagree" in text
        assert "aoa_config" in text
    assert all(report["unchanged"] and report["afterwards"] for report in reports)
