"""Loads through functions that make tensors of others, as Paddle's develop branch takes them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import paddle
import pytest

import paddle_flexckpt
from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.loading import transforms
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer.options import LoadOptions
from tests.documents import code_block
from tests.saved import data_file

ROWS, COLUMNS = 6, 8
VALUES = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
SCALES = np.linspace(0.5, 3, ROWS, dtype=np.float32)[:, None]
PLAIN = np.arange(5, dtype=np.float32) - 2
STORED = {"w.codes": VALUES.astype(np.int8), "w.scales": SCALES, "plain": PLAIN}
EXPECTED = (VALUES * SCALES).astype(ml_dtypes.bfloat16)


class Scaled:
    """What says what a logical tensor is and makes it: codes times scales, rounded to bfloat16."""

    def __init__(self, names: tuple[str, ...] = ("w",), dtype: str = "bfloat16"):
        self.names, self.dtype, self.made = names, dtype, []

    def logical_metadata(self):
        shape = (ROWS, COLUMNS)
        return {name: SimpleNamespace(global_shape=shape, dtype=self.dtype) for name in self.names}

    def source_keys(self, logical_key):
        return [f"{logical_key}.codes", f"{logical_key}.scales"]

    def apply(self, logical_key, source_tensors, output_dtype):
        self.made.append(logical_key)
        codes, scales = (source_tensors[name] for name in self.source_keys(logical_key))
        return (codes.astype("float32") * scales).astype(output_dtype)


def write(path, kind, stored=STORED):
    """A checkpoint of this library, whose blocks are verified, or a Hugging Face directory."""
    if kind == "native":
        save_state_dict(stored, path, SoloCommunicator())
        return path
    path.mkdir()
    return write_safetensors(path, {name: (_CODES[array.dtype.name], array) for name, array in stored.items()})


_CODES = {"int8": "I8", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "uint8": "U8"}


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (code, array) in tensors.items():
        raw = array.tobytes()
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def part(key, shape, axis, comm, dtype=ml_dtypes.bfloat16):
    """A rank's part of a target, and the slice that it is."""
    local, offset = list(shape), [0] * len(shape)
    local[axis] //= comm.size
    offset[axis] = comm.position * local[axis]
    where = tuple(slice(o, o + n) for o, n in zip(offset, local))
    return ShardedWeight(key, np.zeros(local, dtype), tuple(local), tuple(shape), tuple(offset)), where


