"""TRL's GRPOTrainer on one copy of the weights. Only the lines marked with + differ from a stock script.

Start a server first: bridge serve-vllm --model MODEL
"""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import bridge  # +

PROBLEMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]


def right(completions: list[str], answer: list[str], **_: object) -> list[float]:
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


args = GRPOConfig(
    output_dir="trl_grpo",
    max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 100,
    learning_rate=2e-4,
    per_device_train_batch_size=64,
    num_generations=8,
    max_completion_length=4,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
with bridge.attach() as policy:  # +
    trainer = GRPOTrainer(
        **bridge.for_trl(policy, args),  # + instead of model=MODEL
        args=args,
        reward_funcs=right,
        train_dataset=Dataset.from_list(PROBLEMS),
    )
    trainer.train()
