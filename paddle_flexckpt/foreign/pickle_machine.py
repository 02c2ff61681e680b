"""The stack machine of :func:`load_pickle`: the operations of a pickle that make plain data."""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError, LocalTensorIndex, LocalTensorMetadata, UnsafePickleError
from paddle_flexckpt.foreign.pickle_values import (
    ATOMS,
    CALLABLE,
    INERT,
    NAMES,
    RECORDS,
    Arguments,
    Limits,
    Symbol,
    Unfinished,
    describe,
    is_flat,
)  # fmt: skip

_REMEDY = (
    "Remedy: do not open this file with anything else either; if you trust its writer, let that program save the data "
    "as safetensors"
)
_OPCODE_NAMES = {opcode.code: opcode.name for opcode in pickletools.opcodes}
_LARGEST_KEY = 1 << 60


class Machine:
    """The stack machine: a stack, the starts of its open sequences, and the memo."""

    def __init__(self, data: memoryview, file: str, limits: Limits) -> None:
        self._data, self._file, self._limits = data, file, limits
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        # Nesting of the lists and dicts that have any in them and are still on the stack.
        self._depth: dict[int, int] = {}
        self._containers = limits.free_containers + len(data) // limits.bytes_per_container
        self._views = limits.free_containers + len(data) // limits.bytes_per_view

    def run(self) -> Any:
        """The object of the pickle; errors as of :func:`load_pickle`."""
        data, end = self._data, len(self._data)
        if end < 2 or data[0] != 0x80:
            self._damaged("it does not begin as a pickle of protocol 2 to 5 does")
        for _ in range(self._limits.operations):
            if self._position >= end:
                self._damaged("it is cut short")
            code = data[self._position]
            self._position += 1
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
        self._refuse(f"more than {self._limits.operations} operations")

    def _result(self) -> Any:
        if len(self._stack) != 1 or self._marks:
            self._damaged("it ends with an incomplete object")
        result = self._stack[0]
        if type(result) in INERT:
            self._refuse(f"{describe(result)} as the object")
        return result

    # Errors

    def _refuse(self, what: str) -> NoReturn:
        raise UnsafePickleError(f"{self._file}: refused before byte {self._position}: {what}. {_REMEDY}")

    def _damaged(self, what: str) -> NoReturn:
        raise CorruptCheckpointError(
            f"{self._file} is damaged or not a pickle of protocol 2 to 5: {what} (byte {self._position}). "
            "Remedy: restore the file"
        )

    # Bytes and stack

    def _take(self, count: int) -> memoryview:
        begin = self._position
        if count > len(self._data) - begin:
            self._damaged(f"{count} bytes are declared where {len(self._data) - begin} are left")
        self._position = begin + count
        return self._data[begin : begin + count]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            self._damaged("an operation lacks its operand")
        return self._stack.pop()

    def _pop_mark(self) -> list[Any]:
        if not self._marks:
            self._damaged("the end of a sequence without its beginning")
        begin = self._marks.pop()
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def _container(self) -> None:
        self._containers -= 1
        if self._containers < 0:
            self._refuse(f"more lists, tuples and dicts than {len(self._data)} bytes of data need")

    def _attach(self, parent: Any, values: list[Any]) -> None:
        """Checks what becomes part of a list or dict, and how deep that makes it."""
        depth = self._depth.get(id(parent), 0)
        for value in values:
            kind = type(value)
            if kind in INERT:
                self._refuse(f"{describe(value)} as an element")
            if kind is list or kind is dict:
                depth = max(depth, self._depth.pop(id(value), 0) + 1)
        if depth:
            if depth > self._limits.depth:
                self._refuse(f"lists and dicts nested deeper than {self._limits.depth}")
            self._depth[id(parent)] = depth

    # Operations

    def _protocol(self) -> None:
        number = self._number(1)
        if not 2 <= number <= 5:
            self._damaged(f"protocol {number}")

    def _frame(self) -> None:
        if self._number(8) > len(self._data) - self._position:
            self._damaged("a frame is longer than the file")

    def _mark(self) -> None:
        if len(self._marks) >= self._limits.marks:
            self._refuse(f"more than {self._limits.marks} sequences one in the other")
        self._marks.append(len(self._stack))

    def _integer(self) -> None:
        size = self._number(1)
        if size > self._limits.integer_bytes:
            self._refuse(f"an integer of {size} bytes")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _byte(self) -> None:
        # By index: int.from_bytes makes a new object of every small number on older Pythons.
        self._stack.append(self._take(1)[0])

    def _floating(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

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

    def _empty_list(self) -> None:
        self._container()
        self._stack.append([])

    def _empty_dict(self) -> None:
        self._container()
        self._stack.append({})

    def _append(self) -> None:
        self._extend([self._pop()])

    def _appends(self) -> None:
        self._extend(self._pop_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            self._refuse(f"elements added to {describe(target)}, which is not a list")
        self._attach(target, values)
        target.extend(values)

    def _top(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            self._damaged("an operation lacks its operand")
        return self._stack[-1]

    def _set_item(self) -> None:
        value = self._pop()
        self._update([self._pop(), value])

    def _set_items(self) -> None:
        self._update(self._pop_mark())

    def _update(self, items: list[Any]) -> None:
        target = self._top()
        if type(target) is not dict:
            self._refuse(f"entries added to {describe(target)}, which is not a dict")
        if len(items) % 2:
            self._damaged("a dict has a key without a value")
        values = items[1::2]
        self._attach(target, values)
        for key, value in zip(items[::2], values):
            kind = type(key)
            # The hash of other keys could be slow, deep, or chosen so that all of them collide.
            small = kind is int and -_LARGEST_KEY < key < _LARGEST_KEY
            if not (kind is str or small or kind is LocalTensorIndex):
                self._refuse(f"{describe(key)} as the key of a dict")
            if key in target:
                self._refuse("the same key twice in a dict")
            target[key] = value

    def _tuple(self, items: list[Any]) -> None:
        self._container()
        inert = False
        for item in items:
            kind = type(item)
            if kind in ATOMS or kind is np.ndarray or kind is LocalTensorMetadata or kind is LocalTensorIndex:
                continue
            if kind is tuple and is_flat(item):
                continue
            if kind not in INERT or kind is Unfinished or kind is Arguments:
                self._refuse(f"{describe(item)} in a tuple")
            inert = True
        self._stack.append(Arguments(tuple(items)) if inert else tuple(items))

    def _tuple_of_marked(self) -> None:
        self._tuple(self._pop_mark())

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

    def _get(self, index: int) -> None:
        if index >= len(self._memo):
            self._damaged(f"memo index {index} where {len(self._memo)} objects are known")
        value = self._memo[index]
        kind = type(value)
        # Lists in lists, each twice, are small in a file and endless for whoever walks through them.
        if kind is list or kind is dict or kind is Unfinished or kind is Arguments:
            self._refuse(f"{describe(value)} referred to more than once, or from within itself")
        if kind is tuple and (len(value) > self._limits.shared_tuple or not is_flat(value)):
            self._refuse(f"a tuple that is long or nested, of length {len(value)}, referred to more than once")
        if (kind is str or kind is memoryview) and len(value) > self._limits.shared_text:
            self._refuse(f"{describe(value)} of length {len(value)} referred to more than once")
        self._stack.append(value)

    def _find(self, module: Any, name: Any) -> None:
        symbol = NAMES.get((module, name)) if type(module) is str and type(name) is str else None
        if symbol is None:
            described = ".".join(x[:80] if type(x) is str else describe(x) for x in (module, name))
            self._refuse(f"the name {described!r} is not among those of plain data")
        self._stack.append(symbol)

    def _global_name(self) -> None:
        words = []
        for _ in range(2):
            window = bytes(self._data[self._position : self._position + self._limits.name_bytes])
            length = window.find(b"\n")
            if length < 0:
                self._refuse(f"a name without an end within {self._limits.name_bytes} bytes")
            words.append(window[:length].decode("utf-8", "backslashreplace"))
            self._position += length + 1
        self._find(*words)

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._find(module, name)

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        make = CALLABLE.get(function) if type(function) is Symbol else None
        if make is None:
            self._refuse(f"a call of {describe(function)}")
        if type(arguments) is Arguments:
            arguments = arguments.items
        if type(arguments) is not tuple:
            self._damaged("a call without a tuple of arguments")
        self._stack.append(make(arguments))

    def _new_object(self) -> None:
        arguments, cls = self._pop(), self._pop()
        make = RECORDS.get(cls) if type(cls) is Symbol else None
        if make is None or type(arguments) is not tuple or arguments:
            self._refuse(f"an object of {describe(cls)}")
        self._container()
        self._stack.append(make())

    def _build(self) -> None:
        state, target = self._pop(), self._pop()
        if type(target) is not Unfinished:
            self._refuse(f"a state given to {describe(target)}")
        finished = target.finish(state)
        self._stack.append(finished)
        if target.memo >= 0 and self._memo[target.memo] is target:
            self._memo[target.memo] = finished


_Operation = Callable[[Machine], None]


def _push(value: Any) -> _Operation:
    return lambda machine: machine._stack.append(value)


def _push_number(size: int, signed: bool = False) -> _Operation:
    return lambda machine: machine._stack.append(int.from_bytes(machine._take(size), "little", signed=signed))


def _push_text(size: int) -> _Operation:
    return lambda machine: machine._text(machine._number(size))


def _push_bytes(size: int) -> _Operation:
    return lambda machine: machine._bytes(machine._number(size))


def _tuple_of(count: int) -> _Operation:
    return lambda machine: machine._tuple([machine._pop() for _ in range(count)][::-1])


def _memo_get(size: int) -> _Operation:
    return lambda machine: machine._get(machine._number(size))


def _memo_put(size: int) -> _Operation:
    return lambda machine: machine._put(machine._number(size))


_STOP = ord(".")
# Text forms of protocol 0, persistent ids, extension codes, buffers outside the file, DUP and POP are not here.
OPERATIONS: dict[int, _Operation] = {
    0x80: Machine._protocol,
    0x95: Machine._frame,
    ord("("): Machine._mark,
    ord("N"): _push(None),
    0x88: _push(True),
    0x89: _push(False),
    ord("J"): _push_number(4, signed=True),
    ord("K"): Machine._byte,
    ord("M"): _push_number(2),
    0x8A: Machine._integer,
    ord("G"): Machine._floating,
    0x8C: _push_text(1),
    ord("X"): _push_text(4),
    0x8D: _push_text(8),
    ord("C"): _push_bytes(1),
    ord("B"): _push_bytes(4),
    0x8E: _push_bytes(8),
    0x96: _push_bytes(8),
    ord("]"): Machine._empty_list,
    ord("a"): Machine._append,
    ord("e"): Machine._appends,
    ord("}"): Machine._empty_dict,
    ord("s"): Machine._set_item,
    ord("u"): Machine._set_items,
    ord(")"): _push(()),
    ord("t"): Machine._tuple_of_marked,
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    0x94: lambda machine: machine._put(len(machine._memo)),
    ord("q"): _memo_put(1),
    ord("r"): _memo_put(4),
    ord("h"): _memo_get(1),
    ord("j"): _memo_get(4),
    ord("c"): Machine._global_name,
    0x93: Machine._stack_global,
    ord("R"): Machine._reduce,
    0x81: Machine._new_object,
    ord("b"): Machine._build,
}