@pytest.mark.parametrize("kind", ["native", "safetensors"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_logical_tensors_are_loaded_like_stored_ones(tmp_path, kind, size, axis):
    directory = write(tmp_path / "from", kind)

    def load(comm):
        weight, where = part("w", EXPECTED.shape, axis, comm)
        plain, transform = np.zeros_like(PLAIN), Scaled()
        report = load_state_dict(
            {"w": weight, "plain": plain}, directory, comm, strict=True, comm_method="cooperative",
            worker_groups=[None, None], num_workers=4, load_transform=transform,
        )  # fmt: skip
        assert weight.local_tensor.tobytes() == np.ascontiguousarray(EXPECTED[where]).tobytes()
        assert np.array_equal(plain, PLAIN)
        assert transform.made == ["w"]
        assert report.comm_method == "direct"
        assert report.comm_reason == "load_transform: every rank makes what it needs"
        # The sources, whole, on each rank.
        assert report.bytes_read == VALUES.size + SCALES.nbytes + PLAIN.nbytes
        return report.bytes_needed

    needed = SimulatedWorld(size).run(load)
    assert needed == [EXPECTED.nbytes // size + PLAIN.nbytes] * size


@pytest.mark.parametrize("size", [1, 2])
def test_statements_are_about_logical_names(tmp_path, size):
    stored = {f"{name}.{part}": STORED[f"w.{part}"] + number for number, name in enumerate("qkv")
              for part in ("codes", "scales")}  # fmt: skip
    directory = write(tmp_path / "from", "safetensors", {**stored, "plain": PLAIN})
    expected = [((VALUES + n) * (SCALES + n)).astype(ml_dtypes.bfloat16) for n in range(3)]
    statements = ["q, k, v -> joined, axis=0", "joined^T -> turned"]

    def load(comm):
        weight, where = part("turned", (COLUMNS, 3 * ROWS), 0, comm)
        options = {"aoa_config": {"aoa_statements": statements}, "load_transform": Scaled(("q", "k", "v"))}
        load_state_dict({"turned": weight}, directory, comm, **options)
        assert weight.local_tensor.tobytes() == np.ascontiguousarray(np.concatenate(expected).T[where]).tobytes()

    SimulatedWorld(size).run(load)


def test_a_transform_has_the_place_of_paddles_develop_branch(tmp_path):
    save_state_dict(STORED, tmp_path, SoloCommunicator())
    target = {"w": np.zeros((ROWS, COLUMNS), ml_dtypes.bfloat16)}
    load_state_dict(
        target, tmp_path, SoloCommunicator(), 0, None, False, True, None, False, None, "broadcast", Scaled(), 4
    )
    assert target["w"].tobytes() == EXPECTED.tobytes()


def test_a_target_of_another_dtype_is_cast_or_refused_as_ever(tmp_path):
    directory, comm = write(tmp_path / "from", "native"), SoloCommunicator()
    target = np.zeros((ROWS, COLUMNS), np.float32)
    with pytest.raises(ValidationError, match="dtype"):
        load_state_dict({"w": target}, directory, comm, load_transform=Scaled())
    assert not target.any()
    load_state_dict({"w": target}, directory, comm, dtype="cast", load_transform=Scaled())
    assert np.array_equal(target, EXPECTED.astype(np.float32))


@pytest.mark.parametrize(("room", "made"), [(1 << 20, ["a", "b"]), (0, ["a", "b", "a"])])
def test_what_is_let_go_of_is_made_again(tmp_path, monkeypatch, room, made):
    monkeypatch.setattr(transforms, "KEPT_BYTES", room)
    stored = {f"{name}.{part}": STORED[f"w.{part}"] for name in "ab" for part in ("codes", "scales")}
    directory, transform = write(tmp_path / "from", "safetensors", stored), Scaled(("a", "b"))
    files = transforms.TransformedFiles(directory, LoadOptions(load_transform=transform))
    with files.closing:
        files.open()
        with files.directory.backend.open("load_transform") as file:
            places = dict(zip(files.catalog.keys, files.catalog.byte_offset.tolist()))
            for name in "aba":
                assert file.read(places[name], EXPECTED.nbytes) == EXPECTED.tobytes()
            whole = file.read(0, file.size)
            assert len(whole) == file.size
            assert files.manifest.save_token.encode() in whole[:256]
            assert file.read(file.size, 8) == b""
    assert transform.made[: len(made)] == made


@pytest.mark.parametrize("where", ["verified in full", "in an object store"])
def test_so_are_they_from_elsewhere(tmp_path, where):
    """Every block of stored tensors is verified; what is made has no checksums."""
    path = tmp_path / "from" if where == "verified in full" else f"memory://transforms/{tmp_path.name}"
    write(path, "native")

    def load(comm):
        weight, cut = part("w", EXPECTED.shape, 1, comm)
        plain = np.zeros(3, PLAIN.dtype)
        rest = ShardedWeight("plain", plain, (3,), PLAIN.shape, (1,))
        verify = "full" if where == "verified in full" else "read"
        report = load_state_dict({"w": weight, "plain": rest}, path, comm, verify=verify, load_transform=Scaled())
        assert weight.local_tensor.tobytes() == np.ascontiguousarray(EXPECTED[cut]).tobytes()
        assert np.array_equal(plain, PLAIN[1:4])
        assert report.bytes_extra == PLAIN.nbytes - 3 * PLAIN.itemsize
        return report.bytes_verified

    verified = SimulatedWorld(2).run(load)
    sources = VALUES.size + SCALES.nbytes  # whole blocks, which every load compares
    assert verified == [sources + PLAIN.nbytes] * 2


class Raises(Scaled):
    def apply(self, logical_key, source_tensors, output_dtype):
        raise ZeroDivisionError("no scale")


class Turned(Scaled):
    def apply(self, *arguments):
        return super().apply(*arguments).T


class Wide(Scaled):
    def apply(self, *arguments):
        return super().apply(*arguments).astype("float32")


class NoTensor(Scaled):
    def apply(self, *arguments):
        return super().apply(*arguments).astype("float32").numpy()


class Lacking(Scaled):
    def source_keys(self, logical_key):
        return [f"{logical_key}.codes", f"{logical_key}.zero_points"]


class Silent(Scaled):
    def logical_metadata(self):
        raise OSError("no index")


class Hiding(Scaled):
    def logical_metadata(self):
        return {**super().logical_metadata(), "plain": SimpleNamespace(global_shape=(5,), dtype="float32")}

    def source_keys(self, logical_key):
        return ["w.codes", "w.scales"]


class Empty(Scaled):
    def source_keys(self, logical_key):
        return []


class Twice(Scaled):
    def source_keys(self, logical_key):
        return ["w.codes"] * 2


class Odd(Scaled):
    def logical_metadata(self):
        return {"w": (ROWS, COLUMNS)}


class Negative(Scaled):
    def logical_metadata(self):
        return {"w": SimpleNamespace(global_shape=(ROWS, -1), dtype="float32")}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Raises, "load_transform.apply('w') raised ZeroDivisionError: no scale; no target was changed. Remedy"),
        (Turned, f"gave bfloat16 [{COLUMNS}, {ROWS}]; expected bfloat16 [{ROWS}, {COLUMNS}], as its logical_metadata"),
        (Wide, f"gave float32 [{ROWS}, {COLUMNS}]; expected bfloat16"),
        (NoTensor, "gave a ndarray; expected a Tensor"),
        (Lacking, "of one that the checkpoint lacks (key 'w'); expected w.zero_points; got 3 other keys. Remedy"),
        (Silent, "load_transform.logical_metadata() raised OSError: no index. Remedy (FC101): correct the transform"),
        (Hiding, "load_transform makes a tensor under the name of a stored one, and not of that (key 'plain')"),
        (Empty, "source_keys() has to give a list of names (key 'w')"),
        (Twice, "source_keys() gives a name twice (key 'w')"),
        (Odd, "logical_metadata() has to give global_shape and dtype of each tensor (key 'w')"),
        (Negative, "logical_metadata() gives an invalid shape (key 'w')"),
        (object, "logical_metadata, source_keys, apply; a object lacks logical_metadata, source_keys, apply"),
    ],
)
def test_what_a_transform_does_wrong_is_every_rank_s_error(tmp_path, kind, said):
    """And where it does it on one rank alone, the others have that one's error."""
    directory = write(tmp_path / "from", "safetensors")

    def load(wrong_on, comm):
        weight, _ = part("w", EXPECTED.shape, 0, comm)
        transform = kind() if comm.position in wrong_on else Scaled()
        try:
            load_state_dict({"w": weight}, directory, comm, load_transform=transform)
        except CheckpointError as error:
            return type(error), str(error), weight.local_tensor.any()
        return None

    of_apply = kind in (Raises, Turned, Wide, NoTensor)
    for wrong_on in ((0, 1), (1,)):
        first, second = SimulatedWorld(2).run(lambda comm, wrong_on=wrong_on: load(wrong_on, comm))
        assert first == second
        assert said in first[1]
        assert first[0] is (CheckpointError if of_apply else ValidationError)
        assert not first[2]


