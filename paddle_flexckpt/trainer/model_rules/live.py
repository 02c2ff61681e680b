"""AOA statements of a live model, by the protocols of PaddleFormers and PaddleFleet.

A model gives the statements from Hugging Face's weights to its own in one of two ways. Hand-written:
``_gen_aoa_config(config)`` of its class or, as PaddleFleet attaches it, of the instance. Modular: the model overrides
``paddle.nn.Layer.gen_aoa_statements``. In Paddle's develop branch every layer has this method, so an override is
recognised by comparing it with the base's. This library never adds the method to a layer. Modular generation may be a
collective of the model's own, over its pipeline. Tested in tests/trainer/test_live_rules.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paddle_flexckpt.aoa.invert import inverse_texts
from paddle_flexckpt.aoa.parser import parse_program
from paddle_flexckpt.aoa.statements import AoaError, read_config, shorten
from paddle_flexckpt.aoa.union import united_statements
from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.trainer.model_rules.axes import qualified_name
from paddle_flexckpt.trainer.model_rules.hf import hf_rules, with_optional_patterns, without_pipeline

_HAND_WRITTEN = {"from_hf": "_gen_aoa_config", "to_hf": "_gen_inv_aoa_config"}
_MODULAR = {"from_hf": "gen_aoa_statements", "to_hf": "gen_inv_aoa_statements"}
_TABLE = "_get_name_mappings"
_CONTEXT_MODULE = "paddle.distributed.flex_checkpoint.aoa.generation"
# The argument of a layer's method; that of a whole model takes the configuration.
_OF_A_LAYER = "structured_name_prefix"
_CONTEXT = "cannot tell the AOA statements of the model"


class _Protocol(NamedTuple):
    """The method by which a model gives its statements.

    Attributes:
        name: The method; the same on every rank.
        generate: Returns the statements of this rank's part of the model. It may communicate.
        is_reversed: Whether the statements are for the other direction.
    """

    name: str
    generate: Callable[[], Any]
    is_reversed: bool = False


def aoa_config_of(
    model: Any, direction: str = "from_hf", *, config: Any = None, process_group: Any = None
) -> dict[str, Any]:
    """Return the AOA configuration between Hugging Face's weights and a live model, the same on every rank.

    The model is asked in PaddleFleet's order: ``_gen_aoa_config``, of the class or the instance; else its override of
    ``gen_aoa_statements``; else, for a model of PaddleNLP, the tables of its class (:func:`hf_rules`). For ``"to_hf"``:
    ``_gen_inv_aoa_config``; else ``_gen_aoa_config`` with ``aoa_config_reverse``; else the override of
    ``gen_inv_aoa_statements``; else that of ``gen_aoa_statements`` with ``aoa_config_reverse``; else the tables.

    All ranks of the group call this together. If their statements differ, as each has its own layers or experts, every
    rank gets the statements of all.

    Args:
        model: The model itself, without wrappers.
        direction: ``"from_hf"`` or ``"to_hf"``.
        config: The argument of the model's method; by default ``model.config``, and for ``"to_hf"`` PaddleFleet's
            ``model.config_to_save`` if the model has it.
        process_group: The ranks that call this together; all of the job by default.

    Returns:
        ``{"aoa_statements": [...]}``, with ``"aoa_config_reverse": True`` where the other direction's are reversed.

    Raises:
        ValidationError: The model gives no statements, or gives them by another method than on another rank.
        AoaError: The statements are malformed, or ranks contradict each other.
    """
    if direction not in _MODULAR:
        raise ValidationError(f"direction is 'from_hf' or 'to_hf'; got {direction!r}")
    if config is None:
        config = getattr(model, "config", None)
        if direction == "to_hf":
            config = getattr(model, "config_to_save", config)
    comm = communicator_for(process_group)

    def choose() -> tuple[_Protocol, bytes]:
        found = _protocol_of(model, direction, config)
        return found, json.dumps([found.name, found.is_reversed]).encode()

    protocol, chosen = comm.together(choose, _CONTEXT)
    _check_equal(chosen, comm)

    def generate() -> tuple[tuple[list[str], bool], bytes]:
        given = read_config(protocol.generate())
        if protocol.name != _TABLE:
            given = dataclasses.replace(given, statements=tuple(with_optional_patterns(given.statements)))
        # A list that is equal on all ranks need not travel.
        return (list(given.statements), given.reverse), hashlib.sha256(repr(given).encode()).digest()

    (own, is_reverse), digests = comm.together(generate, _CONTEXT)
    statements = own if len(set(digests)) == 1 else _of_all_ranks(own, is_reverse, comm)
    is_reverse ^= protocol.is_reversed
    return {"aoa_statements": statements, **({"aoa_config_reverse": True} if is_reverse else {})}


def export_config_of(model: Any, *, process_group: Any = None) -> dict[str, Any]:
    """Return the AOA configuration with which a checkpoint of a live model is exported as Hugging Face's weights.

    It is that of :func:`aoa_config_of`, ``"to_hf"``, with statements that need no shapes of a destination: an export
    has none.

    Args:
        model: The model itself, without wrappers.
        process_group: The ranks that call this together; all of the job by default.

    Raises:
        ValidationError: As :func:`aoa_config_of`; or the model has no inverse of its own, and its statements alone
            cannot be inverted.
    """
    found = aoa_config_of(model, "to_hf", process_group=process_group)
    if not found.get("aoa_config_reverse"):
        return found
    back = inverse_texts(parse_program(found["aoa_statements"]), exact=False)
    open_ = [s for s in parse_program(back) if any(attribute.value == "auto" for attribute in s.attributes)]
    if open_:
        raise AoaError(
            f"the AOA statements of a {qualified_name(type(model))}, reversed, take shapes from a destination, and an "
            f"export has none: {len(open_)} of them, such as {shorten(open_[0].place.text)!r}. Remedy (FC605): give "
            f'the model a method {_HAND_WRITTEN["to_hf"]}(config), or the joins among its statements sizes="[...]"'
        )
    return {"aoa_statements": back}


def _check_equal(chosen: list[bytes], comm: Communicator) -> None:
    """Raise the same error on every rank if the models of two ranks give their statements by different methods.

    Modular generation may be a collective, which would wait for ranks that do not take part.
    """
    for rank, other in zip(comm.ranks, chosen):
        if other != chosen[0]:
            names = [json.loads(each)[0] for each in (chosen[0], other)]
            raise ValidationError(
                Problem(
                    "the models of ranks say their AOA statements by different methods",
                    rank=rank,
                    expected=f"{names[0]}, as on rank {comm.ranks[0]}",
                    got=names[1],
                    code="FC502",
                    remedy="build the model by the same class on all ranks",
                ),
                _CONTEXT,
            )


def _of_all_ranks(own: list[str], is_reverse: bool, comm: Communicator) -> list[str]:
    """Return the statements of all ranks, each once."""

    described = zlib.compress(json.dumps([own, is_reverse]).encode(), 1)
    _, answers = comm.together(lambda: (None, described), _CONTEXT)
    gathered = {rank: json.loads(zlib.decompress(answer)) for rank, answer in zip(comm.ranks, answers)}
    directions = {rank: reverse for rank, (_, reverse) in gathered.items()}
    different = next((rank for rank, reverse in directions.items() if reverse != directions[comm.ranks[0]]), None)
    if different is not None:
        raise ValidationError(
            Problem(
                "ranks have aoa_config_reverse of different values",
                rank=different,
                expected=f"{directions[comm.ranks[0]]}, as on rank {comm.ranks[0]}",
                got=directions[different],
                code="FC502",
                remedy="generate statements of one direction on all ranks",
            ),
            _CONTEXT,
        )
    return united_statements({rank: statements for rank, (statements, _) in gathered.items()})


def _protocol_of(model: Any, direction: str, config: Any) -> _Protocol:
    """Return the first method by which a model can give its statements."""
    forward = "from_hf"
    ways = [_hand_written(model, direction, config)]
    if direction != forward:
        ways.append(_reversed(_hand_written(model, forward, config)))
    ways.append(_modular(model, direction, config))
    if direction != forward:
        ways.append(_reversed(_modular(model, forward, config)))
    found = next((way for way in ways if way is not None), None)
    if found is not None:
        return found
    if hasattr(without_pipeline(type(model)), _TABLE):
        return _Protocol(_TABLE, lambda: hf_rules(type(model), config)[direction])
    own, inherited = _HAND_WRITTEN["from_hf"], _MODULAR["from_hf"]
    raise ValidationError(
        Problem(
            f"a {qualified_name(type(model))} does not say how Hugging Face's weights become its own",
            expected=f"a method {own}(config), or an override of paddle.nn.Layer.{inherited}",
            got="neither of them, and no table of names",
            code="FC606",
            remedy="pass the model itself where this is a wrapper; or write the AOA statements yourself "
            "(paddle_flexckpt.model_rules has them for some families, paddle_flexckpt.gen_aoa_statements makes them "
            "from a model), and pass them as aoa_config",
        )
    )


def _reversed(protocol: _Protocol | None) -> _Protocol | None:
    return None if protocol is None else protocol._replace(is_reversed=True)


def _hand_written(model: Any, direction: str, config: Any) -> _Protocol | None:
    name = _HAND_WRITTEN[direction]
    method = getattr(model, name, None)
    return None if method is None else _Protocol(name, lambda: method(config))


def _modular(model: Any, direction: str, config: Any) -> _Protocol | None:
    import paddle

    name = _MODULAR[direction]
    method = getattr(type(model), name, None)
    if method is None or method is getattr(paddle.nn.Layer, name, None):
        return None
    if _OF_A_LAYER in inspect.signature(method).parameters:
        return _Protocol(f"{name} of a layer", lambda: getattr(model, name)(_context_for(model, config)))
    return _Protocol(name, lambda: getattr(model, name)(config))


def _context_for(model: Any, config: Any) -> Any:
    """Return the argument of the methods of Paddle's layers, as PaddleFleet makes it for a whole model.

    Paddle's develop branch had it with seven fields, and later with five. The two former fields have no meaning for a
    model that declares neither casts nor names to leave out.
    """
    try:
        context = importlib.import_module(_CONTEXT_MODULE).AOAContext
    except (ImportError, AttributeError) as error:
        raise ValidationError(
            Problem(
                f"the method {_MODULAR['from_hf']} of {qualified_name(type(model))} takes an AOAContext, which this "
                "version of Paddle does not have",
                expected=_CONTEXT_MODULE,
                code="FC808",
                remedy=f"install a version of Paddle that has it, or give the model a method "
                f"{_HAND_WRITTEN['from_hf']}(config)",
            )
        ) from error
    if getattr(model, "_pipeline_name_mapping", False) is None:  # of a pipeline that has not named its layers yet
        model._set_pipeline_name_mapping()
    prefix = getattr(model, "_model_name_prefix", None)
    names: Mapping[str, str] = getattr(config, "aoa_checkpoint_name_mapping", None) or {}
    checkpoint_prefix = getattr(config, "aoa_checkpoint_name_prefix", None)
    known = {
        "config": config,
        "model_name_prefix": prefix() if callable(prefix) else "model",
        "checkpoint_name_prefix": "model" if checkpoint_prefix is None else checkpoint_prefix,
        "checkpoint_name_mapping": dict(names),
        "pp_to_single_mapping": getattr(model, "_pp_to_single_mapping", None) or {},
        "dtype_cast_rules": {},
        "excluded_names": frozenset(),
    }
    fields = [field.name for field in dataclasses.fields(context)]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ValidationError(
            Problem(
                "the AOAContext of this version of Paddle has fields that are not known",
                expected=f"of {', '.join(known)}",
                got=", ".join(unknown),
                code="FC808",
                remedy=f"give the model a method {_HAND_WRITTEN['from_hf']}(config)",
            )
        )
    return context(**{name: known[name] for name in fields})
