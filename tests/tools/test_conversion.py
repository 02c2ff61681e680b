"""convert_checkpoint: any format to any, whole or for a strategy; killed at any call, it goes on to the same bytes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import NATURAL, CheckpointError, CorruptCheckpointError, Order, ValidationError, concat
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools import conversion, conversion_targets
from paddle_flexckpt.tools.comparison import diff
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.tools.conversion_targets import TARGETS, in_blocks
from paddle_flexckpt.tools.export import export_safetensors
from paddle_flexckpt.tools.models import layout_of
from paddle_flexckpt.tools.verification import verify_checkpoint
from paddle_flexckpt.transfer import plan
from paddle_flexckpt.transfer.codes import Codes
from paddle_flexckpt.transfer.mapping import whole_mapping
from tests.crash.harness import read_tree
from tests.foreign import test_paddle_pickles, test_torch_dcp
from tests.loading import test_fused_degrees as fused
from tests.native.samples import flip
from tests.property import examples
from tests.ramdisk import memory_directory
from tests.remedies.following import advised
from tests.saved import data_file
from tests.transfer.samples import Part, catalog, save, values_of

KINDS = {
    "embed.weight": ("bfloat16", (16, 6)),
    "layers.0.w": ("bfloat16", (8, 12)),
    "layers.1.w": ("bfloat16", (8, 12)),
    "layers.0.norm": ("float32", (7,)),
    "layers.1.norm": ("float32", (7,)),
    "cube": ("int64", (4, 3, 5)),
    "none": ("float32", (0, 3)),
    "one": ("float64", ()),
    "pair": ("complex128", (3,)),
}
STATES = {"moment1_0": "float32", "moment2_0": "float32", "w_0": "float32", "beta1_pow_acc_0": "float32"}
for key in ("embed.weight", "layers.0.w", "layers.1.w"):
    KINDS |= {f"{key}.{state}": (kind, (1,) if "pow" in state else KINDS[key][1]) for state, kind in STATES.items()}
KINDS["extra_state.rng.rank0"] = ("uint8", (16,))
WEIGHTS = sorted(key for key in KINDS if not key.endswith("_0") and not key.startswith("extra"))
CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16"}
CUTS = (("*.w", 1), ("embed.weight", 0))


@pytest.fixture
def tmp_path():
    """A directory in memory: hundreds of conversions are made here."""
    with memory_directory(256 << 20) as path:
        yield path


@pytest.fixture(scope="module")
def values():
    return values_of(KINDS)


@pytest.fixture(scope="module")
def checkpoint(values, tmp_path_factory):
    path = tmp_path_factory.mktemp("convert") / "checkpoint"
    save(path, values, step=7)
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def tree(path) -> dict[str, bytes]:
    return {name: data for name, data in read_tree(str(path)).items() if data is not None}


def same_tensors(one, two, **options) -> None:
    report = diff(one, two, extra_state=True, **options)
    assert report.equal, report.lines()


# --- formats and layouts --------------------------------------------------------------------------------------------


def test_native_to_native_in_whole_tensors(checkpoint, tmp_path):
    report = convert_checkpoint(checkpoint, tmp_path / "out", max_file_bytes=500)
    same_tensors(checkpoint, tmp_path / "out")
    manifest = SourceDirectory(tmp_path / "out").read_manifest()
    assert (manifest.step, manifest.world_size, manifest.unique_id) == (7, len(report.files), 0)
    assert len(report.files) > 3
    assert (manifest.catalog.shape == manifest.catalog.global_shape).all()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        [*report.files, "0.manifest", "config.json", "flex-ckpt.auto_generated.metadata"]
    )
    assert (report.origin, report.format, report.strategy, report.kept_files) == ("native", "native", None, [])
    assert report.bytes_written == report.total_bytes == report.bytes_read - report.bytes_extra
    assert report.keys == len(KINDS)
    assert verify_checkpoint(tmp_path / "out").ok


MESHES = [
    "mesh=2x2:dp,mp;sharding=stage1:dp",
    "mesh=2x2:pp,mp",
    "mesh=3:x;cube=S1;*.w=S0",
    "mesh=2:dp;sharding=fusion:dp",
]


@pytest.mark.parametrize("strategy", ["tp=2", "tp=2,pp=2,dp=2", "sharding=v2:3", "tp=2,sharding=v1:2", "dp=3", *MESHES])
def test_for_a_strategy_each_rank_has_what_it_would_have_saved(checkpoint, values, tmp_path, strategy):
    report = convert_checkpoint(checkpoint, tmp_path / "out", strategy=strategy, cuts=CUTS)
    same_tensors(checkpoint, tmp_path / "out")
    manifest = SourceDirectory(tmp_path / "out").read_manifest()
    layout, _ = layout_of(checkpoint, strategy, cuts=CUTS)
    assert manifest.world_size == layout.strategy.ranks
    ranks = [layout.catalog(rank) for rank in range(layout.strategy.ranks)]
    wanted, found = concat(ranks), manifest.catalog
    has = {(wanted.key_name(row), box_of(wanted, row)) for row in range(len(wanted)) if wanted.size[row]}
    stored = {
        (found.key_name(row), box_of(found, row))
        for row in range(len(found))
        if found.size[row] and not found.key_name(row).startswith("extra_state")
    }
    assert stored == has
    told = ("tensor parallelism", "optimizer", "tied parameters")
    assert all(any(words in note for words in told) for note in report.notes)


@pytest.mark.parametrize("form", ["torch_dcp", "paddle"])
def test_other_formats_take_meshes_too(checkpoint, tmp_path, form):
    """The same mesh as a text and as a file makes the same bytes, of the ranks that it has."""
    said = {"mesh": {"shape": [2, 2], "dim_names": ["pp", "mp"]}, "placements": {"*.w": ["@0", "S1"]}}
    (tmp_path / "mesh.json").write_text(json.dumps(said))
    options = {"format": form, "cuts": CUTS, "states": False}
    first = convert_checkpoint(checkpoint, tmp_path / "text", strategy="mesh=2x2:pp,mp;*.w=@0,S1", **options)
    second = convert_checkpoint(checkpoint, tmp_path / "file", strategy=str(tmp_path / "mesh.json"), **options)
    assert first.strategy == second.strategy == "mesh=2x2:pp,mp;*.w=@0,S1"
    assert read_tree(tmp_path / "text") == read_tree(tmp_path / "file")
    found = diff(checkpoint, tmp_path / "text")
    assert (found.keys, found.only_in_second, found.unlike, found.differing) == (len(WEIGHTS), [], {}, {})


def box_of(table, row):
    return (
        table.unpadded(row, table.offset),
        table.unpadded(row, table.shape),
        (int(table.flat_start[row]), int(table.flat_stop[row])),
    )


def test_what_the_strategy_says_nothing_of_is_stored_by_rank_0(tmp_path):
    """A factored state has not its parameter's shape."""
    kinds = {
        "w": ("float32", (4, 6)),
        "w.row_0": ("float32", (4,)),
        "v": ("float32", (6, 4)),
        "v.row_0": ("float32", (6,)),
    }
    save(tmp_path / "in", values_of(kinds))
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", strategy="tp=2", cuts=[("*", 0)])
    same_tensors(tmp_path / "in", tmp_path / "out")
    assert any("rank 0 stores all of v.row_0, w.row_0" in note for note in report.notes)


