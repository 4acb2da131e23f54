"""What a person may choose, each field declared once; flags, environment and TOML all come from here.

Not covered: what is derived from it (the code that derives says so), and the command line itself (`cli/options.py`).
Precedence: TOML (`--config`) < environment (`BRIDGE_` + the field's name) < flags.
"""

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bridge.errors import UsageError

ENVIRONMENT_PREFIX = "BRIDGE_"


class Config(BaseModel):
    """A frozen set of choices that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    synonyms: ClassVar[Mapping[str, str]] = {}
    """Another name under which a field may be given -> the field."""

    @classmethod
    def resolve(
        cls, flags: Mapping[str, Any], toml: Path | None = None, *, beside: tuple[type["Config"], ...] = ()
    ) -> Self:
        """Merge the TOML file, the environment and `flags` (None: not given), the later winning.

        Keys that only the classes `beside` it know are left to them.

        Raises:
            UsageError: an unknown key, a value of the wrong kind or out of range; all of them at once.
        """
        given: dict[str, Any] = {}
        named: dict[str, str] = {}
        for key, value, place in _given(flags, toml, (cls, *beside)):
            field = cls.field_of(key)
            if field is not None:
                given[field], named[field] = value, place
            elif not any(other.field_of(key) for other in beside):
                raise _unknown(key, place, (cls, *beside))
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            faults = "; ".join(_fault(fault, named) for fault in error.errors())
            raise UsageError(faults, remedy="see --help for every choice and its default") from error

    @classmethod
    def field_of(cls, key: str) -> str | None:
        """Return the field that `key` names, by its own name or a synonym; None if there is none."""
        field = cls.synonyms.get(key, key)
        return field if field in cls.model_fields else None


def _given(
    flags: Mapping[str, Any], toml: Path | None, classes: tuple[type[Config], ...]
) -> Iterator[tuple[str, Any, str]]:
    """Yield every given (key, value, how its place is named to a person), the strongest source last."""
    yield from ((key, value, f"{key} in {toml}") for key, value in _from_toml(toml).items())
    for key in dict.fromkeys(key for cls in classes for key in (*cls.synonyms, *cls.model_fields)):
        variable = ENVIRONMENT_PREFIX + key.upper()
        if os.environ.get(variable):
            yield key, os.environ[variable], variable
    yield from ((key, value, _flag(key)) for key, value in flags.items() if value is not None)


def _from_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UsageError(f"no file {path}", remedy="--config takes a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}", remedy="mend the line that it names") from error


def _unknown(key: str, place: str, classes: tuple[type[Config], ...]) -> UsageError:
    known = [name for cls in classes for name in (*cls.model_fields, *cls.synonyms)]
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
    return UsageError(
        f"{place}: there is no such choice",
        remedy=f"did you mean {near[0]}?" if near else "see --help for every choice",
    )


def _fault(fault: Any, named: Mapping[str, str]) -> str:
    if not fault["loc"]:
        return str(fault["msg"]).removeprefix("Value error, ")
    field = str(fault["loc"][0])
    if fault["type"] == "missing":
        return f"{_flag(field)} is missing"
    message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input ").replace("should", "must", 1)
    return f"{named.get(field, _flag(field))}: {message.partition(', unable')[0]}, found {fault['input']!r}"


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


class ServeConfig(Config):
    """How the patched vLLM is started."""

    synonyms: ClassVar[Mapping[str, str]] = {"model_name": "model", "vllm_port": "port"}

    model: str
    """The model to serve: a folder or a hub name."""
    port: int = Field(default=9001, ge=1, le=65535)
    """TCP port of the server."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is reachable from this machine alone."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where vLLM runs; `auto` takes the GPU when there is one."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Element type of the one copy; `auto` takes the one that the model's configuration names."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, lt=1)
    """Share of the GPU that vLLM may use; when absent it is derived so that training fits beside it."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest sequence in tokens, prompt and completion together; absent: the model's own limit."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share each layer."""
    vllm_config_path: Path | None = None
    """Where to write the manifest: a file or a folder; absent: $LOGDIR, else the current folder."""


class TrainConfig(Config):
    """One training run."""

    synonyms: ClassVar[Mapping[str, str]] = {"model": "model_name", "port": "vllm_port", "weight_bridge_mode": "mode"}

    model_name: str
    """The model to train: the folder or hub name that the server was started with."""
    mode: Literal["shared_vllm"] = "shared_vllm"
    """How new weights reach vLLM."""
    training_steps: int = Field(default=10, ge=1)
    """Optimizer steps."""
    environment: str = "arithmetic"
    """`arithmetic`, or `file.py:ClassName` of your own."""
    batch_size: int = Field(default=64, ge=2)
    """Completions per step; a multiple of the group size."""
    group_size: int = Field(default=8, ge=2)
    """Completions per prompt."""
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip of the probability ratio, as 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip of the probability ratio, as 1 + clip_high."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest completion in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the rollouts; the loss uses the same."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Padded tokens of one forward and backward pass; gradients are accumulated over them."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    seed: int = Field(default=0, ge=0)
    """Seed of the data's order and of the sampling."""
    in_flight: Literal["keep", "wait", "abort"] = "keep"
    """What the fence does with other clients' requests that are under way."""
    vllm_host: str = "127.0.0.1"
    """Where the server answers, if it is not what the manifest says."""
    vllm_port: int | None = Field(default=None, ge=1, le=65535)
    """The server's port; absent: the manifest's."""
    vllm_config_path: Path | None = None
    """The manifest; absent: searched for in $LOGDIR, the current folder and /tmp/atropos_bridge."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds until one request to the server is given up."""
    save_path: Path = Path("saved_models")
    """Folder of the checkpoints, `step_N/`."""
    save_interval: int = Field(default=0, ge=0)
    """Steps between checkpoints; the last step is always saved; 0: the last one only."""
    eval_samples: int = Field(default=0, ge=0)
    """Completions per held-out problem before and after training; 0: no evaluation."""
    run_dir: Path | None = None
    """The run directory; absent: runs/ and the time."""

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.batch_size % self.group_size:
            raise ValueError(f"--batch-size {self.batch_size} is no multiple of --group-size {self.group_size}")
        return self
