"""What commands print as JSON, and what reports give: each has the schema that docs/schemas documents, and no more."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddle_flexckpt.catalog import Problem
from paddle_flexckpt.cli.main import build_parser, main
from paddle_flexckpt.report import LoadReport, Report, SaveReport, VerifyReport
from tests.native.samples import flip
from tests.transfer.samples import save

jsonschema = pytest.importorskip("jsonschema")
if sys.version_info < (3, 10):
    pytest.skip("types are read as of Python 3.10", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "docs" / "schemas"
VALUES = {
    "model.layers.0.w": np.arange(24, dtype=np.float32).reshape(4, 6),
    "model.layers.0.w.moment1_0": np.ones((4, 6), np.float32),
    "model.odd": np.asarray([np.nan, np.inf, -np.inf, 1], dtype=np.float16),
    "model.flags": np.asarray([True, False]),
}
#: By command, the command lines of which each is tried; ONE and TWO are checkpoints, BAD a damaged one.
LINES = {
    "inspect": (["ONE"], ["ONE", "--key", "model.odd"]),
    "show": (["ONE", "model.odd", "model.layers.0.w[1:, 0]", "model.flags"],),
    "digest": (["ONE"],),
    "diff": (["ONE", "ONE"], ["ONE", "TWO"]),
    "verify": (["ONE"], ["BAD"]),
    "ls": (["ROOT"],),
    "clean": (["ROOT"], ["ROOT", "--remove"]),
    "du": (["ONE"], ["ONE", "--by", "rank"]),
    "apply": (["VERSIONS", "LOCAL"], ["VERSIONS", "LOCAL", "--version", "1"]),
    "doctor": ([],),
    "rehearse": (["ONE", "--to", "tp=1", "--weights"], ["ONE", "--to", "dp=2", "--save"]),
    "map": (["ONE"],),
    "convert": (["ONE", "OUT"],),
    "bench": (["ROOT", "--bytes", "1MiB"],),
}


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("schemas", ROOT / "docs" / "schemas.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    return dict(action.choices)


def strict(schema: Any) -> Any:
    """The schema, so that nothing that it does not name is there."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(each) for name, each in schema.items()}
    return {**found, "additionalProperties": False} if isinstance(found.get("properties"), dict) else found


def check(text: str) -> dict[str, Any]:
    """Return what a text has; it has the schema that it names."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(text, parse_constant=refuse)
    schema = json.loads((SCHEMAS / f"{found['schema']['name']}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(found, strict(schema))
    return found


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("json")
    save(str(root / "ONE"), VALUES, world=2)
    save(str(root / "TWO"), {**VALUES, "model.odd": VALUES["model.odd"][:2], "more": np.ones(3)}, world=1)
    save(str(root / "BAD"), VALUES, world=1)
    (data,) = (root / "BAD").glob("*.safetensors")
    flip(data, data.stat().st_size - 3)
    versions = tmp_path_factory.mktemp("versions")
    (versions / "weight_v000001").mkdir()
    save_file({"w": np.ones(3, np.float32)}, versions / "weight_v000001" / "model.safetensors")
    return {
        "VERSIONS": str(versions),
        "LOCAL": str(versions / "local"),
        "ROOT": str(root),
        "OUT": str(tmp_path_factory.mktemp("out") / "new"),
        **{name: str(root / name) for name in ("ONE", "TWO", "BAD")},
    }


def test_the_files_are_those_of_the_reports():
    """Remedy: python docs/schemas.py."""
    assert {path.name: path.read_text(encoding="utf-8") for path in SCHEMAS.iterdir()} == generator().files()


def test_every_command_that_prints_json_is_tried():
    there = {name for name, parser in commands().items() if "--json" in parser.format_help()}
    assert there == set(LINES), "a command with --json needs a line in LINES"


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in LINES.items() for line in lines])
def test_what_a_command_prints_has_its_schema(places, capsys, name, line):
    assert main([name, *(places.get(word, word) for word in line), "--json"]) in (0, 1)
    captured = capsys.readouterr()
    assert captured.err == ""
    check(captured.out)


def test_show_tells_numbers_that_are_not_finite_as_text(places, capsys):
    main(["show", places["ONE"], "model.odd", "model.layers.0.w[1:, 0]", "--json"])
    odd, column = check(capsys.readouterr().out)["tensors"]
    assert odd["values"] == ["nan", "inf", "-inf", 1.0]
    assert (odd["smallest"], odd["not_finite"], odd["zeros"]) == (1.0, 3, 0)
    assert (column["values"], column["mean"], column["shape"]) == ([6.0, 12.0, 18.0], 12.0, [3])


def test_reading_a_manifest_is_logged_at_debug_only(places, caplog):
    with caplog.at_level("DEBUG", "paddle_flexckpt"):
        main(["inspect", places["ONE"]])
    found = [record for record in caplog.records if "0.manifest" in record.getMessage()]
    assert [record.levelname for record in found] == ["DEBUG"]


def test_digest_and_du_say_the_same_as_in_lines(places, capsys):
    main(["digest", places["ONE"], "--json"])
    found = check(capsys.readouterr().out)
    main(["digest", places["ONE"]])
    lines = dict(line.split("  ")[::-1] for line in capsys.readouterr().out.splitlines())
    assert found["digests"] == lines
    main(["du", places["ONE"], "--json"])
    found = check(capsys.readouterr().out)
    assert (found["by"], found["total_bytes"]) == ("role", sum(each["bytes"] for each in found["groups"]))


def test_reports_say_which_schema_they_have():
    report = SaveReport("/a", 0, 1, 1, 4, 4, 4, 1.0, {"total": 0.5}, {"w": "equal"})
    assert check(report.to_json())["schema"] == {"name": "save", "version": 1}
    assert report.to_dict() == {"schema": {"name": "save", "version": 1}, **report.as_dict()}
    check(LoadReport("/a", None, 1, ["w"], [], {}, {"w": "float32 -> float16"}).to_json())
    problem = Problem("is damaged", key="w", expected=[1], got=np.int64(3), offset=5)
    found = check(VerifyReport("/a", 0, problems=[problem], seconds={"total": np.float64("nan")}).to_json(None))
    assert found["problems"][0]["got"] == 3
    assert found["seconds"] == {"total": "nan"}
    assert found["ok"] is False


def test_a_schema_has_a_text_for_each_field_of_a_report():
    for name, cls in generator().reports().items():
        assert issubclass(cls, Report)
        properties = generator().schema_of(cls)["properties"]
        silent = [field for field, each in properties.items() if field != "schema" and not each.get("description")]
        assert not silent, f"{name}: {silent}"


def test_a_type_that_json_does_not_have_is_refused():
    with pytest.raises(TypeError, match="JSON has no such type: <class 'complex'>"):
        generator()._of_type(complex)
