"""Steps in the memory of nodes: a job dies, one of its two nodes is lost, and the rest goes on with half of the ranks.

Half of the ranks imitate a node. First python -m paddle.distributed.launch --nproc_per_node 4 memory_tier.py, then
--nproc_per_node 2 memory_tier.py lost
"""

import shutil
import sys

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world

if not paddle.device.is_compiled_with_cuda():
    cpu_world.install()
strategy = fleet.DistributedStrategy()
size = dist.ParallelEnv().world_size
strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": size}
strategy.tensor_parallel_configs = {"tensor_init_seed": 1}
fleet.init(is_collective=True, strategy=strategy)
rank = dist.get_rank()
node = rank * 2 // size

model = fleet.meta_parallel.ColumnParallelLinear(8, 32, has_bias=True, gather_output=True)
optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())


def train(step):
    loss = ((model(paddle.full([4, 8], 0.1 * step)) - 1) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    if rank == 0:
        print(f"step {step}: loss {float(loss):.4f}")


path = f"runs/memory/node{node}"  # a real node would say "/dev/shm/run"
if "lost" in sys.argv:
    if rank == 0:
        shutil.rmtree("runs/memory/node1")  # the node is replaced by an empty one
    dist.barrier()
memory = fc.MemoryTier(path, save_when=fc.SaveEvery(2), copies=2)
try:
    with fc.CheckpointManager("runs/tier", save_when=fc.SaveEvery(100), memory=memory) as manager:
        start = 0
        if manager.latest_step() is not None:
            report = manager.restore(model=model, optimizer=optimizer)
            start = report.step
            if rank == 0:
                here, saved = report.nodes
                print(f"restored step {start} from the {report.tier} of {here} of {saved} nodes")
        for step in range(start + 1, 8):
            train(step)
            if manager.should_save(step):
                manager.save(step, model=model, optimizer=optimizer)
            if step == 5 and "lost" not in sys.argv:
                manager.wait()
                raise InterruptedError("the job dies")
        manager.save(7, model=model, optimizer=optimizer)  # the last step, to the root; the memory is freed
except InterruptedError:
    pass
