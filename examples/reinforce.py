"""REINFORCE without a baseline or clipping, in a run that resumes when it is restarted after a kill.

Start a server first: bridge serve-vllm --model MODEL
Then look at it: bridge report runs/reinforce
Source: Williams, Machine Learning 8 (1992), 229-256.
"""

import sys

import bridge

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
RUN = sys.argv[2] if len(sys.argv) > 2 else "runs/reinforce"
SAVE_EVERY = int(sys.argv[3]) if len(sys.argv) > 3 else 20


def vowels(problem: dict, text: str) -> float:
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


with bridge.attach(sampling=bridge.SamplingConfig(max_new_tokens=16), run_dir=RUN) as policy:
    optimizer = policy.optimizer("adamw", lr=1e-5)
    for step in range(policy.resume(optimizer) + 1, STEPS + 1):
        groups = policy.sample([f"say {number}:" for number in range(16)], vowels)
        returns = [group.with_advantages(group.rewards) for group in groups]
        loss = 0.0
        for batch in policy.pack(bridge.samples(returns)):
            logprobs, _ = policy.logprobs(batch)
            part = (-logprobs * batch.advantages_N * batch.weights_N).sum()
            part.backward()
            loss += part.item()
        policy.update(optimizer, max_norm=1.0)
        policy.log(step, groups, loss=loss)
        if step % SAVE_EVERY == 0 or step == STEPS:
            policy.save(step=step, optimizer=optimizer)
        share = sum(sum(each.rewards) for each in groups) / sum(len(each.rewards) for each in groups)
        print(f"version {policy.version}: {share:.3f} of the letters are vowels")
