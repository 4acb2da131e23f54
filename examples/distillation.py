"""On-policy distillation: a larger model's server grades each token that the student sampled.

    bridge serve-vllm --model STUDENT --vllm-config-path student.json --port 9001
    bridge serve-vllm --model TEACHER --vllm-config-path teacher.json --port 9002     # with the same tokenizer
    python examples/distillation.py student.json teacher.json

The teacher's weights are not copied either: this process computes with its server's. Source: Agarwal et al.,
arXiv 2306.13649; each token's advantage is the reverse KL divergence's.
"""

import sys

import torch

import bridge

STUDENT, TEACHER, *MORE = sys.argv[1:]
STEPS = int(MORE[0]) if MORE else 100

with bridge.attach(STUDENT) as student, bridge.attach(TEACHER, reads_only=True) as teacher:
    optimizer = student.optimizer("adamw", lr=1e-5)
    for _ in range(STEPS):
        groups = student.sample([f"Explain the number {number}." for number in range(8)])
        every = [group.with_advantages([1.0] * len(group.completions)) for group in groups]
        divergence = 0.0
        for batch in student.pack(bridge.samples(every)):  # weights are one over the number of tokens
            with torch.no_grad():
                wanted, _ = teacher.logprobs(batch)
            logprobs, _ = student.logprobs(batch)
            gain = wanted - logprobs.detach()
            (-(logprobs - logprobs.detach()).exp() * gain * batch.weights_N).sum().backward()
            divergence -= (gain * batch.weights_N).sum().item()
        student.update(optimizer, max_norm=1.0)
        print(f"version {student.version}: {divergence:.4f} nats from the teacher")
