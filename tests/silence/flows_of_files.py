"""Flows of files: damaged, linked, of other programs, and more of them than may be open."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

import paddle_flexckpt as fc
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.native import row_files
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.aoa.test_config_rules import HEADS, in_paddle, weights
from tests.damage.layouts import CHANGES, Stored, filled
from tests.property.layouts import Pick
from tests.silence.flow import flow, judged, refused
from tests.silence.flows import write_safetensors
from tests.silence.judge import Finding

Arrays = dict[str, np.ndarray]


def raw(arrays: Arrays) -> dict[str, tuple]:
    """What is compared of arrays: shapes, types and bits."""
    return {key: (array.shape, array.dtype.name, array.tobytes()) for key, array in arrays.items()}


@flow("a bit of a data file flips")
def _flips(pick: Pick, root: Path) -> str:
    layouts = ("rows", "columns", "both", "flattened", "whole")
    saved, layout, ranks = pick.choice(layouts), pick.choice(layouts), pick.choice((2, 3, 4))
    if pick.integer(0, 3):
        stored = Stored(root, saved)
    else:
        save, layout, ranks = CHANGES[pick.choice(sorted(CHANGES))]
        stored = save(root)
    file, byte = stored.place(random.Random(pick.integer(0, 1 << 30)))
    content = bytearray(stored.files[file])
    content[byte] ^= 1 << pick.integer(0, 7)
    file.write_bytes(content)
    outcomes = filled(layout, ranks, stored.load)
    if all(outcome is True for outcome in outcomes):
        return "equal"
    if all(isinstance(outcome, fc.CorruptCheckpointError) for outcome in outcomes) and not stored.has_copies:
        return "error"
    raise Finding(f"{file.name}, byte {byte}, to {layout} of {ranks} ranks: {outcomes!r:.300}")


@flow("a head beside a configuration that may tie it")
def _head(pick: Pick, root: Path) -> str:
    hf, native, out = root / "hf", root / "native", root / "out"
    hf.mkdir()
    said = [{}, *({"tie_word_embeddings": flag} for flag in (True, False))]
    config = {"model_type": "llama", "num_hidden_layers": 1, **HEADS, **pick.choice(said)}
    if pick.integer(0, 1):
        config["text_config"] = pick.choice(said)
    kind = pick.choice(("other", "same", "none", "nearly"))
    state = weights("same" if kind == "nearly" else kind)
    embedding = state["model.embed_tokens.weight"]
    if kind == "nearly":
        state["lm_head.weight"] = head = embedding.copy()
        head.view(np.uint8).reshape(-1)[pick.integer(0, head.nbytes - 1)] ^= 1
    save_file(state, hf / "model.safetensors")
    (hf / "config.json").write_text(json.dumps(config))
    forth, back = (fc.model_rules(config=config, direction=way) for way in ("from_hf", "to_hf"))
    live = in_paddle(state, state.get("lm_head.weight", embedding).T.copy())
    if kind in ("same", "none") and pick.integer(0, 1):
        live["lm_head.weight"] = live["model.embed_tokens.weight"]

    def convert() -> None:
        fc.convert_checkpoint(hf, native, aoa_config=forth)
        stored = raw({key: tensor.numpy() for key, tensor in fc.load_merged_state_dict(native).items()})
        wanted = [in_paddle(state, state.get("lm_head.weight", embedding).T)]
        if kind in ("same", "none"):
            # A tied head is the embedding as it is; where nothing ties, a model without a head stays one.
            wanted += [in_paddle(state, embedding), *([in_paddle(state)] if kind == "none" else [])]
        if stored not in map(raw, wanted):
            raise Finding(f"{kind}, {config}: converted to {sorted(stored)}, with other values")

    def publish() -> None:
        fc.publish(live, out, "self", aoa_config=back)

    ways: list[Callable[[], Any]] = [
        lambda: fc.convert_checkpoint(native, out, format="huggingface", aoa_config=back),
        lambda: fc.export_safetensors(native, out, aoa_config=back),
        lambda: fc.merge_sharded_state_dict(native, out, process_group="self", aoa_config=back),
    ]
    way = pick.choice([publish, *ways])
    error = refused(publish) if way is publish else refused(convert) or refused(way)
    found = {} if error else load_file(out / "model.safetensors")
    if kind in ("same", "none"):
        # Written out, or left to the embedding.
        state["lm_head.weight"] = embedding
        found.setdefault("lm_head.weight", embedding)
    return judged(error, raw(found), raw(state), f"{kind}, {config}", may_fail=kind == "none")


WORDS = ("scale", "factor", "amax", "inv", "meta", "s", "weight_scale_inv", "multiplier", "q")


@flow("float8 of another program beside a scale of any name")
def _scales(pick: Pick, root: Path) -> str:
    bits = np.arange(32, dtype=np.uint8).view(pick.choice((ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)))
    bits = bits.reshape(8, 4)
    word = pick.choice((*WORDS, "".join(chr(97 + pick.integer(0, 25)) for _ in range(pick.integer(1, 9)))))
    name = pick.choice(("", "a.{}", "a.weight_{}", "a.weight.{}", "{}", "b.{}", "a.{}_weight", "scaled_fp8"))
    tensors = {"a.weight": bits}
    if name:
        scale = np.full(pick.choice(((), (1,), (8, 1), (4,))), 0.5, np.float32)
        tensors[name.format(word)] = bits.reshape(-1)[:1].copy() if name == "scaled_fp8" else scale
    hf, native, turned, out = (root / each for each in ("hf", "native", "turned", "out"))
    hf.mkdir()
    write_safetensors(hf / "model.safetensors", tensors)
    fc.convert_checkpoint(hf, native, format=pick.choice(("native", "huggingface")))
    fc.convert_checkpoint(native, turned, aoa_config=["a.weight^T -> x", "x^T -> a.weight"])
    source = pick.choice((hf, native, turned))
    kind = pick.choice(("float32", "bfloat16"))
    target = {"a.weight": np.full((8, 4), 7, getattr(ml_dtypes, kind, kind))}
    same = {key: np.zeros_like(array) for key, array in tensors.items()}
    statement = [f'a.weight -> a.weight, dtype="{kind}"']

    def stay(call: Callable[[], Any]) -> str:
        error = refused(call)
        if not any(array.any() for array in same.values()) and error is None:
            same.update({k: t for k, t in _stored(out).items()})
        return judged(error, raw(same), raw(tensors), f"{sorted(tensors)} of {source.name}", may_fail=False)

    if pick.integer(0, 1):
        return stay(
            pick.choice(
                (
                    lambda: fc.load_state_dict(same, source),
                    lambda: fc.convert_checkpoint(source, out),
                    lambda: fc.export_safetensors(source, out),
                )
            )
        )
    error = refused(
        pick.choice(
            (
                lambda: fc.load_state_dict(target, source, dtype="cast", strict="missing"),
                lambda: fc.load_state_dict(target, source, strict="missing", aoa_config=statement),
                lambda: fc.convert_checkpoint(source, out, dtype=kind),
                lambda: fc.convert_checkpoint(source, out, aoa_config=statement),
                lambda: fc.export_safetensors(source, out, aoa_config=statement),
            )
        )
    )
    if error is None or "(FC208)" not in error or out.exists() or (target["a.weight"] != 7).any():
        raise Finding(f"codes beside {sorted(tensors)} of {source.name} became {kind}: {error}")
    return "error"


def _stored(path: Path) -> Arrays:
    """The tensors of a converted or an exported checkpoint, as they are."""
    found: Arrays = {}
    for file in path.glob("*.safetensors"):
        content = file.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        for key, entry in json.loads(content[8:begin]).items():
            if key != "__metadata__":
                low, high = entry["data_offsets"]
                name = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F32": "float32"}[entry["dtype"]]
                array = np.frombuffer(content[begin + low : begin + high], getattr(ml_dtypes, name, name))
                found[key] = array.reshape(entry["shape"])
    return found


@flow("an entry of a run is a link to elsewhere")
def _links(pick: Pick, root: Path) -> str:
    steps, keep = iter(range(1, 40)), pick.integer(1, 2)
    kind = pick.choice(("run", "memory", "versions"))
    tier = {"memory": fc.MemoryTier(root / "memory", save_when=fc.SaveEvery(1))} if kind == "memory" else {}

    def opened() -> fc.CheckpointManager:
        options = {"keep": fc.KeepLatest(keep), "save_when": fc.SaveEvery(4 if tier else 1), **tier}
        return fc.CheckpointManager(root / "run", process_group="self", preemption_signals=(), **options)

    publisher = fc.WeightPublisher(root / "versions", full_every=2, process_group="self", keep=keep)

    def save(times: int) -> None:
        for step in [next(steps) for _ in range(times)]:
            array = np.full(64, step, np.float32)
            if kind == "versions":
                publisher.publish({"w": array})
            elif manager.should_save(step):
                manager.save(step, state={"w": array}, rng=False, blocking=True)

    manager = opened()
    save(pick.integer(1, 6))
    entries = sorted((root / kind).rglob("*"))
    if pick.integer(0, 1):
        entries = [path for path in entries if path.is_dir()]
    place, elsewhere = pick.choice(entries), root / "elsewhere" / "copy"
    elsewhere.parent.mkdir()
    if place.is_symlink():
        return "equal"
    shutil.move(place, elsewhere)
    place.symlink_to(elsewhere)
    before = _tree(elsewhere.parent)

    def go_on(what: str) -> None:
        nonlocal manager
        if what == "save":
            save(pick.integer(1, 6))
        elif what == "clean":
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                main(["clean", str(root / kind), "--remove"])
        elif what == "close":
            manager.close()
            manager = opened()
        elif kind != "versions":
            target = {"w": np.zeros(64, np.float32)}
            step = manager.restore(state=target)
            if step is not None and (target["w"] != (step if isinstance(step, int) else step.step)).any():
                raise Finding(f"step {step} is restored with the values of {target['w'][0]}")

    told = [refused(lambda what=what: go_on(what)) for what in (pick.choice(ACTS) for _ in range(4))]
    told.append(refused(manager.close))
    after = _tree(elsewhere.parent)
    # A directory of runs in memory that is on another disk gets new steps there.
    if after != before and (place.parent != root / "memory" or not before.items() <= after.items()):
        changed = sorted(str(each) for each in {*before.items()} ^ {*after.items()})
        raise Finding(f"the target of a link in place of {place.relative_to(root)}: {changed!r:.300}; {told!r:.300}")
    return "error" if any(told) else "equal"


ACTS = ("save", "save", "clean", "close", "restore")


def _tree(path: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() if each.is_file() else b"" for each in path.rglob("*")}


@flow("more files than may be open")
def _files(pick: Pick, root: Path) -> str:
    ranks, readers, rows = pick.integer(3, 5), pick.integer(1, 3), pick.integer(5, 9)
    whole = {
        f"w{i}": np.random.default_rng(i).standard_normal((rows, 1 << pick.integer(2, 12)), np.float32)
        for i in range(3)
    }

    def shards(comm: Any, target: bool = False, full: bool = True) -> dict[str, fc.ShardedWeight]:
        made = {}
        for key, array in whole.items():
            axis = 1 if target and comm.size > 1 and array.shape[1] >= comm.size and key != "w0" else 0
            low, high = (array.shape[axis] * (comm.rank + i) // comm.size for i in (0, 1))
            part = np.ascontiguousarray(array[low:high] if axis == 0 else array[:, low:high])
            offset = (low, 0) if axis == 0 else (0, low)
            made[key] = fc.ShardedWeight(key, part if full else np.zeros_like(part), part.shape, array.shape, offset)
        return made

    before = row_files.MOST_OPEN
    row_files.MOST_OPEN = pick.integer(1, 2)
    try:
        SimulatedWorld(ranks).run(lambda comm: fc.save_state_dict(shards(comm), root / "x", comm))

        def load(comm: Any) -> bool:
            found = shards(comm, target=True, full=False)
            fc.load_state_dict(found, root / "x", comm, **({"verify": "full"} if verify else {}))
            wanted = shards(comm, target=True)
            return raw({k: w.local_tensor for k, w in found.items()}) == raw(
                {k: w.local_tensor for k, w in wanted.items()}
            )

        verify = pick.integer(0, 1)
        if SimulatedWorld(readers).run_all(load) != [True] * readers:
            raise Finding("the ranks of a load")
        fc.export_safetensors(root / "x", root / "out", max_file_bytes=pick.choice((1 << 12, 1 << 16, 1 << 30)))
        fc.convert_checkpoint(root / "out", root / "back")
        found = [fc.load_merged_state_dict(root / each) for each in ("x", "out", "back")]
    finally:
        row_files.MOST_OPEN = before
    return judged(
        None,
        [raw({k: t.numpy() for k, t in each.items()}) for each in found],
        [raw(whole)] * 3,
        "more files than may be open",
    )
