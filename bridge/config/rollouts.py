"""What is sampled and how: choices shared by all commands that sample rollouts, and every choice of `bridge env`."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from bridge.config.choices import Config, flag
from bridge.config.declaration import Only, Section, declare
from bridge.core import json_lines
from bridge.core.address import Urls

SIZE, THINKING = '{"size": 1000}', '{"enable_thinking": false}'
"""Examples shown in error messages."""
FROM_ENVIRONMENT: Only = ("rollouts", ("environment",))
ATROPOS = "Atropos"
EVALUATION = "Evaluation and saving"
"""Panels of the help text."""
DEFAULT_NEW_TOKENS = 256
"""Default length of the longest completion, if the server's sequences are long enough."""
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""vLLM raises lower temperatures to 0.01, and refuses requests above 2."""
TIMED_TOKENS = 4_096
"""Length of a completion, in tokens, up to which `--request-timeout-s` is the time limit; longer ones get more."""


SET_BY_BRIDGE = {
    "conversation", "messages", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that only Bridge sets: they decide what a prompt is made of."""


def _from_json(given: Any) -> Any:
    """Parse a flag or a variable as JSON; return `given` unchanged if it is not JSON."""
    try:
        return json_lines.parsed(given) if isinstance(given, str) else given
    except ValueError:
        return given


def _texts(given: Any) -> tuple[str, ...]:
    parsed = _from_json(given)
    texts = tuple(parsed) if isinstance(parsed, list | tuple) else (given,)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be text that is not empty, or a JSON list of such texts")
    return texts


def _names(given: Any) -> Any:
    return tuple(filter(None, map(str.strip, given.split(",")))) if isinstance(given, str) else given


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
"""Names, as a list or separated by commas."""


def _json_object(example: str, *, reserved: Collection[str] = (), optional: bool = False) -> BeforeValidator:
    """Return a validator that takes a JSON object, as text or already parsed, without the `reserved` keys."""

    def parse(given: Any) -> dict[str, Any] | None:
        parsed = _from_json(given)
        if parsed is None and optional:
            return None
        if not isinstance(parsed, dict):
            raise ValueError(f"must be a JSON object, such as {example}")
        if taken := sorted(parsed.keys() & set(reserved)):
            raise ValueError(f"must not contain {', '.join(taken)}, which Bridge sets")
        return parsed

    return BeforeValidator(parse)


class TaskConfig(Section, panel="Problems and rewards", only=FROM_ENVIRONMENT):
    """An environment: its problems and its rewards."""

    environment: str = declare("arithmetic", panel="", identifies=True, is_path=True)
    """`arithmetic`, `word_problems`, `gsm8k`, `jsonl`, `file.py:ClassName` for your own, `verifiers:ID`, or
    `reasoning_gym:TASK`."""
    env_args: Annotated[dict[str, Any], _json_object(SIZE)] = Field(default={})
    """Arguments of `reasoning_gym:TASK`, such as `{"size": 1000}`, or the table `[env]` of `verifiers:ID`, such as
    `{"agent": {"max_turns": 4}}` (default: their own)."""
    eval_env_args: Annotated[dict[str, Any] | None, _json_object(SIZE, optional=True)] = declare(
        None, panel=EVALUATION, position=2
    )
    """Arguments that differ for held-out problems; for `verifiers:ID` the table `[env.taskset]` (default: there are no
    held-out problems)."""
    verifiers_python: Path | None = None
    """Python with verifiers in it, for `verifiers:ID` (default: the one that `make verifiers` sets up)."""
    data: str | None = declare(None, panel="", identifies=True, is_path=True)
    """Problems for `gsm8k` and `jsonl`: a JSONL, JSON or Parquet file, a folder, or a dataset on the hub (default:
    those bundled with `gsm8k`). With --loss `sft` or `dpo`, the rows to train on."""
    eval_data: str | None = declare(None, panel=EVALUATION, position=1, is_path=True)
    """Held-out problems, in the same forms as --data (default: those of the environment)."""
    prompt_column: str | None = declare(None, min_length=1)
    """Column with the prompts, as text or chat messages (default: `question` for `gsm8k`, `prompt` for `jsonl`)."""
    answer_column: str = declare("answer", min_length=1)
    """Column with the answers."""
    system_prompt: str | None = None
    """System message put before every prompt, which makes it a chat message (default: the environment's own)."""
    chat_template_kwargs: Annotated[dict[str, Any], _json_object(THINKING, reserved=SET_BY_BRIDGE)] = Field(default={})
    """Arguments of the model's chat template, such as `{"enable_thinking": false}` (default: the template's own)."""
    reward: str | None = declare(None, min_length=1)
    """Rewards that replace the environment's own: names or `file.py:function`, each optionally followed by `=WEIGHT`,
    separated by commas."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit for scoring one completion, in seconds."""
    reward_processes: int | None = Field(default=None, ge=0)
    """Worker processes for scoring; 0 scores in the trainer without a time limit (default: one per core, at most 4).
    With tools or an agent, the number of concurrent completions (default: 8 per core)."""
    worker_env: Names = ()
    """Variables with secrets that rewards, tools and agents may read, such as `OPENAI_API_KEY`, separated by commas
    (default: none whose name suggests a secret)."""
    max_unscored_share: float = declare(0.2, ge=0, le=1, position=1, only=None)
    """Stop the run when scoring fails for more than this share of a batch."""


