"""Changes of classes and modules, taken back exactly."""

from __future__ import annotations

import sys
import types

from paddle_flexckpt.undo import Undo


class Base:
    inherited = 1


class Sample(Base):
    own = staticmethod(len)


def test_everything_is_put_back_the_last_first():
    before, undo, order = dict(vars(Sample)), Undo(), []
    assert not undo
    undo.set(Sample, "own", 1)
    undo.set(Sample, "own", 2)
    undo.set(Sample, "inherited", 3)
    undo.set(Sample, "new", 4)
    undo.call(lambda: order.append(Sample.own))
    assert undo and (Sample.own, Sample.inherited, Sample.new) == (2, 3, 4)
    undo.put_back()
    assert dict(vars(Sample)) == before and order == [2] and not undo
    assert Sample.inherited == 1 and Sample().own([1]) == 1, "the base's, and still a static method"
    undo.put_back()


def test_a_class_is_kept_whatever_happens_to_it():
    before, undo = dict(vars(Sample)), Undo()
    undo.record_all(Sample)
    Sample.own, Sample.more = None, 1
    undo.put_back()
    assert dict(vars(Sample)) == before


def test_a_function_is_replaced_wherever_it_was_imported_by_name(monkeypatch):
    def function() -> None: ...

    modules = [types.ModuleType(name) for name in ("sample_home", "sample_home.inner", "sample_user")]
    for module in modules:
        module.function = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
    other = types.ModuleType("sample_home.other")
    other.function = len
    monkeypatch.setitem(sys.modules, other.__name__, other)
    for package, replaced in (("sample_home", 2), ("", 3)):
        undo = Undo()
        undo.replace_everywhere("function", function, print, package)
        assert [module.function for module in modules].count(print) == replaced and other.function is len
        undo.put_back()
        assert all(module.function is function for module in modules)
