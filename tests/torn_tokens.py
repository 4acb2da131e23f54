"""Search for torn tokens: two states of the weights alternate while many requests generate, and every token is checked.

transformers computes each token's log-probability, given all tokens before it, under both states. The token must match
the state of its reported version: frozen requests recompute their keys and values after the fence, so no token may mix
the two. If requests keep their keys and values instead, transformers does the same: it computes each run of tokens with
the reported state, over the keys and values of the preceding runs.

The server and transformers run in float32 (CPU) or float16 (GPU), whose rounding is small against the difference
between the states. A token that matches both within the tolerance is counted as undecided.

In a mixture of experts, the reported experts of a token must also be those of its version.

Not covered: bf16, whose rounding alone is 0.03 nats; adapters.
"""

import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel

from bridge.rollouts import openai_api
from bridge.server import fence
from bridge.server.client import BridgeClient
from bridge.server.fence import Update
from bridge.server.protocol import COMPLETIONS, InFlight
from bridge.types import Quantization
from bridge.weights import fp8
from bridge.weights.attach import AttachedModel, attach
from tests import scenarios
from tests.models import tiny
from tests.scenarios import LiveServer

TIMEOUT_S = 300
NUM_PROMPTS = 4
"""Number of prompts: few, so that a stale prefix cache would be hit."""
JUDGED_AT_ONCE = 64
"""Completions in one forward pass of transformers."""
PER_PARAMETER_S = 0.01
"""Seconds per parameter of an unguarded write: at least one step of the server."""
TIED_LIMIT = 0.002
"""Largest share of tokens with two experts whose scores are so close that rounding decides."""
UNDECIDED_LIMIT = 0.05
SHARE_OF_STATE = 0.1
"""Share of a load's tokens that each of the two states must serve before the load may end."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load, how often the weights change, and how tokens are checked."""

    num_tokens: int
    """Fewest tokens to generate."""
    num_fences: int
    """Fewest changes of the weights."""
    num_requests: int
    """Requests in flight at any time."""
    num_samples: int
    """Completions per request."""
    max_tokens: int
    """Longest completion."""
    prompt_tokens: int
    """Prompt length, longer than a KV cache block, since otherwise no prefix is cached."""
    fence_every_s: float
    """Seconds between two fences."""
    dtype: Literal["float16", "float32"]
    """Dtype of the served weights and of the reference."""
    tolerance: float
    """Largest difference per token between the server and transformers, in nats."""
    undecided: float = UNDECIDED_LIMIT
    """Largest share of tokens at which the two states may be too close to tell apart."""
    quantization: Quantization | None = None
    """How the server quantizes the weights; transformers computes with the dequantized ones."""


@dataclass(frozen=True)
class Answer:
    """One completion."""

    tokens: tuple[int, ...]
    """The prompt and the completion."""
    logprobs: torch.Tensor
    """Log-probabilities of the completion's tokens, as returned by the server."""
    runs: tuple[tuple[int, int], ...]
    """Each reported version, with its number of consecutive tokens."""
    experts: torch.Tensor | None = None
    """In a mixture of experts, the experts of every token but the last, in ascending order: [T - 1, L, K]."""

    @property
    def versions(self) -> list[int]:
        """The reported version of each token."""
        return [version for version, count in self.runs for _ in range(count)]

    def moved(self) -> "Answer":
        """Return a wrong answer: the first token of each later version is assigned to the preceding version."""
        claimed = [self.versions[0], *self.versions[:-1]]
        return replace(self, runs=tuple((version, len(list(run))) for version, run in itertools.groupby(claimed)))


@dataclass
class Verdict:
    """The counts of a search, in tokens unless stated otherwise."""

    of_state: list[int] = field(default_factory=lambda: [0, 0])
    """Tokens that match one state only."""
    undecided: int = 0
    """Tokens that match both states."""
    neither: int = 0
    """Torn tokens, which match neither state."""
    mislabeled: int = 0
    """Tokens that do not match the state of their reported version."""
    spanning: int = 0
    """Completions that span several versions."""
    largest_diff: float = 0.0
    """Largest difference in nats between the server and the nearer state, over all tokens except torn ones."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens judged."""
        return sum(self.of_state) + self.undecided + self.neither


