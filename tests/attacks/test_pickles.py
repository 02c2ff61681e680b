"""Known malicious pickles: each is refused by a named error, and a canary proves that nothing was executed."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import time
import tracemalloc
import types

import numpy as np
import pytest

from paddle_flexckpt.catalog import CorruptCheckpointError, UnsafePickleError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from tests.attacks.opcodes import DTYPE, array, call, long4, long8, named, named_by_line, program, short

NEW = "paddle.distributed.flex_checkpoint.dcp.metadata"


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A file that exists as soon as any of the attacks is carried out, and a module that cannot be imported unseen."""
    path = tmp_path / "canary"
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield path
    assert not path.exists()
    assert not {"antigravity", "this", "nntplib", "turtle"} & (set(sys.modules) - before)


COMMAND = "touch canary"
CODE = "open('canary', 'w')"
# What to name, what to call it with, and the name that the error has to give.
CALLS = [
    ("os", "system", (COMMAND,)),
    ("posix", "system", (COMMAND,)),
    ("nt", "system", (COMMAND,)),
    ("subprocess", "Popen", (COMMAND,)),
    ("subprocess", "check_output", (COMMAND,)),
    ("builtins", "eval", (CODE,)),
    ("builtins", "exec", (CODE,)),
    ("builtins", "getattr", ("a", "upper")),
    ("builtins", "__import__", ("antigravity",)),
    ("builtins", "open", ("canary", "w")),
    ("__builtin__", "eval", (CODE,)),
    ("importlib", "import_module", ("this",)),
    ("runpy", "run_path", ("canary",)),
    ("webbrowser", "open", ("canary",)),
    ("copyreg", "_reconstructor", ("a", "b", "c")),
    ("copyreg", "add_extension", ("os", "system", "1")),
    ("copy_reg", "__newobj__", ("a",)),
    ("functools", "partial", ("a",)),
    ("operator", "attrgetter", ("a",)),
    ("operator", "methodcaller", ("a",)),
    ("types", "CodeType", ("a",)),
    ("ctypes", "CDLL", ("libc.so.6",)),
    ("pickle", "loads", ("a",)),
    ("_pickle", "loads", ("a",)),
    ("marshal", "loads", ("a",)),
    ("shelve", "open", ("canary",)),
    ("timeit", "timeit", (CODE,)),
    ("pdb", "run", (CODE,)),
    ("profile", "run", (CODE,)),
    ("numpy.testing._private.utils", "runstring", (CODE, "a")),
    ("numpy.testing", "rundocs", ("canary",)),
    ("numpy", "load", ("canary",)),
    ("numpy", "fromfile", ("canary",)),
    ("numpy", "memmap", ("canary",)),
    ("numpy", "core.os.system", (COMMAND,)),
    ("numpy", "f2py.os.system", (COMMAND,)),
    ("numpy.core.multiarray", "_reconstruct.__globals__", ()),
    ("numpy.ndarray", "tofile", ("canary",)),
    ("numpy.lib.npyio", "os.system", (COMMAND,)),
    ("paddle", "load", ("canary",)),
    ("paddle.utils", "try_import", ("this",)),
    (NEW, "os.system", (COMMAND,)),
    (NEW, "Metadata.__init__.__globals__", ()),
    (NEW + ".Metadata", "__init__", ()),
    (NEW, "__builtins__", ()),
    ("", "", ()),
    ("os\nsystem", "x", ()),
    ("builtins", "bytearray", ("a",)),
    ("builtins", "bytes", ("a",)),
    ("builtins", "object", ()),
]


def test_names_outside_the_table_are_refused(canary):
    for module, name, arguments in CALLS:
        check_refused(module, name, arguments)
        assert not canary.exists(), (module, name)


