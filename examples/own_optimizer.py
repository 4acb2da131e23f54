"""Your own optimizer: Lion, in place on vLLM's weights.

Start a server first: bridge serve-vllm --model MODEL
Source: Chen et al., arXiv 2302.06675. Plain bf16 weights lose steps smaller than half a bf16 step; Bridge's own
`policy.optimizer("adamw")` loses none.
"""

import sys

import torch

import bridge

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in (each for each in group["params"] if each.grad is not None):
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                weight.sub_(momentum.lerp(weight.grad, 0.1).sign_(), alpha=group["lr"])
                momentum.lerp_(weight.grad, 0.01)


with bridge.attach(sampling=bridge.SamplingConfig(max_new_tokens=16)) as policy:
    optimizer = Lion(policy.parameters(), lr=1e-4)
    for _ in range(STEPS):
        groups = policy.sample(["Name a color:"] * 8, lambda _, text: -float(len(text)))  # shorter is better
        for batch in policy.pack(bridge.samples(groups)):
            logprobs, _ = policy.logprobs(batch)
            bridge.policy_loss(logprobs, batch).backward()
        times = policy.update(optimizer, max_norm=1.0)
        print(
            f"version {times.version}: paused for {1e3 * times.pause_s:.1f} ms, wrote for {1e3 * times.write_s:.1f} ms"
        )
