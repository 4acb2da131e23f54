"""Speculation without a second set of weights, on the real vLLM on the CPU: drafts change only the speed.

Prompts repeat themselves, so that most steps draft; vLLM's counters show that drafts were made and accepted.

Not covered: its speed (`benchmarks/speculation.py`), methods other than `ngram`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from bridge.server.protocol import COMPLETIONS, Refusal
from tests import scenarios
from tests.models import tiny
from tests.scenarios import LiveServer

pytestmark = pytest.mark.slow

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
VOCABULARY, END = 20, 2
PROMPT = [*range(3, VOCABULARY), *range(VOCABULARY - 1, 2, -1), *range(3, VOCABULARY)]
"""A prompt with every non-special token in two orders, so that any sampled token occurs in it."""
NUM_DRAWS, AT_ONCE = 4_000, 200
LEAST_EXPECTED = 5.0
"""Cells with fewer expected draws are merged, as usual for the chi-squared test."""
SURELY_DIFFERENT, SURELY_NOT = 1e-9, 1e-4
"""P-values: below the first a difference is certain; above the second there is no sign of one."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("speculation")
    model = tiny.write(tiny.llama(VOCABULARY), folder / "model", std=0.12)
    flags = ("--speculative-config", json.dumps(NGRAM))
    with scenarios.served(model, folder / "server", *flags, dtype="float32") as server:
        yield server


@pytest.fixture(scope="module")
def reference(server: LiveServer) -> PreTrainedModel:
    return scenarios.loaded(Path(server.manifest.model)).float()


def test_speculative_greedy_completions_match_the_model(server: LiveServer, reference: PreTrainedModel) -> None:
    before, num_tokens = accepted(server), 0
    for start in range(0, len(PROMPT), 2):
        prompt = [*PROMPT[start:], *PROMPT[:start]]
        (choice,) = sampled(server, prompt=prompt, n=1, temperature=0.0, max_tokens=64, seed=0)
        tokens = choice["token_ids"]
        logits = _logits(reference, [*prompt, *tokens])[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        num_tokens += len(tokens)
    assert num_tokens > 300
    assert accepted(server) > before + num_tokens / 4


def test_speculative_log_probs_match_the_model(server: LiveServer, reference: PreTrainedModel) -> None:
    for choice in sampled(server, n=8, temperature=0.7, max_tokens=48, seed=1):
        tokens = choice["token_ids"]
        logits = _logits(reference, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=1e-4, rtol=0)
        assert sum(count for _, count in choice["versions"]) == len(tokens)


def test_speculative_samples_follow_the_models_distribution(server: LiveServer, reference: PreTrainedModel) -> None:
    before = accepted(server)
    draws = Counter(
        tuple(choice["token_ids"][:2])
        for first in range(0, NUM_DRAWS, AT_ONCE)
        for choice in sampled(server, n=AT_ONCE, temperature=1.0, max_tokens=4, seed=10_000 + first)
    )
    assert accepted(server) > before + NUM_DRAWS / VOCABULARY
    assert p_value(draws, _pairs(reference, temperature=1.0)) > SURELY_NOT
    assert p_value(draws, _pairs(reference, temperature=1.2)) < SURELY_DIFFERENT


def test_speculative_server_is_trained_in_place(server: LiveServer, tmp_path: Path) -> None:
    scenarios.trained(server, tmp_path, "--lr", "1e-4", steps=3)
    assert not scenarios.different(server, tmp_path / "saved" / "step_3")
    scenarios.verifies(server, tmp_path)


def test_filters_are_refused(server: LiveServer) -> None:
    body = {"model": server.manifest.model, "prompt": PROMPT, "n": 1, "temperature": 1.0, "max_tokens": 4, "top_p": 0.9}
    answer = httpx.post(f"{server.manifest.url}{COMPLETIONS}", json=body, timeout=120, trust_env=False)
    assert answer.status_code == httpx.codes.CONFLICT
    assert Refusal.model_validate_json(answer.content).error.startswith("top_p cannot be combined with speculation")


def sampled(server: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    """Send one request, and return its choices."""
    body = {"model": server.manifest.model, "prompt": PROMPT, **fields}
    answer = httpx.post(f"{server.manifest.url}{COMPLETIONS}", json=body, timeout=120, trust_env=False)
    return list(answer.raise_for_status().json()["choices"])


def accepted(server: LiveServer) -> float:
    """Return the number of draft tokens that were accepted so far."""
    page = httpx.get(f"{server.manifest.url}/metrics", trust_env=False).raise_for_status().text
    return sum(map(float, re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)))


def p_value(draws: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Return the chi-squared test's p-value for these draws."""
    assert set(draws) <= set(expected)
    total = draws.total()
    cells = [(draws[pair], total * share) for pair, share in expected.items()]
    kept = [cell for cell in cells if cell[1] >= LEAST_EXPECTED]
    rest = [cell for cell in cells if cell[1] < LEAST_EXPECTED]
    kept += [(sum(count for count, _ in rest), sum(share for _, share in rest))] if rest else []
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in kept)
    half = torch.tensor([(len(kept) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _pairs(reference: PreTrainedModel, *, temperature: float) -> dict[tuple[int, ...], float]:
    """Return the probability of every pair of first two tokens, or of an immediate end token."""
    first = (_logits(reference, PROMPT)[-1] / temperature).softmax(-1)
    shares: dict[tuple[int, ...], float] = {(END,): float(first[END])}
    for token in (token for token in range(VOCABULARY) if token != END):
        second = (_logits(reference, [*PROMPT, token])[-1] / temperature).softmax(-1)
        shares |= {(token, other): float(first[token] * second[other]) for other in range(VOCABULARY)}
    assert abs(sum(shares.values()) - 1) < 1e-4
    return shares


@torch.no_grad()
def _logits(reference: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return torch.as_tensor(reference(torch.tensor([tokens])).logits[0]).float()
