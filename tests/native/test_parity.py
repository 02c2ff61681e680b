"""Parity: each file of a stripe can be rebuilt from the other members' files, bit for bit, and nothing else is used."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native import parity
from paddle_flexckpt.native.data_file import write_data_file
from paddle_flexckpt.native.file_exchange import Making, exchange_files
from paddle_flexckpt.native.manifest import Manifest, SaveInfo, merge_parts
from paddle_flexckpt.native.parity import (
    Stripe,
    check_checksum,
    check_parity,
    group_nodes,
    read_stripe,
    stripe_of,
    write_parity,
    write_rebuilt,
)
from paddle_flexckpt.native.save_names import SaveNames, parity_of
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from tests.attacks.targets import Target, outcome
from tests.native.samples import flip, items_of, whole

WORDS = [b"", b"0", b"-1", b"9" * 30, b"[", b"]", b"{}", b"null", b'"', b"1e999", b"NaN", b"\xff", b"\0", b",", b"../"]
TOKEN = "0000002a" + "0123456789abcdef01234567"
NAMES = SaveNames(0, TOKEN)


def make(path, blocks, output, readers=None, rank=0):
    """One rank makes a file that it reads everything for."""
    files = {source.file for block in blocks for source in block.sources}
    making = Making(rank, blocks, dict.fromkeys(files, rank), output)
    exchange_files(SoloCommunicator(rank), [making], open_backend(str(path)).open, "")


def protect(path, stripe):
    """All parity files of a stripe, in one directory."""
    backend = open_backend(str(path))
    for member in range(len(stripe.files)):
        if stripe.parity(member).length:
            make(path, [stripe.parity(member)], write_parity(backend, stripe, member))


def saved(path, sizes, seed=0) -> Manifest:
    """Data files of so many bytes of data each, in one directory; 0: none."""
    parts, random = [], np.random.default_rng(seed)
    for rank, size in enumerate(sizes):
        shards = [whole(f"k{rank}", "uint8", (size,), rank)] if size else []
        items, data = items_of(shards, NAMES.data_file(rank)), [random.integers(0, 256, size, dtype=np.uint8)]
        parts.append(write_data_file(str(path), items, data[: len(shards)], SaveInfo(TOKEN, 0, len(sizes))))
    nodes = {f"{rank} (h:/n{rank})": () for rank in range(len(sizes))}
    return replace(merge_parts(parts), nodes=nodes)


def names(path, ending):
    return sorted(name for name in os.listdir(path) if name.endswith(ending))


def rebuild(path, manifest, stripe, member):
    name = stripe.files[member]
    make(path, stripe.data(member), write_rebuilt(open_backend(str(path)), manifest, name))


@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 63, 64, 65, 200, 700]), min_size=2, max_size=6).filter(any),
    lost=st.integers(0, 5),
    chunk=st.sampled_from([16, 64, 4 << 20]),
)
def test_any_lost_file_is_rebuilt_from_the_others(tmp_path_factory, sizes, lost, chunk):
    path, lost = tmp_path_factory.mktemp("nodes"), lost % len(sizes)
    manifest = saved(path, sizes)
    stripe = stripe_of(manifest, range(len(sizes)))
    with pytest.MonkeyPatch.context() as context:
        context.setattr(parity, "CHUNK_BYTES", chunk)
        protect(path, stripe)
        for name in names(path, ".parity"):
            assert read_stripe(open_backend(str(path)), name, manifest) == stripe
            check_checksum(open_backend(str(path)), name)
        name, wanted = stripe.files[lost], None
        if sizes[lost]:
            wanted = (path / name).read_bytes()
            os.unlink(path / name)
        (path / parity_of(name)).unlink(missing_ok=True)
        rebuild(path, manifest, stripe, lost) if wanted else None
    assert not wanted or (path / name).read_bytes() == wanted
    assert not names(path, ".tmp")


@given(sizes=st.lists(st.integers(0, 1000), min_size=2, max_size=9).filter(any))
def test_each_byte_is_in_one_parity_file_of_another_member(sizes):
    stripe = Stripe(TOKEN, tuple(map(NAMES.data_file, range(len(sizes)))), tuple(sizes))
    covered = [np.zeros(size, dtype=int) for size in sizes]
    for holder in range(len(sizes)):
        for source in stripe.parity(holder).sources:
            member = stripe.files.index(source.file)
            assert member != holder
            covered[member][source.begin : source.begin + source.length] += 1
        # The least memory by which the loss of any one member can be survived.
        assert stripe.parity(holder).length <= -(-max(sizes) // (len(sizes) - 1))
    assert all((each == 1).all() for each in covered)


def test_the_parity_of_two_is_the_other_ones_file(tmp_path):
    stripe = stripe_of(saved(tmp_path, [100, 40]), (0, 1))
    protect(tmp_path, stripe)
    for member, other in ((0, 1), (1, 0)):
        data = (tmp_path / stripe.files[other]).read_bytes()
        assert (tmp_path / parity_of(stripe.files[member])).read_bytes()[len(stripe.header(member)) :][:-8] == data


@pytest.mark.parametrize("count", range(2, 40))
@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_groups_have_all_nodes_and_are_even_and_not_too_small(count, k):
    if k > count:
        return
    groups = group_nodes(count, k)
    assert sorted(node for group in groups for node in group) == list(range(count))
    sizes = {len(group) for group in groups}
    assert min(sizes) >= k and max(sizes) - min(sizes) <= 1 and max(sizes) < 2 * k
    if len(groups) > 1:
        assert not any({node, node + 1} <= {*group} for group in groups for node in group)


@pytest.mark.parametrize("wrong", [1, 0, -2, True, "2", 2.0, 4, 1000])
def test_parity_that_no_node_can_have_is_refused(wrong):
    with pytest.raises(ValidationError, match="parity has to be None, or 2 to 128"):
        check_parity(wrong, [[0], [1], [2]], ["a", "b", "c"])


def test_nodes_with_different_numbers_of_ranks_are_refused():
    with pytest.raises(ValidationError, match=r"as many ranks on each node; got 2, 1.*node_copies=2"):
        check_parity(2, [[0, 1], [2]], ["a", "b"])
    check_parity(2, [[0, 1], [3, 2]], ["a", "b"])


@pytest.fixture
def stored(tmp_path):
    """Four files of one stripe, and their parity files; a chunk is a block."""
    manifest = saved(tmp_path, [700, 90, 0, 333])
    stripe = stripe_of(manifest, range(4))
    protect(tmp_path, stripe)
    return tmp_path, manifest, stripe


@pytest.mark.parametrize(
    "damaged", [NAMES.data_file(1), NAMES.data_file(3), NAMES.parity_file(1), NAMES.parity_file(2)]
)
def test_what_is_rebuilt_from_damage_is_refused_and_leaves_no_file(stored, damaged):
    path, manifest, stripe = stored
    os.unlink(path / stripe.files[0])
    flip(path / damaged, (path / damaged).stat().st_size // 2)
    with pytest.raises(CorruptCheckpointError) as error:
        rebuild(path, manifest, stripe, 0)
    assert f"{stripe.files[0]}, rebuilt by parity, is not what was saved: " in str(error.value)
    assert stripe.files[0] not in os.listdir(path) and not names(path, ".tmp")
    if damaged.endswith("parity"):
        with pytest.raises(CorruptCheckpointError, match="is damaged: its checksum is another"):
            check_checksum(open_backend(str(path)), damaged)


def test_a_damaged_header_is_found_too(stored):
    path, manifest, stripe = stored
    os.unlink(path / stripe.files[0])
    first = NAMES.parity_file(1)
    flip(path / first, len(stripe.header(1)) + 20)
    with pytest.raises(CorruptCheckpointError, match="not what was saved: its header"):
        rebuild(path, manifest, stripe, 0)


def test_a_manifest_that_does_not_describe_all_bytes_is_refused(stored):
    path, manifest, stripe = stored
    sizes = manifest.file_bytes + np.asarray([1, 0, 0])
    with pytest.raises(CorruptCheckpointError, match="its blocks in the manifest have not its"):
        rebuild(path, replace(manifest, file_bytes=sizes), stripe, 0)


def header(**changes):
    def change(fields):
        fields.update(changes)

    return change


def other_size(fields):
    fields["files"][1][1] += 1


def twice(fields):
    fields["files"][1] = fields["files"][0]


def elsewhere(fields):
    fields["files"][1][0] = "../1_0.safetensors"


def more(fields):
    fields["files"] += [[NAMES.data_file(rank), 0] for rank in range(4, 40)]


CHANGES = [
    header(save_token=TOKEN[:-1] + "8"),
    header(format="flexckpt"),
    header(version=2),
    header(version=True),
    header(member=2),
    header(files=[]),
    header(files=[["0_0", 1]]),
    header(files={}),
    header(files=None),
    header(more=1),
    lambda fields: fields.pop("files"),
    other_size,
    twice,
    elsewhere,
    more,
]


@pytest.mark.parametrize("change", CHANGES)
def test_another_header_is_refused(stored, change):
    path, manifest, _ = stored
    file = path / NAMES.parity_file(1)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + length])
    change(fields)
    text = json.dumps(fields, separators=(",", ":")).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(CorruptCheckpointError):
        read_stripe(open_backend(str(path)), file.name, manifest)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (30000).to_bytes(8, "little") + b"[" * 30000,
        (30002).to_bytes(8, "little") + b"[" + b"{}," * 10000 + b"]",
        (40000).to_bytes(8, "little") + b" " * 40000,
    ],
)
def test_bytes_that_are_no_parity_file_are_refused(stored, data):
    assert isinstance(hostile(stored, data), CorruptCheckpointError)


def hostile(stored, data):
    """The error that refuses these bytes, in bounded time and memory; None if they are accepted."""
    path, manifest, _ = stored
    name = NAMES.parity_file(1)

    def read(given: bytes) -> None:
        (path / name).write_bytes(given)
        read_stripe(open_backend(str(path)), name, manifest)

    return outcome(Target("parity", read, list, ()), data)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """As ``stored``, and the bytes of the second parity file."""
    path = tmp_path_factory.mktemp("kept")
    manifest = saved(path, [700, 90, 0, 333])
    protect(path, stripe_of(manifest, range(4)))
    return path, manifest, (path / NAMES.parity_file(1)).read_bytes()


@given(data=st.data())
def test_a_changed_header_is_refused_and_nothing_else_happens(kept, data):
    _, manifest, whole = kept
    stripe = stripe_of(manifest, range(4))
    header = bytearray(whole[: len(stripe.header(1))])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(header) - 1))
        header[at : at + data.draw(st.integers(0, 2))] = data.draw(st.sampled_from(WORDS))
    changed = bytes(header) + whole[len(stripe.header(1)) :]
    assert (changed == whole) or isinstance(hostile(kept, changed), CorruptCheckpointError)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_parity_file_of_another_length_is_refused(stored, change):
    path, manifest, _ = stored
    file = path / NAMES.parity_file(1)
    os.truncate(file, file.stat().st_size + change)
    with pytest.raises(CorruptCheckpointError, match=r"has \d+ bytes; expected \d+"):
        read_stripe(open_backend(str(path)), file.name, manifest)


def test_a_parity_file_of_another_rank_is_refused(stored):
    path, manifest, _ = stored
    shutil.copy(path / NAMES.parity_file(0), path / NAMES.parity_file(1))
    with pytest.raises(CorruptCheckpointError, match="not of this checkpoint"):
        read_stripe(open_backend(str(path)), NAMES.parity_file(1), manifest)


def test_a_parity_file_of_another_save_is_refused(stored):
    path, manifest, _ = stored
    other = replace(manifest, save_token=TOKEN[:-1] + "8")
    with pytest.raises(CorruptCheckpointError, match="not of this checkpoint"):
        read_stripe(open_backend(str(path)), NAMES.parity_file(1), other)
