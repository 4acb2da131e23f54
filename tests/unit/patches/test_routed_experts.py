"""The experts that a server reports for cached prefixes, restarted requests, and steps that finish in any order."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bridge_patches import routed_experts
from bridge_patches.engine_outputs import ROLLOUT
from bridge_patches.routed_experts import ROUTED, ROWS, ExpertsInCache, Recorder

BLOCK_SIZE = 4
NUM_LAYERS, NUM_CHOSEN = 2, 3
ONE, TWO, OTHER = f"0_{ROLLOUT}{ROUTED}0-one", f"0_{ROLLOUT}{ROUTED}0-two", f"0_{ROLLOUT}other"


@pytest.fixture
def in_cache(monkeypatch: pytest.MonkeyPatch) -> ExpertsInCache:
    """Return the experts of a model whose cache has two groups, the second of which holds every token."""
    monkeypatch.setattr(routed_experts, "_attention_group", lambda _: 1)
    return ExpertsInCache()


class Engine:
    """A scheduler and a worker; a token's experts encode its position and a version."""

    def __init__(self, in_cache: ExpertsInCache) -> None:
        self.in_cache = in_cache
        self.version = 0
        spec = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK_SIZE))
        self._scheduler = SimpleNamespace(
            kv_cache_config=SimpleNamespace(num_blocks=16, kv_cache_groups=[SimpleNamespace(), spec])
        )

    def rows(self, start: int, end: int, version: int | None = None) -> Any:
        """Return the experts of tokens: [T, L, K]."""
        first = np.arange(start, end)[:, None, None] * NUM_LAYERS * NUM_CHOSEN % 100
        inner = np.arange(NUM_LAYERS * NUM_CHOSEN).reshape(NUM_LAYERS, NUM_CHOSEN)
        return (first + inner + 100 * (self.version if version is None else version)).astype(np.uint8)

    def step(
        self,
        *,
        new: dict[str, tuple[list[int], int, int]] | None = None,
        cached: dict[str, tuple[list[int] | None, int, int]] | None = None,
        resumed: dict[str, tuple[list[int], int, int]] | None = None,
        num_output_tokens: int = 1,
        finished: Collection[str] = (),
    ) -> None:
        """Compute a step: of each request its (new) blocks, how many tokens were computed before, and how many are.

        Every prompt has three tokens.
        """
        all_cached = [*(cached or {}).items(), *(resumed or {}).items()]
        every = [*(new or {}).items(), *all_cached]
        scheduled = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=id_,
                    block_ids=([], blocks),
                    num_computed_tokens=start,
                    prompt_token_ids=[1] * 3,
                    prefill_token_ids=None,
                )
                for id_, (blocks, start, _) in (new or {}).items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[id_ for id_, _ in all_cached],
                resumed_req_ids=set(resumed or {}),
                new_block_ids=[None if blocks is None else ([], blocks) for _, (blocks, _, _) in all_cached],
                num_computed_tokens=[start for _, (_, start, _) in all_cached],
                num_output_tokens=[num_output_tokens] * len(all_cached),
            ),
            num_scheduled_tokens={id_: count for id_, (_, _, count) in every},
            finished_req_ids=set(finished),
        )
        order = sorted(every, key=lambda item: item[1][2])  # workers may use any order
        rows = np.concatenate([self.rows(start, start + count) for _, (_, start, count) in order])
        output = SimpleNamespace(req_ids=[id_ for id_, _ in order], **{ROWS: rows})
        self.in_cache.take(self._scheduler, scheduled, output)

    def reported(self, request_id: str, finish_reason: str | None = "stop") -> Any:
        output = SimpleNamespace(request_id=request_id, finish_reason=finish_reason, routed_experts=None)
        self.in_cache.report([output], at_once="at-once-")
        return output.routed_experts


def test_request_reports_experts_of_prompt_and_completion(in_cache: ExpertsInCache) -> None:
    engine = Engine(in_cache)
    engine.step(new={ONE: ([3, 5], 0, 4), OTHER: ([7], 0, 3)})  # the remaining prompt follows
    engine.step(cached={OTHER: (None, 3, 1), ONE: (None, 4, 3)})
    engine.step(cached={ONE: (None, 7, 1), OTHER: ([8], 4, 1)})
    engine.step(cached={ONE: ([9], 8, 1)})
    assert np.array_equal(engine.reported(ONE), engine.rows(0, 9))
    assert engine.reported(OTHER) is None, "it did not ask"


