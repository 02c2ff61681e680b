"""Remedies: the statement for a tensor of another shape, and that for a head that the saved model had tied."""

from __future__ import annotations

import pytest

from paddle_flexckpt.transfer.problems import reshaped, untied
from tests.transfer.samples import Part, catalog


def test_another_size_is_cut_or_extended_along_one_axis():
    def remedy(new, old, key="w", found="w", parameter=(2, 2)):
        here = catalog(Part("first", parameter), Part(key, new))
        there = catalog(Part("w", parameter), Part("last", (3, 3, 3)), Part(found, old))
        return reshaped(here, 1, there, 2, {*here.keys, *there.keys})

    text = (
        "load into a model of the saved size, or leave this key out (by aoa_config, KEY -> _, and strict=False), or, "
        "if elements were added or removed at the end, as in a vocabulary, cut or extend it by the AOA statement "
    )
    assert remedy((4, 6), (4, 8), found="v") == f"{text}'v -> w, resize=\"auto\"'"
    assert remedy((5, 6), (4, 6), found="v") == f'{text}\'v -> w, resize="auto", fill="keep"\''
    assert remedy((3, 7), (4, 6), found="v") == remedy((4, 6), (4, 8, 1), found="v") == ""
    # Statements are about parameters, either side tells that this is a state; one of another shape speaks for itself.
    states = "first.x_0", "w.x_0"
    assert remedy((4, 6), (4, 8), *states, parameter=(4, 8)).endswith("'w.x_0 -> first.x_0, resize=\"auto\"'")
    assert remedy((4, 6), (4, 8), *states).endswith("'w.x_0 -> first.x_0, resize=\"auto\"'")
    here, there = (
        catalog(Part("first", (4, 6)), Part("first.x_0", (4, 6))),
        catalog(Part("w", (4, 8)), Part("w.x_0", (4, 8))),
    )
    assert reshaped(here, 1, there, 1, {*here.keys, *there.keys}) == f"{text}'w -> first, resize=\"auto\"'"


def tied(key, shape, *source):
    here = catalog(Part("decoder.weight", (9, 9)), Part(key, shape))
    return untied(here, 1, catalog(*source))


def advice(name, statement):
    return f"if the saved model tied it to {name!r}, add the AOA statement '{statement}'; or "


EMBEDDING = Part("model.embed_tokens.weight", (8, 6))


@pytest.mark.parametrize("head", ["lm_head.weight", "LM_Head_2.weight", "x.decoder.w", "embedding.x", "wte.weight"])
def test_a_head_of_the_shape_of_an_embedding_may_have_been_tied(head):
    others = (Part("wte.odd", (8, 7)), Part("other.weight", (8, 6)))
    assert tied(head, (8, 6), *others, EMBEDDING) == advice(EMBEDDING.key, f"{EMBEDDING.key} -> {head}")
    assert tied(head, (6, 8), *others, EMBEDDING) == advice(EMBEDDING.key, f"{EMBEDDING.key}^T -> {head}")
    assert tied(head, (6, 6), *others, EMBEDDING) == ""
    assert tied(head, (8, 6), *others) == ""


def test_a_square_embedding_is_not_transposed():
    name = EMBEDDING.key
    assert tied("head.weight", (6, 6), Part(name, (6, 6))) == advice(name, f"{name} -> head.weight")


@pytest.mark.parametrize(("key", "shape"), [
    ("lm_head.weight", (8,)), ("lm_head.weight", (8, 6, 1)), ("layer.weight", (8, 6)), ("lm_head.sub.weight", (8, 6)),
    ("lm_head", (8, 6)),
])  # fmt: skip
def test_other_targets_get_no_such_advice(key, shape):
    assert tied(key, shape, Part("wte.weight", shape)) == ""


def test_advice_for_a_state_is_about_its_parameter():
    found = tied("lm_head.weight.moment1_0", (8, 6), Part("wte.weight.moment1_0", (8, 6)), Part("wte.weight", (8, 6)))
    assert found == advice("wte.weight", "wte.weight -> lm_head.weight")
    assert tied("lm_head.weight", (8, 6), Part("wte.weight.moment1_0", (8, 6))) == ""
    # The keys of either side tell states from parameters.
    known = tied("decoder.weight.x_0", (8, 6), Part("wte.weight", (8, 6)))
    assert known == advice("wte.weight", "wte.weight -> decoder.weight")
    assert tied("lm_head.weight", (8, 6), Part("head.x_0", (8, 6)), Part("head", (1,))) == ""
    assert tied("head.x_0", (8, 6), Part("wte.weight", (8, 6)), Part("head", (8, 6))) == ""


def test_the_shape_is_that_of_the_whole_tensor_of_its_own_key():
    shards = [Part("wte.weight", (8, 6), shape=(4, 6), offset=(4 * n, 0), rank=n) for n in (0, 1)]
    source = [Part("a.weight", (8, 5)), shards[0], shards[1], Part("head.bias", (8, 7), rank=1)]
    assert tied("lm_head.weight", (8, 6), *source) == advice("wte.weight", "wte.weight -> lm_head.weight")
    assert tied("lm_head.weight", (4, 6), *source) == ""
    assert tied("lm_head.weight", (8, 7), *source) == advice("head.bias", "head.bias -> lm_head.weight")