def test_a_failure_later_says_that_targets_may_be_overwritten(tmp_path):
    stored = {f"{name}.{part}": STORED[f"w.{part}"] for name in "ab" for part in ("codes", "scales")}
    directory, transform = write(tmp_path / "from", "native", stored), Scaled(("a", "b"))
    plain = transform.apply
    transform.apply = lambda key, *rest: plain(key, *rest) if key == "a" else None
    state = {key: np.zeros((ROWS, COLUMNS), ml_dtypes.bfloat16) for key in "ab"}
    with pytest.raises(CheckpointError, match=r"apply\('b'\) gave a NoneType.*targets may be partly overwritten"):
        load_state_dict(state, directory, SoloCommunicator(), load_transform=transform)


class Planned(Scaled):
    """Of which Paddle's loader asks parts: a plan of an earlier load says so still."""

    def __init__(self, *arguments, answer="global"):
        super().__init__(*arguments)
        self.plans, self.asked, self.answer = {"w": SimpleNamespace(mode="local")}, [], answer

    def read_plan(self, logical_key, target_metadata, force_global=False):
        told = (tuple(target_metadata.global_offset), tuple(target_metadata.local_shape), target_metadata.dtype)
        self.asked.append((logical_key, tuple(target_metadata.global_shape), *told, force_global))
        self.plans[logical_key] = SimpleNamespace(mode=self.answer)
        return self.plans[logical_key]

    def apply(self, logical_key, *rest):
        assert self.plans[logical_key].mode == "global", "sources are parts"
        return super().apply(logical_key, *rest)