class SamplingConfig(Section, panel="Batch and sampling"):
    """How completions are sampled."""

    group_size: int = declare(8, ge=1, borrowed=("num_generations",))
    """Completions per prompt; with rewards at least 2, which are compared."""
    max_new_tokens: int | None = declare(None, ge=1, borrowed=("max_completion_length", "max_response_length"))
    """Longest completion, in tokens (default: 256, or half of the server's longest sequence if that is less)."""
    temperature: float = Field(default=1.0, ge=LEAST_TEMPERATURE, le=MOST_TEMPERATURE)
    """Sampling temperature, from 0.01 to 2; the loss uses the same."""
    top_k: int = declare(0, ge=0, only=FROM_ENVIRONMENT)
    """Sample from this many of the likeliest tokens, and train on their distribution (default: from all)."""
    top_p: float = declare(1.0, gt=0, le=1, only=FROM_ENVIRONMENT)
    """Sample from the fewest likeliest tokens whose probabilities add up to this (default: from all)."""
    min_p: float = declare(0.0, ge=0, lt=1, only=FROM_ENVIRONMENT)
    """Sample only from tokens at least this fraction as likely as the likeliest one (default: from all)."""
    stop: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    """End a completion after this text, which stays part of it, or after any in a JSON list (default: none)."""
    request_timeout_s: float = declare(600.0, gt=0, panel="Server", position=2)
    """Time limit for one request, in seconds, and as much for each 4,096 tokens of a longer completion; the request is
    then retried, on a different server if there is one."""
    max_retries: int = declare(4, ge=0, panel="Server", position=2)
    """Retries of a request that failed on the server's side, with growing pauses."""
    max_concurrency: int = declare(256, ge=1, panel="Server", position=2, only=FROM_ENVIRONMENT)
    """Maximum number of requests in flight."""

    @property
    def longest(self) -> int:
        """Return the longest completion in tokens: the chosen one, or the default."""
        return self.max_new_tokens or DEFAULT_NEW_TOKENS

    @property
    def answer_limit_s(self) -> float:
        """Return the time limit of a completion in seconds, which grows with `longest`."""
        return self.request_timeout_s * max(1.0, self.longest / TIMED_TOKENS)