def test_to_hugging_face_it_is_what_an_export_writes(checkpoint, tmp_path):
    statements = {"aoa_statements": ["pair -> _", "layers.$LAYER_ID.w^T -> model.layers.$LAYER_ID.w"]}
    for limit in (300, 1 << 30):
        exported, converted = tmp_path / f"export {limit}", tmp_path / f"convert {limit}"
        export_safetensors(checkpoint, exported, statements, max_file_bytes=limit)
        convert_checkpoint(checkpoint, converted, statements, max_file_bytes=limit, format="huggingface")
        assert tree(converted) == {**tree(exported), "config.json": json.dumps(CONFIG).encode()}


def write_hf(path):
    path.mkdir()
    save_file(
        {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float16)}, path / "model.safetensors"
    )
    return path


def write_npz(path):
    path.mkdir()
    np.savez(path / "state.npz", a=np.arange(12.0).reshape(3, 4), b=np.arange(3))
    return path


def write_pdparams(path):
    path.mkdir()
    return test_paddle_pickles.write(path)


SOURCES = {
    "huggingface": write_hf,
    "npz": write_npz,
    "paddle_pickle": write_pdparams,
    "torch_dcp": test_torch_dcp.write,
}


@pytest.mark.parametrize("to", sorted(TARGETS))
@pytest.mark.parametrize("origin", sorted(SOURCES))
def test_any_format_that_can_be_read_to_any_that_can_be_written(tmp_path, origin, to):
    source = SOURCES[origin](tmp_path / "in")
    options = {"states": True} if to == "huggingface" else {}
    if (origin, to) == ("torch_dcp", "paddle"):
        with pytest.raises(ValidationError, match="Paddle does not read this dtype back .*float8_e4m3fn"):
            convert_checkpoint(source, tmp_path / "out", format=to)
        options["aoa_config"] = {"aoa_statements": ["model.eighth -> _"]}
    report = convert_checkpoint(source, tmp_path / "out", format=to, **options)
    assert report.origin == origin
    assert SourceDirectory(tmp_path / "out").origin() == to
    same_tensors(source, tmp_path / "out", aoa_config=options.get("aoa_config"))