@pytest.mark.parametrize("size", [1, 2])
def test_a_transform_that_plans_is_told_that_its_sources_come_whole(tmp_path, size):
    directory = write(tmp_path / "from", "safetensors")

    def load(comm):
        weight, where = part("w", EXPECTED.shape, 0, comm)
        transform = Planned()
        load_state_dict({"w": weight}, directory, comm, load_transform=transform)
        assert weight.local_tensor.tobytes() == np.ascontiguousarray(EXPECTED[where]).tobytes()
        assert transform.asked == [("w", EXPECTED.shape, (0, 0), EXPECTED.shape, "bfloat16", True)]

    SimulatedWorld(size).run(load)


def test_a_plan_for_parts_is_refused(tmp_path):
    directory, target = write(tmp_path / "from", "safetensors"), np.zeros(EXPECTED.shape, ml_dtypes.bfloat16)
    said = r"read_plan\('w', force_global=True\) gave a plan of mode 'local'; expected 'global'.*no target was changed"
    with pytest.raises(CheckpointError, match=said):
        load_state_dict({"w": target}, directory, SoloCommunicator(), load_transform=Planned(answer="local"))
    assert not target.any()


class Turnabout(Scaled):
    def source_keys(self, logical_key):
        return super().source_keys(logical_key)[::-1]

    def apply(self, *arguments):
        return Scaled().apply(*arguments)


def test_ranks_with_other_transforms_disagree(tmp_path):
    directory = write(tmp_path / "from", "safetensors")

    def load(comm):
        weight, _ = part("w", EXPECTED.shape, 0, comm)
        given = Scaled() if comm.position else Turnabout()
        with pytest.raises(ValidationError, match='ranks disagree: rank 0: {"load_transform"'):
            load_state_dict({"w": weight}, directory, comm, load_transform=given)

    SimulatedWorld(2).run(load)


def test_a_damaged_source_is_an_error(tmp_path):
    directory = write(tmp_path / "from", "native")
    data = directory / data_file(directory)
    raw = bytearray(data.read_bytes())
    at = raw.index(STORED["w.codes"].tobytes())
    raw[at + 3] ^= 1
    data.write_bytes(raw)
    target = np.zeros((ROWS, COLUMNS), ml_dtypes.bfloat16)
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        load_state_dict({"w": target}, directory, SoloCommunicator(), load_transform=Scaled())
    assert not target.any()


