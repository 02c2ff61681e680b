"""Tiny models as tables: Hugging Face's arrays, PaddleFleet's made of them by hand, and the statements between them.

The statements have the forms that PaddleFleet's generators write (read in its sources, not run; docs/aoa.md, 9):
layers and experts are written out, lists of experts are joined by commas without blanks, texts in attributes stand in
single quotes, and temporaries have model-side names. Each part of a model is a method that adds to all four tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np

HIDDEN, HEADS, GROUPS, WIDTH, INNER, EXPERTS = 4, 4, 2, 2, 4, 3
HEADS_TEXT = f"num_heads={HEADS}, num_key_value_groups={GROUPS}"


class FleetModel:
    """One model.

    Attributes:
        hf: Hugging Face's arrays.
        paddle: PaddleFleet's.
        forward: The statements from the first to the second.
        inverse: Those back, as generated, not derived.
        cuts: How the model's keys are cut where that matters: axis and tensor-parallel parts.
        kept: Keys of the model that no weight of the checkpoint feeds.
    """

    def __init__(self, parts: int = 1) -> None:
        """Args: parts: tensor-parallel degree of the model's side."""
        self.parts = parts
        self.hf: dict[str, np.ndarray] = {}
        self.paddle: dict[str, np.ndarray] = {}
        self.forward: list[str] = []
        self.inverse: list[str] = []
        self.cuts: dict[str, tuple[int, int]] = {}
        self.kept: list[str] = []
        self._next = 1

    def array(self, *shape: int, dtype: str = "float32") -> np.ndarray:
        """An array whose elements are like no others of the model; bfloat16 tells less than that apart."""
        count = math.prod(shape)
        found = np.arange(self._next, self._next + count).reshape(shape)
        self._next += count
        return found.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    # -- one tensor ----------------------------------------------------------------------------------------------------

    def same(self, hf: str, paddle: str, *shape: int) -> None:
        """A tensor that is the same in both; with the same name it needs no statement."""
        self.hf[hf] = self.paddle[paddle] = self.array(*shape)
        if hf != paddle:
            self.forward.append(f"{hf} -> {paddle}")
            self.inverse.append(f"{paddle} -> {hf}")

    def linear(self, hf: str, paddle: str, inputs: int, outputs: int) -> None:
        """A weight of a linear layer."""
        self.hf[hf] = self.array(outputs, inputs)
        self.paddle[paddle] = self.hf[hf].T
        self.forward.append(f"{hf}^T -> {paddle}")
        self.inverse.append(f"{paddle}^T -> {hf}")

    def copied(self, hf: str, paddle: str) -> None:
        """One more tensor of the model that an array of the checkpoint fills; it is not written back."""
        self.paddle[paddle] = self.hf[hf]
        self.forward.append(f"{hf} -> {paddle}")
        self.inverse.append(f"{paddle} -> _")

    def from_scratch(self, paddle: str, *shape: int) -> None:
        """A tensor that the checkpoint does not have."""
        self.paddle[paddle] = self.array(*shape)
        self.kept.append(paddle)
        self.forward.append(f"_ -> {paddle}")
        self.inverse.append(f"{paddle} -> _")

    # -- fused layers --------------------------------------------------------------------------------------------------

    def qkv(self, hf: str, paddle: str, bias: bool = False) -> None:
        """q, k and v of attention with key-value groups."""
        heads = {"q": HEADS, "k": GROUPS, "v": GROUPS}
        names = {x: f"{hf}.{x}_proj.weight" for x in heads}
        for x, count in heads.items():
            self.hf[names[x]] = self.array(count * WIDTH, HIDDEN)
        fused = f"{paddle}.qkv_proj.weight"
        self.paddle[fused] = grouped_rows([self.hf[names[x]] for x in heads]).T
        self.cuts[fused] = (1, self.parts)
        sources = ", ".join(f"{name}^T" for name in names.values())
        self.forward.append(f"{sources} -> {fused}, fused_qkv, {HEADS_TEXT}")
        self.inverse.append(f"{fused} -> {', '.join(names.values())}, fused_qkv, {HEADS_TEXT}")
        self.inverse += [f"{name}^T -> {name}" for name in names.values()]
        if bias:
            names = {x: f"{hf}.{x}_proj.bias" for x in heads}
            for x, count in heads.items():
                self.hf[names[x]] = self.array(count * WIDTH)
            fused = f"{paddle}.qkv_proj.bias"
            self.paddle[fused] = grouped_rows([self.hf[names[x]] for x in heads])
            self.cuts[fused] = (0, self.parts)
            self.forward.append(f"{', '.join(names.values())} -> {fused}, fused_qkv, {HEADS_TEXT}, axis=0")
            self.inverse.append(f"{fused} -> {', '.join(names.values())}, fused_qkv, {HEADS_TEXT}, axis=0")
        self.linear(f"{hf}.o_proj.weight", f"{paddle}.o_proj.weight", HEADS * WIDTH, HIDDEN)

    def mlp(self, hf: str, paddle: str, bias: bool = False) -> None:
        """Gate and up, side by side on every tensor-parallel rank, and down. Back through model-side temporaries."""
        gate, up = f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"
        fused, own_gate, own_up = (f"{paddle}.{x}_proj.weight" for x in ("up_gate", "gate", "up"))
        for name in (gate, up):
            self.hf[name] = self.array(INNER, HIDDEN)
        self.paddle[fused] = interleaved([self.hf[gate].T, self.hf[up].T], 1, self.parts)
        self.cuts[fused] = (1, self.parts)
        self.forward.append(f"{gate}^T, {up}^T -> {fused}, fused_ffn")
        self.inverse.append(f"{fused} -> {own_gate}, {own_up}, fused_ffn")
        self.inverse += [f"{own_gate}^T -> {gate}", f"{own_up}^T -> {up}"]
        if bias:
            gate, up, fused = f"{hf}.gate_proj.bias", f"{hf}.up_proj.bias", f"{paddle}.up_gate_proj.bias"
            for name in (gate, up):
                self.hf[name] = self.array(INNER)
            self.paddle[fused] = interleaved([self.hf[gate], self.hf[up]], 0, self.parts)
            self.cuts[fused] = (0, self.parts)
            self.forward.append(f"{gate}, {up} -> {fused}, fused_ffn, axis=0")
            self.inverse.append(f"{fused} -> {gate}, {up}, fused_ffn, axis=0")
        self.linear(f"{hf}.down_proj.weight", f"{paddle}.down_proj.weight", INNER, HIDDEN)

    def gated_qkv(self, hf: str, paddle: str, layout: str, bias: bool, width: int = 4, value_width: int = 2) -> None:
        """q, its gate, k and v, group by group, cut into pieces of the common divisor of both widths."""
        for kind in ("weight", *(["bias"] if bias else [])):
            fused = f"{paddle}.qkv_proj.{kind}"
            pieces = PieceNames(fused, width, value_width)
            shapes = {"q": HEADS * width, "gate": HEADS * value_width, "k": GROUPS * width, "v": GROUPS * value_width}
            q, gate, k, v = (self.array(*(n, HIDDEN)[: 1 if kind == "bias" else 2]) for n in shapes.values())
            rows = {"q": (q, width), "gate": (gate, value_width)}
            if layout == "separate":
                names = {"q": pieces.q, "gate": pieces.gate, "k": pieces.k, "v": pieces.v}
                self.hf.update({f"{hf}.{x}_proj.{kind}": array for x, array in zip(shapes, (q, gate, k, v))})
            else:
                names = {"q": pieces.q_and_gate, "k": pieces.k, "v": pieces.v}
                both = [rows[x][0][h * rows[x][1] : (h + 1) * rows[x][1]] for h in range(HEADS) for x in rows]
                self.hf.update(
                    {f"{hf}.{x}_proj.{kind}": a for x, a in (("q", np.concatenate(both)), ("k", k), ("v", v))}
                )
            whole = grouped_rows([q, gate, k, v])
            self.paddle[fused] = whole if kind == "bias" else whole.T
            joined, whole_name = ",".join(pieces.fused), fused if kind == "bias" else f"{fused}.qkv_fused_tmp"
            self.forward += [f"{hf}.{x}_proj.{kind} -> {','.join(each)}, axis=0" for x, each in names.items()]
            self.forward.append(f"{joined} -> {whole_name}, axis=0")
            if kind == "weight":
                self.forward.append(f"{whole_name}^T -> {fused}")
                self.inverse.append(f"{fused}^T -> {whole_name}")
            self.inverse.append(f"{whole_name} -> {joined}, axis=0")
            self.inverse += [f"{','.join(each)} -> {hf}.{x}_proj.{kind}, axis=0" for x, each in names.items()]
        self.linear(f"{hf}.o_proj.weight", f"{paddle}.o_proj.weight", HEADS * value_width, HIDDEN)

    def latent(self, hf: str, paddle: str, indexer: bool = True) -> None:
        """Multi-head latent attention, with the indexer of sparse attention, whose model-side name is longer."""
        for name, inputs, outputs in (
            ("kv_a_proj_with_mqa", HIDDEN, 5),
            ("kv_b_proj", 3, 8),
            ("q_a_proj", HIDDEN, 3),
            ("q_b_proj", 3, 8),
            ("o_proj", 4, HIDDEN),
        ):
            self.linear(f"{hf}.{name}.weight", f"{paddle}.{name}.weight", inputs, outputs)
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            self.same(f"{hf}.{name}.weight", f"{paddle}.{name}.weight", 3)
        if indexer:
            own = f"{paddle}.core_attention.indexer"
            for name in ("wq_b", "wk", "weights_proj"):
                self.linear(f"{hf}.indexer.{name}.weight", f"{own}.{name}.weight", HIDDEN, 2)
            for kind in ("bias", "weight"):
                name, paddle_name = f"{hf}.indexer.k_norm.{kind}", f"{own}.k_norm.{kind}"
                self.hf[name] = self.paddle[paddle_name] = self.array(2)
                self.forward.append(f"{name} ->  {paddle_name}")
                self.inverse.append(f"{paddle_name} -> {name}")

    # -- experts -------------------------------------------------------------------------------------------------------

    def router(self, hf: str, paddle: str) -> None:
        """A router in float32, of which the checkpoint has bfloat16, and the bias of its choice."""
        self.same(f"{hf}.gate.e_score_correction_bias", f"{paddle}.gate.e_score_correction_bias", EXPERTS)
        name, paddle_name = f"{hf}.gate.weight", f"{paddle}.gate.weight"
        self.hf[name] = self.array(EXPERTS, HIDDEN, dtype="bfloat16")
        self.paddle[paddle_name] = self.hf[name].astype("float32")
        self.forward.append(f"{name} -> {paddle_name}, dtype='float32'")
        self.inverse.append(f"{paddle_name} -> {name}, dtype='bfloat16'")

    def _experts_of_hf(self, hf: str) -> Iterable[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        for expert in range(EXPERTS):
            shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
            arrays = {x: self.array(*shape) for x, shape in shapes.items()}
            self.hf.update({f"{hf}.experts.{expert}.{x}_proj.weight": array for x, array in arrays.items()})
            yield expert, arrays["gate"], arrays["up"], arrays["down"]

    def experts(self, hf: str, paddle: str, transposed: bool = True) -> None:
        """Experts of their own, by ``$EXPERT_ID``; without transposes as SonicMoE has them."""
        mark, axis = ("^T", 1) if transposed else ("", 0)
        for expert, *arrays in self._experts_of_hf(hf):
            gate, up, down = (array.T if transposed else array for array in arrays)
            self.paddle[f"{paddle}.experts.{expert}.up_gate_proj.weight"] = np.concatenate([gate, up], axis)
            self.paddle[f"{paddle}.experts.{expert}.down_proj.weight"] = down
        here, there = f"{hf}.experts.$EXPERT_ID", f"{paddle}.experts.$EXPERT_ID"
        self.forward += [
            f"{here}.down_proj.weight{mark} -> {there}.down_proj.weight",
            f"{here}.gate_proj.weight{mark}, {here}.up_proj.weight{mark} -> {there}.up_gate_proj.weight, axis={axis}",
        ]
        self.inverse.append(
            f"{there}.up_gate_proj.weight -> {there}.gate_proj.weight, {there}.up_proj.weight, axis={axis}"
        )
        if transposed:
            self.inverse += [f"{there}.{x}_proj.weight^T -> {here}.{x}_proj.weight" for x in ("down", "gate", "up")]

    def modular_experts(self, hf: str, paddle: str) -> None:
        """Experts of their own, each with the statements of a layer."""
        for expert in range(EXPERTS):
            self.mlp(f"{hf}.experts.{expert}", f"{paddle}.experts.{expert}")

    def grouped_experts(self, hf: str, paddle: str, ranks: int = 1, placeholders: bool = False) -> None:
        """All experts in two tensors of grouped GEMM; ``ranks``: each expert's inner extent is cut over so many."""
        first, second = (f"{paddle}.grouped_gemm_experts.weight{i}" for i in (1, 2))
        ups, downs = [], []
        for _, gate, up, down in self._experts_of_hf(hf):
            ups.append(interleaved([gate.T, up.T], 1, ranks))
            downs.append(np.split(down.T, ranks, 0))
        self.paddle[first] = np.concatenate(ups, 0)
        self.paddle[second] = np.concatenate([each[rank] for rank in range(ranks) for each in downs], 0)
        fused = [f"{paddle}.experts.{e}.up_gate_proj.weight" for e in range(EXPERTS)]
        down = [f"{paddle}.experts.{e}.down_proj.weight" for e in range(EXPERTS)]
        sources = {x: [f"{hf}.experts.{e}.{x}_proj.weight" for e in range(EXPERTS)] for x in ("gate", "up", "down")}
        if ranks == 1 and placeholders:  # as hand-written models do
            here, there = f"{hf}.experts.$EXPERT_ID", f"{paddle}.experts.$EXPERT_ID"
            self.forward += [
                f"{here}.down_proj.weight^T -> {there}.down_proj.weight",
                f"{here}.gate_proj.weight^T, {here}.up_proj.weight^T -> {there}.up_gate_proj.weight, axis=1",
            ]
        for e in range(EXPERTS):
            if ranks == 1 and not placeholders:
                self.forward += [
                    f"{sources['gate'][e]}^T, {sources['up'][e]}^T -> {fused[e]}, axis=1",
                    f"{sources['down'][e]}^T -> {down[e]}",
                ]
            elif ranks > 1:
                self.forward += [
                    f"{sources['gate'][e]}^T -> {_parts(fused[e] + '.gate_ep', ranks)}, axis=1",
                    f"{sources['up'][e]}^T -> {_parts(fused[e] + '.up_ep', ranks)}, axis=1",
                    ",".join(f"{fused[e]}.gate_ep{r},{fused[e]}.up_ep{r}" for r in range(ranks))
                    + f" -> {fused[e]}, axis=1",
                    f"{sources['down'][e]}^T -> {_parts(down[e] + '.ep', ranks)}, axis=0",
                ]
        by_rank = down if ranks == 1 else [f"{name}.ep{r}" for r in range(ranks) for name in down]
        self.forward += [f"{','.join(fused)} -> {first}, axis=0", f"{','.join(by_rank)} -> {second}, axis=0"]
        self._split_experts(sources, (first, second), (fused, down), ranks)

    def _split_experts(
        self, sources: dict[str, list[str]], wholes: tuple[str, str], made: tuple[list[str], list[str]], ranks: int
    ) -> None:
        (first, second), (fused, down) = wholes, made
        middle = {
            x: [name.replace("up_gate_proj", f"{x}_proj") + ".intermediate" for name in fused] for x in ("gate", "up")
        }
        middle["down"] = [f"{name}.intermediate" for name in down]
        if ranks == 1:
            self.inverse += [
                f"{first} -> {','.join(fused)}, axis=0",
                f"{second} -> {','.join(middle['down'])}, axis=0",
            ]
        else:
            blocks = [f"{first}.ep_blk{i}" for i in range(2 * ranks)]
            self.inverse += [
                f"{first} -> {','.join(blocks)}, axis=1",
                f"{','.join(blocks[::2])} -> {first}.gate_all, axis=1",
                f"{','.join(blocks[1::2])} -> {first}.up_all, axis=1",
                f"{first}.gate_all,{first}.up_all -> {first}.all, axis=1",
                f"{first}.all -> {','.join(fused)}, axis=0",
                f"{second} -> " + ",".join(f"{name}.ep{r}" for r in range(ranks) for name in down) + ", axis=0",
                *(f"{_parts(name + '.ep', ranks)} -> {name}.intermediate, axis=0" for name in down),
            ]
        for e in range(EXPERTS):
            self.inverse.append(f"{fused[e]} -> {middle['gate'][e]}, {middle['up'][e]}, axis=1")
            self.inverse += [f"{middle[x][e]}^T -> {sources[x][e]}" for x in ("gate", "up", "down")]

    def joined_experts(self, hf: str, paddle: str) -> None:
        """Experts joined along their first axis under names without ``weight``, as for deployment."""
        ups, downs = [], []
        for _, gate, up, down in self._experts_of_hf(hf):
            ups.append(np.concatenate([gate.T, up.T], 1))
            downs.append(down.T)
        self.paddle[f"{paddle}.experts.up_gate_proj"] = np.concatenate(ups, 0)
        self.paddle[f"{paddle}.experts.down_proj"] = np.concatenate(downs, 0)
        here, there = f"{hf}.experts.$EXPERT_ID", f"{paddle}.experts.$EXPERT_ID"
        lists = {x: ",".join(f"{paddle}.experts.{e}.{x}.weight" for e in range(EXPERTS)) for x in _JOINED}
        self.forward += [
            f"{here}.gate_proj.weight^T, {here}.up_proj.weight^T -> {there}.up_gate_proj.weight, axis=1",
            f"{here}.down_proj.weight^T -> {there}.down_proj.weight",
            *(f"{lists[x]} -> {paddle}.experts.{x}, axis=0" for x in _JOINED),
        ]
        self.inverse += [
            *(f"{paddle}.experts.{x} -> {lists[x]}, axis=0" for x in _JOINED),
            f"{there}.up_gate_proj.weight -> {there}.gate_proj.weight, {there}.up_proj.weight, axis=1",
            *(f"{there}.{x}_proj.weight^T -> {here}.{x}_proj.weight" for x in ("down", "gate", "up")),
        ]

    def packed_experts(self, hf: str, paddle: str) -> None:
        """Experts that the checkpoint has in tensors of three axes."""
        for name, own, shape in (
            ("gate_up_proj", "weight1", (EXPERTS, 2 * INNER, HIDDEN)),
            ("down_proj", "weight2", (EXPERTS, HIDDEN, INNER)),
        ):
            here, there = f"{hf}.experts.{name}", f"{paddle}.grouped_gemm_experts.{own}"
            self.hf[here] = self.array(*shape)
            self.paddle[there] = self.hf[here].transpose(0, 2, 1)
            self.forward.append(f"{here} -> {there}, permute='[0,2,1]'")
            self.inverse.append(f"{there} -> {here}, permute='[0,2,1]'")

    # -- whole models --------------------------------------------------------------------------------------------------

    def frame(self, tied: bool, embeddings: Iterable[str] = ()) -> None:
        """Embedding, final norm and head; ``embeddings``: further tables that the embedding fills."""
        self.same("model.norm.weight", "model.final_norm.weight", HIDDEN)
        self.same("model.embed_tokens.weight", "model.embedding.embed_tokens.weight", 6, HIDDEN)
        for name in embeddings:
            self.copied("model.embed_tokens.weight", name)
        if tied:
            self.copied("model.embed_tokens.weight", "model.lm_head.weight")
            self.from_scratch("model.lm_head.bias", 6)
        else:
            self.same("lm_head.weight", "model.lm_head.weight", 6, HIDDEN)

    def norms(self, hf: str, paddle: str) -> None:
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.same(f"{hf}.{name}.weight", f"{paddle}.{name}.weight", HIDDEN)


_JOINED = ("up_gate_proj", "down_proj")


def _parts(base: str, count: int) -> str:
    return ",".join(f"{base}{i}" for i in range(count))


class PieceNames:
    """The temporaries of a gated attention layer: pieces of heads."""

    def __init__(
        self, base: str, width: int, value_width: int, heads: int = HEADS, groups: int = GROUPS, gated: bool = True
    ) -> None:
        """Args: base: what all names begin with; width, value_width: elements of a head of q and k, of gate and v."""
        piece = math.gcd(width, value_width)
        counts = {"q": width // piece, "gate": value_width // piece if gated else 0}
        self.q: list[str] = []
        self.gate: list[str] = []
        self.k: list[str] = []
        self.v: list[str] = []
        self.fused: list[str] = []
        self.q_and_gate: list[str] = []
        for g in range(groups):
            own: dict[str, list[str]] = {"q": [], "gate": []}
            for h in range(heads // groups):
                for x, count in counts.items():
                    names = [f"{base}._{x}_g{g}_h{h}_c{c}" for c in range(count)]
                    own[x] += names
                    self.q_and_gate += names
            k = [f"{base}._k_g{g}_c{c}" for c in range(width // piece)]
            v = [f"{base}._v_g{g}_c{c}" for c in range(value_width // piece)]
            self.q += own["q"]
            self.gate += own["gate"]
            self.k += k
            self.v += v
            self.fused += own["q"] + own["gate"] + k + v


def grouped_rows(components: list[np.ndarray]) -> np.ndarray:
    """Components along their first axis, group by group."""
    return interleaved(components, 0, GROUPS)


def interleaved(components: list[np.ndarray], axis: int, parts: int) -> np.ndarray:
    """Components, part by part: each part has its share of each of them."""
    shares = [np.split(component, parts, axis) for component in components]
    return np.concatenate([share[part] for part in range(parts) for share in shares], axis)


def dense(parts: int) -> FleetModel:
    """Two layers with biases."""
    model = FleetModel(parts)
    model.frame(tied=False)
    for i in range(2):
        model.norms(f"model.layers.{i}", f"model.layers.{i}")
        model.qkv(f"model.layers.{i}.self_attn", f"model.layers.{i}.self_attn", bias=True)
        model.mlp(f"model.layers.{i}.mlp", f"model.layers.{i}.mlp", bias=True)
    return model


def tied(parts: int) -> FleetModel:
    """The head is the embedding, and has a bias of its own; another root on the checkpoint's side."""
    model = FleetModel(parts)
    model.frame(tied=True)
    model.norms("hf.layers.0", "model.layers.0")
    model.qkv("hf.layers.0.self_attn", "model.layers.0.self_attn")
    model.mlp("hf.layers.0.mlp", "model.layers.0.mlp")
    return model


def mixture(*kinds: str, root: str = "hf", **options: object) -> Callable[[int], FleetModel]:
    """One layer for each way in which experts are held; the checkpoint's names of layers begin with ``root``."""

    def build(parts: int) -> FleetModel:
        model = FleetModel(parts)
        model.frame(tied=False)
        for i, kind in enumerate(kinds):
            hf, paddle = f"{root}.layers.{i}.mlp", f"model.layers.{i}.mlp"
            model.router(hf, paddle)
            getattr(model, kind)(hf, paddle, **options)
            model.mlp(f"{hf}.shared_experts", f"{paddle}.shared_experts")
        return model

    return build


def latent(parts: int) -> FleetModel:
    """Latent attention; the second layer has an indexer that the checkpoint lacks."""
    model = FleetModel(parts)
    model.frame(tied=False)
    model.latent("model.layers.0.self_attn", "model.layers.0.self_attn")
    model.latent("model.layers.1.self_attn", "model.layers.1.self_attn", indexer=False)
    for name in ("wq_b", "wk", "weights_proj", "k_norm"):
        model.from_scratch(f"model.layers.1.self_attn.core_attention.indexer.{name}.weight", 2, 3)
    return model


def multi_token(parts: int) -> FleetModel:
    """Layers with other numbers than the checkpoint's, the last of them predicts one more token, and has a level more.

    Names of the one side are other tensors' names on the other: forward the last layer goes first, back the first.
    """
    model = FleetModel(parts)
    model.frame(tied=False, embeddings=["model.layers.3.mtp_embed.weight"])
    blocks = [model.forward]
    for i in range(3):
        model.forward = []
        hf, paddle = f"model.layers.{i}", f"model.layers.{i + 1}"
        if i == 2:
            model.linear(f"{hf}.eh_proj.weight", f"{paddle}.eh_proj.weight", 2 * HIDDEN, HIDDEN)
            for name in ("enorm", "hnorm"):
                model.same(f"{hf}.{name}.weight", f"{paddle}.{name}.weight", HIDDEN)
            model.same(f"{hf}.shared_head.norm.weight", f"{paddle}.norm.weight", HIDDEN)
            paddle += ".transformer_layer"
        model.norms(hf, paddle)
        model.qkv(f"{hf}.self_attn", f"{paddle}.self_attn")
        model.experts(f"{hf}.mlp", f"{paddle}.mlp")
        blocks.append(model.forward)
    model.forward = [text for block in (blocks[0], *reversed(blocks[1:])) for text in block]
    return model


def gated(layout: str, bias: bool, width: int = 4, value_width: int = 2) -> Callable[[int], FleetModel]:
    """Gated attention in two layers."""

    def build(parts: int) -> FleetModel:
        model = FleetModel(parts)
        model.frame(tied=False)
        for i in range(2):
            name = f"layers.{i}.self_attn"
            model.gated_qkv(f"hf.{name}", f"model.{name}", layout, bias, width, value_width)
        return model

    return build


MODELS: dict[str, Callable[[int], FleetModel]] = {
    "dense": dense,
    "tied": tied,
    "experts": mixture("experts", "modular_experts", "joined_experts"),
    "sonic experts": mixture("experts", root="model", transposed=False),
    "grouped experts": mixture("grouped_experts"),
    "grouped experts, hand-written": mixture("grouped_experts", placeholders=True),
    "grouped experts, cut over ranks": mixture("grouped_experts", ranks=2),
    "packed experts": mixture("packed_experts"),
    "latent attention": latent,
    "multi-token prediction": multi_token,
    "gated attention": gated("separate", True),
    "gated attention, interleaved": gated("interleaved", True, 2, 6),
    "gated attention, equal widths": gated("separate", False, 2, 2),
}