@dataclass
class Alternation:
    """A server, the two states, and the state of each version."""

    server: LiveServer
    client: BridgeClient
    states: tuple[PreTrainedModel, PreTrainedModel]
    """The weights that the server computes with once a state is published."""
    written: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
    """The weights of each state."""
    parameters: Mapping[str, torch.Tensor]
    """The server's own memory."""
    published: dict[int, int]
    """Index of the state of each version."""

    @torch.no_grad()
    def write(self, state: int, after_each: Callable[[], None] = lambda: None) -> None:
        """Overwrite the served state with this one, parameter by parameter."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.written[state][name])
            after_each()

    def publish(self, in_flight: InFlight, *, keep_kv: bool = False) -> None:
        """Publish the other state through the fence."""
        state = 1 - self.published[max(self.published)]
        with fence.publish(self.client, Update(), in_flight=in_flight, keep_kv=keep_kv) as window:
            self.write(state)
        times = window.times
        self.published[times.version] = state

    def under_load(self, load: Load, meanwhile: Callable[[], None]) -> list[Answer]:
        """Generate, and call `meanwhile` repeatedly, until there are enough calls, and enough tokens of both states.

        On a busy machine, one state may be served for most of a short load, so this waits for each state's share.
        """
        first = max(self.published)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, tiny.VOCABULARY, (NUM_PROMPTS, load.prompt_tokens), generator=generator).tolist()
        requests, enough = _Requests(self.server, load), threading.Event()
        with ThreadPoolExecutor(load.num_requests) as pool:
            sent = [
                pool.submit(requests.send, prompts[index % NUM_PROMPTS], index, enough)
                for index in range(load.num_requests)
            ]
            try:
                for number in itertools.count(1):
                    meanwhile()
                    time.sleep(load.fence_every_s)
                    if number >= load.num_fences and self._has_share_of_both(requests.answers, first, load):
                        enough.set()
                    if all(future.done() for future in sent):
                        break
            finally:
                enough.set()
            for future in sent:
                future.result()
        return requests.answers

    def _has_share_of_both(self, answers: Sequence[Answer], first: int, load: Load) -> bool:
        """Return whether each state that was published since version `first` has its share of the tokens."""
        num_tokens = dict.fromkeys((state for version, state in self.published.items() if version >= first), 0)
        for answer in list(answers):
            for version, count in answer.runs:
                num_tokens[self.published[version]] += count
        return len(num_tokens) == 1 or min(num_tokens.values()) >= SHARE_OF_STATE * load.num_tokens

    def judge(self, answers: Sequence[Answer], tolerance: float) -> Verdict:
        """Match each token to a state."""
        verdict, left = Verdict(), iter(sorted(answers, key=lambda answer: len(answer.tokens)))
        while batch := list(islice(left, JUDGED_AT_ONCE)):
            expected = [_logprobs(state, batch) for state in self.states]
            for answer, *both in zip(batch, *expected, strict=True):
                self._count(verdict, answer, torch.stack(both, dim=1), tolerance)
        return verdict

    def misfits(self, answers: Sequence[Answer], tolerance: float) -> int:
        """Return the number of tokens that do not match kept keys and values of their reported versions."""

        def states(answer: Answer) -> tuple[int, ...]:
            return tuple(self.published[version] for version, _ in answer.runs)

        by_states = itertools.groupby(sorted(answers, key=lambda answer: (states(answer), len(answer.tokens))), states)
        num_misfits = 0
        for _, group in by_states:
            while batch := list(islice(group, JUDGED_AT_ONCE)):
                for answer, logprobs in zip(batch, self._with_kept_kv(batch), strict=True):
                    num_misfits += int(((answer.logprobs - logprobs).abs() > tolerance).sum())
        return num_misfits

    @torch.no_grad()
    def wrong_experts(self, answers: Sequence[Answer]) -> int:
        """Return the number of tokens whose experts differ from those of their reported state.

        A prompt has the version of its first sampled token, which restarts it. A sampled token's own experts come from
        the step that sampled the next token.
        """
        num_wrong = 0
        for answer in answers:
            chosen = torch.stack([_experts_of(state, answer.tokens[:-1]) for state in self.states])
            named = torch.tensor([self.published[version] for version in answer.versions])
            num_first = len(answer.tokens) - len(answer.logprobs)
            named = torch.cat([named[:1].expand(num_first - 1), named])
            expected = chosen[named, torch.arange(len(named))]
            assert answer.experts is not None
            num_wrong += int((answer.experts != expected).flatten(1).any(1).sum())
        return num_wrong

    @torch.no_grad()
    def _with_kept_kv(self, answers: Sequence[Answer]) -> list[torch.Tensor]:
        """Return the log-probabilities of completions whose runs have the same sequence of states.

        Each run is computed over the cache of the preceding runs; padding after shorter runs is masked.
        """
        device, cache = self.states[0].device, DynamicCache()
        starts = [len(answer.tokens) - len(answer.logprobs) for answer in answers]
        taken, ends = [0] * len(answers), list(starts)
        pieces = [list[torch.Tensor]() for _ in answers]
        mask = torch.zeros(len(answers), 0, dtype=torch.long, device=device)
        for number, (version, _) in enumerate(answers[0].runs):
            ends = [end + answer.runs[number][1] for end, answer in zip(ends, answers, strict=True)]
            counts = [end - 1 - begin for end, begin in zip(ends, taken, strict=True)]
            rows = torch.zeros(len(answers), max(counts), dtype=torch.long)
            for row, answer, begin, count in zip(rows, answers, taken, counts, strict=True):
                row[:count] = torch.tensor(answer.tokens[begin : begin + count])
            columns = torch.arange(max(counts), device=device)
            mask = torch.cat([mask, (columns < torch.tensor(counts, device=device)[:, None]).long()], dim=1)
            logits = self.states[self.published[version]](
                rows.to(device),
                past_key_values=cache,
                attention_mask=mask,
                position_ids=torch.tensor(taken, device=device)[:, None] + columns,
            ).logits
            logprobs = logits.float().log_softmax(-1).cpu()
            for index, (answer, begin, count) in enumerate(zip(answers, taken, counts, strict=True)):
                following = torch.tensor(answer.tokens[begin + 1 : begin + 1 + count])
                pieces[index].append(logprobs[index, :count].gather(1, following[:, None])[:, 0])
            taken = [end - 1 for end in ends]
        return [torch.cat(parts)[start - 1 :] for parts, start in zip(pieces, starts, strict=True)]

    def _count(self, verdict: Verdict, answer: Answer, both: torch.Tensor, tolerance: float) -> None:
        diffs = (answer.logprobs[:, None] - both).abs()
        fits = diffs <= tolerance
        num_fitting = fits.sum(1)
        for state in (0, 1):
            verdict.of_state[state] += int((fits[:, state] & (num_fitting == 1)).sum())
        verdict.undecided += int((num_fitting == 2).sum())
        verdict.neither += int((num_fitting == 0).sum())
        verdict.spanning += len(answer.runs) > 1
        named = torch.tensor([self.published[version] for version in answer.versions])
        verdict.mislabeled += int((~fits[torch.arange(len(named)), named]).sum())
        verdict.largest_diff = max([verdict.largest_diff, *diffs.amin(1)[num_fitting > 0].tolist()])


@contextmanager
def alternating(
    config: PretrainedConfig, folder: Path, load: Load, *flags: str, std: float = 0.08
) -> Iterator[Alternation]:
    """Serve one state of a tiny model, and load both states in transformers."""
    folders = [tiny.write(config, folder / f"state_{seed}", seed=seed, std=std) for seed in (0, 1)]
    flags = ("--enable-prefix-caching", *flags)
    with (
        scenarios.served(
            folders[0], folder / "server", *flags, dtype=load.dtype, quantization=load.quantization
        ) as server,
        BridgeClient(server.manifest, timeout_s=TIMEOUT_S) as client,
    ):
        attached = attach(server.manifest)
        dtype = getattr(torch, load.dtype)
        one, other = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(attached.device) for folder in folders
        )
        written = dict(one.named_parameters()), dict(other.named_parameters())
        states = one, other
        if load.quantization is not None:
            with fence.publish(client, Update()):
                states = _quantized(one, attached), _quantized(other, attached)
                _copy(attached.parameters, written[0])
        yield Alternation(server, client, states, written, attached.parameters, {client.status().version: 0})


def finds_no_torn_token(alternation: Alternation, load: Load, in_flight: InFlight = "keep") -> Verdict:
    """Alternate the states under load; every token must match a state that its versions allow."""
    before = max(alternation.published)
    answers = alternation.under_load(load, lambda: alternation.publish(in_flight))
    verdict = alternation.judge(answers, load.tolerance)
    num_fences = max(alternation.published) - before
    print(in_flight, verdict, "fences:", num_fences)  # noqa: T201  shown by pytest -s
    assert num_fences >= load.num_fences
    assert verdict.num_tokens >= load.num_tokens, verdict
    assert (verdict.neither, verdict.mislabeled) == (0, 0), verdict
    assert verdict.undecided < load.undecided * verdict.num_tokens, verdict
    assert min(verdict.of_state) > SHARE_OF_STATE / 2 * load.num_tokens, verdict
    return verdict


def keeps_what_is_in_flight(alternation: Alternation, load: Load) -> None:
    """Alternate the states under load while requests keep keys and values; every token must report its true version.

    To show that the check can fail, the boundary between two versions is moved by one token.
    """
    before = max(alternation.published)
    answers = alternation.under_load(load, lambda: alternation.publish("keep", keep_kv=True))
    num_fences, num_tokens = max(alternation.published) - before, sum(len(answer.logprobs) for answer in answers)
    spanning = [answer for answer in answers if len(answer.runs) > 1]
    moved = alternation.misfits([answer.moved() for answer in spanning], load.tolerance)
    print("kept", num_tokens, "tokens", num_fences, "fences", len(spanning), "spanning", moved)  # noqa: T201
    assert num_fences >= load.num_fences
    assert num_tokens >= load.num_tokens
    assert alternation.misfits(answers, load.tolerance) == 0
    assert len(spanning) > load.num_fences
    assert moved > len(spanning) / 2


def names_the_experts_of_its_version(alternation: Alternation, load: Load) -> None:
    """Alternate the states of a mixture of experts; each token's experts must be those of its reported version.

    To show that the check can fail, the boundary between two versions is moved by one token.
    """
    before = max(alternation.published)
    answers = alternation.under_load(load, lambda: alternation.publish("keep"))
    num_fences, num_tokens = max(alternation.published) - before, sum(len(answer.logprobs) for answer in answers)
    spanning = [answer for answer in answers if len(answer.runs) > 1]
    wrong, moved = (alternation.wrong_experts(some) for some in (answers, [answer.moved() for answer in spanning]))
    print("experts of", num_tokens, "tokens", num_fences, "fences", len(spanning), "spanning", wrong, moved)  # noqa: T201
    assert num_fences >= load.num_fences
    assert num_tokens >= load.num_tokens
    assert wrong <= TIED_LIMIT * num_tokens
    assert len(spanning) > load.num_fences
    assert moved > len(spanning) / 2


def agrees_without_fences(alternation: Alternation, load: Load) -> None:
    """Check the tolerance's margin: with constant weights, server and transformers differ by less than half of it."""
    verdict = alternation.judge(alternation.under_load(load, lambda: None), load.tolerance)
    print("no fence", verdict)  # noqa: T201
    assert (verdict.neither, verdict.mislabeled) == (0, 0), verdict
    assert verdict.largest_diff < load.tolerance / 2, verdict


