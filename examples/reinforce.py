"""REINFORCE without a baseline or a clip.

Start a server first: bridge serve-vllm --model MODEL
Source: Williams, Machine Learning 8 (1992), 229-256.
"""

import sys
from dataclasses import replace

import bridge

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100


def vowels(problem: dict, text: str) -> float:
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


with bridge.attach(sampling=bridge.SamplingConfig(max_new_tokens=16)) as policy:
    optimizer = policy.optimizer("adamw", lr=1e-5)
    for _ in range(STEPS):
        groups = policy.sample([f"say {number}:" for number in range(16)], vowels)
        returns = [replace(each, advantages=tuple((reward,) for reward in each.rewards)) for each in groups]
        for batch in policy.pack(bridge.samples(returns)):
            logprobs, _ = policy.logprobs(batch)
            (-logprobs * batch.advantages_N * batch.weights_N).sum().backward()
        policy.update(optimizer, max_norm=1.0)
        share = sum(sum(each.rewards) for each in groups) / sum(len(each.rewards) for each in groups)
        print(f"version {policy.version}: {share:.3f} of the letters are vowels")
