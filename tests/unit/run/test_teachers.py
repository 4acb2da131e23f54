"""Distillation: losses and gradients against float64 over the whole vocabulary, for every divergence and teacher."""

import copy
import json
import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os.path import commonprefix
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import bridge
from bridge.agents.rehearsal import rehearse
from bridge.agents.trajectories import as_chat
from bridge.config import LossConfig, SamplingConfig, TaskConfig, TrainConfig
from bridge.core.logs import warn_once
from bridge.engine import teacher as teachers
from bridge.errors import RewardError, UsageError
from bridge.modes import shared_vllm
from bridge.ranks.world import ALONE, Ranks
from bridge.rollouts.problems import encode, hinted, with_hint
from bridge.types import Array, Completion, Group, Images
from bridge.weights import skeleton
from tests.models import chat, tiny
from tests.unit import http_server, toy_server
from tests.unit.engine.test_policy import FenceClient
from tests.unit.engine.test_reference import filled
from tests.unit.passes.test_divergence import exact
from tests.unit.run.test_learner import (
    CLOSE,
    FAR,
    LARGE,
    TEMPERATURE,
    Descent,
    base,
    distance,
    gradient,
    learner_of,
    made_by,
    moved,
    prepared,
    same,
    updated,
    weights,
)
from tests.unit.several_ranks import on_ranks

HINT = (5, 6, 7, 8)
"""Tokens that only the teacher sees, after the prompt."""
LIMIT_S = 110.0
SMALL = LARGE / 10
"""A step after which no probability ratio is clipped."""
DIVERGENCES: list[dict[str, Any]] = [
    {"divergence": "reverse_kl"},
    {"divergence": "forward_kl"},
    {"divergence": "jsd", "jsd_beta": 0.3},
    {"divergence": "sampled"},
]


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    return made_by(base(seed=8))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a teacher whose head has more rows than the policy's, as if its vocabulary were padded more."""
    return tiny.write(tiny.llama(tiny.VOCABULARY + 19), tmp_path_factory.mktemp("teacher") / "model", seed=3)


def with_hints(groups: Sequence[Group]) -> list[Group]:
    return [replace(group, teacher_prompt_token_ids=group.prompt_token_ids + HINT) for group in groups]


def wide(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).double()


