"""100,000 tokens of conversations with the real vLLM are recorded exactly: the model's log-probs match for each one.

A token that was recorded differently from what vLLM sampled or read would change all following log-probabilities,
and `test_wrong_token_is_detected` shows by how much.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from transformers import GenerationConfig

from bridge.checks.one_copy_proof import logprob_diffs
from bridge.config import TrainConfig
from bridge.passes.prepared_model import PreparedModel
from bridge.server.endpoint import Endpoint
from bridge.types import Completion, Group
from bridge.weights import skeleton
from bridge_environments import registry
from tests import scenarios
from tests.models import chat, tiny
from tests.scenarios import LiveServer, loaded
from tests.streams import environment_stream

AGENTS = Path(__file__).parents[1] / "unit" / "agents_sample.py"
VOCABULARY = 600
TEMPLATES = ("qwen2_5", "qwen3", "qwen3_training", "llama3", "gemma3", "mistral")
NUM_GROUPS, GROUP_SIZE = 5, 8
ENOUGH_TOKENS = 100_000
RIGHT_LIMIT, WRONG_LIMIT = 0.002, 0.02
"""Nats, in float32: upper limit without a wrong token, and lower limit of the largest difference after one."""
STD = 0.2
"""Standard deviation of the model's weights, with which each token changes what follows."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Run a server with a random model that ends a turn at the end token of any template."""
    folder = tmp_path_factory.mktemp("recorded")
    tiny.write(tiny.qwen2(VOCABULARY), folder / "model", std=STD)
    tokenizer = chat.tokenizer(folder / "model", "qwen2_5")
    ends = [tokenizer.convert_tokens_to_ids(end) for end in chat.ENDS.values()]
    GenerationConfig(eos_token_id=ends).save_pretrained(folder / "model")
    with scenarios.served(folder / "model", folder / "server", dtype="float32") as made:
        yield made


def recorded(server: LiveServer, folder: Path, template: str, kind: str = "Chatting") -> list[Group]:
    """Let agents talk to the server's model through a chat template, and return their runs."""
    tiny.qwen2(VOCABULARY).save_pretrained(folder)
    chat.tokenizer(folder, template)
    off = {"chat_template_kwargs": {"enable_thinking": False}} if template == "qwen3_training" else {}
    config = TrainConfig.of(
        model_name=str(folder), environment=f"{AGENTS}:{kind}", max_new_tokens=1800, reward_processes=0,
        batch_size=NUM_GROUPS * GROUP_SIZE, group_size=GROUP_SIZE, **off,
    )  # fmt: skip
    with closing(environment_stream(config, registry.load(config.task))) as stream:
        stream.served(Endpoint(url=server.manifest.url, model=server.manifest.model), 0)
        return stream.take(NUM_GROUPS, step=1)


def turns(group: Group) -> Iterator[Group]:
    """Yield each turn as a completion of everything before it."""
    for completion in (one for run in group.completions for one in run.sequences):
        whole = (*group.prompt_token_ids, *completion.token_ids)
        for turn, positions in groupby(range(len(completion.token_ids)), key=completion.turns.__getitem__):
            first, *rest = positions
            if turn is not None:
                own = slice(first, first + 1 + len(rest))
                turn_completion = Completion(
                    token_ids=completion.token_ids[own],
                    logprobs=completion.logprobs[own],
                    text="",
                    finish_reason="stop",
                )
                begun = whole[: len(group.prompt_token_ids) + first]
                yield replace(group, prompt_token_ids=begun, completions=(turn_completion,), rewards=(0.0,))


@pytest.mark.slow
def test_100_000_recorded_tokens_match_vllms(server: LiveServer, tmp_path: Path) -> None:
    prepared, num_tokens = PreparedModel(loaded(Path(server.manifest.model)).float()), 0
    for template in TEMPLATES:
        groups = recorded(server, tmp_path / template, template)
        all_turns = [turn for group in groups for turn in turns(group)]
        assert len(all_turns) >= NUM_GROUPS * GROUP_SIZE * 2
        assert logprob_diffs(prepared, all_turns).max() < RIGHT_LIMIT, template
        num_tokens += sum(len(one.token_ids) for group in groups for run in group.completions for one in run.sequences)
    assert num_tokens > ENOUGH_TOKENS


@pytest.mark.slow
def test_turns_ended_by_a_stop_string_keep_its_tokens(server: LiveServer, tmp_path: Path) -> None:
    prepared = PreparedModel(loaded(Path(server.manifest.model)).float())
    groups = recorded(server, tmp_path, "qwen2_5", "Stopping")
    all_turns = [turn for group in groups for turn in turns(group)]
    assert len(all_turns) == 3 * NUM_GROUPS * GROUP_SIZE, "each run is one sequence, and each turn continues it"
    assert logprob_diffs(prepared, all_turns).max() < RIGHT_LIMIT
    tokenizer = skeleton.tokenizer(str(tmp_path))
    texts = [tokenizer.decode(turn.completions[0].token_ids) for turn in all_turns]
    assert sum("e" in text[-3:] or " t" in text[-3:] for text in texts) > len(texts) / 2, "a stop is in the last token"


@pytest.mark.slow
def test_wrong_token_is_detected(server: LiveServer, tmp_path: Path) -> None:
    prepared = PreparedModel(loaded(Path(server.manifest.model)).float())
    later = [turn for group in recorded(server, tmp_path, "qwen2_5") for turn in turns(group)][2::3]
    differences = []
    for turn in later[:16]:
        middle = len(turn.prompt_token_ids) // 2
        wrong = (*turn.prompt_token_ids[:middle], 7, *turn.prompt_token_ids[middle + 1 :])
        differences.append(logprob_diffs(prepared, [replace(turn, prompt_token_ids=wrong)]).max().item())
    assert min(differences) > WRONG_LIMIT
