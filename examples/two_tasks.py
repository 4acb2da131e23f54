"""Two tasks in one batch, each with its own score.

Start a server first: bridge serve-vllm --model MODEL
"""

import sys

import bridge

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100


def brief(problem: dict, text: str) -> float:
    return 1 / (1 + len(text))


def vowels(problem: dict, text: str) -> float:
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


TASKS = {"brief": brief, "vowels": vowels}
PROBLEMS = [{"prompt": f"{task} {number}:", "answer": task} for task in TASKS for number in range(8)]

with bridge.attach(sampling=bridge.SamplingConfig(max_new_tokens=16)) as policy:
    optimizer = policy.optimizer("adamw-8bit", lr=1e-5)
    for _ in range(STEPS):
        groups = policy.sample(PROBLEMS, lambda problem, text: TASKS[problem["answer"]](problem, text))
        for batch in policy.pack(bridge.samples(groups, bridge.LossConfig(name="grpo"))):
            logprobs, _ = policy.logprobs(batch)
            bridge.policy_loss(logprobs, batch, bridge.LossConfig(name="grpo")).backward()
        policy.update(optimizer, max_norm=1.0)
        means = {task: [g.rewards for g in groups if g.problem["answer"] == task] for task in TASKS}
        print(f"version {policy.version}:", {task: sum(map(sum, each)) / 64 for task, each in means.items()})