def test_a_kept_plan_serves_with_a_transform_too(tmp_path):
    directory, comm = write(tmp_path / "from", "native"), SoloCommunicator()
    for number in range(3):
        target, transform = np.zeros((ROWS, COLUMNS), ml_dtypes.bfloat16), Scaled()
        load_state_dict({"w": target}, directory, comm, load_transform=transform)
        assert target.tobytes() == EXPECTED.tobytes(), number
        assert transform.made == ["w"]


def test_nodes_without_shared_storage_are_refused(tmp_path):
    save_state_dict(STORED, tmp_path, SoloCommunicator(), storage="per_node")
    with pytest.raises(ValidationError, match="storage='per_node' may have parts on other nodes. Remedy"):
        load_state_dict({}, tmp_path, SoloCommunicator(), storage="per_node", load_transform=Scaled())


def test_the_guide_s_transform_does_what_it_says(tmp_path):
    directory, target = write(tmp_path / "from", "native"), np.zeros((ROWS, COLUMNS), ml_dtypes.bfloat16)
    names = {"fc": paddle_flexckpt, "SimpleNamespace": SimpleNamespace, "state": {"w": target}, "path": str(directory)}
    exec(code_block("docs/guide.md", "class Dequantize"), names)
    assert target.tobytes() == EXPECTED.tobytes()


def test_exponents_are_read_as_bytes(tmp_path):
    scales = np.asarray([[127, 128], [126, 129]], np.uint8)
    write_safetensors(tmp_path, {"scale": ("F8_E8M0", scales)})
    target = np.zeros((2, 2), np.uint8)
    load_state_dict({"scale": target}, tmp_path, SoloCommunicator())
    assert np.array_equal(target, scales)


# -- FP8 ---------------------------------------------------------------------------------------------------------------

FP8 = (np.arange(24 * 16).reshape(24, 16) % 97 - 48).astype(ml_dtypes.float8_e4m3fn)
BLOCK = (8, 8)


class Dequantized:
    """As PaddleFleet's HFDequantLoadTransform: a weight that has its logical tensor's name, and a scale beside it."""

    def __init__(self, keys, scale="float32", axes=(0, 1), method="fp8_block"):
        relations = {
            key: SimpleNamespace(group_name="g", components={"qweight": key, "scale": f"{key}_scale"}) for key in keys
        }
        group = SimpleNamespace(quant_method=method, block_axes=axes, block_shape=BLOCK)
        self.quan_metadata = SimpleNamespace(relations=relations, groups={"g": group})
        self.exponents, self.made = scale == "exponents", []

    def logical_metadata(self):
        return {key: SimpleNamespace(global_shape=FP8.shape, dtype="bfloat16") for key in self.quan_metadata.relations}

    def source_keys(self, logical_key):
        return list(self.quan_metadata.relations[logical_key].components.values())

    def apply(self, logical_key, source_tensors, output_dtype):
        self.made.append(logical_key)
        weight, scale = (source_tensors[name] for name in self.source_keys(logical_key))
        scales = paddle.pow(paddle.to_tensor(2.0), scale.astype("float32") - 127) if self.exponents else scale
        for axis, block in enumerate(BLOCK):
            scales = paddle.repeat_interleave(scales, block, axis=axis)
        values = paddle.to_tensor(weight.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32))
        return (values * scales).astype(output_dtype)


def dequantized(scales):
    whole = np.repeat(np.repeat(scales, BLOCK[0], 0), BLOCK[1], 1)
    return (FP8.astype(np.float32) * whole).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("size", [1, 2])
