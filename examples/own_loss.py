"""Your own loss: a clipped probability ratio, written out.

Start a server first: bridge serve-vllm --model MODEL
"""

import sys

import torch

import bridge

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
PROBLEMS = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(4) for b in range(4)]


def score(problem: dict, text: str) -> float:
    return float(text.split()[:1] == [problem["answer"]])


with bridge.attach(sampling=bridge.SamplingConfig(max_new_tokens=16)) as policy:
    optimizer = policy.optimizer("adamw", lr=1e-5)
    for _ in range(STEPS):
        groups = policy.sample(PROBLEMS, score)
        for batch in policy.pack(bridge.samples(groups)):  # advantages and weights as in DAPO
            logprobs, _ = policy.logprobs(batch)
            ratios = (logprobs - batch.sampled_logprobs_N).exp()
            clipped = ratios.clamp(0.8, 1.28)
            terms = torch.minimum(ratios * batch.advantages_N, clipped * batch.advantages_N)
            (-terms * batch.weights_N).sum().backward()
        policy.update(optimizer, max_norm=1.0)
        rewards = [reward for group in groups for reward in group.rewards]
        print(f"version {policy.version}: mean reward {sum(rewards) / len(rewards):.3f}")