class RolloutConfig(Section, panel="Continuous rollouts", renamed={"source": "rollouts"}):
    """Where rollouts come from, and how many a step takes."""

    source: Literal["environment", "atropos"] = declare("environment", panel=ATROPOS, identifies=True)
    """Source of the rollouts: the environment's problems, or batches from an Atropos API."""
    batch_size: int = declare(64, ge=2, panel=SamplingConfig.panel, position=-1)
    """Completions per step; a multiple of the group size."""
    warm_up_data: str | None = declare(None, panel=TaskConfig.panel, position=-1, is_path=True, only=FROM_ENVIRONMENT)
    """Rows for supervised training before the run samples: chat messages, or a prompt and a completion, in the same
    forms as --data."""
    warm_up_steps: int = declare(0, ge=0, panel=TaskConfig.panel, position=-1, only=FROM_ENVIRONMENT)
    """The first N steps are supervised, each on --batch-size rows of --warm-up-data; they count in --training-steps."""
    max_staleness: int = declare(0, ge=0, only=FROM_ENVIRONMENT)
    """Train on completions begun up to N versions ago, while longer ones continue under new weights (default: each
    step waits for all of its completions)."""
    groups_in_flight: int | None = declare(None, ge=1, only=FROM_ENVIRONMENT)
    """Groups sampled at once (default: what fits the KV cache, up to a batch for each version and one)."""
    skip_without_signal: bool = declare(
        False, position=1, only=FROM_ENVIRONMENT, synonyms=("skip_groups_without_signal",)
    )
    """Sample another group in place of one whose rewards are all equal."""
    max_oversampling: float = declare(3.0, ge=1, position=1, only=FROM_ENVIRONMENT)
    """Sample at most this many times the groups of a step to replace those without signal."""
    max_turns: int = declare(8, ge=1, panel=TaskConfig.panel, only=FROM_ENVIRONMENT)
    """Turns of the model per completion, in an environment with tools or an agent."""
    tool_timeout_s: float = declare(30.0, gt=0, panel=TaskConfig.panel, only=FROM_ENVIRONMENT)
    """Time limit for one call of a tool, or for an agent between two turns, in seconds."""
    overlong_buffer: int = declare(0, ge=0, panel=TaskConfig.panel, position=1, only=FROM_ENVIRONMENT)
    """Tokens before --max-new-tokens over which the reward falls by --overlong-penalty (DAPO; 0: none)."""
    overlong_penalty: float = declare(1.0, gt=0, panel=TaskConfig.panel, position=1, only=FROM_ENVIRONMENT)
    """Reward that a completion of --max-new-tokens loses."""
    atropos_url: Urls = declare("http://127.0.0.1:8000", panel=ATROPOS, only=("rollouts", ("atropos",)))
    """URL of the Atropos API."""
    atropos_timeout_s: float = declare(600.0, gt=0, panel=ATROPOS, only=("rollouts", ("atropos",)))
    """Stop the run after this many seconds without a batch from the Atropos API."""

    @property
    def samples_here(self) -> bool:
        """Return whether the run samples its own problems; otherwise other processes sample from its servers."""
        return self.source == "environment"


class FeedConfig(Config):
    """Rollouts for an Atropos API."""

    model_name: str = declare(synonyms=("model",), borrowed=("model_name_or_path",), is_path=True)
    """The served model: the folder or hub name that the server was started with."""
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()
    seed: int = declare(0, ge=0, panel=SamplingConfig.panel, position=1)
    """Seed for the order of the problems and for sampling."""
    atropos_url: Urls = declare("http://127.0.0.1:8000", panel=ATROPOS)
    """URL of the Atropos API."""
    server_url: Urls = declare("http://127.0.0.1:9001", panel="Server")
    """URLs of the servers to sample from, separated by commas; the least loaded one is used."""
    max_queued_batches: float = declare(2.0, ge=1, panel=ATROPOS)
    """Pause sampling while this many batches wait in the Atropos API."""

    @model_validator(mode="after")
    def _fits_the_api(self) -> Self:
        for key in ("top_k", "top_p", "min_p"):
            if self.get(key) != self.default(key):
                raise ValueError(
                    f"{flag(key)} {self.get(key):g} cannot be trained on: the Atropos API has no field for the"
                    " part of the vocabulary that is kept; leave it out"
                )
        if self.sampling.group_size == 1:
            raise ValueError("--group-size 1: rewards are compared within a group, take at least 2")
        return self
