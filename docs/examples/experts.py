"""Train a GPT with experts over two replicas that have half of them each, as one process would.

Prints::

    0F1.0 0B0.0 0F1.1 0B0.1 0F1.2 0B0.2 0F1.3 0B0.3 0F1.4 0B0.4
    step 1: loss 5.79, largest difference to the whole model less than 1e-5
    step 2: loss 5.30, largest difference to the whole model less than 1e-5
    exchanges of one step: 64 of 2 replicas
"""

import copy

import torch

import pipeexec as px
import pipesim as ps
from pipeexec.demo_models.gpt import moe_gpt
from pipeexec.demo_models.registry import cross_entropy
from pipesim.ops import is_expert_exchange


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = moe_gpt(n_layers=2, d_model=32, n_experts=4, sequence=16)
    whole = copy.deepcopy(model)
    tokens = torch.randint(32, (16, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    # Each B is paired with the next F, whose segments run while the other's tokens are exchanged.
    order = ["0F0", *(f"(0F{k + 1};0B{k})OVERLAP_F_B" for k in range(3)), "0B3"]
    schedule = ps.Schedule.from_orders([order])
    graph = ps.lower(schedule, n_replicas=2, expert_layers=2)
    segments = [str(task) for task in graph if task.replica == 0]
    print(*[name for name in segments if name.startswith(("0F1", "0B0"))])

    optimizer = sgd(whole.parameters())
    with px.Pipeline([model], graph, ["cpu"] * 2, cross_entropy, sgd) as pipeline:
        for number in (1, 2):
            result = pipeline.step(inputs, targets)
            optimizer.zero_grad()
            cross_entropy(whole(inputs), targets).backward()
            optimizer.step()
            pairs = zip(model.parameters(), whole.parameters(), strict=True)
            largest = max((a - b).abs().max() for a, b in pairs)
            assert largest < 1e-5
            text = "largest difference to the whole model less than 1e-5"
            print(f"step {number}: loss {result.loss:.2f}, {text}")
    n_tasks = is_expert_exchange(graph.op, graph.part).sum()
    print(f"exchanges of one step: {n_tasks} of 2 replicas")


if __name__ == "__main__":
    main()
