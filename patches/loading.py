"""Watch vLLM load the model: where each weight would go, and whether it is still there, as it was, once vLLM is done.

Symptom: updates of some weights are not seen in what is generated.
Cause: after loading, vLLM rewrites weights for a kernel, or derives others from them that the kernel reads: packed or
shuffled experts, the absorbed projections of latent attention.
What is done: every parameter's digest is taken when its weights are loaded and again when vLLM has processed them, and
tensors that turn up in between are noticed. A model of which either is found is refused by name.
Seen in vLLM 0.26 to 0.33, `vllm/model_executor/model_loader/base_loader.py`.

Not covered: the layout itself (`layers.py`), draft models, loaders that do not go through `BaseModelLoader.load_model`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn
from transformers import PreTrainedModel

from bridge.errors import BridgeError, UnsupportedModelError
from bridge.server.shard import View
from bridge.weights import digest, skeleton
from bridge.weights.layout import OTHER_MODES, Shape

RECORDS: "WeakKeyDictionary[nn.Module, Record]" = WeakKeyDictionary()
"""What is known of every model that this process has loaded."""


@dataclass
class Record:
    """How one model was loaded."""

    expected: dict[str, Shape] = field(default_factory=dict)
    """Hugging Face parameter -> its shape."""
    views: dict[str, View] = field(default_factory=dict)
    """Hugging Face parameter -> where it lies, by the names that vLLM's parameters have without LoRA."""
    refusal: BridgeError | None = None
    """Why it cannot be shared; None if it can."""


def patch() -> None:
    """Wrap `BaseModelLoader.load_model`; once per process."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    original = BaseModelLoader.load_model
    if hasattr(original, "bridge"):
        return

    @wraps(original)
    def load_model(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        if model_config is not vllm_config.model_config:  # a draft's
            loaded: nn.Module = original(self, vllm_config, model_config, *args, **kwargs)
            return loaded
        with watching(self, model_config) as watch:
            model: nn.Module = original(self, vllm_config, model_config, *args, **kwargs)
        RECORDS[model] = watch.finish(model)
        return model

    load_model.bridge = True  # type: ignore[attr-defined]
    BaseModelLoader.load_model = load_model


def record_of(model: nn.Module) -> Record:
    """Return how `model` was loaded.

    Raises:
        UnsupportedModelError: it was loaded in a way that was not watched, or cannot be shared.
    """
    record = RECORDS.get(model)
    if record is None:
        raise UnsupportedModelError(
            "vLLM loaded its weights by a loader that Bridge cannot watch", remedy="leave --load-format away"
        )
    if record.refusal is not None:
        raise record.refusal
    return record


@contextmanager
def watching(loader: Any, model_config: Any) -> Iterator["Watch"]:
    """Watch `loader` load one model."""
    watch = Watch(model_config)
    original = loader.load_weights

    def load_weights(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        watch.before(model)
        original(model, *args, **kwargs)
        watch.loaded(model)

    loader.load_weights = load_weights
    try:
        yield watch
    finally:
        del loader.load_weights


class Watch:
    """What is seen of one load; the model of transformers is made first, since vLLM may change its classes."""

    def __init__(self, model_config: Any) -> None:
        self._record = Record()
        self._skeleton: PreTrainedModel | None = None
        self._digests: dict[str, str] = {}
        self._known: dict[int, ReferenceType[Tensor]] = {}
        with self._refusing():
            config = model_config
            built = skeleton.build(config.model, config.dtype, trust_remote_code=config.trust_remote_code)
            self._skeleton, self._record.expected = built, skeleton.shapes(built)

    def before(self, model: nn.Module) -> None:
        """Learn where each weight goes; `model` has its parameters, and nothing in them yet."""
        from patches import layers

        with self._refusing():
            if self._skeleton is not None:
                self._record.views = layers.views(model, self._skeleton)
        self._skeleton = None

    def loaded(self, model: nn.Module) -> None:
        """Note what the weights are, and which tensors there are."""
        self._digests = {name: digest.digest(parameter) for name, parameter in model.named_parameters()}
        self._known = {id(tensor): ref(tensor) for _, tensor in _tensors(model)}

    def finish(self, model: nn.Module) -> Record:
        """Compare with what vLLM has made of it, and return what is known."""
        now = {name: digest.digest(parameter) for name, parameter in model.named_parameters()}
        altered = sorted(name for name, before in self._digests.items() if now.get(name) != before)
        derived = sorted({name for name, tensor in _tensors(model) if self._is_new(tensor)} - self._digests.keys())
        with self._refusing():
            _refuse(altered, "rewritten by vLLM for one of its kernels")
            _refuse(derived, "derived by vLLM from weights, and would not follow a step")
        return self._record

    def _is_new(self, tensor: Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is None or known() is not tensor

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Keep the first refusal for when somebody asks: the server itself is none the worse for it."""
        try:
            yield
        except BridgeError as error:
            self._record.refusal = self._record.refusal or error


def _refuse(names: list[str], why: str) -> None:
    if names:
        more = f"; and {len(names) - 3} more" if len(names) > 3 else ""
        raise UnsupportedModelError(f"{', '.join(names[:3])}{more}: {why}", remedy=OTHER_MODES)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of floating-point numbers that a module holds, parameter or not; single numbers are scales."""
    for prefix, module in model.named_modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        for name, value in held.items():
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 1:
                    yield f"{prefix}.{name}", tensor
