"""The compiler's work grows as it has to: counted, not timed."""

from __future__ import annotations

from collections import Counter

import pytest

from paddle_flexckpt.aoa import compile_program, emit, macros, parser, rule
from paddle_flexckpt.aoa import placeholders as names
from paddle_flexckpt.aoa.structure import Structure
from tests.aoa.fleet_models import PieceNames
from tests.aoa.small import catalog, room


class CountingPattern:
    """A compiled regular expression that counts how often it is applied."""

    def __init__(self, pattern, counts: Counter) -> None:
        self._pattern, self._counts = pattern, counts

    def __getattr__(self, name: str):
        self._counts["digits"] += 1
        return getattr(self._pattern, name)


def counted(
    monkeypatch,
    texts: list[str],
    source: dict,
    target: dict | None,
    cuts: dict | None = None,
    reverses: bool = False,
) -> Counter:
    """How often the compiler does what takes long."""
    counts: Counter = Counter()

    def count(owner: object, name: str, label: str) -> None:
        original = getattr(owner, name)

        def counting(*args, **kwargs):
            counts[label] += 1
            return original(*args, **kwargs)

        patch.setattr(owner, name, counting)

    catalogs = catalog(source, cuts), None if target is None else catalog(target, cuts)
    with monkeypatch.context() as patch:
        count(Structure, "__init__", "structures")
        count(emit, "_lower", "lowered")
        for module in (macros, parser, rule):
            count(module, "parse", "parsed")
        count(names.KeyIndex, "bindings", "bindings")
        count(names, "_enter", "entered")
        patch.setattr(names, "_DIGITS", CountingPattern(names._DIGITS, counts))
        tokenize = parser.tokenize

        def counting_tokens(text: str) -> list:
            found = tokenize(text)
            counts["tokens"] += len(found)
            return found

        patch.setattr(parser, "tokenize", counting_tokens)
        mapping = compile_program({"aoa_statements": texts, "aoa_config_reverse": reverses}, *catalogs)
    counts["rows"] = len(mapping.maps)
    return counts


EXPERT = "l.$LAYER_ID.e.$EXPERT_ID"
TEXTS = [
    f"{EXPERT}.gate^T, {EXPERT}.up^T -> {EXPERT}.fused, fused_ffn",
    f"{EXPERT}.down^T -> t.$LAYER_ID.$EXPERT_ID",
    f"t.$LAYER_ID.$EXPERT_ID -> {EXPERT}.out, dtype='bfloat16'",
]


def experts(layers: int, each: int) -> tuple[dict, dict]:
    prefixes = [f"l.{i}.e.{j}" for i in range(layers) for j in range(each)]
    source = {f"{prefix}.{name}": room(2, 4) for prefix in prefixes for name in ("gate", "up", "down")}
    target = {f"{prefix}.fused": room(4, 4) for prefix in prefixes}
    target.update({f"{prefix}.out": room(4, 2, dtype="bfloat16") for prefix in prefixes})
    return source, target


@pytest.mark.parametrize("derives", [False, True])
def test_structures_are_made_once_for_all_layers_and_experts(monkeypatch, derives: bool):
    found = []
    for layers, each in ((2, 3), (5, 8), (9, 30)):
        source, target = experts(layers, each)
        counts = counted(monkeypatch, TEXTS, source, None if derives else target)
        assert counts["rows"] == 3 * layers * each
        found.append(counts)
    for label in ("structures", "lowered", "parsed", "bindings"):
        assert {counts[label] for counts in found} == {found[0][label]} != {0}, label


def test_every_key_is_looked_at_once(monkeypatch):
    """However many statements there are."""
    for statements in (1, 4, 20):
        source = {f"l.{i}.p{j}": room(2, 4) for i in range(7) for j in range(statements)}
        target = {f"m.{i}.p{j}": room(4, 2) for i in range(7) for j in range(statements)}
        texts = [f"l.$LAYER_ID.p{j}^T -> m.$LAYER_ID.p{j}" for j in range(statements)]
        counts = counted(monkeypatch, texts, source, target)
        # One scan of each key, and one of each pattern.
        assert counts["digits"] <= len(source) + 4 * statements
        assert counts["bindings"] == statements
        assert counts["lowered"] == 1


def test_variables_are_looked_at_when_somebody_asks(monkeypatch):
    """Names assigned in every layer are scanned by the statement that reads them, and no earlier."""
    source = {f"l.{i}.w": room(2, 4) for i in range(50)}
    target = {f"m.{i}.w": room(2, 4) for i in range(50)}
    direct = counted(monkeypatch, ["l.$LAYER_ID.w -> m.$LAYER_ID.w"], source, target)
    texts = ["l.$LAYER_ID.w -> t.$LAYER_ID.w", "t.$LAYER_ID.w -> m.$LAYER_ID.w"]
    through = counted(monkeypatch, texts, source, target)
    assert direct["digits"] <= 50 + 4
    assert 100 <= through["digits"] <= 100 + 8