def test_a_file_is_a_source(tmp_path):
    write_pdparams(tmp_path / "in")
    convert_checkpoint(tmp_path / "in" / "model.pdparams", tmp_path / "out")
    same_tensors(tmp_path / "in", tmp_path / "out")


def test_types_prefix_and_weights_alone(tmp_path):
    values = {
        "m.w": np.linspace(0, 1, 24, dtype=np.float32).reshape(4, 6),
        "m.n": np.arange(5),
        "m.w.moment1_0": np.ones((4, 6), np.float32),
        "other": np.ones(3, np.float32),
    }
    save(tmp_path / "in", values)
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", prefix="m", dtype="float16")
    with fc.tools.tensor_reader.TensorReader(tmp_path / "out") as reader:
        assert {key: info.dtype for key, info in reader.infos.items()} == {
            "w": "float16", "n": "int64", "w.moment1_0": "float32"
        }  # fmt: skip
        assert reader.read("w").tobytes() == values["m.w"].astype(np.float16).tobytes()
    assert (report.cast, report.left_out) == (1, 0)
    report = convert_checkpoint(tmp_path / "in", tmp_path / "few", prefix="m", states=False)
    assert (report.keys, report.left_out) == (2, 1)


def test_a_configuration_that_says_another_type_is_told(checkpoint, tmp_path):
    report = convert_checkpoint(checkpoint, tmp_path / "out", dtype="float64")
    assert "config.json was copied as it is, and says bfloat16; the tensors are float64" in report.summary()
    other = tmp_path / "other.json"
    other.write_text('{"dtype": "float64"}')
    report = convert_checkpoint(checkpoint, tmp_path / "out2", dtype="float64", config=other)
    assert (tmp_path / "out2" / "config.json").read_text() == '{"dtype": "float64"}'
    assert not any("config.json" in note for note in report.notes)


@pytest.mark.parametrize("sharding", ["", "v2"])
@pytest.mark.parametrize("strategy", [None, "tp=4"])
def test_fused_parameters_load_under_any_degree_afterwards(tmp_path, strategy, sharding):
    """They get natural order, and the checkpoint says so."""
    ranks = 2 * (2 if sharding else 1)
    SimulatedWorld(ranks).run(
        lambda comm: fc.save_state_dict(fused.layout(2, sharding, comm.rank), tmp_path / "in", comm)
    )
    cuts = [(name, axis % ndim) for name, (_, _, axis, ndim) in fused.FUSED.items()]
    convert_checkpoint(tmp_path / "in", tmp_path / "out", strategy=strategy, cuts=cuts)
    for degree in (1, 2, 4):

        def load(comm, degree=degree):
            target = fused.layout(degree, "", comm.rank, empty=True)
            fc.load_state_dict(target, tmp_path / "out", comm)
            return target

        for rank, target in enumerate(SimulatedWorld(degree).run(load)):
            for key, expected in fused.layout(degree, "", rank).items():
                assert np.asarray(target[key].local_tensor).tolist() == np.asarray(expected.local_tensor).tolist(), key


def test_what_is_known_of_orders_is_written():
    source = catalog(
        Part("fused", (4, 12), shape=(4, 6), order=Order(2, 1, "fused_ffn")),
        Part("natural", (4, 12), shape=(4, 6), order=NATURAL),
        Part("cut", (4, 12), shape=(4, 6)),
        Part("whole", (4, 12)),
        Part("fused", (4, 12), shape=(4, 6), offset=(0, 6), order=Order(2, 1, "fused_ffn"), rank=1),
        Part("natural", (4, 12), shape=(4, 6), offset=(0, 6), order=NATURAL, rank=1),
        Part("cut", (4, 12), shape=(4, 6), offset=(0, 6), rank=1),
    )
    keys = {f"m.{key}": key for key in source.keys}
    mapping = whole_mapping(None, source)
    assert conversion._orders(keys, source, mapping, Codes(source, mapping)) == {
        "m.fused": Order(1, 1, "fused_ffn"),
        "m.natural": NATURAL,
        "m.whole": NATURAL,
    }


# --- memory ---------------------------------------------------------------------------------------------------------


