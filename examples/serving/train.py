"""A policy trains under tensor parallelism 2 and sharding V2 2, and a serving engine has its weights after every step.

python -m paddle.distributed.launch --nproc_per_node 4 train.py --export policy
python -m paddle.distributed.launch --nproc_per_node 4 train.py --engine http://127.0.0.1:8000
"""

import argparse
import json
import urllib.request

import paddle
import paddle.distributed as dist
from model import CONFIG, WORDS, Llama
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world

parser = argparse.ArgumentParser()
parser.add_argument("--export", help="write the model as Hugging Face has it, for the engine to start with")
parser.add_argument("--engine", help="the URL of the engine")
parser.add_argument("--steps", type=int, default=4)
options = parser.parse_args()

if not paddle.device.is_compiled_with_cuda():
    cpu_world.install()
fc.install()
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2, "sharding_degree": 2}
strategy.hybrid_configs["sharding_configs"].split_param = True
strategy.tensor_parallel_configs = {"tensor_init_seed": 1}
fleet.init(is_collective=True, strategy=strategy)
paddle.seed(1)
model = fleet.distributed_model(Llama())
optimizer = fleet.distributed_optimizer(paddle.optimizer.AdamW(0.01, parameters=model.parameters()))
names = fc.model_rules("llama", "plain", "to_hf")
loss_of = fleet.meta_parallel.ParallelCrossEntropy()
tokens = paddle.randint(3, WORDS, [1, 24])
dist.broadcast(tokens, 0)


def ask(prompt):
    """Return the mean loss of a prompt by the engine."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{options.engine}/v1/completions", data, headers)) as answer:
        scores = json.load(answer)["choices"][0]["prompt_logprobs"][1:]
    return -sum(each[str(token)]["logprob"] for each, token in zip(scores, prompt[1:])) / len(scores)


def loss():
    return loss_of(model(tokens[:, :-1]), tokens[:, 1:].unsqueeze(-1)).mean()


if options.export:
    report = fc.publish(model, options.export, aoa_config=names, config=CONFIG)
    if dist.get_rank() == 0:
        print(report.summary())
else:
    channel = fc.WeightChannel(options.engine, aoa_config=names)
    for step in range(1, options.steps + 1):
        loss().backward()
        optimizer.step()
        optimizer.clear_grad()
        report = channel.push(model, version=step)
        with paddle.no_grad():
            trained = float(loss())
        if dist.get_rank() == 0:
            served = ask(tokens.flatten().tolist())
            print(f"step {step}: loss {trained:.4f}, the engine's {served:.4f}")
    compared = channel.verify(model)
    if dist.get_rank() == 0:
        print("every tensor of the engine is the trainer's:", compared.is_equal)
    channel.close()