def check_refused(module, name, arguments):
    programs = [program(call(named(module, name), *arguments)), program(named(module, name))]
    if "\n" not in module:
        programs.append(program(call(named_by_line(module, name), *arguments), protocol=2))
    # As a class, and as a class with a state.
    programs += [program(named(module, name) + b")\x81."), program(named(module, name) + b")\x81}b")]
    # As a key or an element of what would else be fine.
    programs.append(program(b"}" + short("w") + call(named(module, name), *arguments) + b"s"))
    for data in programs:
        with pytest.raises(UnsafePickleError) as caught:
            load_pickle(data, "the file")
        text = str(caught.value)
        assert text.startswith("the file: refused before byte ")
        assert f"the name {f'{module}.{name}'!r} is not among those of plain data" in text
        assert "Remedy (FC" in text


def test_the_canary_sings_when_a_pickle_is_executed(tmp_path, monkeypatch):
    """The attacks above are attacks: the standard unpickler carries them out."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(program(call(named("os", "system"), COMMAND)))
    assert (tmp_path / "canary").exists()


def reduced(function, *arguments):
    class Evil:
        def __reduce__(self):
            return (function, arguments)

    return Evil()


NOT_PLAIN = [
    reduced(os.system, COMMAND),
    reduced(eval, CODE),
    reduced(exec, CODE),
    {"w": np.zeros(3), "x": [reduced(os.system, COMMAND)]},
    reduced(__import__, "antigravity"),
    types.SimpleNamespace(a=1),
    slice(1, 2),
    {1, 2},
    frozenset([1]),
    Ellipsis,
    object(),
    range(3),
    np.array([reduced(os.system, COMMAND)], dtype=object),
    np.array(["text"]),
    np.array([b"bytes"]),
    np.zeros(2, dtype=[("a", "f4")]),
    np.zeros(2, dtype=">f4"),
    np.datetime64("2020-01-01"),
    np.dtype("f4"),
    np.ndarray,
    np.ma.zeros(3),
    np.random.default_rng(0),
]


@pytest.mark.parametrize("protocol", range(6))
def test_objects_that_are_not_plain_data_are_refused(canary, protocol):
    written = 0
    for value in NOT_PLAIN:
        try:
            data = pickle.dumps(value, protocol)
        except (pickle.PicklingError, TypeError):
            continue  # this protocol cannot write it
        written += 1
        with pytest.raises(CorruptCheckpointError if protocol < 2 else UnsafePickleError, match="Remedy .FC....: "):
            load_pickle(data)
        assert not canary.exists(), value
    assert written >= len(NOT_PLAIN) - 3


OPERATIONS = [
    (b"Pid\n", "PERSID"),
    (b"K\x01Q", "BINPERSID"),
    (b"\x82\x01", "EXT1"),
    (b"\x83\x01\x00", "EXT2"),
    (b"\x84\x01\x00\x00\x00", "EXT4"),
    (b"(ios\nsystem\n", "INST"),
    (b"(o", "OBJ"),
    (b")}\x92", "NEWOBJ_EX"),
    (b"S'text'\n", "STRING"),
    (b"I1\n", "INT"),
    (b"L1L\n", "LONG"),
    (b"F1.0\n", "FLOAT"),
    (b"Vtext\n", "UNICODE"),
    (b"g0\n", "GET"),
    (b"p0\n", "PUT"),
    (b"(l", "LIST"),
    (b"(d", "DICT"),
    (b"U\x01a", "SHORT_BINSTRING"),
    (b"T\x01\0\0\0a", "BINSTRING"),
    (b"\x97", "NEXT_BUFFER"),
    (b"\x98", "READONLY_BUFFER"),
    (b"\x8f", "EMPTY_SET"),
    (b"\x91", "FROZENSET"),
    (b"K\x010", "POP"),
    (b"(1", "POP_MARK"),
    (b"K\x012", "DUP"),
    (b"\x8b\x01\0\0\0\x01", "LONG4"),
]


def test_operations_that_plain_data_does_not_need_are_refused(canary):
    for body, what in OPERATIONS:
        with pytest.raises(UnsafePickleError, match=rf"operation {what} \(0x"):
            load_pickle(program(body))


def test_a_persistent_id_of_a_real_pickler(canary):
    stream = io.BytesIO()

    class Persistent(pickle.Pickler):
        def persistent_id(self, obj):
            return "an id" if type(obj) is complex else None

    Persistent(stream, 4).dump([1j])
    with pytest.raises(UnsafePickleError, match="operation BINPERSID"):
        load_pickle(stream.getvalue())


def measured(data: bytes) -> tuple[str, int, float]:
    """The refusal of a pickle, and the memory and seconds that it cost."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(CorruptCheckpointError) as caught:
            load_pickle(data)
        return str(caught.value), tracemalloc.get_traced_memory()[1], time.process_time() - begin
    finally:
        tracemalloc.stop()