def test_cached_prefix_reports_its_original_experts(in_cache: ExpertsInCache) -> None:
    engine = Engine(in_cache)
    engine.step(new={OTHER: ([3, 5], 0, 8)})
    engine.version = 1
    engine.step(new={ONE: ([3, 5, 9], 8, 2), TWO: ([3, 10], 4, 1)})
    assert np.array_equal(engine.reported(ONE), np.concatenate([engine.rows(0, 8, 0), engine.rows(8, 10)]))
    assert np.array_equal(engine.reported(TWO), np.concatenate([engine.rows(0, 4, 0), engine.rows(4, 5)]))


def test_prefix_computed_in_the_same_step_is_reported(in_cache: ExpertsInCache) -> None:
    engine = Engine(in_cache)
    engine.step(new={ONE: ([3, 5], 0, 6), TWO: ([3, 6], 4, 2)})
    assert np.array_equal(engine.reported(TWO), engine.rows(0, 6))


def test_reused_block_has_the_experts_of_its_new_tokens(in_cache: ExpertsInCache) -> None:
    engine = Engine(in_cache)
    engine.step(new={OTHER: ([3], 0, 4)})
    engine.version = 1
    engine.step(new={TWO: ([3], 0, 4)})
    engine.step(new={ONE: ([3, 4], 4, 1)})
    assert np.array_equal(engine.reported(ONE), engine.rows(0, 5))


def test_sampled_tokens_keep_the_experts_that_sampled_them(in_cache: ExpertsInCache) -> None:
    """A preempted request recomputes its tokens, at other positions and possibly with newer weights."""
    engine = Engine(in_cache)
    engine.step(new={ONE: ([3], 0, 3)})
    engine.step(cached={ONE: (None, 3, 1)})
    engine.version = 1
    engine.step(resumed={ONE: ([6, 7], 0, 3)}, num_output_tokens=2)  # in two chunks
    engine.step(cached={ONE: (None, 3, 2)})
    engine.step(cached={ONE: (None, 5, 1)})
    assert np.array_equal(engine.reported(ONE), np.concatenate([engine.rows(0, 4, 0), engine.rows(4, 6)]))
    engine.step(new={TWO: ([6, 8], 4, 1)})
    assert np.array_equal(engine.reported(TWO), engine.rows(0, 5)), "what finds its tokens finds what is in the cache"


def test_experts_of_a_discarded_token_are_dropped(in_cache: ExpertsInCache) -> None:
    """For example, the token of a step that was computed while the request was preempted is sampled again."""
    engine = Engine(in_cache)
    engine.step(new={ONE: ([3], 0, 3)})
    engine.step(cached={ONE: (None, 3, 1)})
    engine.version = 1
    engine.step(resumed={ONE: ([6], 0, 4)}, num_output_tokens=1)
    assert np.array_equal(engine.reported(ONE), np.concatenate([engine.rows(0, 3, 0), engine.rows(3, 4)]))


@pytest.mark.parametrize("how", ["resumed", "new"])
def test_prompt_restarted_before_sampling_has_one_version(in_cache: ExpertsInCache, how: str) -> None:
    engine = Engine(in_cache)
    engine.step(new={ONE: ([3], 0, 2)})
    engine.version = 1
    engine.step(**{how: {ONE: ([6], 0, 4)}}, num_output_tokens=0)  # type: ignore[arg-type]
    assert np.array_equal(engine.reported(ONE), engine.rows(0, 4))


def test_finished_request_is_forgotten_after_its_last_step(in_cache: ExpertsInCache) -> None:
    """Asynchronous scheduling does this."""
    engine = Engine(in_cache)
    engine.step(new={ONE: ([3], 0, 2), TWO: ([4], 0, 2)})
    assert len(engine.reported(ONE)) == 2
    engine.step(cached={ONE: (None, 2, 1), TWO: (None, 2, 1)})
    engine.step(cached={TWO: (None, 3, 1)}, finished={ONE})
    assert engine.reported(ONE) is None
    assert np.array_equal(engine.reported(TWO), engine.rows(0, 4))


