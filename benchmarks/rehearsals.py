"""How long a rehearsal takes: of jobs of few kinds of ranks, and of jobs in which no two ranks are alike.

The checkpoint has a manifest and files of the right lengths, without data in them: a rehearsal reads no more.

    python -m benchmarks.rehearsals                             # 1,000 tensors, 512 and 10,000 ranks
    python -m benchmarks.rehearsals --tensors 40 --pairs 1
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness import arguments, finish, row, turns
from paddle_flexckpt.native.checksums import BLOCK_BYTES
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from paddle_flexckpt.planning.job_layout import JobLayout
from paddle_flexckpt.planning.layouts import Layout, Model, ModelTensor
from paddle_flexckpt.planning.mesh_layouts import MeshLayout
from paddle_flexckpt.planning.meshes import Mesh, is_mesh, parse_mesh
from paddle_flexckpt.planning.strategy import Strategy, parse_strategy
from paddle_flexckpt.planning.write_plan import plan_write
from paddle_flexckpt.tools.rehearsal import rehearse

# What a job is, whether ranks read together too, and the bound in seconds.
CASES = (
    ("tp=8,pp=4,sharding=v2:16", False, 2),
    ("tp=8,pp=4,sharding=v2:16", True, 2),
    ("sharding=stage3:512", False, 2),
    ("sharding=stage3:512", True, 2),
    ("mesh=64x8:dp,mp;sharding=stage3:dp", False, 2),
    ("mesh=64x8:dp,mp;sharding=stage3:dp", True, 2),
    ("tp=8,pp=10,dp=125", False, 15),
    ("tp=8,pp=10,sharding=v2:125", False, 15),
    ("sharding=stage3:10000", False, 15),
    ("mesh=1250x8:dp,mp;sharding=stage3:dp", False, 15),
)
SHAPES = ((2048, 4096), (4096, 2048), (2048,), (2048, 2048))
_TOKEN = "0123456789abcdef" * 2


def model_of(tensors: int) -> Model:
    """A model of ten tensors in a layer, most of them cut by rows or by columns."""
    found = []
    for number in range(tensors):
        shape, layer = SHAPES[number % len(SHAPES)], number // 10
        axis = number % 2 if len(shape) > 1 else None
        found.append(ModelTensor(f"layers.{layer}.w{number % 10}.weight", shape, "bfloat16", axis, (layer,)))
    return Model(tuple(found), tensors // 10, states=())


def strategy_of(text: str) -> Strategy | Mesh:
    """The strategy or mesh that a text says."""
    return parse_mesh(text) if is_mesh(text) else parse_strategy(text)


def layout_of(model: Model, text: str) -> JobLayout:
    """The layout of a job, by its strategy or mesh."""
    strategy = strategy_of(text)
    return MeshLayout(model, strategy) if isinstance(strategy, Mesh) else Layout(model, strategy)


def make_checkpoint(path: Path, layout: JobLayout) -> None:
    """The manifest of what a job would save, and files that are all holes."""
    catalog = plan_write(layout.catalogs(range(layout.strategy.ranks)).compact(), "{}_0.safetensors".format).catalog
    length, offset, sizes = catalog.byte_length, np.zeros(len(catalog), dtype=np.int64), {}
    for number, name in enumerate(catalog.files):
        rows = np.flatnonzero(catalog.file == number)
        ends = np.cumsum(length[rows])
        offset[rows] = BLOCK_BYTES + ends - length[rows]
        sizes[name] = BLOCK_BYTES + int(ends[-1])
        with open(path / name, "wb") as file:
            file.write(_TOKEN.encode())
            file.truncate(sizes[name])
    sums = np.zeros(int((-(-length // BLOCK_BYTES)).sum()), dtype=np.uint64)
    info = SaveInfo(_TOKEN, 0, len(catalog.files))
    manifest = Manifest.of_save(info, replace(catalog, byte_offset=offset), sums, sizes)
    (path / "0.manifest").write_bytes(manifest.encode())


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, pairs=3)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--saved", default="dp=1", help="how the job was parallel that saved (default %(default)s)")
    parser.add_argument("--most-ranks", type=int, default=10_000, help="leave out cases of more ranks")
    options = parser.parse_args(argv)
    model = model_of(options.tensors)
    cases = [case for case in CASES if strategy_of(case[0]).ranks <= options.most_ranks]
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        make_checkpoint(Path(folder), layout_of(model, options.saved))

        def subject(text: str, together: bool):
            def work() -> None:
                report = rehearse(folder, layout_of(model, text), cooperative=together)
                if report.error:
                    raise ValueError(f"{text} does not load: {report.error}")

            return work

        subjects = {
            f"{text}{', read together' if together else ''}": subject(text, together) for text, together, _ in cases
        }
        seconds = turns(subjects, options.pairs, warm_up=0)
    is_bound = options.tensors == 1000 and options.saved == "dp=1"
    found = [
        row(f"rehearse {options.tensors:,} tensors: {name}", seconds[name], f"<= {most}" if is_bound else "", "s")
        for name, (_, _, most) in zip(subjects, cases)
    ]
    finish(options, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
