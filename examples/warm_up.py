"""Supervised warm-up before reinforcement learning.

Start a server first: bridge serve-vllm --model MODEL
"""

import sys

import bridge

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
FOLDER = sys.argv[2] if len(sys.argv) > 2 else "warm"
TEXTS = [(f"{a} + {b} =", f" {a + b}") for a in range(10) for b in range(10)]

with bridge.attach() as policy:
    optimizer = policy.optimizer("adamw", lr=1e-5)
    for step in range(STEPS):
        chosen = [TEXTS[(step * 16 + number) % len(TEXTS)] for number in range(16)]
        samples = [policy.encode(prompt, answer, weight=1 / len(chosen)) for prompt, answer in chosen]
        loss = 0.0
        for batch in policy.pack(samples):
            logprobs, _ = policy.logprobs(batch)
            part = (-logprobs * batch.weights_N).sum()
            part.backward()
            loss += part.item()
        policy.update(optimizer, max_norm=1.0)
        print(f"version {policy.version}: {loss:.3f} nats an answer")
    print(f"saved {policy.save(FOLDER)}")
