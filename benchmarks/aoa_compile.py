"""How long it takes to compile AOA statements for models of thousands of tensors, and what Paddle's engine takes.

Four cases: ``statements`` (many different statements, each for every layer), ``experts`` (a mixture of experts whose
gate and up projections are transposed and fused), ``large`` (the same with the layers and experts of DeepSeek-V3) and
``gated`` (attention with a gate, as PaddleFleet writes it: each layer's q, gate, k and v are cut into pieces of heads,
hundreds of temporaries, and joined group by group).
Both compilers take turns within one process, and start from the descriptions of both sides that each of them takes.
Paddle's engine looks up targets one by one afterwards ("resolve"); this library's result needs nothing more.

    python -m benchmarks.aoa_compile                      # all cases, 3 turns: a minute, nearly all of it Paddle's
    python -m benchmarks.aoa_compile --pairs 5 --json result.json
    python -m benchmarks.aoa_compile --no-paddle
"""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Row, arguments, finish, ratios, row

Shapes = dict[str, tuple[int, ...]]
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Case:
    """Statements and both sides.

    Attributes:
        name: What is printed.
        texts: The statements.
        source: Shapes of the source keys.
        target: Shapes of the destination keys.
        expanded: Number of statements with placeholders written out.
    """

    name: str
    texts: list[str]
    source: Shapes
    target: Shapes
    expanded: int


def statements_case(statements: int, layers: int) -> Case:
    """Renames and transposes in turn, each for every layer."""
    texts, source, target = [], {}, {}
    for i in range(statements):
        transposed = i % 2 == 1
        old, new = f"block_{i}.weight", f"part_{i}.weight"
        texts.append(f"model.layers.$LAYER_ID.{old}{'^T' if transposed else ''} -> layers.$LAYER_ID.{new}")
        for layer in range(layers):
            source[f"model.layers.{layer}.{old}"] = (64, 128)
            target[f"layers.{layer}.{new}"] = (128, 64) if transposed else (64, 128)
    return Case(f"{statements} statements, {layers} layers", texts, source, target, statements * layers)


