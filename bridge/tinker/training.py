"""The training side of Tinker's calls: what they do to the policy.

A model is either all weights, one model at a time (`all_weights.py`), or one of several adapters (`adapters.py`); this
module has what both share. The main thread makes all calls, because only it can defer Ctrl-C, except for the methods
about sampling, which run in the event loop.
Shape suffixes: N rows, as many as a datum has positions; K targets of a row, X: nothing, or K.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridge.core.http_limits import Refusal
from bridge.engine.held_adapter import HeldAdapter
from bridge.engine.policy import Policy, Step
from bridge.engine.run_folder import RunFolder
from bridge.errors import BridgeError, UsageError
from bridge.passes.packing import MicroBatch, Sample
from bridge.server.protocol import InFlight
from bridge.tinker.losses import OF_RATIOS, Config, LossFunction, Rows, cross_entropy, refuse_other
from bridge.tinker.paths import Checkpoints, SavedPath
from bridge.tinker.wire import Datum, PassRequest

logger = logging.getLogger(__name__)

RUN = "run"
"""Folder of a model's metrics, inside the folder of its checkpoints."""

ADAM = {
    "learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0,
}  # fmt: skip
"""The SDK's `AdamParams`, with its defaults."""


@dataclass
class Tally:
    """Measurements of the passes since a model's last step."""

    loss: float = 0.0
    num_tokens: int = 0
    """Number of tokens that contribute to the loss."""
    num_known: int = 0
    """Number of tokens for which the client has sent the sampler's log-probabilities."""
    sums: dict[str, float] = field(default_factory=dict)
    """Metric -> its sum over these tokens."""
    largest: float = 0.0
    """The largest difference between the two log-probabilities of a token."""

    def add(self, metrics: Mapping[str, float], *, num_tokens: int, num_known: int) -> None:
        self.loss += metrics["loss"]
        self.num_tokens += num_tokens
        if num_known:
            self.num_known += num_known
            self.largest = max(self.largest, metrics["logprob_diff_max"])
            for name in ("logprob_diff_mean", "mismatch_kl"):
                self.sums[name] = self.sums.get(name, 0.0) + metrics[name] * num_known

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step under the names of `metrics.jsonl`."""
        metrics = {"loss": self.loss, "tokens_trained": self.num_tokens}
        if self.num_known:
            metrics |= {name: total / self.num_known for name, total in self.sums.items()}
            metrics["logprob_diff_max"] = self.largest
        return metrics


@dataclass
class Model:
    """What one training client trains."""

    id: str
    run: RunFolder
    """Its metrics, as `bridge report` reads them."""
    rank: int
    """The rank that the client asked for; it has no effect if all weights are trained."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    num_steps: int = 0
    tally: Tally = field(default_factory=Tally)
    is_saved: bool = True
    """Whether its last checkpoint has all of its steps."""
    adapter: HeldAdapter | None = None
    """Its weights, unless all weights are trained."""
    parts: Mapping[str, bool] = field(default_factory=dict)
    """Fields of the SDK's `LoraConfig` that choose the adapter's modules."""
    live: str | None = None
    """Snapshot of its newest weights, if `inflight` clients sample from them."""


@dataclass(frozen=True)
class SamplingClient:
    """What a sampling session samples from."""

    version: int | None = None
    """The only version of all weights that it may sample; None: any version."""
    path: str | None = None
    """The checkpoint that the client named."""
    snapshot: str | None = None
    """The adapter's snapshot; None: the base model, or the newest adapter of `follows`."""
    follows: str | None = None
    """The model whose newest adapter it samples."""


