"""A small Llama with tensor-parallel layers: names and arithmetic are those of Hugging Face's ``LlamaForCausalLM``."""

import paddle
from paddle.distributed import fleet
from paddle.nn import functional

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDTH, INNER, WORDS, HEAD = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"], 64


def columns(inputs, outputs):
    """A layer whose outputs are divided among ranks."""
    return fleet.meta_parallel.ColumnParallelLinear(inputs, outputs, has_bias=False, gather_output=False)


def rows(inputs, outputs):
    """A layer whose inputs are divided among ranks."""
    return fleet.meta_parallel.RowParallelLinear(inputs, outputs, has_bias=False, input_is_parallel=True)


class Norm(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([WIDTH], default_initializer=paddle.nn.initializer.Constant(1.0))

    def forward(self, x):
        return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * self.weight


class Layer(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        attention = {name: columns(WIDTH, WIDTH) for name in ("q_proj", "k_proj", "v_proj")}
        self.self_attn = paddle.nn.LayerDict({**attention, "o_proj": rows(WIDTH, WIDTH)})
        halves = {name: columns(WIDTH, INNER) for name in ("gate_proj", "up_proj")}
        self.mlp = paddle.nn.LayerDict({**halves, "down_proj": rows(INNER, WIDTH)})
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()

    def forward(self, x):
        y, length = self.input_layernorm(x), x.shape[1]
        q, k, v = (
            self.self_attn[name](y).reshape([x.shape[0], length, -1, HEAD]).transpose([0, 2, 1, 3])
            for name in ("q_proj", "k_proj", "v_proj")
        )
        scores = rotated(q) @ rotated(k).transpose([0, 1, 3, 2]) / HEAD**0.5
        later = paddle.triu(paddle.full([length, length], float("-inf")), 1)
        mixed = (functional.softmax(scores + later) @ v).transpose([0, 2, 1, 3]).reshape([x.shape[0], length, -1])
        x = x + self.self_attn["o_proj"](mixed)
        y = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](functional.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


def rotated(x):
    """Rotary embedding."""
    angles = paddle.arange(x.shape[2], dtype="float32").unsqueeze(1) * (
        CONFIG["rope_theta"] ** (-paddle.arange(0, HEAD, 2, dtype="float32") / HEAD)
    )
    angles = paddle.concat([angles, angles], -1)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + paddle.concat([-second, first], -1) * angles.sin()


class Body(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.embed_tokens = fleet.meta_parallel.VocabParallelEmbedding(WORDS, WIDTH)
        self.layers = paddle.nn.LayerList([Layer() for _ in range(CONFIG["num_hidden_layers"])])
        self.norm = Norm()


class Llama(paddle.nn.Layer):
    """The model; its outputs are this rank's part of the words' scores."""

    def __init__(self):
        super().__init__()
        self.model, self.lm_head = Body(), columns(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))