def finds_torn_tokens_without_the_fence(alternation: Alternation, load: Load) -> None:
    """Check that the search can fail: write parameter by parameter while the server generates, and count torn tokens.

    Afterwards one state is written inside the fence, and there must be no torn tokens.
    """
    states = [1, 0]

    def write() -> None:
        alternation.write(states[0], after_each=lambda: time.sleep(PER_PARAMETER_S))
        states.reverse()

    verdict = alternation.judge(alternation.under_load(load, write), load.tolerance)
    print("no fence, half-written", verdict)  # noqa: T201
    assert verdict.neither > 0.1 * verdict.num_tokens, verdict
    assert verdict.mislabeled > 0, verdict
    alternation.publish("keep")
    agrees_without_fences(alternation, load)


@torch.no_grad()
def _copy(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])


@torch.no_grad()
def _quantized(model: PreTrainedModel, attached: AttachedModel) -> PreTrainedModel:
    """Return the model that a server effectively computes with if it serves `model` in FP8; this writes its weights.

    vLLM's kernels also round a layer's inputs; only Bridge's block kernel for the CPU does not.
    """
    _copy(attached.parameters, dict(model.named_parameters()))
    quantized, tensors = attached.shard.quantized, attached.server_tensors
    is_plain = attached.device.type == "cpu" and "fp8_per_block" in quantized.values()
    wide = model.dtype if is_plain else torch.float32  # the weights are rounded to that dtype
    served = copy.deepcopy(model).to(wide)
    dequantized = {
        name: fp8.dequantized(*fp8.quantized(tensors[name], how), how, wide) for name, how in quantized.items()
    }
    for name, view in attached.shard.param_mappings.items():
        if view.parameter not in quantized or not name.endswith(".weight"):
            continue
        part = dequantized[view.parameter].as_strided(view.shape, view.stride, view.offset)
        served.get_parameter(name).copy_(part)
        if not is_plain:
            group = fp8.BLOCK if quantized[view.parameter] == "fp8_per_block" else view.shape[1]
            layer = served.get_submodule(name.removesuffix(".weight"))
            layer.register_forward_pre_hook(partial(_round_inputs, group))
    return served