@examples(25)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    memory=st.integers(4, 900),
    strategy=st.sampled_from([None, "tp=2", "sharding=v2:2", "tp=2,sharding=v2:3"]),
    form=st.sampled_from(sorted(TARGETS)),
    limit=st.sampled_from([1, 300, 1 << 30]),
)
def test_little_memory_makes_the_same_files(rows, columns, memory, strategy, form, limit):
    kinds = {"w": ("float32", (2 * rows, columns)), "v": ("int8", (2, 3, columns)), "e": ("int8", (0, 3))}
    kinds |= {f"{key}.moment1_0": ("float32", kinds[key][1]) for key in "wv"}
    if form == "huggingface":
        strategy = None
    options = {"strategy": strategy, "format": form, "max_file_bytes": limit, "cuts": [("w", 0), ("v", 0)]}
    with memory_directory() as root, pytest.MonkeyPatch.context() as patch:
        save(f"{root}/in", values_of(kinds), 2)
        convert_checkpoint(f"{root}/in", f"{root}/whole", **options)
        patch.setattr(conversion, "LEAST_MEMORY", 1)
        convert_checkpoint(f"{root}/in", f"{root}/bands", memory_bytes=memory, **options)
        assert tree(f"{root}/bands") == tree(f"{root}/whole")


# A transposition takes the longest: in CI to one format, and each of the others with another statement.
MEMORY = [(form, statement) for form in sorted(TARGETS) for statement in (None, "w^T -> t", 'w -> c, dtype="bfloat16"')]