HUGE = 1 << 62
BOMBS = {
    "BINUNICODE8": (long8(b"\x8d", HUGE, b"abc"), "bytes are declared where"),
    "BINBYTES8": (long8(b"\x8e", HUGE, b"abc"), "bytes are declared where"),
    "BYTEARRAY8": (long8(b"\x96", (1 << 64) - 1, b"abc"), "bytes are declared where"),
    "BINUNICODE": (long4(b"X", 0xFFFFFFFF, b"abc"), "bytes are declared where"),
    "BINBYTES": (long4(b"B", 0x7FFFFFFF), "bytes are declared where"),
    "FRAME": (long8(b"\x95", HUGE), "a frame is longer than the file"),
    "LONG4": (long4(b"\x8b", 0x7FFFFFFF), "operation LONG4"),
    "LONG1": (b"\x8a\xff" + b"\x7f" * 255, "an integer of 255 bytes"),
    "LONG_BINPUT": (b"]" + long4(b"r", 0xFFFFFFF0), "memo index 4294967280"),
    "LONG_BINGET": (long4(b"j", 0xFFFFFFF0), "memo index 4294967280"),
    # Lists in lists, each twice: 2 ** 5000 elements for whoever walks through them.
    "laughs": (
        b"]\x94" + b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"e\x94" for i in range(250)),
        "list refer",
    ),
    "tuple laughs": (
        b")\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(250)),
        "tuple",
    ),
    "dict laughs": (b"}\x94" + short("a") + b"h\x00s", "dict referred to more than once, or from within itself"),
    "itself": (b"]\x94h\x00a", "list referred to more than once, or from within itself"),
    "one text often": (long4(b"X", 5000, b"a" * 5000) + b"\x94(" + b"h\x00" * 5000 + b"t", "str of length 5000"),
    "one tuple often": (b"(" + b"N" * 5000 + b"t\x94(" + b"h\x00" * 5000 + b"t", "of length 5000, referred"),
    "deep lists": (b"]" * 100_000 + b"a" * 99_999, "lists"),
    "deep tuples": (b")" + b"\x85" * 100_000, "tuple in a tuple"),
    "deep dicts": (b"}" + (short("a") + b"}") * 2000 + b"s" * 2000, "nested deeper than 64"),
    "deep marks": (b"(" * 200_000 + b"t" * 199_999, "more than 1024 sequences one in the other"),
    "marks between": (b"N(" * 500_000, "more than 1024 sequences one in the other"),
    "byte strings": (b"(" + b"C\x00" * 500_000 + b"t", "more byte strings than"),
    "lists": (b"(" + b"]" * 2_000_000 + b"t", "more lists, tuples and dicts than"),
    "instances": (named(NEW, "Metadata") + b"\x94(" + b"h\x00)\x81" * 100_000 + b"t", ""),
    "GLOBAL without end": (b"c" + b"a" * 100_000, "a name without an end within 256 bytes"),
    "long name": (long4(b"X", 100_000, b"a" * 100_000) + short("b") + b"\x93", "is not among those of plain data"),
    "array of 2 ** 60": (array(b"\x8a\x08" + struct.pack("<q", 1 << 59) + b"\x85"), "bytes: got 4"),
    "array overflow": (array((b"\x8a\x08" + struct.pack("<q", 1 << 59)) * 3 + b"\x87"), "bytes: got 4"),
    "array negative": (array(b"J\xff\xff\xff\xff\x85"), "an extent of an array has to be an integer >= 0"),
    "array of many axes": (array(b"(" + b"K\x01" * 100 + b"t"), "a tuple of at most 64 integers"),
    "array of a list": (array(b"K\x01\x85", payload=b"]"), "arrays of objects are refused|list in a tuple"),
    "array of no bytes": (array(b"K\x01\x85", payload=b"N"), "arrays of objects are refused"),
    "array without type": (array(b"K\x01\x85", dtype=b"N"), "has to be a numpy.dtype"),
    "array of objects": (array(b"K\x01\x85", dtype=DTYPE.replace(b"f4", b"O8")), "object, text and record types are"),
    "array of a long type": (array(b"K\x01\x85", dtype=DTYPE.replace(b"\x02f4", b"\x08f4,f4,O8")), "record types are"),
    "big-endian": (array(b"K\x01\x85", dtype=DTYPE.replace(b"\x01<", b"\x01>")), "native byte order"),
    "array as a key": (b"}" + array(b"K\x01\x85") + b"Ns", "ndarray as the key of a dict"),
    "tuple as a key": (b"}K\x01\x85Ns", "tuple as the key of a dict"),
    "a key twice": (b"}(" + (short("a") + b"N") * 2 + b"u", "the same key twice"),
    "colliding keys": (b"}\x8a\x10" + b"\x00" * 15 + b"\x01Ns", "int as the key of a dict"),
    "array unfinished": (array(b"K\x01\x85").split(b"(K\x01")[0], "numpy.ndarray as the object"),
    "array not of zeros": (
        named("numpy.core.multiarray", "_reconstruct")
        + named("numpy", "ndarray")
        + long4(b"J", 1 << 30)
        + b"\x85C\x01b\x87R",
        "other arguments than numpy.ndarray",
    ),
    "reconstruct a type": (
        named("numpy.core.multiarray", "_reconstruct") + named("numpy", "dtype") + b"K\x00\x85C\x01b\x87R",
        "other arguments than numpy.ndarray",
    ),
    "state of a number": (b"K\x01}b", "a state given to int"),
    "state of a class": (named(NEW, "Metadata") + b"}b", "a state given to Metadata"),
    "fields of others": (named(NEW, "Metadata") + b")\x81}" + short("__class__") + b"Nsb", "no field of that name"),
    "field types": (named(NEW, "Metadata") + b")\x81}" + short("storage_metadata") + b"]sb", "not of its type"),
    "negative offset": (
        named(NEW, "LocalTensorMetadata") + b")\x81}" + short("global_offset") + b"J\xff\xff\xff\xff\x85sb",
        "global_offset is not of its type",
    ),
    "arguments of a class": (named(NEW, "Metadata") + b"K\x01\x85\x81", "an object of Metadata"),
    "call of a class": (named(NEW, "Metadata") + b")R", "a call of Metadata"),
    "call of a text": (short("os") + b")R", "a call of str"),
    "codec": (call(named("_codecs", "encode"), "a", "rot13"), "'latin1'"),
    "codec of zip": (call(named("_codecs", "encode"), "a", "zip"), "'latin1'"),
    "symbol in a list": (b"]" + named("numpy", "dtype") + b"a", "dtype as an element"),
    "bytes as data": (b"C\x01a", "bytes as the object"),
}


def test_bombs_are_refused_in_little_memory_and_time(canary):
    for name in BOMBS:
        check_bomb(name)


def check_bomb(name):
    body, what = BOMBS[name]
    data = program(body)
    text, memory, seconds = measured(data)
    assert any(part in text for part in what.split("|")), (name, text)
    assert "Remedy (FC" in text
    assert len(text) < 1000
    # A million empty lists are refused when a quarter of the file's size of them is there.
    small = 40 * len(data) if name == "lists" else 24 * len(data)
    assert memory < (1 << 20) + small, name
    assert seconds < 10, name


def test_a_checkpoint_with_code_in_it_is_not_executed(canary, tmp_path):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "0.metadata").write_bytes(program(call(named("os", "system"), COMMAND)))
    with pytest.raises(UnsafePickleError, match=r"0\.metadata: refused before byte .*'os\.system'"):
        SourceDirectory(directory).read_manifest()
