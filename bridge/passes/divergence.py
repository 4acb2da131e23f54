"""Divergences of a policy from a teacher, over the whole vocabulary of each row.

A divergence is a sum over words (vocabulary entries), so it is added up block by block, like the log-probabilities in
`logprobs.py`. Its derivative by the policy's logit of word j is g_j - p_j * sum(g), for the policy's probability p_j
and the word's pull g_j = p_j * dD / dp_j. Each divergence is therefore defined by two numbers per word: its term and
its pull.

    reverse_kl    KL(p || q): the policy avoids what the teacher finds unlikely
    forward_kl    KL(q || p): the policy covers all that the teacher finds likely
    jsd           beta * KL(q || m) + (1 - beta) * KL(p || m), for the mixture m = beta * q + (1 - beta) * p

Source: "On-Policy Distillation of Language Models" (arXiv 2306.13649), section 2, whose P is the teacher q here.
Shape suffixes: N rows, W words of one block of the vocabulary, K words, X: any number of words.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

DivergenceKind = Literal["reverse_kl", "forward_kl", "jsd"]
LEAST_REST = 1e-7
"""Smallest probability of all words that are not listed; float32 sums of the others may exceed 1."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A divergence of the policy p from the teacher q."""

    kind: DivergenceKind
    beta: float = 0.5
    """The teacher's share of the mixture of `jsd`."""

    def parts(self, policy_NX: Tensor, teacher_NX: Tensor) -> tuple[Tensor, Tensor]:
        """Return the term and the pull of each word, given both models' log-probabilities.

        Shapes: [N, X] x 2 -> [N, X] x 2.
        """
        if self.kind == "reverse_kl":
            terms_NX = policy_NX.exp() * (policy_NX - teacher_NX)
            return terms_NX, terms_NX
        if self.kind == "forward_kl":
            teacher_probabilities_NX = teacher_NX.exp()
            return teacher_probabilities_NX * (teacher_NX - policy_NX), -teacher_probabilities_NX
        mixture_NX = torch.logaddexp(teacher_NX + math.log(self.beta), policy_NX + math.log1p(-self.beta))
        of_policy_NX = (1 - self.beta) * policy_NX.exp() * (policy_NX - mixture_NX)
        of_teacher_NX = self.beta * teacher_NX.exp() * (teacher_NX - mixture_NX)
        return of_teacher_NX + of_policy_NX, of_policy_NX

    def of_listed(self, policy_NK: Tensor, teacher_NK: Tensor) -> Tensor:
        """Return the divergence of K listed words and one more that stands for all others; it has a gradient.

        It is a lower bound of the divergence over the whole vocabulary, and equals it if the two models agree on how
        the remaining probability is distributed.

        Shapes: [N, K] x 2 -> [N].
        """
        terms_NX, _ = self.parts(_with_rest(policy_NK), _with_rest(teacher_NK))
        return terms_NX.sum(dim=1)


def _with_rest(logprobs_NK: Tensor) -> Tensor:
    """Append the log-probability of all words that are not listed: [N, K] -> [N, K + 1]."""
    rest_N1 = (1 - logprobs_NK.exp().sum(dim=1, keepdim=True)).clamp(min=LEAST_REST)
    return torch.cat([logprobs_NK, rest_N1.log()], dim=1)