def loaded(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model.eval()


def distribution(
    model: PreTrainedModel,
    prompt: Sequence[int],
    completion: Completion,
    temperature: float = TEMPERATURE,
    words: int = tiny.VOCABULARY,
) -> Tensor:
    """Return the log-probabilities of the first `words`, at each token of the completion."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logits_TV = model(ids).logits[0, len(prompt) - 1 : -1, :words]
    logprobs_TV: Tensor = (logits_TV / temperature).log_softmax(-1)
    return logprobs_TV


def naive_gradient(
    model: PreTrainedModel,
    groups: Sequence[Group],
    teacher: PreTrainedModel,
    divergence: str,
    *,
    jsd_beta: float = 0.5,
    listed: int = 0,
    temperature: float = TEMPERATURE,
) -> tuple[dict[str, Tensor], float]:
    """Return the gradient and the mean divergence, from full logits, one completion at a time, in float64."""
    policy, teacher = wide(model), wide(teacher)
    terms = []
    total = 0.0
    for group in groups:
        for completion in group.completions:
            own_TV = distribution(policy, group.prompt_token_ids, completion, temperature)
            seen = group.teacher_prompt_token_ids or group.prompt_token_ids
            taught_TV = distribution(teacher, seen, completion, temperature).detach()
            sampled_T1 = torch.tensor(completion.token_ids).unsqueeze(1)
            if divergence == "sampled":
                every = distribution(teacher, seen, completion, temperature, words=len(teacher.lm_head.weight))
                taught_TV = every.detach()  # a log-probability is over the teacher's own vocabulary
                own_T = own_TV.gather(1, sampled_T1)[:, 0]
                gaps_T = own_T.detach() - taught_TV.gather(1, sampled_T1)[:, 0]
                terms.append((gaps_T * own_T).sum())
                total += gaps_T.sum().item()
                continue
            if listed:
                every = distribution(teacher, seen, completion, temperature, words=len(teacher.lm_head.weight))
                taught_TV = every.detach()  # a server's log-probabilities are over its own vocabulary
                likeliest_TK = taught_TV[:, : tiny.VOCABULARY].topk(listed).indices
                own_TV, taught_TV = (with_rest(of_model.gather(1, likeliest_TK)) for of_model in (own_TV, taught_TV))
            of_tokens_T = exact(divergence, jsd_beta, own_TV, taught_TV)  # type: ignore[arg-type]
            terms.append(of_tokens_T.sum())
            total += of_tokens_T.sum().item()
    num_tokens = sum(len(completion.token_ids) for group in groups for completion in group.completions)
    (torch.stack(terms).sum() / num_tokens).backward()
    return gradient(policy), total / num_tokens


def with_rest(logprobs: Tensor) -> Tensor:
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).log()
    return torch.cat([logprobs, rest], dim=-1)


def distilled(model: PreTrainedModel, groups: Sequence[Group], **choices: Any) -> tuple[dict[str, Tensor], Any]:
    """Return Bridge's gradient, and the metrics of the step."""
    learner = prepared(model, groups, loss="distill", mismatch="none", **choices)
    return gradient(model), learner.learnt()


@pytest.mark.parametrize("choices", DIVERGENCES, ids=lambda choices: choices["divergence"])
@pytest.mark.parametrize("more", [{}, {"micro_batch_tokens": 20}, {"offload_teacher": True}], ids=str)
def test_another_model_as_teacher_has_the_exact_gradient(
    groups: list[Group], teacher: Path, choices: dict[str, Any], more: dict[str, Any]
) -> None:
    model = base()
    expected, mean = naive_gradient(model, groups, loaded(teacher), **choices)
    actual, learnt = distilled(model, groups, teacher=str(teacher), **choices, **more)
    assert distance(actual, expected) < CLOSE
    assert learnt["divergence"] == pytest.approx(mean, rel=1e-4)
    assert learnt["tokens_trained"] == 52


@pytest.mark.parametrize("choices", DIVERGENCES, ids=lambda choices: choices["divergence"])
def test_policy_with_a_hint_teaches_itself(groups: list[Group], choices: dict[str, Any]) -> None:
    model = base()
    taught = with_hints(groups)
    expected, mean = naive_gradient(model, taught, model, **choices)
    actual, learnt = distilled(model, taught, teacher="self", **choices)
    assert distance(actual, expected) < CLOSE
    assert abs(learnt["divergence"]) > 1e-3
    assert learnt["divergence"] == pytest.approx(mean, rel=1e-4)


def test_hint_reaches_another_model(groups: list[Group], teacher: Path) -> None:
    model = base()
    taught = with_hints(groups)
    expected, _ = naive_gradient(model, taught, loaded(teacher), "forward_kl")
    without, _ = naive_gradient(model, groups, loaded(teacher), "forward_kl")
    actual, _ = distilled(model, taught, teacher=str(teacher), divergence="forward_kl")
    assert distance(actual, expected) < CLOSE
    assert distance(actual, without) > FAR


@pytest.mark.parametrize("name", ["the base by another path", "self"])
def test_adapter_learns_from_its_own_base_or_from_a_hint(groups: list[Group], tmp_path: Path, name: str) -> None:
    folder = tiny.write(tiny.llama(), tmp_path / "model")
    (tmp_path / "link").symlink_to(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    filled(model)
    is_self = name == "self"
    taught = with_hints(groups) if is_self else groups
    expected, _ = naive_gradient(model, taught, model if is_self else loaded(folder), "jsd")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    learner = prepared(
        model, taught, lr_factors=dict.fromkeys(trained, 1.0), model_name=str(folder), mode="lora_only",
        loss="distill", teacher="self" if is_self else str(tmp_path / "link"), divergence="jsd",
    )  # fmt: skip
    assert isinstance(learner.trainable.teacher, teachers.Teacher)
    assert learner.trainable.teacher.frozen.prepared is learner.trainable.prepared  # no second model is loaded
    assert distance(gradient(model), {name: expected[name] for name in trained}) < CLOSE


@pytest.mark.parametrize("divergence", ["reverse_kl", "sampled"])
def test_tokens_that_the_teacher_lacks_are_trained_on(groups: list[Group], tmp_path: Path, divergence: str) -> None:
    """A policy whose head is padded to more rows may sample a token of the padding."""
    teacher = tiny.write(tiny.llama(tiny.VOCABULARY // 2), tmp_path / "teacher", seed=3)
    learner = prepared(base(), groups, loss="distill", teacher=str(teacher), divergence=divergence)
    learner.write()
    learnt = learner.learnt()
    assert math.isfinite(learnt["loss"])
    assert learnt["updates"] == 1
    assert learnt["divergence"] > 0


def test_teacher_beside_rewards_adds_its_weighted_gradient(groups: list[Group], teacher: Path) -> None:
    alone, both = base(), base()
    prepared(alone, groups, mismatch="none")
    of_rewards = gradient(alone)
    of_teacher, _ = naive_gradient(base(), groups, loaded(teacher), "reverse_kl")
    learner = prepared(both, groups, mismatch="none", teacher=str(teacher), teacher_weight=0.5)
    expected = {name: of_rewards[name] + 0.5 * of_teacher[name] for name in of_teacher}
    assert distance(gradient(both), expected) < CLOSE
    assert {"divergence", "clipped_low_share"} <= learner.learnt().keys()


def test_equal_rewards_are_trained_on(groups: list[Group], teacher: Path) -> None:
    """A distillation reads no rewards: batches whose groups have no signal move the policy as others do."""
    equal = [replace(group, rewards=(1.0,) * len(group.rewards)) for group in groups]
    one, other = base(), base()
    actual, _ = distilled(one, groups, teacher=str(teacher))
    expected, _ = distilled(other, equal, teacher=str(teacher))
    assert distance(actual, expected) == 0


@pytest.mark.parametrize("is_self", [False, True], ids=["model", "self"])
def test_sampled_advantages_stay_those_of_the_first_pass(groups: list[Group], teacher: Path, is_self: bool) -> None:
    """The second pass over a batch has other ratios, but the same advantages, also if the teacher has changed."""
    model = base()
    frozen = wide(base()) if is_self else loaded(teacher)
    groups = with_hints(groups) if is_self else groups
    first, _ = naive_gradient(model, groups, frozen, "sampled")
    before = weights(model)
    updated(
        model, groups, make_optimizer=Descent, lr=SMALL, loss="distill", divergence="sampled",
        teacher="self" if is_self else str(teacher),
        mismatch="none", passes_per_batch=2, clip_high=100.0, clip_low=0.99,
    )  # fmt: skip
    once = {name: before[name] - SMALL * first[name].float() for name in before}
    twice = base()
    twice.load_state_dict(once, strict=False)  # tied embeddings
    policy, old = wide(twice), wide(base())
    terms = []
    for group in groups:
        for completion in group.completions:
            columns = torch.tensor(completion.token_ids).unsqueeze(1)
            prompt = group.prompt_token_ids
            own_T, old_T, taught_T = (
                distribution(one, seen, completion, words=400).gather(1, columns)[:, 0]
                for one, seen in ((policy, prompt), (old, prompt), (frozen, group.teacher_prompt_token_ids or prompt))
            )
            gaps_T = (old_T - taught_T).detach()
            terms.append(((own_T - old_T.detach()).exp() * gaps_T).sum() / 52)
    torch.stack(terms).sum().backward()
    second = gradient(policy)
    expected = {name: once[name] - SMALL * second[name].float() for name in before}
    assert distance(moved(weights(model), before), moved(expected, before)) < CLOSE * 10


def learnt_by(ranks: Ranks, groups: Sequence[Group], choices: dict[str, Any]) -> dict[str, Any]:
    model = base()
    learner = learner_of(model, ranks=ranks, loss="distill", **choices)
    learner.take(groups)
    learner.prepare()
    learner.write()
    return {"weights": weights(model), "figures": learner.learnt()}


@pytest.mark.parametrize("cp_size", [1, 2], ids=["replicas", "slices"])
@pytest.mark.parametrize("kind", ["model", "self", "sampled"])
def test_two_ranks_take_the_step_of_one(groups: list[Group], teacher: Path, kind: str, cp_size: int) -> None:
    """Slices of a pack have other rows with a hint than without it."""
    choices: dict[str, Any] = {"teacher": "self" if kind == "self" else str(teacher)}
    choices["divergence"] = "sampled" if kind == "sampled" else "jsd"
    given = with_hints(groups)
    alone = learnt_by(ALONE, given, choices)
    before = dict(base().named_parameters())
    for mine in on_ranks(2, learnt_by, given, choices, cp_size=cp_size, limit_s=LIMIT_S):
        assert not isinstance(mine, BaseException), mine
        assert mine["figures"]["divergence"] == pytest.approx(alone["figures"]["divergence"], rel=1e-3)
        for name, weight in alone["weights"].items():
            step = (weight - before[name].detach()).norm()
            assert (mine["weights"][name] - weight).norm() < 0.01 * step, name


def rehearsed(tmp_path: Path, problems: Sequence[Any], teacher: str) -> None:
    folder = tiny.write(tiny.llama(), tmp_path / "model")
    rehearse(str(folder), TaskConfig(), SamplingConfig(), Rows(problems), teacher=teacher)


class Rows:
    """Problems with a reward of zero."""

    def __init__(self, problems: Sequence[Any]) -> None:
        self._problems = problems

    def __iter__(self) -> Iterator[Any]:
        return iter(self._problems)

    def score(self, problem: Any, completion: str) -> float:
        return 0.0


def test_problems_without_hints_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--teacher self: no problem has a hint"):
        rehearsed(tmp_path, [{"prompt": "1 2"}, {"prompt": "3", "hint": None}, {"prompt": "4", "hint": ""}], "self")
    rehearsed(tmp_path, [{"prompt": "1 2", "hint": "3"}], "self")
    with pytest.raises(RewardError, match="the hint 7 is not text"):
        rehearsed(tmp_path, [{"prompt": "1 2", "hint": 7}], "other")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("2 + 2?", "2 + 2?\n\n4"),
        (
            [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            [{"role": "system", "content": "s"}, {"role": "user", "content": "u\n\n4"}],
        ),
        (
            [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}],
            [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\n\n4"}]},
                {"role": "assistant", "content": "a"},
            ],
        ),
    ],
)
def test_hint_follows_the_users_last_message(prompt: Any, expected: Any) -> None:
    problem: Any = {"prompt": prompt, "hint": "4", "answer": 4}
    before = copy.deepcopy(problem)
    assert hinted(problem) == {**problem, "prompt": expected}
    assert problem == before


@pytest.mark.parametrize("begun", [[""], ["Board: 1 2"], ["Board: 1 2", "Board: 3"]], ids=["", "same", "different"])
def test_teacher_sees_the_hint_and_what_tools_add_to_the_prompt(tmp_path: Path, begun: list[str]) -> None:
    tokenizer = chat.tokenizer(tmp_path, "qwen2_5")
    problem: Any = {"prompt": "2 + 2?", "hint": "4"}
    plain, hint = (encode(tokenizer, as_chat(one)) for one in (problem, hinted(problem)))
    prompts = [encode(tokenizer, as_chat(problem, text)) for text in begun]
    shared = tuple(commonprefix(prompts))  # noqa: RUF071  it works for any sequences
    taught = with_hint(shared, plain, hint)
    for text, prompt in zip(begun, prompts, strict=True):
        assert taught + prompt[len(shared) :] == encode(tokenizer, as_chat(hinted(problem), text))
    assert with_hint((), plain, hint) == ()


def test_hint_without_a_message_of_the_user_is_refused() -> None:
    with pytest.raises(RewardError, match="has no message of the user"):
        hinted({"prompt": [{"role": "system", "content": "s"}], "hint": "4"})


def test_batch_without_hints_is_logged(groups: list[Group], caplog: pytest.LogCaptureFixture) -> None:
    """By chance, no problem of a batch may have a hint, though others have one."""
    warn_once.cache_clear()
    distilled(base(), groups, teacher="self")
    assert "--teacher self teaches nothing in steps whose problems all lack a hint" in caplog.text
    caplog.clear()
    warn_once.cache_clear()
    distilled(base(), [*with_hints(groups[:1]), *groups[1:]], teacher="self")
    assert not caplog.text


@pytest.mark.parametrize("divergence", ["reverse_kl", "sampled"])
def test_later_updates_are_measured_and_clipped_as_policy_losses(
    groups: list[Group], teacher: Path, divergence: str
) -> None:
    choices: dict[str, Any] = {"loss": "distill", "teacher": str(teacher), "divergence": divergence}
    once = updated(base(), groups, **choices)
    twice = updated(base(), groups, make_optimizer=Descent, lr=LARGE, updates_per_batch=2, **choices)
    assert twice["updates"] == 2
    for name in ("entropy", "logprob_diff_mean", "mismatch_kl"):
        assert twice[name] == pytest.approx(once[name], rel=1e-3)
    if divergence == "sampled":
        assert twice["clipped_low_share"] + twice["clipped_high_share"] > 0


def test_loss_with_another_teacher_than_attached_is_refused(
    groups: list[Group], teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_vllm, "BridgeClient", FenceClient)
    toy = toy_server.serve(tiny.llama(), tmp_path / "model")
    attached = bridge.LossConfig(name="distill", teacher="self")
    with toy_server.attach(toy.manifest, tmp_path, loss=attached) as policy:
        with pytest.raises(UsageError, match="the loss has teacher='other', but the policy was attached with 'self'"):
            policy.forward(bridge.samples(groups), bridge.LossConfig(name="distill", teacher="other"))
        with pytest.raises(UsageError, match="teacher 'self' teaches nothing: no sample has teacher_prompt_token_ids"):
            policy.forward(bridge.samples(groups))
        divergence = policy.forward(bridge.samples(with_hints(groups))).metrics["divergence"]
        assert divergence > 1e-3
        jsd = policy.forward(bridge.samples(with_hints(groups)), attached.model_copy(update={"divergence": "jsd"}))
        assert 0 < jsd.metrics["divergence"] < divergence


# A teacher behind a URL


@contextmanager
def grading(
    model: PreTrainedModel, failures: Sequence[int] = (), noise: float = 0.0
) -> Iterator[tuple[str, list[Any]]]:
    """Serve vLLM's completions with log-probabilities of the prompt, to which random numbers up to `noise` are added.

    First answer with the statuses in `failures`.
    """
    requests: list[Any] = []
    left = list(failures)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"object": "list", "data": [{"id": "teacher", "object": "model", "owned_by": "vllm"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body)
            if left:
                self.answer(left.pop(0), {"error": {"message": "made up", "code": 500}})
                return
            with torch.no_grad():
                logits = model(torch.tensor([body["prompt"]])).logits[0]
                logprobs = (logits + noise * torch.rand_like(logits)).log_softmax(-1)
            positions: list[Any] = [None]
            for of_next, token in zip(logprobs[:-1], body["prompt"][1:], strict=True):
                known = {token, *of_next.topk(body["prompt_logprobs"]).indices.tolist()}
                positions.append({str(word): {"logprob": of_next[word].item(), "rank": 1} for word in known})
            self.answer(200, {"choices": [{"index": 0, "text": "", "prompt_logprobs": positions}]})

        def answer(self, status: int, document: Any) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("choices", "listed"),
    [
        ({}, 0),
        ({"divergence": "forward_kl", "teacher_top_k": 5}, 5),
        ({"divergence": "reverse_kl", "teacher_top_k": 20}, 20),
        ({"teacher_top_k": 5, "divergence": "jsd"}, 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_hint", [False, True], ids=["", "hint"])
def test_a_server_grades_completions(groups: list[Group], choices: dict[str, Any], listed: int, has_hint: bool) -> None:
    model, frozen = base(), wide(base(seed=3))
    given = with_hints(groups) if has_hint else groups
    kind = choices.get("divergence", "sampled")
    expected, mean = naive_gradient(model, given, frozen, kind, listed=listed, temperature=1.0)
    with grading(frozen, failures=[503]) as (url, requests):
        actual, learnt = distilled(model, given, teacher=f"{url}/v1/", temperature=1.0, **choices)
    assert distance(actual, expected) < CLOSE
    assert learnt["divergence"] == pytest.approx(mean, rel=1e-3)
    assert len(requests) == 16 + 1
    assert requests[0]["model"] == "teacher"


def test_a_server_that_fails_is_named(groups: list[Group], teacher: Path) -> None:
    with grading(loaded(teacher), failures=[400]) as (url, _):
        learner = learner_of(base(), loss="distill", teacher=url, temperature=1.0)
        with pytest.raises(UsageError, match=f"the teacher at {url} does not grade completions: .*made up") as caught:
            learner.take(groups)
    assert "--max-logprobs" in caught.value.hint


def test_a_server_grades_only_at_temperature_1() -> None:
    with pytest.raises(UsageError, match=r"--temperature 0\.8: the teacher at http://nowhere grades tokens at"):
        learner_of(base(), loss="distill", teacher="http://nowhere")


MODELS = http_server.as_json({"object": "list", "data": [{"id": "teacher", "object": "model", "max_model_len": 64}]})


def answering(scores: http_server.Answer, tokens: http_server.Answer | None = None) -> http_server.Answers:
    """Answer as a teacher's server, with these `scores` of completions and these `tokens` of a text."""
    missing = http_server.as_json({"error": {"message": "no such route"}}, 404)

    def answer(request: http_server.HttpRequest) -> http_server.Answer:
        others = {"/v1/models": MODELS, "/tokenize": tokens or missing}
        return others.get(request.path, scores)

    return answer


@pytest.mark.parametrize(
    ("scores", "fault"),
    [
        ({"choices": []}, "sent an invalid response: choices: "),
        ({"choices": [{"prompt_logprobs": None}]}, "invalid response: choices.0.prompt_logprobs: "),
        ({"choices": [{"prompt_logprobs": [None, {"5": {"logprob": math.nan}}]}]}, "; are its weights NaN?"),
        ({"choices": [{"prompt_logprobs": [None, {"five": {"logprob": -1.0}}]}]}, "invalid response: choices.0"),
        ({"choices": [{"prompt_logprobs": [None]}]}, "scored 0 tokens of a completion of"),
        ({"choices": [{"prompt_logprobs": [None] * 99}]}, " tokens of a completion of"),
    ],
    ids=["nothing", "no logprobs", "nan", "no id", "few", "many"],
)
def test_malformed_scores_of_a_server_are_one_line(groups: list[Group], scores: Any, fault: str) -> None:
    with http_server.serving(answering(http_server.as_json(scores))) as server:
        learner = learner_of(base(), loss="distill", teacher=server.url, temperature=1.0, max_retries=0)
        with pytest.raises(UsageError, match=re.escape(fault)):
            learner.take(groups)


def test_server_that_answers_too_late_is_named(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "wait_s", lambda _: 0.0)

    def late(request: http_server.HttpRequest) -> http_server.Answer:
        if request.path != "/v1/models":
            time.sleep(0.3)
        return MODELS

    with http_server.serving(late) as server:
        choices: dict[str, Any] = {"request_timeout_s": 0.1, "max_retries": 1, "temperature": 1.0}
        learner = learner_of(base(), loss="distill", teacher=server.url, **choices)
        with pytest.raises(UsageError, match=r"does not grade completions: no answer within 0\.1 s"):
            learner.take(groups)


def test_a_server_grades_no_images(groups: list[Group]) -> None:
    images = Images.of((Array(name="pixel_values", dtype="uint8", shape=(1,), content=b"1"),), starts=(0,), grids=())
    seen = [replace(group, images=images) for group in groups]
    with http_server.serving(answering(MODELS)) as server:
        learner = learner_of(base(), loss="distill", teacher=server.url, temperature=1.0)
        with pytest.raises(UsageError, match=r"the prompts have images, which the teacher at .* would not see"):
            learner.take(seen)


def checked_with(answers: http_server.Answers, folder: Path, **sampling: Any) -> None:
    with http_server.serving(answers) as server:
        loss = LossConfig(name="distill", teacher=f"{server.url}/v1")
        teachers.check_server(str(folder), loss, SamplingConfig(**sampling))


def test_server_is_checked_before_a_run(teacher: Path) -> None:
    ids = skeleton.tokenizer(str(teacher))(teachers.PROBE, add_special_tokens=False)["input_ids"]
    checked_with(answering(MODELS, http_server.as_json({"tokens": ids})), teacher)
    checked_with(answering(MODELS), teacher)  # a proxy without the route
    with pytest.raises(UsageError, match=f"has a different tokenizer: .* as {len(ids)} tokens, .* is 1 instead of"):
        checked_with(answering(MODELS, http_server.as_json({"tokens": [1, *ids[1:]]})), teacher)
    with pytest.raises(UsageError, match=r"as 2 tokens, expected .*; one of them stops earlier"):
        checked_with(answering(MODELS, http_server.as_json({"tokens": ids[:2]})), teacher)
    with pytest.raises(UsageError, match="does not grade completions: /v1/models sent an invalid response: data"):
        checked_with(lambda _: http_server.as_json({"data": []}), teacher)
    with pytest.raises(UsageError, match="rejected the request with status 401") as caught:
        checked_with(http_server.locked(answering(MODELS), "secret"), teacher)
    assert "VLLM_API_KEY" in caught.value.hint
    with pytest.raises(UsageError, match=r"--temperature 0\.5"):
        checked_with(answering(MODELS), teacher, temperature=0.5)


def test_unreachable_server_ends_a_run_before_it_starts(teacher: Path) -> None:
    with http_server.serving(answering(MODELS)) as server:
        pass
    with pytest.raises(UsageError, match=f"the teacher at {server.url} does not grade completions: ConnectError"):
        teachers.check_server(str(teacher), LossConfig(name="distill", teacher=server.url), SamplingConfig())


def test_ranks_that_share_a_pass_get_the_same_scores(groups: list[Group], teacher: Path) -> None:
    """A server may answer the same request differently, for example in a batch of another size."""
    frozen = wide(base(seed=3))
    with grading(frozen, noise=0.1) as (url, requests):
        choices = {"teacher": url, "teacher_top_k": 3, "temperature": 1.0}
        one, other = on_ranks(2, learnt_by, groups, choices, cp_size=2, limit_s=LIMIT_S)
    assert len(requests) == 16
    assert same(one["weights"], other["weights"])


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"loss": "distill"}, "--loss distill needs a teacher, found none"),
        ({"teacher": "t"}, "--teacher t would not be used: --loss dapo has no weight for it"),
        ({"teacher_weight": 1.0}, "--teacher-weight has no effect without --teacher"),
        ({"divergence": "jsd"}, "--divergence has no effect without --teacher"),
        ({"offload_teacher": True}, "--offload-teacher has no effect without --teacher"),
        ({"loss": "distill", "teacher": "self", "offload_teacher": True}, "--offload-teacher has no effect: --teacher"),
        ({"loss": "distill", "teacher": "t", "teacher_top_k": 5}, "--teacher-top-k 5 has no effect: --teacher t is"),
        ({"loss": "distill", "teacher": "t", "clip_high": 0.3}, "--clip-high 0.3 has no effect with --divergence"),
        ({"loss": "distill", "teacher": "t", "jsd_beta": 0.1}, "--jsd-beta has no effect with --divergence"),
        ({"loss": "distill", "teacher": "http://t", "divergence": "jsd"}, "--divergence jsd: a server does not give"),
        (
            {"loss": "distill", "teacher": "http://t", "divergence": "sampled", "teacher_top_k": 5},
            "--teacher-top-k 5 has no effect with --divergence sampled",
        ),
    ],
)
def test_choices_of_a_teacher_without_effect_are_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        TrainConfig.resolve({"model_name": "m", **choices})
    assert caught.value.message.startswith(message)