@pytest.mark.parametrize(
    ("form", "statement"),
    [
        pytest.param(*each, marks=pytest.mark.slow if each[1] == "w^T -> t" and each[0] != "native" else ())
        for each in MEMORY
    ],
)
def test_memory_is_bounded(tmp_path, monkeypatch, form, statement):
    """Of a tensor of 64 MiB, with 16 MiB for bands and tiles, and 28 for what buffers of reader and writer hold."""
    size, memory = 64 << 20, 16 << 20
    monkeypatch.setattr(plan, "TILE_ELEMENTS", 1 << 17)
    monkeypatch.setattr(conversion, "LEAST_MEMORY", 1)
    save(tmp_path / "in", {"w": np.arange(size // 4, dtype=np.float32).reshape(-1, 1024)}, world=1)
    tracemalloc.start()
    try:
        convert_checkpoint(
            tmp_path / "in",
            tmp_path / "out",
            statement and {"aoa_statements": [statement]},
            format=form,
            memory_bytes=memory,
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < memory + (28 << 20)


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([20], [20]),
        ([20], [3, 3, 3, 11]),
        ([7, 0, 33], [7, 1, 1, 31]),
        ([16, 16], [8, 8, 5, 11]),
        ([8], [1] * 8),
        ([17, 3], [9, 8, 3]),
    ],
)
def test_items_in_blocks(monkeypatch, lengths, parts):
    monkeypatch.setattr(conversion_targets, "BLOCK_BYTES", 8)
    data = np.arange(sum(parts), dtype=np.uint8)
    ends = np.cumsum(parts).tolist()
    arrays = (data[end - part : end] for part, end in zip(parts, ends))
    found = [array.copy() for array in in_blocks(lengths, arrays)]
    assert np.concatenate(found).tolist() == data.tolist()
    place = 0
    for length in lengths:
        taken = 0
        while True:
            taken += found[place].nbytes
            place += 1
            if taken == length:
                break
            assert found[place - 1].nbytes % 8 == 0
    assert place == len(found)


@pytest.mark.parametrize("parts", [[5], [5, 6], []])
def test_data_that_does_not_end_with_an_item_is_refused(parts):
    with pytest.raises(ValueError, match="does not end with an item"):
        list(in_blocks([10], (np.zeros(part, np.uint8) for part in parts)))


def test_progress_is_told(checkpoint, tmp_path):
    told = []
    report = convert_checkpoint(checkpoint, tmp_path / "out", max_file_bytes=500, progress=told.append)
    assert (told[-1].phase, told[-1].bytes_done, told[-1].bytes_total) == ("write", *[report.total_bytes] * 2)
    assert (told[-1].items_done, told[-1].items_total) == (len(report.files), len(report.files))
    with pytest.raises(ValidationError, match="progress has to be a function"):
        convert_checkpoint(checkpoint, tmp_path / "other", progress=3)


# --- what is interrupted --------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone."""


class Victim:
    """Lets a process die at one of its calls that change files: from then on it changes nothing."""

    NAMES = ("open", "writev", "fsync", "rename", "unlink", "mkdir", "rmdir")

    def __init__(self, patch: pytest.MonkeyPatch, limit: int) -> None:
        self.calls, self._limit = 0, limit
        for name in self.NAMES:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name, function):
        def call(*arguments, **options):
            if name == "open" and not arguments[1] & os.O_CREAT:
                return function(*arguments, **options)
            self.calls += 1
            if self.calls == self._limit and name == "writev":
                first = memoryview(arguments[1][0])
                function(arguments[0], [first[: len(first) // 2]])  # some of it is there
            if self.calls >= self._limit:
                raise Killed
            return function(*arguments, **options)

        return call


def killed(limit: int, *arguments, **options) -> bool:
    """Whether the conversion died at the call with this number."""
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        Victim(patch, limit)
        convert_checkpoint(*arguments, **options)
        return False
    return True


WAYS = {
    "native": {"max_file_bytes": 900},
    "native for a strategy": {"strategy": "tp=2,sharding=v2:2", "cuts": CUTS},
    "one file": {"format": "huggingface", "aoa_config": {"aoa_statements": ["pair -> _"]}},
    "torch": {"format": "torch_dcp", "max_file_bytes": 2500},
    "torch for a strategy": {"format": "torch_dcp", "strategy": "tp=2,sharding=v2:2", "cuts": CUTS},
    "several files": {"format": "huggingface", "aoa_config": {"aoa_statements": ["pair -> _"]}, "max_file_bytes": 400},
    "paddle": {"format": "paddle", "max_file_bytes": 2500},
}


@pytest.mark.parametrize(
    ("way", "every"),
    [
        *((way, 3) for way in ("native", "one file", "several files", "torch", "paddle")),
        *(pytest.param(way, 1, marks=pytest.mark.slow) for way in WAYS),
    ],
)
def test_killed_at_any_call_it_goes_on_to_the_same_bytes(checkpoint, tmp_path, way, every):
    options = WAYS[way]
    whole = convert_checkpoint(checkpoint, tmp_path / "whole", **options)
    expected, kept = tree(tmp_path / "whole"), set()
    for limit in range(1, 1000, every):
        out = tmp_path / f"out {limit}"
        if not killed(limit, checkpoint, out, **options):
            break
        # What Paddle's own loader goes by is written after the commit, and refuses until then.
        wanted = {name: data for name, data in expected.items() if not name.startswith("flex-ckpt")}
        assert not is_there(out) or {name: data for name, data in tree(out).items() if name in wanted} == wanted
        if tree(out) != expected:
            kept.add(len(convert_checkpoint(checkpoint, out, **options).kept_files))
        assert tree(out) == expected
    else:
        pytest.fail("it never came to its end")
    assert limit > 20
    assert kept == set(range(len(whole.files) + 1))


def is_there(path) -> bool:
    """Whether anybody would take it for a checkpoint."""
    names = os.listdir(path) if path.exists() else []
    manifests = {"0.manifest", "model.safetensors", "model.safetensors.index.json", ".metadata", "0.metadata"}
    return bool(manifests & set(names))


@pytest.mark.parametrize("way", ["native", "several files", pytest.param("paddle", marks=pytest.mark.slow)])
def test_a_checkpoint_that_exists_is_not_touched_by_whoever_goes_on(checkpoint, tmp_path, way):
    """The first dies while it removes its notes: some files have none any more. The second dies anywhere."""
    whole = convert_checkpoint(checkpoint, tmp_path / "whole", **WAYS[way])
    files = tree(tmp_path / "whole")
    expected = {name: data for name, data in files.items() if not name.startswith("flex-ckpt")}
    for limit in range(40, 400):
        left = tmp_path / f"left {limit}"
        assert killed(limit, checkpoint, left, **WAYS[way])
        notes = list(left.glob(".convert-*/*.done"))
        if is_there(left) and len(notes) == len(whole.files) - 2:
            break
    for again in range(1, 100):
        out = tmp_path / f"out {again}"
        shutil.copytree(left, out)
        ended = not killed(again, checkpoint, out, **WAYS[way])
        assert {name: data for name, data in tree(out).items() if name in expected} == expected
        if ended:
            break
    assert ended and again > 3
    assert tree(out) == tree(tmp_path / "whole")


def test_killed_twice_it_goes_on_too(checkpoint, tmp_path):
    options = WAYS["native"]
    convert_checkpoint(checkpoint, tmp_path / "whole", **options)
    out, times = tmp_path / "out", 0
    while killed(45, checkpoint, out, **options):
        times += 1
        assert times < 100
    assert times > 2
    assert tree(out) == tree(tmp_path / "whole")


def begun(checkpoint, out, **options):
    """A conversion that has died with some of its files done."""
    options = {**WAYS["several files"], **options}
    for limit in range(20, 200, 5):
        assert killed(limit, checkpoint, out, **options)
        if len(list(out.glob(".convert-*/*.done"))) >= 2:
            return options
    raise AssertionError("it was never far enough")


def test_an_error_leaves_what_is_done(checkpoint, tmp_path, monkeypatch):
    options, create = WAYS["several files"], LocalBackend.create

    def full(self, name, *arguments, **more):
        if name.startswith("model-00004"):
            raise OSError(28, "No space left on device")
        return create(self, name, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "create", full)
        with pytest.raises(OSError, match="No space left"):
            convert_checkpoint(checkpoint, tmp_path / "out", **options)
    report = convert_checkpoint(checkpoint, tmp_path / "out", **options)
    assert report.kept_files == [name for name in report.files if name < "model-00004"]
    assert 0 < report.bytes_read < report.total_bytes
    assert "3 of the files had been written before" in report.summary()


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_done_file_that_is_damaged_is_written_again(checkpoint, tmp_path, damage):
    for way in ("native", "several files"):
        out, whole = tmp_path / way, tmp_path / f"whole {way}"
        convert_checkpoint(checkpoint, whole, **WAYS[way])
        begun(checkpoint, out, **WAYS[way]) if way != "native" else killed_after(2, checkpoint, out, WAYS[way])
        done = sorted(out.glob(".convert-*/*.done"))
        file = out / done[1].name[: -len(".done")]
        if damage == "flip":
            flip(file, file.stat().st_size - 1)
        elif damage == "cut":
            os.truncate(file, file.stat().st_size - 1)
        else:
            file.unlink()
        report = convert_checkpoint(checkpoint, out, **WAYS[way])
        assert file.name not in report.kept_files
        assert len(report.kept_files) == len(done) - 1
        assert tree(out) == tree(whole)


def killed_after(count, checkpoint, out, options):
    for limit in range(20, 300):
        assert killed(limit, checkpoint, out, **options)
        if len(list(out.glob(".convert-*/*.done"))) >= count:
            return
    raise AssertionError("it was never far enough")


def test_another_conversion_does_not_go_on_with_it(checkpoint, values, tmp_path):
    out = tmp_path / "out"
    options = begun(checkpoint, out)
    before = tree(out)
    for other in ({"max_file_bytes": 500}, {"dtype": "float16"}, {"format": "native"}, {"prefix": "layers"}):
        with pytest.raises(
            ValidationError, match="with other options. Remedy .FC405.: repeat the command .* --restart"
        ):
            convert_checkpoint(checkpoint, out, **{**options, **other})
        assert tree(out) == before
    changed = tmp_path / "changed"
    save(changed, {**values, "one": values["one"] + 1.0}, step=7)
    (changed / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValidationError, match="of one that has changed since"):
        convert_checkpoint(changed, out, **options)
    assert tree(out) == before
    convert_checkpoint(changed, out, restart=True, max_file_bytes=700)
    same_tensors(changed, out)
    assert not list(out.glob("model-*"))


def test_a_restart_removes_only_what_a_conversion_has_written(checkpoint, tmp_path):
    out = tmp_path / "out"
    options = begun(checkpoint, out)
    (out / "mine").write_text("mine")
    with pytest.raises(ValidationError, match="is not empty"):
        convert_checkpoint(checkpoint, out, **{**options, "restart": True})
    assert os.listdir(out) == ["mine"]


def test_a_foreign_source_that_was_touched_has_changed(tmp_path):
    source = write_hf(tmp_path / "in")
    options = {"max_file_bytes": 20, "format": "huggingface"}
    killed_after(1, source, tmp_path / "out", options)
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(ValidationError, match="has changed since"):
        convert_checkpoint(source, tmp_path / "out", **options)


def test_a_destination_that_is_in_use_is_left_as_it_is(checkpoint, tmp_path):
    (tmp_path / "readme").write_text("mine")
    for more in ({}, {"restart": True}):
        with pytest.raises(ValidationError, match="is not empty. Remedy"):
            convert_checkpoint(checkpoint, tmp_path, **more)
    assert os.listdir(tmp_path) == ["readme"]
    out = tmp_path / "out"
    convert_checkpoint(checkpoint, out)
    before = tree(out)
    with pytest.raises(ValidationError, match="has a checkpoint, so it is not empty. Remedy .FC405."):
        convert_checkpoint(checkpoint, out, restart=True)
    assert tree(out) == before


def test_two_at_a_time_are_refused(checkpoint, tmp_path):
    out = LocalBackend(str(tmp_path / "out"))
    out.make_directory()
    with out.locks.take(), pytest.raises(CheckpointError, match="another save is writing"):
        convert_checkpoint(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_a_damaged_source_is_an_error_and_no_checkpoint(checkpoint, values, tmp_path):
    save(tmp_path / "in", values, world=1)
    file = tmp_path / "in" / data_file(tmp_path / "in")
    flip(file, file.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not is_there(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "gguf"}, "format is one of native, huggingface, .*; got 'gguf'"),
        ({"format": "huggingface", "strategy": "tp=2"}, "has whole tensors, which no strategy cuts"),
        ({"strategy": "tp=2"}, "nothing says how tensor parallelism cuts the model"),
        ({"strategy": "tp=3", "cuts": CUTS}, "tensor parallelism cannot cut a tensor evenly"),
        ({"strategy": "xp=3"}, "cannot read a strategy"),
        ({"max_file_bytes": 0}, "max_file_bytes has to be an integer >= 1"),
        ({"memory_bytes": 1 << 20}, "memory_bytes has to be an integer of at least 128.0 MiB; got 1048576"),
        ({"dtype": "int8"}, "dtype is a floating-point type"),
        ({"dtype": "float7"}, "'float7' is not supported"),
        ({"config": "/nowhere/config.json"}, "cannot be read as a model's configuration"),
        ({"format": "huggingface"}, "safetensors has no such dtype"),
        ({"prefix": "x"}, "there is nothing to export"),
        ({"aoa_config": {"aoa_statements": ["no -> w"]}}, "no"),
    ],
)
def test_what_does_not_fit_is_an_error_before_anything_is_written(values, tmp_path, options, words):
    save(tmp_path / "in", values, world=1)
    with pytest.raises(CheckpointError, match=words):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_it_reads_and_writes_stores_without_directories(values, tmp_path):
    pytest.importorskip("fsspec")
    save(tmp_path / "in", values)
    url = f"memory://{tmp_path.name}/out"
    convert_checkpoint(tmp_path / "in", url, max_file_bytes=500)
    same_tensors(tmp_path / "in", url)
    convert_checkpoint(url, tmp_path / "back", format="huggingface", aoa_config={"aoa_statements": ["pair -> _"]})
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert sorted(found) == [key for key in WEIGHTS if key != "pair"]
    assert Path(tmp_path / "back" / "model.safetensors").stat().st_size > 0


WHOLE = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
STEP = np.full((), 10001, np.float32)
OF_TORCH = {"model.w": WHOLE, "optim.state.w.exp_avg": WHOLE / 3, "optim.state.w.step": STEP, "global_step": STEP}
OF_PADDLE = {"w": WHOLE, "linear_0.w_0_moment1_0": WHOLE / 3, "master_weights.linear_0.w_0": WHOLE / 7}


@pytest.mark.parametrize("again", [None, "native", "torch_dcp"])
@pytest.mark.parametrize("state", [OF_TORCH, OF_PADDLE])
def test_states_under_names_of_others_stay_states(tmp_path, state, again):
    pytest.importorskip("paddle")
    path = tmp_path / "source"
    fc.save_state_dict(state, path)
    if again is not None:
        path, first = tmp_path / again, path
        convert_checkpoint(first, path, format=again)
    weights = {key for key in state if key in ("w", "model.w", "global_step")}
    convert_checkpoint(path, tmp_path / "bf16", dtype="bfloat16")
    found = fc.load_merged_state_dict(tmp_path / "bf16")
    for key, value in state.items():
        kind = "bfloat16" if key in ("w", "model.w") else "float32"
        assert str(found[key].dtype) == f"paddle.{kind}", key
        if kind == "float32":
            assert found[key].numpy().tolist() == value.tolist()
    for name, options in (("weights", {"states": False}), ("hf", {"format": "huggingface"})):
        report = convert_checkpoint(path, tmp_path / name, **options)
        assert (report.keys, report.left_out) == (len(weights), len(state) - len(weights))
        assert set(fc.load_merged_state_dict(tmp_path / name)) == weights
    assert fc.export_safetensors(path, tmp_path / "export").left_out == len(state) - len(weights)


@pytest.mark.parametrize("form", list(TARGETS))
def test_a_tokenizer_is_copied_and_the_rest_is_named(tmp_path, checkpoint, form):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "README.md", "modeling.py"):
        (source / name).write_text(name)
    options = {"format": form, "aoa_config": {"aoa_statements": ["pair -> _"]}}
    report = convert_checkpoint(source, tmp_path / "out", **options)
    copied = ["config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"]
    assert report.copied == copied
    assert [(tmp_path / "out" / name).read_bytes() for name in copied] == [(source / n).read_bytes() for n in copied]
    assert not {"README.md", "modeling.py"} & set(os.listdir(tmp_path / "out"))
    assert "copied config.json, merges.txt, tokenizer.json, tokenizer_config.json" in report.summary()
    assert "left in the source, as tensors do not need them: README.md" in report.notes
    assert any("as code" in note and "modeling.py" in note for note in report.notes)
    # A file that has changed is another source; a restart removes what was copied.
    again = tmp_path / "again"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TARGETS[form], "commit", broken)
        with pytest.raises(OSError, match="broken"):
            convert_checkpoint(source, again, **options)
    (source / "merges.txt").write_text("other")
    with pytest.raises(ValidationError, match="begun conversion of another checkpoint"):
        convert_checkpoint(source, again, **options)
    (source / "tokenizer.json").unlink()
    convert_checkpoint(source, again, **options, restart=True)
    assert (again / "merges.txt").read_text() == "other"
    assert not (again / "tokenizer.json").exists()


def broken(*arguments) -> None:
    raise OSError("broken")


def test_heads_that_are_cut_are_warned_of(tmp_path, checkpoint):
    pytest.importorskip("paddle")
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    (source / "config.json").write_text(json.dumps({**CONFIG, "num_key_value_heads": 2, "num_attention_heads": 8}))
    for degree, expected in ((1, []), (2, []), (4, ["num_key_value_heads=2"])):
        report = convert_checkpoint(source, tmp_path / f"tp{degree}", strategy=f"tp={degree}", cuts=CUTS)
        told = [note for note in report.notes if "cuts inside of heads" in note]
        assert len(told) == len(expected)
        assert all(words in note and f"tp={degree}" in note for words, note in zip(expected, told))
        assert fc.load_merged_state_dict(tmp_path / f"tp{degree}")["layers.0.w"].shape == [8, 12]


@pytest.mark.parametrize(
    ("strategy", "whole", "is_warned"),
    [
        ("tp=4", False, True),
        ("mp=4", False, True),
        ("mesh=4:mp", False, True),
        ("tp=2", False, False),
        ("tp=4", True, False),
        ("mesh=4:mp", True, False),
    ],
)
def test_key_and_value_heads_of_grouped_queries(tmp_path, strategy, whole, is_warned):
    """Two of them on four ranks: cut in half, or whole on each rank as PaddleNLP's Llama has them."""
    state = {
        f"layers.0.{name}_proj.weight": np.ones((8, rows), dtype=np.float32) for name, rows in zip("qkv", (16, 4, 4))
    }
    save(tmp_path / "source", state)
    (tmp_path / "source" / "config.json").write_text('{"num_key_value_heads": 2, "num_attention_heads": 8}')
    cuts = [("*.k_proj.*", None), ("*.v_proj.*", None)] if whole else []
    cuts += [("*_proj.*", 1)]
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", strategy=strategy, cuts=cuts)
    told = [note for note in report.notes if "cuts inside of heads" in note]
    assert bool(told) == is_warned
    if not told:
        return
    assert "This cuts layers.0.k_proj.weight, layers.0.v_proj.weight. Remedy (FC704): where each rank" in told[0]
    advised("tools/conversion_content.py", "give first --cut '*.k_proj.*=none' --cut '*.v_proj.*=none'", told[0])
    first = [("*.k_proj.*", None), ("*.v_proj.*", None)]
    for name, followed in {"cut": {"strategy": strategy, "cuts": [*first, *cuts]}, "two": {"strategy": "tp=2"}}.items():
        report = convert_checkpoint(tmp_path / "source", tmp_path / name, **{"cuts": cuts, **followed})
        assert not any("cuts inside of heads" in note for note in report.notes)
        same_tensors(tmp_path / "source", tmp_path / name)


@pytest.mark.parametrize("statements", [None, ["net.x -> net.y"]])
@pytest.mark.parametrize(
    ("form", "strategy"), [*((form, None) for form in TARGETS), ("native", "tp=2"), ("paddle", "tp=2")]
)
def test_a_prefix_is_taken_off_in_every_format(tmp_path, form, strategy, statements):
    state = {f"net.{name}": np.full((4, 6), number, np.float32) for number, name in enumerate(("x", "w", "deep.w"))}
    save(tmp_path / "in", {**state, "net.x.moment1_0": np.ones((4, 6), np.float32), "other": np.ones(3, np.float32)})
    config = None if statements is None else {"aoa_statements": statements}
    options = {"format": form, "strategy": strategy, "cuts": [("*", 1)] if strategy else [], "states": False}
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", config, prefix="net", **options)
    renamed = "x" if statements is None else "y"
    manifest = SourceDirectory(tmp_path / "out").read_manifest()
    assert set(manifest.catalog.keys) == {renamed, "w", "deep.w"}
    assert report.keys == 3
    back = [f"{name} -> net.{'x' if name == 'y' else name}" for name in (renamed, "w", "deep.w")]
    found = diff(tmp_path / "out", tmp_path / "in", {"aoa_statements": back})
    assert (found.differing, found.unlike, found.only_in_first) == ({}, {}, [])
