"""What an Atropos API is told and answers: the bodies of both sides, the trainer's and the environments'.

Answers are read as leniently as another version of the API may need: unknown keys are left alone.

Not covered: sending them (`client.py`), what is learnt from a group (`groups.py`).
Source: atroposlib 0.4.0, `atroposlib/api/server.py`.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

MASKED = -100
"""In `masks`, the place of a token that the model did not sample."""
UNKNOWN_LOGPROB = 1.0
"""In `inference_logprobs`, the place of a masked token, and of a sampled one whose log-probability is not known."""

Numbers = tuple[float | None, ...]
"""null, where an API writes it, is no number."""


class Said(BaseModel):
    """A frozen body."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class TrainerRegistration(Said):
    """The body of `POST /register`; an API keeps the first one, and ignores every later one without a word."""

    wandb_group: str
    """Group of the environments' own runs in Weights & Biases."""
    wandb_project: str
    """Project of the same."""
    batch_size: int
    """Sequences of one batch, which is made of whole groups."""
    max_token_len: int
    """Environments leave out groups with a sequence of so many tokens or more; 0 or less: no bound."""
    checkpoint_dir: str
    """Folder below which environments may keep a state of their own."""
    save_checkpoint_interval: int
    """Steps between two of those; 0 or less: none."""
    starting_step: int
    """Steps that were taken before."""
    num_steps: int
    """Step after which environments stop, unless they were told otherwise."""


class Info(Said):
    """The answer of `GET /info`; -1 where no trainer registered."""

    batch_size: int
    """As the trainer registered it."""
    max_token_len: int
    """As the trainer registered it."""


class Status(Said):
    """The answer of `GET /status`."""

    current_step: int
    """Batches that were formed, from the trainer's first step on."""
    queue_size: int
    """Groups that wait and are in no batch yet."""


class EnvironmentRegistration(Said):
    """The body of `POST /register-env`."""

    max_token_length: int
    """Longest sequence that the environment makes, in tokens."""
    desired_name: str
    """Its name; the API adds a number."""
    weight: float
    """Its share among several environments, relative to theirs."""
    group_size: int
    """Sequences of each group."""
    min_batch_allocation: float | None = None
    """Least share of each batch, 0 to 1; None: whatever comes."""


class RegisteredEnvironment(Said):
    """The answer of `POST /register-env`."""

    status: str
    """`success`, or in words what it waits for: a trainer that asked for its first batch."""
    env_id: int | None = None
    """Its number, from 0, which goes with everything that it sends."""
    wandb_name: str | None = None
    """Its name with a number."""
    checkpoint_dir: str | None = None
    """As the trainer registered it."""
    checkpoint_interval: int | None = None
    """As the trainer registered it."""
    starting_step: int | None = None
    """The current step."""
    num_steps: int | None = None
    """As the trainer registered it."""


class EnvironmentId(Said):
    """The body of `GET /status-env` and of `POST /disconnect-env`."""

    env_id: int
    """The number that the environment got."""


class EnvironmentStatus(Said):
    """The answer of `GET /status-env`."""

    current_step: int
    """Batches that were formed, from the trainer's first step on."""
    queue_size: int
    """Groups that wait, counted in this environment's group size."""
    env_weight: float
    """Its share among the environments, 0.01 to 1."""
    max_group_size: int = 1
    """Sequences of the largest group that waits."""
    self_queue_size: int = 0
    """Groups of its own that wait."""
    unallocated_fraction: float = 1.0
    """Share of a batch that no environment has reserved."""


class ScoredGroup(Said):
    """The body of `POST /scored_data`, one of `/scored_data_list`, and one of a batch: sequences of one problem.

    The API checks the types, but neither that lengths agree nor that numbers are numbers: one that is not may cost the
    whole batch. An empty list stands for None.
    """

    tokens: tuple[tuple[int, ...], ...]
    """Each sequence from its first token: prompt, completion, and whatever came between several."""
    masks: tuple[tuple[int, ...], ...]
    """For each token -100 where the model did not sample it, else the token itself; not shifted."""
    scores: Numbers
    """One reward per sequence."""
    advantages: tuple[Numbers, ...] | None = None
    """One per token, prompt included, or one per sequence; None: they come from the scores."""
    ref_logprobs: Any = None
    """A reference's log-probabilities."""
    messages: Any = None
    """The sequences as chat messages."""
    generation_params: dict[str, Any] | None = None
    """How it was sampled."""
    inference_logprobs: tuple[Numbers, ...] | None = None
    """Log-probability of each token where it was sampled, in nats; 1 where masked or not known. None: not known."""
    overrides: tuple[dict[str, Any], ...] | None = None
    """Per sequence: `set_advantage_to_zero`, `temperature`."""
    group_overrides: dict[str, Any] | None = None
    """For the whole group: `temperature`, `group_size`."""
    images: Any = None
    """Images of the prompt."""
    env_id: int | None = None
    """Number of the environment that sent it."""
    distill_token_ids: Any = None
    """A teacher's likeliest tokens at each place."""
    distill_logprobs: Any = None
    """Their log-probabilities."""


class Received(Said):
    """The answer of `POST /scored_data` and `/scored_data_list`."""

    status: Literal["received", "buffered"]
    """`buffered`: it is no whole group of its environment, and waits for the rest."""


class BatchAnswer(Said):
    """The answer of `GET /batch`."""

    batch: tuple[ScoredGroup, ...] | None
    """The newest batch that there is; None: there is none yet."""
    status: str | None = None
    """`error` where no trainer registered; the batch is empty then."""
    message: str | None = None
    """What is wrong, in words."""
