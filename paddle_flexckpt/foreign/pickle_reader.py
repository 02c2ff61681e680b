"""Read foreign pickles as data only.

The standard unpickler finds and calls what a pickle names, and allocates what a pickle declares. This reader is a stack
machine of its own: it knows the operations that protocols 2 to 5 need for plain data, it looks nothing up, and it
compares every length with the existing bytes before it allocates anything. Nothing in it recurses.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError, UnsafePickleError
from paddle_flexckpt.foreign.pickle_values import (
    ATOMS,
    INERT,
    PADDLE,
    Arguments,
    Symbol,
    Unfinished,
    Vocabulary,
    describe,
    is_flat,
    is_named_array,
)
from paddle_flexckpt.media.file_names import check_no_pointer

_REMEDY = (
    "Remedy (FC702): do not open this file with anything else either; if you trust its writer, let that program save "
    "the data as safetensors"
)
_OPCODE_NAMES = {opcode.code: opcode.name for opcode in pickletools.opcodes}
# The most operations of a pickle, whatever the file's size.
MOST_OPERATIONS = 200_000_000
# A list, tuple, dict or record costs more memory than it has bytes in the file, and so does a byte string. So there is
# one of them for so many bytes of the file, and this number in any case.
_BYTES_PER_CONTAINER = 8
_BYTES_PER_VIEW = 16
_FREE_CONTAINERS = 4096
# The most sequences that are open at a time, and the most lists and dicts one in the other.
_MOST_MARKS = 1024
_MOST_DEPTH = 64
# The most characters of a text, and elements of a tuple, that is referred to more than once.
_LONGEST_SHARED_TEXT = 4096
_LONGEST_SHARED_TUPLE = 64
# The most bytes of an integer and of a module's or class's name; the bound of integers that are keys.
_MOST_INTEGER_BYTES = 16
_MOST_NAME_BYTES = 256
_LARGEST_KEY = 1 << 60


def load_pickle(data: bytes | bytearray | memoryview, file: str = "pickle", vocabulary: Vocabulary = PADDLE) -> Any:
    """Load the plain data in a pickle: numbers, str, tuple, list, dict, ndarray, and the vocabulary's values.

    The pickle is of protocol 2 to 5; ``file`` is its name, for errors. Arrays are read-only views of the data, maybe
    not aligned; numpy's numbers become Python's.

    Raises:
        UnsafePickleError: It names anything else, or exceeds a limit. Nothing was called.
        CorruptCheckpointError: It is cut short or not a pickle.
    """
    view = memoryview(data).toreadonly().cast("B")
    return _Machine(view, file, vocabulary).run()


class _Machine:
    """The state of the pickle machine: a stack, the starts of its open sequences, and the memo."""

    def __init__(self, data: memoryview, file: str, vocabulary: Vocabulary) -> None:
        self._data, self._file, self._vocabulary = data, file, vocabulary
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        # Nesting of the lists and dicts that contain others and are still on the stack.
        self._depth: dict[int, int] = {}
        self._containers = _FREE_CONTAINERS + len(data) // _BYTES_PER_CONTAINER
        self._views = _FREE_CONTAINERS + len(data) // _BYTES_PER_VIEW

    def run(self) -> Any:
        """Return the object of the pickle; errors as of :func:`load_pickle`."""
        data, end = self._data, len(self._data)
        check_no_pointer(self._file, bytes(data[:8]))
        if end < 2 or data[0] != 0x80:
            self._damaged("it does not begin as a pickle of protocol 2 to 5 does")
        for _ in range(MOST_OPERATIONS):
            position = self._position
            if position >= end:
                self._damaged("it is cut short")
            code = data[position]
            self._position = position + 1
            if code == _STOP:
                return self._result()
            operation = OPERATIONS.get(code)
            if operation is None:
                name = _OPCODE_NAMES.get(chr(code))
                if name is None:
                    self._damaged(f"byte 0x{code:02x} is no operation")
                self._refuse(f"operation {name} (0x{code:02x})")
            try:
                operation(self)
            except UnsafePickleError as error:
                if error.args and str(error).endswith(_REMEDY):
                    raise
                self._refuse(str(error))
        self._refuse(f"more than {MOST_OPERATIONS} operations")

    def _result(self) -> Any:
        if len(self._stack) != 1 or self._marks:
            self._damaged("it ends with an incomplete object")
        result = self._stack[0]
        if type(result) in INERT:
            self._refuse(f"{describe(result)} as the object")
        return result

    def _refuse(self, what: str) -> NoReturn:
        raise UnsafePickleError(f"{self._file}: refused before byte {self._position}: {what}. {_REMEDY}")

    def _damaged(self, what: str) -> NoReturn:
        raise CorruptCheckpointError(
            f"{self._file} is damaged or not a pickle of protocol 2 to 5: {what} (byte {self._position}). "
            "Remedy (FC305): restore the file"
        )

    def _take(self, count: int) -> memoryview:
        begin = self._position
        if count > len(self._data) - begin:
            self._damaged(f"{count} bytes are declared where {len(self._data) - begin} are left")
        self._position = begin + count
        return self._data[begin : begin + count]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _top(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            self._damaged("an operation lacks its operand")
        return self._stack[-1]

    def _pop(self, count: int = 1) -> list[Any]:
        """Pop the last operands off the stack, the topmost last."""
        if len(self._stack) - count < (self._marks[-1] if self._marks else 0):
            self._damaged("an operation lacks its operand")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _pop_mark(self) -> list[Any]:
        if not self._marks:
            self._damaged("the end of a sequence without its beginning")
        begin = self._marks.pop()
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def _container(self, count: int = 1) -> None:
        self._containers -= count
        if self._containers < 0:
            self._refuse(f"more lists, tuples and dicts than {len(self._data)} bytes of data need")

    def _attach(self, parent: Any, values: list[Any]) -> None:
        """Check a new element of a list or dict, and the depth that results."""
        if len(values) > 1 and set(map(type, values)) <= self._vocabulary.records:
            return  # records are neither inert nor nested
        depth = self._depth.get(id(parent), 0)
        for value in values:
            kind = type(value)
            if kind in INERT:
                self._refuse(f"{describe(value)} as an element")
            if kind is list or kind is dict:
                depth = max(depth, self._depth.pop(id(value), 0) + 1)
        if depth:
            if depth > _MOST_DEPTH:
                self._refuse(f"lists and dicts nested deeper than {_MOST_DEPTH}")
            self._depth[id(parent)] = depth

    def _protocol(self) -> None:
        number = self._number(1)
        if not 2 <= number <= 5:
            self._damaged(f"protocol {number}")

    def _frame(self) -> None:
        length = self._number(8)
        if length > len(self._data) - self._position:
            self._damaged("a frame is longer than the file")

    def _mark(self) -> None:
        if len(self._marks) >= _MOST_MARKS:
            self._refuse(f"more than {_MOST_MARKS} sequences one in the other")
        self._marks.append(len(self._stack))

    def _integer(self) -> None:
        size = self._number(1)
        if size > _MOST_INTEGER_BYTES:
            self._refuse(f"an integer of {size} bytes")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _text(self, size: int) -> None:
        try:
            self._stack.append(str(self._take(size), "utf-8"))
        except UnicodeDecodeError as error:
            self._damaged(f"text is not UTF-8: {error.reason}")

    def _bytes(self, size: int) -> None:
        # A view of the file, however short, is larger than a list.
        self._views -= 1
        if self._views < 0:
            self._refuse(f"more byte strings than {len(self._data)} bytes of data need")
        self._stack.append(self._take(size))

    def _empty(self, container: Any) -> None:
        self._container()
        self._stack.append(container)

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            self._refuse(f"elements added to {describe(target)}, which is not a list")
        self._attach(target, values)
        target.extend(values)

    def _update(self, items: list[Any]) -> None:
        target = self._top()
        if type(target) is not dict:
            self._refuse(f"entries added to {describe(target)}, which is not a dict")
        if len(items) % 2:
            self._damaged("a dict has a key without a value")
        keys, values = items[::2], items[1::2]
        self._attach(target, values)
        if set(map(type, keys)) <= self._vocabulary.keys:
            size = len(target)
            target.update(zip(keys, values))
            if len(target) != size + len(keys):
                self._refuse("the same key twice in a dict")
            return
        for key, value in zip(keys, values):
            kind = type(key)
            # The hash of other keys could be slow, deep, or chosen so that all of them collide.
            small = kind is int and -_LARGEST_KEY < key < _LARGEST_KEY
            if not (kind is str or small or kind in self._vocabulary.keys):
                self._refuse(f"{describe(key)} as the key of a dict")
            if key in target:
                self._refuse("the same key twice in a dict")
            target[key] = value

    def _tuple(self, items: list[Any]) -> None:
        self._container()
        inert = False
        if self._vocabulary.has_ordered_dicts:
            items = [self._inside(item) for item in items]
        for item in items:
            kind = type(item)
            if kind in ATOMS or kind is np.ndarray or kind in self._vocabulary.records:
                continue
            if kind is tuple and (is_flat(item) or is_named_array(item)):
                continue
            if kind not in INERT or kind is Unfinished or (kind is Arguments and not self._may_be_inside(item)):
                self._refuse(f"{describe(item)} in a tuple")
            inert = True
        self._stack.append(Arguments(tuple(items)) if inert else tuple(items))

    def _inside(self, item: Any) -> Any:
        """Return what stands for an element of a tuple: None for a dict, an Arguments for a tuple with other values."""
        if type(item) is dict:
            return None
        if type(item) is tuple and not (is_flat(item) or is_named_array(item)):
            return Arguments(item)
        return item

    def _may_be_inside(self, item: Arguments) -> bool:
        """Return whether arguments may be in a tuple: only those of a tensor, and only to a limited depth."""
        return self._vocabulary.has_ordered_dicts and not any(type(each) is Arguments for each in item.items)

    def _put(self, index: int) -> None:
        value = self._top()
        if index > len(self._memo):
            self._refuse(f"memo index {index} where {len(self._memo)} objects are known")
        if index == len(self._memo):
            self._memo.append(value)
        else:
            self._memo[index] = value
        if type(value) is Unfinished:
            value.memo = index

    def _memoize(self) -> None:
        value = self._top()
        if type(value) is Unfinished:
            value.memo = len(self._memo)
        self._memo.append(value)

    def _get(self, index: int) -> None:
        if index >= len(self._memo):
            self._damaged(f"memo index {index} where {len(self._memo)} objects are known")
        value = self._memo[index]
        kind = type(value)
        if kind is Symbol:
            self._stack.append(value)
            return
        # A list that has another list twice, and so on, is small in a file, but a walk through it takes forever.
        if kind is list or kind is dict or kind is Unfinished or kind is Arguments:
            self._refuse(f"{describe(value)} referred to more than once, or from within itself")
        if kind is tuple and (len(value) > _LONGEST_SHARED_TUPLE or not (is_flat(value) or is_named_array(value))):
            self._refuse(f"a tuple that is long or nested, of length {len(value)}, referred to more than once")
        if (kind is str or kind is memoryview) and len(value) > _LONGEST_SHARED_TEXT:
            self._refuse(f"{describe(value)} of length {len(value)} referred to more than once")
        self._stack.append(value)

    def _find(self, module: Any, name: Any) -> None:
        symbol = self._vocabulary.names.get((module, name)) if type(module) is str and type(name) is str else None
        if symbol is None:
            described = ".".join(x[:80] if type(x) is str else describe(x) for x in (module, name))
            self._refuse(f"the name {described!r} is not among those of plain data")
        self._stack.append(symbol)

    def _global_name(self) -> None:
        words = []
        for _ in range(2):
            window = bytes(self._data[self._position : self._position + _MOST_NAME_BYTES])
            length = window.find(b"\n")
            if length < 0:
                self._refuse(f"a name without an end within {_MOST_NAME_BYTES} bytes")
            words.append(window[:length].decode("utf-8", "backslashreplace"))
            self._position += length + 1
        self._find(*words)

    def _reduce(self) -> None:
        function, arguments = self._pop(2)
        make = function.call if type(function) is Symbol else None
        if make is None:
            self._refuse(f"a call of {describe(function)}")
        if type(arguments) is Arguments:
            arguments = arguments.items
        if type(arguments) is not tuple:
            self._damaged("a call without a tuple of arguments")
        self._stack.append(make(arguments))

    def _new_object(self) -> None:
        cls, arguments = self._pop(2)
        make = cls.make if type(cls) is Symbol else None
        if make is None or type(arguments) is not tuple or arguments:
            self._refuse(f"an object of {describe(cls)}")
        self._container()
        self._stack.append(make())

    def _persistent(self) -> None:
        (identifier,) = self._pop()
        make = self._vocabulary.persistent
        if make is None:
            self._refuse(f"operation BINPERSID (0x51) with {describe(identifier)}")
        self._stack.append(make(identifier))

    def _build(self) -> None:
        target, state = self._pop(2)
        if self._vocabulary.has_ordered_dicts and type(target) is dict and type(state) is dict:
            self._stack.append(target)
            return
        if type(target) is not Unfinished:
            self._refuse(f"a state given to {describe(target)}")
        finished = target.finish(state)
        self._stack.append(finished)
        if target.memo >= 0 and self._memo[target.memo] is target:
            self._memo[target.memo] = finished


_Operation = Callable[[_Machine], None]


def _push(value: Any) -> _Operation:
    return lambda machine: machine._stack.append(value)


def _push_number(size: int, signed: bool = False) -> _Operation:
    return lambda machine: machine._stack.append(int.from_bytes(machine._take(size), "little", signed=signed))


def _numbered(method: Callable[[_Machine, int], None], size: int) -> _Operation:
    """Call a method with a number that the pickle stores in so many bytes."""
    return lambda machine: method(machine, machine._number(size))


def _popped(method: Callable[[_Machine, list[Any]], None], count: int) -> _Operation:
    """Call a method with so many operands."""
    return lambda machine: method(machine, machine._pop(count))


def _marked(method: Callable[[_Machine, list[Any]], None]) -> _Operation:
    """Call a method with the operands since the last mark."""
    return lambda machine: method(machine, machine._pop_mark())


_STOP = ord(".")
# Text forms of protocol 0, extension codes, buffers outside the file, DUP and POP are not supported.
OPERATIONS: dict[int, _Operation] = {
    0x80: _Machine._protocol,
    0x95: _Machine._frame,
    ord("("): _Machine._mark,
    ord("N"): _push(None),
    0x88: _push(True),
    0x89: _push(False),
    ord("J"): _push_number(4, signed=True),
    # By index: int.from_bytes makes a new object of every small number on older Pythons.
    ord("K"): lambda machine: machine._stack.append(machine._take(1)[0]),
    ord("M"): _push_number(2),
    0x8A: _Machine._integer,
    ord("G"): lambda machine: machine._stack.append(struct.unpack(">d", machine._take(8))[0]),
    0x8C: _numbered(_Machine._text, 1),
    ord("X"): _numbered(_Machine._text, 4),
    0x8D: _numbered(_Machine._text, 8),
    ord("C"): _numbered(_Machine._bytes, 1),
    ord("B"): _numbered(_Machine._bytes, 4),
    0x8E: _numbered(_Machine._bytes, 8),
    0x96: _numbered(_Machine._bytes, 8),
    ord("]"): lambda machine: machine._empty([]),
    ord("a"): _popped(_Machine._extend, 1),
    ord("e"): _marked(_Machine._extend),
    ord("}"): lambda machine: machine._empty({}),
    ord("s"): _popped(_Machine._update, 2),
    ord("u"): _marked(_Machine._update),
    ord(")"): _push(()),
    ord("t"): _marked(_Machine._tuple),
    0x85: _popped(_Machine._tuple, 1),
    0x86: _popped(_Machine._tuple, 2),
    0x87: _popped(_Machine._tuple, 3),
    0x94: _Machine._memoize,
    ord("q"): _numbered(_Machine._put, 1),
    ord("r"): _numbered(_Machine._put, 4),
    ord("h"): lambda machine: machine._get(machine._take(1)[0]),
    ord("j"): _numbered(_Machine._get, 4),
    ord("c"): _Machine._global_name,
    0x93: lambda machine: machine._find(*machine._pop(2)),
    ord("R"): _Machine._reduce,
    0x81: _Machine._new_object,
    ord("b"): _Machine._build,
    ord("Q"): _Machine._persistent,
}
