"""Choices of what is sampled, and how: sections of every command that samples rollouts, and all of `bridge env`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from bridge.config.borrowed import ROLLOUT_ALIASES
from bridge.config.choices import Config, Section, flag
from bridge.core.address import Urls

DEFAULT_NEW_TOKENS = 256
"""Default length of the longest completion, if the server's sequences are long enough."""


SET_BY_BRIDGE = {
    "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that decide what a prompt is, and not how its template is filled."""


def _from_json(given: Any) -> Any:
    """Return what a flag or a variable means as JSON; `given` itself if it is none."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given


def _texts(given: Any) -> tuple[str, ...]:
    found = _from_json(given)
    texts = tuple(found) if isinstance(found, list | tuple) else (given,)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be text, or a JSON list of texts, none of them empty")
    return texts


def _names(given: Any) -> Any:
    return tuple(filter(None, map(str.strip, given.split(",")))) if isinstance(given, str) else given


def _arguments(given: Any) -> dict[str, Any] | None:
    found = _from_json(given)
    if not isinstance(found, dict | None):
        raise ValueError('must be a JSON object, such as {"size": 1000}')
    return found


def _template_arguments(given: Any) -> dict[str, Any]:
    found = _from_json(given)
    if not isinstance(found, dict):
        raise ValueError('must be a JSON object, such as {"enable_thinking": false}')
    if taken := sorted(found.keys() & SET_BY_BRIDGE):
        raise ValueError(f"must not contain {', '.join(taken)}, which Bridge sets")
    return found


class TaskConfig(Section):
    """An environment: its problems and its rewards."""

    environment: str = "arithmetic"
    """`arithmetic`, `gsm8k`, `jsonl`, `file.py:ClassName` for your own, `verifiers:ID`, or `reasoning_gym:TASK`."""
    env_args: Annotated[dict[str, Any], BeforeValidator(_arguments)] = Field(default={})
    """Arguments of `reasoning_gym:TASK`, such as `{"size": 1000}`, or the table `[env]` of `verifiers:ID`, such as
    `{"agent": {"max_turns": 4}}` (default: their own)."""
    eval_env_args: Annotated[dict[str, Any] | None, BeforeValidator(_arguments)] = None
    """Arguments that differ for held-out problems; for `verifiers:ID` the table `[env.taskset]` (default: there are no
    held-out problems)."""
    verifiers_python: Path | None = None
    """Python with verifiers in it, for `verifiers:ID` (default: the one that `make verifiers` sets up)."""
    data: str | None = None
    """Problems for `gsm8k` and `jsonl`: a JSONL file, a folder, or a dataset on the hub (default: the bundled ones)."""
    eval_data: str | None = None
    """Held-out problems, in the same forms as --data (default: those of the environment)."""
    prompt_column: str | None = None
    """Column with the prompts, as text or chat messages (default: `question` for `gsm8k`, `prompt` for `jsonl`)."""
    answer_column: str = "answer"
    """Column with the answers."""
    system_prompt: str | None = None
    """System message put before every prompt, which makes it a chat message (default: the environment's own)."""
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_template_arguments)] = Field(default={})
    """Arguments of the model's chat template, such as `{"enable_thinking": false}` (default: the template's own)."""
    reward: str | None = None
    """Rewards that replace the environment's own: names or `file.py:function`, each optionally followed by `=WEIGHT`,
    separated by commas."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit for scoring one completion, in seconds."""
    reward_processes: int | None = Field(default=None, ge=0)
    """Worker processes for scoring; 0 scores in the trainer without a time limit (default: one per core, at most 4).
    With tools or an agent, completions that run at once (default: 8 per core)."""
    worker_env: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    """Variables with secrets that rewards, tools and agents may read, such as `OPENAI_API_KEY`, separated by commas
    (default: none whose name suggests a secret)."""
    max_unscored_share: float = Field(default=0.2, ge=0, le=1)
    """Stop the run when scoring fails for more than this share of a batch."""


class SamplingConfig(Section):
    """How completions are sampled."""

    group_size: int = Field(default=8, ge=2)
    """Completions per prompt."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest completion, in tokens (default: 256, or half of the server's longest sequence if that is less)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the loss uses the same."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many of the likeliest tokens, and train on their distribution (default: from all)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the fewest of the likeliest tokens that have this probability together (default: from all)."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens at least this times as likely as the likeliest one (default: from all)."""
    stop: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    """End a completion after this text, which stays part of it, or after any in a JSON list (default: none)."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit for one request, in seconds; it is then retried on another server, if there is one."""
    max_retries: int = Field(default=4, ge=0)
    """Retries of a request that failed on the server's side, with growing pauses."""
    max_concurrency: int = Field(default=256, ge=1)
    """Requests in flight at once."""

    @property
    def longest(self) -> int:
        """Return the longest completion in tokens: the chosen one, or the default."""
        return self.max_new_tokens or DEFAULT_NEW_TOKENS


class RolloutConfig(Section):
    """Where rollouts come from, and how many a step takes."""

    renamed: ClassVar[Mapping[str, str]] = {"source": "rollouts"}

    source: Literal["environment", "atropos"] = "environment"
    """Source of the rollouts: the environment's problems, or batches from an Atropos API."""
    batch_size: int = Field(default=64, ge=2)
    """Completions per step; a multiple of the group size."""
    max_staleness: int = Field(default=0, ge=0)
    """Train on completions begun up to N versions ago, while longer ones continue under new weights (default: each
    step waits for all of its completions)."""
    groups_in_flight: int | None = Field(default=None, ge=1)
    """Groups sampled at once (default: what fits the KV cache, up to a batch for each version and one)."""
    skip_without_signal: bool = False
    """Sample another group in place of one whose rewards are all equal."""
    max_oversampling: float = Field(default=3.0, ge=1)
    """Sample at most this many times the groups of a step to replace those without signal."""
    max_turns: int = Field(default=8, ge=1)
    """Turns of the model per completion, in an environment with tools or an agent."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit for one call of a tool, or for an agent between two turns, in seconds."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before --max-new-tokens over which the reward falls by --overlong-penalty (DAPO; 0: none)."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """What a completion of --max-new-tokens loses of its reward."""
    atropos_url: Urls = "http://127.0.0.1:8000"
    """URL of the Atropos API."""
    atropos_timeout_s: float = Field(default=600.0, gt=0)
    """Stop the run after this many seconds without a batch from the Atropos API."""


class FeedConfig(Config):
    """Rollouts for an Atropos API."""

    synonyms: ClassVar[Mapping[str, str]] = {"model": "model_name"}
    aliases: ClassVar[Mapping[str, str]] = ROLLOUT_ALIASES

    model_name: str
    """The served model: the folder or hub name that the server was started with."""
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()
    seed: int = Field(default=0, ge=0)
    """Seed for the order of the problems and for sampling."""
    atropos_url: Urls = "http://127.0.0.1:8000"
    """URL of the Atropos API."""
    server_url: Urls = "http://127.0.0.1:9001"
    """URLs of the servers to sample from, separated by commas; the least loaded one is used."""
    max_queued_batches: float = Field(default=2.0, ge=1)
    """Pause sampling while this many batches wait in the Atropos API."""

    @model_validator(mode="after")
    def _fits_the_api(self) -> Self:
        for key in ("top_k", "top_p", "min_p"):
            if self.get(key) != self.default(key):
                raise ValueError(
                    f"{flag(key)} {self.get(key):g} cannot be trained on: the Atropos API has no field for what is"
                    " kept of the vocabulary; leave it out"
                )
        return self
