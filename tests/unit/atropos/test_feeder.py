"""A Bridge environment feeds an Atropos API: joining, what is sent, how much, and how it ends; against fakes."""

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridge.atropos import feeder
from bridge.atropos.api import AtroposApi
from bridge.atropos.feeder import FeedProgress, Membership
from bridge.atropos.scored_groups import scored_group, to_train_on
from bridge.config import FeedConfig
from bridge.errors import AtroposError, RewardError, ServerUnreachableError, UsageError
from bridge.rollouts.sampler import CALL_SEEDS
from bridge.server.protocol import ADAPTER
from bridge.types import Completion, Problem
from tests.logged import logged
from tests.models import tiny
from tests.unit import openai_server
from tests.unit.http_server import Answer, Answers, HttpRequest, HttpServer, as_json, serving

BATCH, GROUP = 8, 4


class FakeApi:
    """An API like atroposlib's; its trainer takes batches as soon as they can be formed, until it has enough."""

    def __init__(self, *, num_steps: int = 2, batch_size: int = BATCH, max_token_len: int = 100) -> None:
        self.num_steps = num_steps
        self.batch_size = batch_size
        self.max_token_len = max_token_len
        self.step = 0
        self.waits = 0
        """How many requests to join are put off."""
        self.groups: list[dict[str, Any]] = []
        self.queue: list[dict[str, Any]] = []
        self.most_queued = 0
        self.takes = True
        self.drops = 0
        """How many posts lose their answer."""
        self.forgets = False
        self.registration: dict[str, Any] = {}
        self.left: list[int] = []

    def __call__(self, request: HttpRequest) -> Answer | None:
        route = request.path.strip("/").replace("-", "_")
        answer = getattr(self, route)(request.body)
        return as_json(answer) if isinstance(answer, dict) else answer

    def info(self, _: Any) -> Any:
        return {"batch_size": self.batch_size, "max_token_len": self.max_token_len}

    def register_env(self, body: dict[str, Any]) -> Any:
        self.registration = body
        self.waits -= 1
        if self.waits >= 0:
            return {"status": "wait for trainer to start"}
        return {"status": "success", "env_id": 3, "starting_step": self.step, "num_steps": self.num_steps}

    def status_env(self, body: dict[str, Any]) -> Any:
        assert body == {"env_id": 3}
        if self.forgets:
            return as_json({}, 500)
        self.most_queued = max(self.most_queued, len(self.queue))
        if self.takes and len(self.queue) * GROUP >= self.batch_size:
            del self.queue[: self.batch_size // GROUP]
            self.step += 1
        return {"current_step": self.step, "queue_size": len(self.queue), "env_weight": 1.0}

    def scored_data_list(self, body: list[dict[str, Any]]) -> Any:
        self.groups += body
        self.queue += body
        if self.drops:
            self.drops -= 1
            return None
        return {"status": "received", "groups_processed": len(body)}

    def disconnect_env(self, body: dict[str, Any]) -> Any:
        self.left.append(body["env_id"])
        return {"status": "success"}


class Lengths:
    """Rewards a completion by its length; some problems are invalid on purpose."""

    problems: tuple[Problem, ...] = tuple({"prompt": text} for text in ("ab", "cd", "efg", "h"))

    def __iter__(self) -> Iterator[Problem]:
        yield from self.problems

    def score(self, problem: Problem, completion: str) -> float:
        if problem["prompt"] == "bad":
            raise ValueError("no")
        return float(len(completion))


class OftenBad(Lengths):
    problems = ({"prompt": "bad"}, {"prompt": "ab"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tiny.llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "JOIN_POLL_S"):
        monkeypatch.setattr(feeder, name, 0.01)


class Fed:
    """A run of the feeder against a fake API and a fake vLLM."""

    def __init__(
        self,
        model: Path,
        api: Answers,
        environment: type[Lengths] = Lengths,
        longest: int | None = None,
        **choices: Any,
    ) -> None:
        self.reports: list[FeedProgress] = []
        with serving(api) as atropos, serving(openai_server.openai(max_model_len=longest)) as vllm:
            self.vllm: HttpServer = vllm
            wanted: dict[str, Any] = {"model_name": str(model), "atropos_url": atropos.url, "server_url": vllm.url}
            wanted |= {"group_size": GROUP, "reward_processes": 0, "temperature": 1.5}
            config = FeedConfig.of(**(wanted | choices))
            with logged() as self.notes:
                self.last = feeder.feed(config, environment(), environment, report=self.reports.append)
        self.requests = [request.body for request in self.vllm.requests if request.path == "/v1/completions"]


def test_trainer_is_fed_until_it_has_its_batches(model: Path) -> None:
    api = FakeApi(num_steps=3)
    fed = Fed(model, api)
    assert (fed.last.step, fed.last.num_steps, api.left) == (3, 3, [3])
    per_batch = BATCH // GROUP
    assert 3 * per_batch <= len(api.groups) <= 5 * per_batch, "as many as needed, and as many as may wait"
    assert fed.last.groups <= len(api.groups), "what is in flight at the end is not waited for"
    assert fed.last.reward_mean == 2.0


class SomeUnusable(Lengths):
    problems = ({"prompt": "ab"}, {"prompt": [{"role": "user", "content": "c"}]}, {"prompt": "efg"})


class NoneUsable(Lengths):
    problems = ({"prompt": [{"role": "user", "content": "c"}]},)


def test_a_prompt_that_cannot_be_encoded_is_left_out(model: Path) -> None:
    api = FakeApi(num_steps=3)
    fed = Fed(model, api, SomeUnusable)
    assert fed.last.step == 3
    assert fed.last.unscored >= 1
    (line,) = [note for note in fed.notes if "left out" in note]
    assert "the prompt cannot be used: the environment's prompts are chat messages" in line
    with pytest.raises(RewardError, match="consecutive problems cannot be used"):
        Fed(model, FakeApi(), NoneUsable)


def test_several_servers_are_used_round_robin(model: Path) -> None:
    with serving(openai_server.openai()) as one, serving(openai_server.openai()) as other:
        Fed(model, FakeApi(num_steps=3), server_url=f"{one.url}, {other.url}/")
    assert all(any(request.path == "/v1/completions" for request in server.requests) for server in (one, other))


def test_default_length_fits_the_server(model: Path) -> None:
    fed = Fed(model, FakeApi(), longest=64)
    assert {body["max_tokens"] for body in fed.requests} == {32}
    assert "--max-new-tokens defaults to 32, half of the server's longest sequence of 64 tokens" in fed.notes


def test_group_marks_sampled_tokens(model: Path) -> None:
    api = FakeApi(num_steps=1)
    Fed(model, api)
    group = api.groups[0]
    tokens, mask, logprobs = group["tokens"][1], group["masks"][1], group["inference_logprobs"][1]
    length = mask.index(41)  # completion number 1 of the fake begins with this token
    assert tokens[length:] == mask[length:] == [41, 50 + length, 2]
    assert mask[:length] == [-100] * length
    assert logprobs == [1.0] * length + [-5.7] * 3
    assert (group["env_id"], group["generation_params"]["temperature"]) == (3, 1.5)
    assert group["scores"] == [2.0] * GROUP
    assert [message["role"] for message in group["messages"][1]] == ["user", "assistant"]
    assert len(group["tokens"]) == len(group["masks"]) == GROUP


def test_groups_and_environments_have_distinct_seeds(model: Path) -> None:
    """Regression: environment 3 with `--seed 1` must not use the seeds of environment 4 with `--seed 0`."""
    seeds = [body["seed"] for body in Fed(model, FakeApi(num_steps=4), seed=1).requests]
    assert len({seed + index for seed in seeds for index in range(GROUP)}) == GROUP * len(seeds)
    assert min(seeds) // CALL_SEEDS > 1_000 * feeder.SEEDS


@pytest.mark.parametrize(("max_queued_batches", "most"), [(1.0, 2), (2.5, 5)])
def test_queue_is_filled_up_to_its_limit(model: Path, max_queued_batches: float, most: int) -> None:
    api = FakeApi(num_steps=100)
    api.takes = False
    looks = 0

    def bounded(request: HttpRequest) -> Answer | None:
        nonlocal looks
        looks += request.path == "/status-env" and len(api.queue) >= most
        if looks > 20:  # long enough for a superfluous group to arrive
            api.step = 100
        return FakeApi.__call__(api, request)

    Fed(model, bounded, max_queued_batches=max_queued_batches)
    assert api.most_queued == most


def test_joining_waits_for_a_trainer_and_logs_it_once(model: Path) -> None:
    api = FakeApi(num_steps=1, batch_size=-1)
    looks = 0

    def late(request: HttpRequest) -> Answer | None:
        nonlocal looks
        looks += request.path == "/info"
        if looks == 3:
            api.batch_size = BATCH
            api.waits = 2
            looks += 1
        return FakeApi.__call__(api, request)

    fed = Fed(model, late)
    assert [line.partition("waiting for ")[2] for line in fed.notes if "waiting" in line] == [
        "a trainer to register (bridge train --rollouts atropos ...)",
        "the trainer to request its first batch",
    ]
    assert api.registration == {
        "max_token_length": 100, "desired_name": "arithmetic", "weight": 1.0, "group_size": GROUP,
    }  # fmt: skip


def test_group_size_that_does_not_fill_a_batch_is_refused(model: Path) -> None:
    api = FakeApi(batch_size=10)
    with pytest.raises(UsageError, match=r"groups of 4 do not fill .* batches of 10 sequences") as caught:
        Fed(model, api)
    assert caught.value.hint.startswith("--group-size 5")
    assert api.registration == {}, "it never joined"


def test_resumed_trainer_is_fed_without_a_step_limit(model: Path) -> None:
    api = FakeApi(num_steps=2)
    api.step = 2
    config = FeedConfig.of(model_name=str(model), group_size=GROUP)
    with serving(api) as atropos, closing(AtroposApi(atropos.url)) as client:
        joined = feeder.join(client, config)
    assert joined == Membership(env_id=3, groups_per_batch=2, max_token_len=100, num_steps=0)


def test_group_without_a_response_is_not_resent(model: Path) -> None:
    api = FakeApi(num_steps=3)
    api.drops = 2
    fed = Fed(model, api)
    assert fed.last.unanswered == 2
    assert len(api.groups) <= len(fed.requests), "one group for each one sampled"


def test_groups_that_are_too_long_are_left_out(model: Path) -> None:
    api = FakeApi(num_steps=3, max_token_len=1 + 2 + 3)  # the fake's completions have three tokens
    fed = Fed(model, api)
    assert fed.last.too_long > 0
    assert api.groups
    assert all(len(tokens) < 6 for group in api.groups for tokens in group["tokens"])


def test_groups_that_are_all_too_long_end_the_feed(model: Path) -> None:
    api = FakeApi(max_token_len=3)
    with pytest.raises(UsageError, match="each of the first 32 groups has a sequence of 3 tokens or more") as caught:
        Fed(model, api)
    assert "--max-new-tokens" in caught.value.hint
    assert (api.groups, api.left) == ([], [3])


def test_group_without_all_rewards_is_left_out_and_noted(model: Path) -> None:
    api = FakeApi(num_steps=1)
    fed = Fed(model, api, OftenBad, max_unscored_share=1.0)
    assert fed.last.unscored > 0
    assert len([line for line in fed.notes if "OftenBad.score raised ValueError: no" in line]) == 1
    assert all(group["messages"][0][0]["content"] == "ab" for group in api.groups)


class Refusing(FakeApi):
    def scored_data_list(self, body: list[dict[str, Any]]) -> Any:
        return as_json({"detail": "no"}, 422)


class Reset(FakeApi):
    def status_env(self, body: dict[str, Any]) -> Any:
        self.forgets = len(self.groups) > 2
        return super().status_env(body)


class Interrupting(Lengths):
    def score(self, problem: Problem, completion: str) -> float:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("api", "environment", "error", "words"),
    [
        (FakeApi, OftenBad, RewardError, "have no reward, more than the allowed fraction of"),
        (Reset, Lengths, AtroposError, "no longer knows this environment: it was reset or restarted"),
        (Refusing, Lengths, AtroposError, "answered 422"),
        (FakeApi, Interrupting, KeyboardInterrupt, ""),
    ],
)
def test_end_of_the_feed_disconnects(
    model: Path, api: type[FakeApi], environment: type[Lengths], error: type[BaseException], words: str
) -> None:
    made = api(num_steps=50)
    with pytest.raises(error, match=words or None):
        Fed(model, made, environment)
    assert made.left == [3]


def test_lost_server_ends_the_feed(model: Path) -> None:
    with serving(openai_server.openai()) as closed:
        pass
    api = FakeApi()
    with pytest.raises(ServerUnreachableError, match=closed.url):
        Fed(model, api, server_url=closed.url)
    assert api.left == [3]


def test_progress_reports_count_the_groups_sent(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder, "REPORT_S", 0.0)
    fed = Fed(model, FakeApi(num_steps=3))
    lines = [*fed.reports, fed.last]
    counts = [line.groups for line in lines]
    assert counts == sorted(counts)
    assert len(set(counts)) > 1
    for line in lines:
        assert line.tokens_per_s * line.seconds == pytest.approx(3 * GROUP * line.groups)
        assert line.reward_mean == (2.0 if line.groups else None)


def test_unknown_log_probability_is_sent_as_such() -> None:
    nan = Completion(token_ids=(7, 8), logprobs=(math.nan, -1.0), text="x", finish_reason="stop")
    group = scored_group({"prompt": "p"}, (5,), [nan], [1.0], env_id=0, generation_params={})
    assert group.inference_logprobs == ((1.0, 1.0, -1.0),)
    assert "null" not in group.model_dump_json(include={"inference_logprobs"})


def test_versions_are_sent_if_all_are_known() -> None:
    known = Completion(
        token_ids=(7, 8, 9), logprobs=(-1.0,) * 3, text="x", finish_reason="stop", versions=(3, 3, 5)
    )  # fmt: skip
    partly = replace(known, versions=(3, None, 5))
    unknown = replace(known, versions=())
    group = scored_group({"prompt": "p"}, (5,), [known, partly, unknown], [1.0] * 3, env_id=0, generation_params={})
    assert group.overrides == ({"weight_versions": [[3, 2], [5, 1]]}, {}, {})
    assert [completion.versions for completion in to_train_on(group, str).completions] == [(3, 3, 5), (), ()]


def models(*names: str) -> Callable[[HttpRequest], Answer]:
    return lambda _: as_json({"data": [{"id": name, "owned_by": "vllm"} for name in names]})


def test_trained_adapter_is_sampled_from() -> None:
    with serving(models("base", ADAPTER)) as one, serving(models("base")) as other:
        endpoints = feeder.endpoints([one.url, other.url])
    assert [(endpoint.url, endpoint.model) for endpoint in endpoints] == [(one.url, ADAPTER), (other.url, None)]


def test_adapter_that_changes_its_name_is_refused() -> None:
    with (
        serving(models("base", f"{ADAPTER}-4")) as server,
        pytest.raises(UsageError, match=f"currently {ADAPTER}-4") as caught,
    ):
        feeder.endpoints([server.url])
    assert "--lora-handover memory" in caught.value.hint


def test_api_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    with serving(models("base")) as server:
        feeder.endpoints([server.url])
    assert server.requests[0].headers["authorization"] == "Bearer the key"