def experts_case(layers: int, experts: int) -> Case:
    """Gate and up transposed and fused, down transposed, for every expert of every layer."""
    source, target = {}, {}
    for layer in range(layers):
        for expert in range(experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            source[f"{prefix}.gate_proj.weight"] = source[f"{prefix}.up_proj.weight"] = (64, 128)
            source[f"{prefix}.down_proj.weight"] = (128, 64)
            target[f"{prefix}.up_gate_proj.weight"] = (128, 128)
            target[f"{prefix}.down_proj.weight"] = (64, 128)
    expert = "model.layers.$LAYER_ID.mlp.experts.$EXPERT_ID"
    texts = [
        f"{expert}.gate_proj.weight^T, {expert}.up_proj.weight^T -> {expert}.up_gate_proj.weight, fused_ffn",
        f"{expert}.down_proj.weight^T -> {expert}.down_proj.weight",
    ]
    return Case(f"{layers} layers, {experts} experts", texts, source, target, 2 * layers * experts)


def gated_case(layers: int, heads: int, groups: int) -> Case:
    """q, gate, k and v, of heads of 192, 128, 192 and 128 rows, cut into pieces of 64 and joined for each group."""
    texts, source, target = [], {}, {}
    chunks = {"q": 3, "gate": 2, "k": 3, "v": 2}
    for layer in range(layers):
        hf, own = f"hf.layers.{layer}.self_attn", f"model.layers.{layer}.self_attn.qkv_proj.weight"
        pieces: dict[str, list[str]] = {name: [] for name in chunks}
        joined = []
        for group in range(groups):
            for name, count in chunks.items():
                if name in ("q", "gate"):
                    places = [f"g{group}_h{h}" for h in range(heads // groups)]
                else:
                    places = [f"g{group}"]
                made = [f"{own}._{name}_{place}_c{c}" for place in places for c in range(count)]
                pieces[name] += made
                joined += made
        for name, made in pieces.items():
            source[f"{hf}.{name}_proj.weight"] = (64 * len(made), 512)
            texts.append(f"{hf}.{name}_proj.weight -> {','.join(made)}, axis=0")
        texts.append(f"{','.join(joined)} -> {own}.qkv_fused_tmp, axis=0")
        texts.append(f"{own}.qkv_fused_tmp^T -> {own}")
        target[own] = (512, 64 * len(joined))
    return Case(f"{layers} layers, {heads} gated heads", texts, source, target, len(texts))


CASES: dict[str, Callable[[], Case]] = {
    "statements": lambda: statements_case(300, 100),
    "experts": lambda: experts_case(16, 256),
    "large": lambda: experts_case(61, 256),
    "gated": lambda: gated_case(61, 64, 8),
}
SMALL: dict[str, Callable[[], Case]] = {
    "statements": lambda: statements_case(6, 3),
    "experts": lambda: experts_case(2, 3),
    "gated": lambda: gated_case(2, 4, 2),
}


def catalog_of(shapes: Shapes) -> Any:
    """The catalog of whole tensors."""
    from paddle_flexckpt.catalog import CatalogBuilder

    builder = CatalogBuilder(0)
    for key, shape in shapes.items():
        builder.add(key, DTYPE, shape, (0,) * len(shape), shape, None)
    return builder.build()


def compiler_of(case: Case) -> Callable[[], dict[str, Callable[[], object]]]:
    """This library's compiler, as named steps of one turn."""
    from paddle_flexckpt.aoa import compile_program

    source, target = catalog_of(case.source), catalog_of(case.target)
    config = {"aoa_statements": case.texts}

    def compile_all() -> object:
        mapping = compile_program(config, source, target)
        if set(mapping.tensors) != set(case.target):
            raise RuntimeError(f"{case.name}: {len(mapping.tensors)} targets of {len(case.target)} are defined")
        return mapping

    return lambda: {"compile": compile_all}


def engine_of(case: Case) -> Callable[[], dict[str, Callable[[], object]]]:
    """Paddle's engine, likewise."""
    from paddle.distributed.flex_checkpoint.aoa.aoa_engine import AOAEngine
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeightDesc

    def described(shapes: Shapes) -> dict[str, list[Any]]:
        return {k: [ShardedWeightDesc(k, shape, shape, (0,) * len(shape), DTYPE)] for k, shape in shapes.items()}

    source, target = described(case.source), described(case.target)

    def turn() -> dict[str, Callable[[], object]]:
        engines: list[Any] = []
        return {
            "compile": lambda: engines.append(AOAEngine({"aoa_statements": case.texts}, source, target)),
            "resolve": lambda: [engines[0].find_shard_sources(descs[0]) for descs in target.values()],
        }

    return turn


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Paddle's engine prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def timed(steps: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """Wall and CPU seconds of each step."""
    found = {}
    for name, step in steps.items():
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        found[name] = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    return found


def summary(turns: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over the turns, by step and in total; and all measurements."""
    steps = {
        name: {kind: statistics.median(turn[name][kind] for turn in turns) for kind in ("wall", "cpu")}
        for name in turns[0]
    }
    total = {
        kind: statistics.median(sum(step[kind] for step in turn.values()) for turn in turns) for kind in ("wall", "cpu")
    }
    return {"steps": steps, "total": total, "turns": turns}


def measure(case: Case, compares: bool, pairs: int) -> dict[str, Any]:
    """Both compilers on one case, in turn.

    Args:
        case: The case.
        compares: Whether Paddle's engine takes part.
        pairs: Number of turns.
    """
    subjects = {"ours": compiler_of(case)}
    if compares:
        subjects["Paddle"] = engine_of(case)
    turns: dict[str, list[Any]] = {name: [] for name in subjects}
    for _ in range(pairs):
        for name, steps in subjects.items():
            with quiet():
                turns[name].append(timed(steps()))
    result: dict[str, Any] = {
        "case": case.name,
        "statements": len(case.texts),
        "expanded": case.expanded,
        "source_keys": len(case.source),
        "target_keys": len(case.target),
        **{name: summary(each) for name, each in turns.items()},
    }
    return result


def rows_of(name: str, result: dict[str, Any]) -> list[Row]:
    """Tell the time, and compare it with Paddle's."""
    totals = {
        subject: [sum(step["cpu"] for step in turn.values()) for turn in result[subject]["turns"]]
        for subject in ("ours", "Paddle")
        if subject in result
    }
    case = f"{name} ({result['case']})"
    rows = [row(f"AOA, compile: {case}", totals["ours"], unit="s", note="CPU time")]
    if "Paddle" in totals:
        rows.append(
            row(f"AOA, compile, times Paddle: {case}", ratios(totals["Paddle"], totals["ours"]), note="CPU time")
        )
    return rows


def report(name: str, result: dict[str, Any]) -> str:
    """One case in words."""

    def times(each: dict[str, Any]) -> str:
        return f"{each['cpu']:.3f} s CPU, {each['wall']:.3f} s"

    lines = [
        f"{name}: {result['case']}, {result['source_keys']:,} source keys, {result['expanded']:,} statements expanded",
        f"  ours    {times(result['ours']['total'])}",
    ]
    if "Paddle" in result:
        steps = result["Paddle"]["steps"]
        parts = ", ".join(f"{step} {steps[step]['cpu']:.3f} s" for step in steps)
        lines.append(f"  Paddle  {times(result['Paddle']['total'])} ({parts})")
    return "\n".join(lines)


def has_engine() -> bool:
    """Whether Paddle is there and has an AOA engine."""
    try:
        import paddle.distributed.flex_checkpoint.aoa.aoa_engine  # noqa: F401
    except ImportError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, pairs=3)
    parser.add_argument("--small", action="store_true", help="small cases, to see that it runs")
    parser.add_argument("--no-paddle", action="store_true", help="measure this library alone")
    options = parser.parse_args(argv)
    if options.pairs < 1:
        parser.error("--pairs has to be positive")
    cases: dict[str, Any] = {}
    rows: list[Row] = []
    for name, make in (SMALL if options.small else CASES).items():
        cases[name] = measure(make(), not options.no_paddle and has_engine(), options.pairs)
        rows += rows_of(name, cases[name])
        print(report(name, cases[name]), flush=True)
    finish(options, rows, cases=cases)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
