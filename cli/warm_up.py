"""Warm the demo's model up by next-token prediction, so that a sampled answer is right nearly every second time.

It sees the training problems alone: first with right answers, then with a share of wrong ones near the right one.
The held-out problems are new to it and stay new, so what reinforcement learning gains on them, it learnt from others.
It knows how to add by the time the wrong answers come, though: reinforcement learning has to prefer what the model
knows, and need not discover it.

Not covered: the model and where it is kept (`demo_model.py`), and any training after the warm-up.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.types import Problem

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""Label of a token that is given rather than predicted."""
WEIGHT_DECAY = 0.1
"""Without it the sums that are not shown are learnt later."""
SLIPS = (-2, -1, 1, 2)
"""How far a wrong answer is from the right one."""

Progress = Callable[[int, int], None]
"""Is told the step just done, counted from 1, and how many there are."""
Example = tuple[str, str, float]
"""A prompt, an answer and its weight in the loss."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps that share one mixture of answers."""

    num_steps: int
    """Optimizer steps."""
    right_share: float
    """Weight of the right answers in the loss."""
    lr: float
    """Learning rate at its peak; it falls to a twentieth along a cosine."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long and from what the model learns."""

    clean: Phase = Phase(num_steps=160, right_share=1.0, lr=3e-3)
    """First, with right answers alone."""
    mixed: Phase = Phase(num_steps=40, right_share=0.53, lr=5e-4)
    """Then, with wrong answers mixed in; held-out problems end a little below the share of right ones."""
    batch_size: int = 96
    """Problems per step."""
    seed: int = 0
    """Seed of the initial weights, the order of the problems and the wrong answers."""

    def phases(self) -> tuple[Phase, Phase]:
        """Return the phases in their order."""
        return (self.clean, self.mixed)

    def num_steps(self) -> int:
        """Return the steps of all phases."""
        return sum(phase.num_steps for phase in self.phases())


def warm_up(model: Any, tokenizer: Any, problems: Iterable[Problem], recipe: Recipe, progress: Progress) -> None:
    """Train `model` in place, in the element type that it has."""
    draw = random.Random(recipe.seed)  # noqa: S311  no secret is made of it
    batches = _batches(list(problems), recipe.batch_size, draw)
    done = 0
    for phase in recipe.phases():
        learn = _learner(model, tokenizer, phase)
        for step in range(phase.num_steps):
            learn(step, _examples(next(batches), phase.right_share, draw))
            done += 1
            progress(done, recipe.num_steps())


def _learner(model: Any, tokenizer: Any, phase: Phase) -> Callable[[int, list[Example]], None]:
    """Return what makes one step of `phase`."""
    import torch

    # A new optimizer: after right answers alone the moments are tiny, and the first wrong ones would make huge steps.
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)

    def learn(step: int, examples: list[Example]) -> None:
        optimizer.param_groups[0]["lr"] = phase.lr * _lr_share(step, phase.num_steps)
        optimizer.zero_grad()
        _loss(model, tokenizer, examples).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return learn


def _lr_share(step: int, num_steps: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return min(1.0, (step + 1) / 10) * (0.05 + 0.95 * cosine)


def _batches(problems: list[Problem], size: int, draw: random.Random) -> Iterator[list[Problem]]:
    """Yield batches for ever; every problem comes once before any comes again."""
    waiting: list[Problem] = []
    while True:
        while len(waiting) < size:
            waiting += draw.sample(problems, len(problems))
        yield waiting[:size]
        del waiting[:size]


def _examples(problems: list[Problem], right_share: float, draw: random.Random) -> list[Example]:
    """Pair every problem with its right answer, and with a wrong one too unless the right ones have all the weight."""
    right = [(str(problem["prompt"]), str(problem["answer"]), right_share) for problem in problems]
    if right_share == 1.0:
        return right
    return right + [(prompt, _wrong(answer, draw), 1 - right_share) for prompt, answer, _ in right]


def _wrong(answer: str, draw: random.Random) -> str:
    near = [int(answer) + slip for slip in SLIPS]
    return str(draw.choice([number for number in near if number >= 0]))


def _loss(model: Any, tokenizer: Any, examples: list[Example]) -> "torch.Tensor":
    """Return the weighted negative log-likelihood of the answers and their ends, per unit of weight."""
    import torch

    token_ids, labels = _rows(tokenizer, examples)
    weights = torch.tensor([weight for _, _, weight in examples])
    logits = model(input_ids=token_ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none"
    )
    return (losses.sum(1) * weights).sum() / weights.sum()


def _rows(tokenizer: Any, examples: list[Example]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return token ids and labels, padded on the right, where causal attention never looks."""
    import torch

    rows, labels = [], []
    prompts = tokenizer([prompt for prompt, _, _ in examples])["input_ids"]
    answers = tokenizer([answer + tokenizer.eos_token for _, answer, _ in examples])["input_ids"]
    for asked, answered in zip(prompts, answers, strict=True):
        rows.append(torch.tensor(asked + answered))
        labels.append(torch.tensor([IGNORED] * len(asked) + answered))
    pad = torch.nn.utils.rnn.pad_sequence
    padded = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    return padded, pad(labels, batch_first=True, padding_value=IGNORED)