class Trainer(ABC):
    """The policy, and the models that it trains."""

    is_lora: bool
    """Whether models are adapters."""
    most_models: int
    """Maximum number of models at a time."""

    def __init__(self, policy: Policy, base_name: str, checkpoints: Checkpoints) -> None:
        """Use an attached policy, whose base model is called `base_name` by clients."""
        self.policy = policy
        self.base_name = base_name
        self.checkpoints = checkpoints
        self.models: dict[str, Model] = {}
        self._gone: dict[str, str] = {}
        """Id of a freed model -> why it was freed."""

    def current(self, model_id: str) -> Model:
        """Return a model, and make the policy train it. UsageError: there is no such model."""
        model = self.models.get(model_id)
        if model is None:
            raise UsageError(
                f"model {model_id}: {self.why_gone(model_id)}",
                hint="create_training_client_from_state_with_optimizer(PATH) continues from a checkpoint",
            )
        self._take(model)
        return model

    def why_gone(self, model_id: str) -> str:
        """Return why there is no such model."""
        return self._gone.get(model_id, "there is no such model: this server was restarted, or never had it")

    @abstractmethod
    def _take(self, model: Model) -> None:
        """Let the policy train a model."""

    @abstractmethod
    def _start(self, model_id: str, lora: Mapping[str, Any]) -> Model:
        """Return a new model with the base model's weights; the policy trains it."""

    @abstractmethod
    def _start_from(self, model_id: str, path: SavedPath) -> Model:
        """Return a new model with room for the weights of a checkpoint; the policy trains it."""

    def create(self, model_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Start a model from the base model's weights, with a new optimizer."""
        self._refuse_other_base(body.get("base_model"))
        kind = (body.get("optimizer_config") or {}).get("type", "adamw")
        if kind != "adamw":
            raise UsageError(
                f"optimizer_config {kind!r} is not supported, expected adamw", hint="AdamOptimizerConfig()"
            )
        self._add(self._start(model_id, body.get("lora_config") or {}), body)
        return {"model_id": model_id, "type": "create_model"}

    def load(self, model_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Load a checkpoint into a model, or start one from it."""
        path = SavedPath.parse(str(body["path"]))
        folder = self.checkpoints.found(path)
        self._refuse_other_base(body.get("base_model"))
        if model_id in self.models or model_id in self._gone:
            model = self.current(model_id)
            self._read(folder, body)
        else:
            model = self._start_from(model_id, path)
            self._read(folder, body)
            self._add(model, body)
        self._weights_changed(model)
        model.is_saved = True
        return {"path": str(path), "model_id": model_id, "type": "load_weights"}

    def _read(self, folder: Path, body: Mapping[str, Any]) -> None:
        if body.get("optimizer"):
            self.policy.load_state(folder)
        else:
            self.policy.load(folder)

    def _add(self, model: Model, body: Mapping[str, Any]) -> None:
        model.metadata = body.get("user_metadata") or {}
        self.models[model.id] = model
        self._gone.pop(model.id, None)
        self.checkpoints.describe(model.id, {**self._about(model), "user_metadata": dict(model.metadata)})

    def _run_of(self, model_id: str) -> RunFolder:
        """Return where the metrics of a new model go."""
        return RunFolder(self.checkpoints.run_folder(model_id) / RUN, self.base_name, self.policy.sampling)

    def _about(self, model: Model) -> dict[str, Any]:
        """Return what later models need to know of a model's checkpoints."""
        return {"rank": model.rank, "base_model": self.base_name}

    def free(self, model_id: str, why: str) -> None:
        """Let other models take a model's place, and save its weights if no checkpoint has them.

        Requests of it are refused with the reason.
        """
        if model_id not in self.models:
            return
        model = self.current(model_id)
        path = self._rescue(model, "freed")
        where = "" if path is None else f"; its weights are at {path}"
        logger.info("model %s is freed: %s%s", model_id, why, where)
        self._gone[model_id] = f"{why}{where}"
        model.run.end()
        del self.models[model_id]
        self.policy.drop_gradients()

    def rescue(self) -> list[str]:
        """Save every model whose steps no checkpoint has, and return the paths; one that cannot be saved is logged."""
        paths = []
        for model_id in self.models:
            try:
                path = self._rescue(self.current(model_id), "interrupted")
            except BridgeError as error:
                logger.warning("model %s cannot be saved: %s", model_id, error.message)
                continue
            self.models[model_id].run.end()
            paths += [] if path is None else [path]
        return paths

    def _rescue(self, model: Model, name: str) -> str | None:
        if model.is_saved:
            return None
        path = SavedPath(model.id, "weights", f"{name}-{model.num_steps}")
        self.policy.save_state(self.checkpoints.to_write(path, overwrite=True), step=model.num_steps)
        model.is_saved = True
        return str(path)

    def _refuse_other_base(self, name: str | None) -> None:
        if name is not None and name != self.base_name:
            raise UsageError(
                f"this server has the model {self.base_name!r}, and {name!r} was requested",
                hint=f"bridge tinker --model MODEL --base-model {name}",
            )

    def _refuse_base(self, name: str | None) -> None:
        """Raise Refusal unless a sampling client asks for the base model."""
        if name != self.base_name:
            raise Refusal(f"this server has the model {self.base_name!r}, and {name!r} was requested")

    # Sampling, in the event loop.

    @abstractmethod
    def sampler(self, path: str | None, base_model: str | None) -> SamplingClient:
        """Return a client of a checkpoint or of the base model; Refusal, UsageError: it cannot be sampled."""

    @abstractmethod
    def serving(self, client: SamplingClient) -> AbstractAsyncContextManager[str]:
        """Let vLLM serve what a client samples from during the block, and yield the name under which it does.

        UsageError: it cannot any more.
        """

    async def is_served(self, name: str) -> bool:  # noqa: ARG002 - all weights always are
        """Return whether vLLM still serves what it has served as `name`."""
        return True

    def check_sampled(self, client: SamplingClient) -> None:  # noqa: B027 - adapters do not change while they are sampled
        """Raise UsageError if what a client has sampled may be of other weights than its own."""

    def restart_server(self) -> bool:
        """Start vLLM again after it has died; False: its death cannot be survived. The main thread calls it."""
        return False

    def forget_samplers(self, model_ids: set[str]) -> None:  # noqa: B027 - same reason
        """Forget the snapshots of models whose session is over."""

    async def close(self) -> None:  # noqa: B027 - same reason
        """Close what sampling needs."""

    # Passes and steps.

    def passes(self, request: PassRequest) -> tuple[list[NDArray[np.float32]], dict[str, float]]:
        """Compute each datum's log-probabilities and the loss; unless it is a forward pass, add the gradients."""
        model = self.current(request.model_id)
        refuse_other(request.loss_fn)
        ratios = OF_RATIOS.get(request.loss_fn)
        config = {} if ratios is None else ratios.chosen(request.loss_fn, request.config)
        if ratios is None and request.config:
            raise UsageError(
                f"loss_fn_config of cross_entropy has {min(request.config)!r}, expected none", hint="leave it out"
            )
        if not request.data:
            raise UsageError("the request has no data", hint="forward_backward(data, loss_fn)")
        needed = ("weights",) if ratios is None else ratios.inputs
        longest = self.policy.max_model_len
        data = [_with_only(datum, ("target_tokens", *needed)) for datum in request.data]
        for number, datum in enumerate(data):
            if fault := _fault(datum, request.loss_fn, needed, longest):
                raise UsageError(f"datum {number} {fault}", hint=f"{request.loss_fn} needs {', '.join(needed)}")
        has_several = any(datum.inputs["target_tokens"].ndim > 1 for datum in data)
        counted = [_counted(datum) for datum in data]
        samples = [
            _sample(datum, counted_N, has_several=has_several) for datum, counted_N in zip(data, counted, strict=True)
        ]
        loss = _Loss(data, ratios, config, self.policy.device)
        compute = self.policy.forward if request.is_forward else self.policy.forward_backward
        computed = compute(samples, loss)
        if not request.is_forward:
            num_tokens = sum(int(counted_N.sum()) for counted_N in counted)
            num_known = 0 if ratios is None else num_tokens  # a token counts if it has an advantage
            model.tally.add(computed.metrics, num_tokens=num_tokens, num_known=num_known)
        shapes = [datum.inputs["target_tokens"].shape for datum in data]
        return _on_host(computed.logprobs, shapes), {"loss:sum": computed.metrics["loss"]}

    def step(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take a step with the gradients, and publish it."""
        model = self.current(body["model_id"])
        if "adam_params" not in body:
            kind = (body.get("optimizer_params") or {}).get("type")
            raise UsageError(f"optim_params of the type {kind!r} are not supported", hint="types.AdamParams(...)")
        adam = {**ADAM, **{name: value for name, value in body["adam_params"].items() if value is not None}}
        limit = adam["grad_clip_norm"]
        stepped = self.policy.optim_step(
            lr=adam["learning_rate"],
            betas=(adam["beta1"], adam["beta2"]),
            eps=adam["eps"],
            weight_decay=adam["weight_decay"],
            max_norm=limit if limit > 0 else math.inf,
            in_flight=self._in_flight(),
        )
        model.num_steps += 1
        model.is_saved = False
        self._log_step(model, stepped, adam["learning_rate"])
        self._weights_changed(model)
        metrics = {
            "unclipped_grad_l2:mean": stepped.grad_norm, "changed_weight_share:mean": stepped.changed_weight_share,
            "fence_pause_s:mean": stepped.times.pause_s, "fence_write_s:mean": stepped.times.write_s,
            "fence_publish_s:mean": stepped.times.publish_s, "weight_version:max": float(stepped.version),
        }  # fmt: skip
        return {"metrics": metrics}

    def _log_step(self, model: Model, stepped: Step, lr: float) -> None:
        """Write a step's line into the model's run directory, and say it; a full disk ends no model."""
        measured = {
            **model.tally.metrics(), "grad_norm": stepped.grad_norm, "lr": lr,
            "changed_weight_share": stepped.changed_weight_share,
        }  # fmt: skip
        model.tally = Tally()
        model.run.add_fence(stepped.times)
        logger.info(
            "model %s step %d: loss %.4g over %d tokens, gradient norm %.3g",
            model.id, model.num_steps, measured["loss"], measured["tokens_trained"], stepped.grad_norm,
        )  # fmt: skip
        try:
            model.run.log(model.num_steps, (), measured, version=stepped.version, device=self.policy.device.type)
        except (BridgeError, OSError) as error:
            logger.warning("the metrics of model %s are not written: %s", model.id, error)

    def _in_flight(self) -> InFlight | None:
        """Return what becomes of requests in flight when a step is published; None: nothing."""
        return None

    @abstractmethod
    def _weights_changed(self, model: Model) -> None:
        """Note that the weights of a model have changed."""

    # Checkpoints.

    def save(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Save weights and optimizer, from which a model resumes."""
        model = self.current(body["model_id"])
        path = SavedPath(model.id, "weights", body.get("path") or f"step-{model.num_steps}").checked()
        folder = self.checkpoints.to_write(path, overwrite=bool(body.get("overwrite")))
        self.policy.save_state(folder, step=model.num_steps)
        model.is_saved = True
        return {"path": str(path), "type": "save_weights"}

    def save_for_sampler(self, body: Mapping[str, Any]) -> str | SamplingClient:
        """Save the weights alone under a name, and return the path; without a name, return a client of them."""
        model = self.current(body["model_id"])
        if body.get("path") is None:
            is_live = (body.get("kind") or "snapshot") == "inflight"
            return self._live(model) if is_live else self._snapshot(model)
        path = SavedPath(model.id, "sampler_weights", body["path"]).checked()
        folder = self.checkpoints.to_write(path, overwrite=False)
        self.policy.save(folder)
        self._saved_for_sampler(str(path))
        return str(path)

    @abstractmethod
    def _snapshot(self, model: Model) -> SamplingClient:
        """Return a client of the weights as they are now."""

    @abstractmethod
    def _live(self, model: Model) -> SamplingClient:
        """Return a client of a model's newest weights, whatever they are."""

    def _saved_for_sampler(self, path: str) -> None:  # noqa: B027 - adapters are loaded from the path
        """Note that a checkpoint has the weights as they are now."""


class _Loss:
    """The loss of one request, for the micro-batches that its data become."""

    def __init__(
        self, data: Sequence[Datum], ratios: LossFunction | None, config: Config, device: torch.device
    ) -> None:
        self._data = data
        self._ratios = ratios
        self._config = config
        self._device = device

    def __call__(self, logprobs_NX: Tensor, batch: MicroBatch) -> Tensor:
        if self._ratios is None:
            if batch.several is not None:
                return cross_entropy(logprobs_NX, batch.several.weights_NK)
            return cross_entropy(logprobs_NX, self._input("weights", batch))
        sampled_N, advantages_N = (self._input(name, batch) for name in ("logprobs", "advantages"))
        has_mask = "sequence_ratio_mask" in self._ratios.inputs
        mask_N = self._input("sequence_ratio_mask", batch) if has_mask else torch.ones_like(sampled_N)
        rows = Rows(logprobs_NX, sampled_N, advantages_N, mask_N, batch.sequences_N)
        return self._ratios.compute(rows, self._config)

    def _input(self, name: str, batch: MicroBatch) -> Tensor:
        """Return an input of all rows."""
        of_data = self._inputs[name]
        return torch.cat([of_data[index] for index in batch.indices])

    @cached_property
    def _inputs(self) -> Mapping[str, Sequence[Tensor]]:
        """Name -> the input of each datum, on the device after one transfer; weights that a datum lacks are 1."""
        names = ("weights",) if self._ratios is None else self._ratios.inputs
        arrays = [datum.inputs.get(name, np.ones(len(datum.tokens))) for name in names for datum in self._data]
        joined = torch.from_numpy(np.concatenate(arrays).astype(np.float32)).to(self._device)
        split = joined.split([len(values) for values in arrays])
        return {
            name: split[number * len(self._data) : (number + 1) * len(self._data)] for number, name in enumerate(names)
        }


def _with_only(datum: Datum, names: Collection[str]) -> Datum:
    """Return a datum with only these inputs: clients may send others, of any shape, which their loss does not read."""
    return replace(datum, inputs={name: value for name, value in datum.inputs.items() if name in names})


def _fault(datum: Datum, loss: str, needed: Sequence[str], longest: int | None) -> str:
    """Return why a datum cannot be used; empty: it can."""
    length = len(datum.tokens)
    if not length or (longest is not None and length >= longest):
        return f"has {length} tokens, expected 1 to {'any' if longest is None else longest - 1}"
    if "target_tokens" not in datum.inputs:
        return "has no target_tokens"
    missing = [name for name in needed if name not in datum.inputs and name != "weights"]
    if missing:
        return f"has no {missing[0]}"
    targets = datum.inputs["target_tokens"]
    if targets.ndim not in ((1, 2) if loss == "cross_entropy" else (1,)):
        return f"has target_tokens of shape {targets.shape}, expected ({length},)"
    for name in ("target_tokens", *needed):
        value = datum.inputs.get(name)
        if value is None:
            continue
        expected = targets.shape if name in ("target_tokens", "weights") else (length,)
        if value.shape != expected or len(value) != length or not value.size:
            return f"has {name} of shape {value.shape} for {length} tokens, expected {expected}"
        if not np.isfinite(value).all():
            return f"has {name} that are not finite"
    return ""


def _on_host(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.float32]]:
    """Copy tensors from the device in one transfer, and reshape them."""
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
    split = joined.split([tensor.numel() for tensor in tensors])
    return [values.numpy().reshape(shape) for values, shape in zip(split, shapes, strict=True)]


def _counted(datum: Datum) -> NDArray[np.bool_]:
    """Return which positions count for the loss."""
    length = len(datum.tokens)
    weights = datum.inputs.get("advantages", datum.inputs.get("weights"))
    if weights is None:
        return np.ones(length, dtype=bool)
    counted: NDArray[np.bool_] = np.any(weights.reshape(length, -1), axis=1)
    return counted


def _sampled_logprobs(datum: Datum) -> tuple[float, ...]:
    """Return the sampler's log-probabilities; NaN where there are none: clients fill prompts with zeros."""
    length = len(datum.tokens)
    if "logprobs" not in datum.inputs or "advantages" not in datum.inputs:
        return (math.nan,) * length
    sampled = np.where(datum.inputs["advantages"] != 0, datum.inputs["logprobs"], math.nan)
    return tuple(sampled.astype(float).tolist())


def _sample(datum: Datum, counted_N: NDArray[np.bool_], *, has_several: bool) -> Sample:
    """Return a datum as passes take it: every position is a row, and its target is whatever the client says.

    The tokens before the first one that counts are the prompt, which is computed once for all data that begin with it.
    The last token is there for its row alone; nothing attends to it.
    """
    length = len(datum.tokens)
    targets = datum.inputs["target_tokens"]
    several: dict[str, Any] = {}
    if has_several:
        weights = datum.inputs.get("weights", np.ones(targets.shape)).reshape(length, -1)
        several = {"target_weights": tuple(map(tuple, weights.astype(float).tolist()))}
        targets = targets.reshape(length, -1)
    as_tuples = tuple(map(tuple, targets.tolist())) if has_several else tuple(targets.tolist())
    last_of_prompt = int(counted_N.argmax())  # 0 if none counts
    tokens = (*datum.tokens, datum.tokens[-1])
    return Sample(
        prompt_token_ids=tokens[: last_of_prompt + 1],
        token_ids=tokens[last_of_prompt + 1 :],
        sampled_logprobs=_sampled_logprobs(datum),
        advantages=(0.0,) * length,
        weight=1.0,
        targets=as_tuples,
        num_prompt_rows=last_of_prompt,
        **several,
    )