def test_requests_with_stop_strings_report_in_every_output(in_cache: ExpertsInCache) -> None:
    engine, early = Engine(in_cache), f"{ONE}at-once-"
    engine.step(new={early: ([3], 0, 3)})
    first = engine.reported(early, finish_reason=None)
    engine.step(cached={early: (None, 3, 1)})
    assert np.array_equal(first, engine.rows(0, 3))
    assert np.array_equal(engine.reported(early, finish_reason=None), engine.rows(3, 4))
    engine.step(new={TWO: ([4], 0, 3)})
    assert engine.reported(TWO, finish_reason=None) is None


def test_later_turn_reports_only_new_tokens(in_cache: ExpertsInCache) -> None:
    engine, turn = Engine(in_cache), f"0_{ROLLOUT}{ROUTED}5-turn"
    engine.step(new={OTHER: ([3, 5], 0, 6)})
    engine.version = 1
    engine.step(new={turn: ([3, 6], 4, 3)})
    engine.step(resumed={turn: ([7, 8], 0, 7)}, num_output_tokens=0)
    engine.step(cached={turn: (None, 7, 1)})
    assert np.array_equal(engine.reported(turn), engine.rows(5, 8))
    engine.step(new={TWO: ([7, 9], 4, 1)})
    assert np.array_equal(engine.reported(TWO), engine.rows(0, 5)), "all tokens are known"


def test_unsupported_models_report_no_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_experts, "_attention_group", lambda _: None)
    engine = Engine(ExpertsInCache())
    engine.step(new={ONE: ([3], 0, 2)})
    assert engine.reported(ONE) is None
    engine.in_cache.take(None, None, SimpleNamespace(req_ids=[ONE]))
    engine.in_cache.take(None, None, None)


class Router:
    """A vLLM router."""

    def __init__(self, num_experts: int = 8, top_k: int = NUM_CHOSEN) -> None:
        self.top_k = top_k
        self.global_num_experts = num_experts

    def set_capture_fn(self, capture: Any) -> None:
        self.capture = capture


@pytest.mark.parametrize(("num_experts", "kind"), [(256, np.uint8), (300, np.int16)])
def test_worker_records_the_experts_of_every_layer(num_experts: int, kind: type) -> None:
    routers = [Router(num_experts), Router(num_experts)]
    recorder = Recorder(routers, 5, torch.device("cpu"))
    assert recorder.may_report, "a CPU computes no example beforehand"
    routers[0].capture(torch.full((5, NUM_CHOSEN), num_experts - 1))
    assert not recorder.is_complete, "a layer whose kernel chooses by itself"
    routers[1].capture(torch.arange(9).view(3, NUM_CHOSEN))
    rows = recorder.rows(2)()
    assert (rows.dtype, rows.shape) == (kind, (2, 2, NUM_CHOSEN))
    assert rows[1].tolist() == [[num_experts - 1] * NUM_CHOSEN, [3, 4, 5]]
    assert recorder.is_complete


def model(*routers: Router) -> nn.Module:
    made = nn.Sequential(*(nn.Linear(1, 1) for _ in routers), nn.Linear(1, 1))
    for layer, router in zip(made, routers, strict=False):
        vars(layer)["router"] = router
    return made


@pytest.mark.parametrize(
    ("routers", "speculation", "num_stages", "is_watched"),
    [
        ([Router(), Router()], None, 1, True),
        ([], None, 1, False),
        ([Router(), Router(top_k=2)], None, 1, False),
        ([Router()], object(), 1, False),
        ([Router()], None, 2, False),
    ],
)
def test_only_models_with_uniform_routers_are_watched(
    routers: list[Router], speculation: Any, num_stages: int, is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_experts, "_recorder", None)
    monkeypatch.setattr(routed_experts, "_attention_group", lambda _: 0)
    config = SimpleNamespace(
        speculative_config=speculation,
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16),
    )
    routed_experts.watch(model(*routers), config)
    assert routed_experts.reported(None) == ((2, NUM_CHOSEN) if is_watched else None)
    monkeypatch.setattr(routed_experts, "_attention_group", lambda _: None)
    assert routed_experts.reported(None) is None, "no group of the cache holds every token"
