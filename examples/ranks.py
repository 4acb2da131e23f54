"""Train an adapter of a mixture of experts in several processes; after a kill and a restart, it resumes exactly.

Start a server first: bridge serve-vllm --model MODEL --tensor-parallel-size 2 --max-lora-rank 8
Then one process for each of its GPUs: torchrun --nproc-per-node 2 ranks.py MANIFEST
"""

import sys

import bridge

MANIFEST = sys.argv[1]
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 100
RUN = sys.argv[3] if len(sys.argv) > 3 else "runs/ranks"


def vowels(problem: dict, text: str) -> float:
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


with bridge.attach(
    MANIFEST,
    lora=bridge.LoraConfig(r=8, target_modules="q_proj,k_proj,v_proj,o_proj"),
    sampling=bridge.SamplingConfig(group_size=4, max_new_tokens=16),
    optimizer=bridge.OptimizerConfig(lr=1e-4),
    compute=bridge.ComputeConfig(router_replay=True),  # compute with the experts that the server chose
    run_dir=RUN,
) as policy:
    for step in range(policy.resume() + 1, STEPS + 1):
        groups = policy.sample([f"say {number}:" for number in range(8)], vowels)
        passes, stepped = policy.train_step(bridge.samples(groups))
        policy.log(step, groups, grad_norm=stepped.grad_norm, **passes.metrics)
        policy.save(step=step)
        if policy.ranks.is_rank_zero:
            print(f"version {policy.version}: mismatch {passes.metrics['logprob_diff_mean']:.4f} nats", flush=True)
    checks = policy.verify()
    if policy.ranks.is_rank_zero:
        print("one copy:", *(check.status for check in checks))