def test_degrees_and_shapes_make_structures_and_layers_do_not(monkeypatch):
    text = "l.$LAYER_ID.w -> l.$LAYER_ID.w, fused_ffn"

    def structures(layers: int, *widths: int) -> int:
        arrays = {f"l.{i}.w": room(2, widths[i % len(widths)]) for i in range(layers)}
        return counted(monkeypatch, [text], arrays, arrays, {key: (1, 2) for key in arrays})["structures"]

    assert structures(20, 8) == structures(2, 8)
    assert structures(20, 8, 16) == structures(2, 8, 16) > structures(2, 8)


def test_a_join_of_many_has_one_row_for_each(monkeypatch):
    """And takes one structure, not one for each that is added."""
    found = []
    for count in (4, 64, 512):
        source = {f"e.{i}.w": room(2, 4) for i in range(count)}
        counts = counted(monkeypatch, ["e.*.w -> all, stack, axis=0"], source, {"all": room(count, 2, 4)})
        assert counts["rows"] == count
        found.append(counts["structures"])
    assert found[0] == found[1] == found[2]


def test_optimizer_states_make_structures_once_too(monkeypatch):
    def counts(layers: int) -> Counter:
        source, target = {}, {}
        for i in range(layers):
            for side, key, shape in ((source, f"l.{i}.w", (2, 3)), (target, f"m.{i}.w", (3, 2))):
                side[key] = room(*shape, dtype="float16")
                side.update({f"{key}.{state}": room(*shape) for state in ("w_0", "moment1_0", "moment2_0")})
                side[f"{key}.beta1_pow_acc_0"] = room(1)
        return counted(monkeypatch, ["l.$L.w^T -> m.$L.w"], source, target)

    few, many = counts(2), counts(40)
    assert many["structures"] == few["structures"]
    assert many["lowered"] == few["lowered"]
    assert many["rows"] == 20 * few["rows"] == 40 * 5


def gated(layers: int, heads: int, width: int = 6, value_width: int = 4) -> tuple[list[str], dict, dict]:
    """Gated attention as PaddleFleet writes it, and both sides."""
    texts, source, target = [], {}, {}
    for i in range(layers):
        own = f"model.layers.{i}.self_attn.qkv_proj.weight"
        pieces = PieceNames(own, width, value_width, heads, groups=heads // 4)
        for name, made in (("q", pieces.q), ("gate", pieces.gate), ("k", pieces.k), ("v", pieces.v)):
            source[f"hf.layers.{i}.{name}"] = room(2 * len(made), 3)
            texts.append(f"hf.layers.{i}.{name} -> {','.join(made)}, axis=0")
        texts += [f"{','.join(pieces.fused)} -> {own}.qkv_fused_tmp, axis=0", f"{own}.qkv_fused_tmp^T -> {own}"]
        target[own] = room(3, 2 * len(pieces.fused))
    return texts, source, target


@pytest.mark.parametrize("reverses", [False, True])
def test_gated_attention_takes_a_few_operations_for_each_name(monkeypatch, reverses: bool):
    """Hundreds of temporaries a layer: each is read once and looked at once, and layers share their structures."""
    found = {}
    for layers, heads in ((2, 8), (8, 8), (2, 32)):
        texts, source, target = gated(layers, heads)
        sides = (target, source) if reverses else (source, target)
        found[layers, heads] = counts = counted(monkeypatch, texts, *sides, reverses=reverses)
        names = sum(text.count(",") + 2 for text in texts)
        # Nothing but the transposes, of three tokens, is parsed a second time.
        in_texts = sum(len(parser.tokenize(text)) for text in texts)
        assert in_texts <= counts["tokens"] <= in_texts + 30 * layers
        assert counts["digits"] <= 2 * names
        assert counts["structures"] <= 3 * names / layers
    assert found[8, 8]["structures"] == found[2, 8]["structures"]
    for label in ("tokens", "digits", "rows"):
        assert found[8, 8][label] <= 4 * found[2, 8][label], label
        assert found[2, 32][label] <= 4.1 * found[2, 8][label], label


def test_layers_that_are_written_out_look_at_their_own_experts_alone(monkeypatch):
    """Temporaries of each layer have the form of those of all others: the index is not made anew for them."""

    def entered(layers: int) -> int:
        texts, source, target = [], {}, {}
        for i in range(layers):
            prefix = f"model.layers.{i}.experts"
            for e in range(5):
                source[f"{prefix}.{e}.up_gate"] = room(2, 4)
                target.update({f"hf.{i}.{e}.{x}": room(2, 2) for x in ("gate", "up")})
            texts.append(f"{prefix}.$EXPERT_ID.up_gate -> {prefix}.$EXPERT_ID.gate, {prefix}.$EXPERT_ID.up, axis=1")
            texts += [f"{prefix}.$EXPERT_ID.{x}^T -> hf.{i}.$EXPERT_ID.{x}" for x in ("gate", "up")]
        return counted(monkeypatch, texts, source, target)["entered"]

    # Each source key and each temporary once.
    assert entered(3) == 3 * 15
    assert entered(12) == 12 * 15