def _round_inputs(group: int, _: object, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Round a layer's inputs like vLLM: to FP8, with one scale per `group` of a row."""
    groups = inputs[0].float().unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / fp8.LARGEST
    rounded = (groups / scales).to(torch.float8_e4m3fn).float() * scales
    return (rounded.flatten(-2).to(inputs[0].dtype), *inputs[1:])


class _Requests:
    """The requests of all threads; each thread has its own connection."""

    def __init__(self, server: LiveServer, load: Load) -> None:
        self._url, self._model, self._load = server.manifest.url, server.manifest.model, load
        self._shape = server.status().experts
        self.answers = list[Answer]()

    def send(self, prompt: list[int], thread: int, enough: threading.Event) -> None:
        """Send one request after another until this thread has its share of the tokens and `enough` is set."""
        load, num_tokens = self._load, 0
        with httpx.Client(base_url=self._url, timeout=TIMEOUT_S, trust_env=False) as http:
            for number in itertools.count():
                if num_tokens >= load.num_tokens / load.num_requests and enough.is_set():
                    return
                seed = thread * 1_000_003 + number * load.num_samples
                answers = list(self._answers(http, prompt, seed))
                num_tokens += sum(len(answer.logprobs) for answer in answers)
                self.answers += answers
        raise AssertionError("unreachable")

    def _answers(self, http: httpx.Client, prompt: list[int], seed: int) -> Iterator[Answer]:
        body = {"model": self._model, "prompt": prompt, "n": self._load.num_samples, "seed": seed}
        body |= {"max_tokens": self._load.max_tokens, "temperature": 1.0, "experts": self._shape and 0}
        response = http.post(COMPLETIONS, json=body).raise_for_status()
        for choice in response.json()["choices"]:
            tokens, runs = (*prompt, *choice["token_ids"]), tuple(map(tuple, choice["versions"]))
            if choice["token_ids"]:  # an aborted request may have no tokens
                experts = None if self._shape is None else self._experts(choice["experts"], len(tokens) - 1)
                yield Answer(tokens, torch.tensor(choice["logprobs"]["token_logprobs"]), runs, experts)

    def _experts(self, document: Mapping[str, Any], num_rows: int) -> torch.Tensor:
        numbers = np.frombuffer(openai_api.Experts.model_validate(document).widened(), "<i2").astype(np.int64)
        return torch.from_numpy(numbers).view(num_rows, *(self._shape or ())).sort(-1).values


def _experts_of(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the experts that the routers of transformers' model choose, in ascending order: [T, L, K]."""
    chosen = list[torch.Tensor]()
    routers = [module for name, module in model.named_modules() if name.endswith(".gate")]
    hooks = [router.register_forward_hook(lambda *call: chosen.append(call[2][2])) for router in routers]
    model(torch.tensor([tokens], device=model.device))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).cpu().sort(-1).values


@torch.no_grad()
def _logprobs(model: PreTrainedModel, answers: Sequence[Answer]) -> list[torch.Tensor]:
    """Return the log-probabilities of each completion; padding is on the right, so causal attention never sees it."""
    longest = max(len(answer.tokens) for answer in answers)
    rows = torch.tensor([[*answer.tokens, *[0] * (longest - len(answer.tokens))] for answer in answers])
    ids = rows.to(model.device)
    logprobs = model(ids).logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].cpu()
    ends = [len(answer.tokens) - 1 for answer in answers]
    return [row[end - len(answer.logprobs) : end] for row, end, answer in zip(logprobs, ends, answers, strict=True)]