def test_fp8_weights_become_statements_where_they_are_known_and_are_made_whole_elsewhere(tmp_path, size):
    """Both in one load: one scale is floating-point, the other is exponents alone."""
    exact = np.linspace(0.01, 2, 6, dtype=np.float32).reshape(3, 2)
    powers = np.asarray([[126, 127], [128, 129], [125, 130]], np.uint8)
    tensors = {
        "a.w": ("F8_E4M3", FP8), "a.w_scale": ("F32", exact),
        "b.w": ("F8_E4M3", FP8), "b.w_scale": ("F8_E8M0", powers),
    }  # fmt: skip
    write_safetensors(tmp_path, tensors)
    expected = {"a": dequantized(exact).T, "b": dequantized(np.exp2(powers.astype(np.float32) - 127))}
    statements = {"aoa_statements": ["a.w^T -> a", "b.w -> b"]}

    def load(comm):
        transform = Dequantized(["a.w", "b.w"], scale="exponents")
        parts = {key: part(key, array.shape, 0, comm) for key, array in expected.items()}
        state = {key: weight for key, (weight, _) in parts.items()}
        report = load_state_dict(state, tmp_path, comm, aoa_config=statements, load_transform=transform)
        for key, (weight, where) in parts.items():
            assert weight.local_tensor.tobytes() == np.ascontiguousarray(expected[key][where]).tobytes(), key
        assert transform.made == ["b.w"]
        return report.bytes_needed

    SimulatedWorld(size).run(load)


def test_with_statements_a_rank_reads_what_it_needs(tmp_path):
    exact = np.linspace(0.01, 2, 6, dtype=np.float32).reshape(3, 2)
    write_safetensors(tmp_path, {"a.w": ("F8_E4M3", FP8), "a.w_scale": ("F32", exact)})

    def load(comm):
        transform = Dequantized(["a.w"])
        weight, where = part("a.w", FP8.shape, 1, comm)
        report = load_state_dict({"a.w": weight}, tmp_path, comm, load_transform=transform)
        assert weight.local_tensor.tobytes() == np.ascontiguousarray(dequantized(exact)[where]).tobytes()
        assert transform.made == []
        assert report.computed == ["a.w"]
        return report.bytes_needed

    assert SimulatedWorld(2).run(load) == [FP8.size // 2 + exact.nbytes // 2] * 2


@pytest.mark.parametrize("change", [{"axes": (1, 0)}, {"method": "mxfp4_group"}])
def test_what_no_statement_says_is_left_to_the_transform(tmp_path, change):
    exact = np.linspace(0.01, 2, 6, dtype=np.float32).reshape(3, 2)
    write_safetensors(tmp_path, {"a.w": ("F8_E4M3", FP8), "a.w_scale": ("F32", exact)})
    transform, target = Dequantized(["a.w"], **change), np.zeros(FP8.shape, ml_dtypes.bfloat16)
    plans: list[object] = []
    transform.read_plan = lambda key, *rest, **how: plans.append((key, how)) or SimpleNamespace(mode="global")
    load_state_dict({"a.w": target}, tmp_path, SoloCommunicator(), load_transform=transform)
    assert target.tobytes() == dequantized(exact).tobytes()
    assert transform.made == ["a.w"]
    assert plans == [("a.w", {"force_global": True})]
    reverse = {"aoa_statements": ["b -> a.w"], "aoa_config_reverse": True}
    target = np.zeros(FP8.shape, ml_dtypes.bfloat16)
    load_state_dict(
        {"b": target}, tmp_path, SoloCommunicator(), aoa_config=reverse, load_transform=Dequantized(["a.w"])
    )
    assert target.tobytes() == dequantized(exact).tobytes()


def test_a_stored_name_is_known_by_its_logical_tensor_alone(tmp_path):
    directory = write(tmp_path / "from", "native")
    assert "w.codes" in SourceDirectory(directory).read_manifest().catalog.keys
    with pytest.raises(ValidationError, match="no such key"):
        load_state_dict({"w.codes": np.zeros((ROWS, COLUMNS), np.int8)}, directory, SoloCommunicator(),
                        load_transform=Scaled())  # fmt: skip
