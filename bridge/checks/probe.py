"""The probe: a child process that answers questions about torch, the driver and a model. It may crash or hang.

`python -m bridge.checks.probe MODEL QUESTION...` prints each fact immediately: imports are slow, and a crash must not
lose what was found before it.
"""

import ctypes
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field

from bridge.core.python_child import Ended, exit_code, run_child
from bridge.errors import UnsupportedModelError, first_line, with_class
from bridge.server.manifest import Record

MODULE = "bridge.checks.probe"
TIMEOUT_S = 120.0
COMPANIONS = ("torchvision",)
"""transformers imports them if they are installed: a broken one breaks text models too."""
MODEL_CLASSES = ("AutoModelForCausalLM", "AutoTokenizer")
IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, NameError, TypeError, ValueError)
FACTS = '{"probe": '
"""Start of a line with facts; libraries may print other lines."""
Question = Literal["imports", "cuda", "tokens", "build"]


class Gpu(Record):
    """One GPU that this process can use."""

    uuid: str
    """UUID as nvidia-smi prints it."""
    name: str
    total_bytes: int
    free_bytes: int | None
    """None: the driver does not report it."""
    error: str | None = None
    """Why the driver does not report free memory."""


class Tokens(Record):
    """A model's tokens, according to its tokenizer, its chat template and its embedding."""

    num_tokens: int
    num_embeddings: int | None
    """None: the configuration does not name it."""
    beyond: str
    """Describes the tokens without an embedding; empty: every token has one."""
    chat_is_beyond: bool
    """Whether every prompt of chat messages contains a token without an embedding."""
    has_template: bool
    end_of_turn: str
    """The token that ends a turn in the chat template; empty: there is none."""
    end_id: int | None
    stops_there: bool
    """Whether a server of the model stops at that token by itself."""


class Facts(Record):
    """Everything that the child reported before it ended."""

    torch: str | None = None
    """Version of torch with its build, such as `2.13.0+cpu`; None: torch cannot be imported."""
    torch_cuda: str | None = None
    """CUDA version that torch was built for; None: a CPU build."""
    driver_cuda: str | None = None
    """Newest CUDA version that the driver runs; None: no driver, or the child did not get that far."""
    gpus: tuple[Gpu, ...] = ()
    """The visible GPUs, in torch's order."""
    cuda_error: str | None = None
    """Why torch could not initialize CUDA."""
    imports: dict[str, str | None] = Field(default_factory=dict)
    """Module -> import error; None: it can be imported. Modules that were not reached are missing."""
    unsupported: str = ""
    """Why transformers' class for the model cannot be trained; empty: it can be, or the question was not asked."""
    tokens: Tokens | None = None
    trouble: str | None = None
    """How the child failed, and at which action; None: it did not fail."""

    def import_error(self, module: str) -> str | None:
        """Return why `module` cannot be imported; None: it can."""
        return self.imports.get(module, self.trouble or "not tried")


def ask(*questions: Question, model: str = "") -> Facts:
    """Ask a child process, about `model` if a question needs one. Never raises, whatever state torch is in."""
    return parse(run_child(MODULE, model, *questions, timeout_s=TIMEOUT_S))


def parse(ended: Ended) -> Facts:
    """Merge the child's lines, one JSON object each; `doing` names the last action that it began."""
    known: dict[str, Any] = {"imports": {}, "doing": ""}
    for line in ended.stdout.splitlines():
        if line.startswith(FACTS):
            facts = json.loads(line)["probe"]
            known |= {**facts, "imports": known["imports"] | facts.get("imports", {})}
    doing = known.pop("doing")
    trouble = ended.trouble()
    if trouble and doing:
        trouble = f"{trouble} ({doing})"
    return Facts.model_validate(known | {"trouble": trouble})


def _imports(_model: str) -> None:
    """Import torch, then transformers and the packages that transformers imports."""
    _report(doing="import torch")
    if not try_import("torch"):
        return
    import torch

    _report(torch=str(torch.__version__), torch_cuda=torch.version.cuda)
    for companion in filter(importlib.util.find_spec, COMPANIONS):
        _report(doing=f"import {companion}")
        try_import(companion)
    _report(doing="import transformers")
    try_import("transformers", MODEL_CLASSES)


def _cuda(_model: str) -> None:
    """Start CUDA, which may hang or crash: make this the last question."""
    try:
        import torch
    except IMPORT_ERRORS:
        return  # reported by the question `imports`
    _report(doing="start CUDA")
    if torch.version.cuda is None:
        _report(cuda_error="torch is a CPU build")
        return
    _report(driver_cuda=_driver_cuda())
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        _report(cuda_error=first_line(error))
        return
    _report(gpus=[_describe_gpu(index) for index in range(torch.cuda.device_count())])


def try_import(name: str, members: tuple[str, ...] = ()) -> bool:
    """Import `name` and its lazily loaded `members`, and report and return whether that worked."""
    fault = None
    try:
        module = importlib.import_module(name)
        for member in members:
            getattr(module, member)
    except IMPORT_ERRORS as error:
        fault = with_class(error)
    _report(imports={name: fault})
    return fault is None


def _report(**facts: Any) -> None:
    sys.stdout.write(json.dumps({"probe": facts}) + "\n")
    sys.stdout.flush()


def _driver_cuda() -> str | None:
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def _describe_gpu(index: int) -> dict[str, Any]:
    import torch

    from bridge.weights.cuda_ipc import gpu_uuid

    properties = torch.cuda.get_device_properties(index)
    uuid = gpu_uuid(torch.device("cuda", index))
    gpu = {"uuid": uuid, "name": properties.name, "total_bytes": properties.total_memory}
    try:
        return gpu | {"free_bytes": torch.cuda.mem_get_info(index)[0]}
    except RuntimeError as error:
        return gpu | {"free_bytes": None, "error": first_line(error)}


def _build(model: str) -> None:
    """Build the class of `model` without weights, and derive the names of the tensors in its files."""
    import torch

    from bridge.weights import model_folder, skeleton

    try:
        empty = skeleton.build(model, torch.bfloat16)
        model_folder.saved_form(empty, model_folder.state(empty))
    except UnsupportedModelError as error:
        _report(unsupported=first_line(error))


def _tokens(model: str) -> None:
    """Report how the tokenizer of `model`, its chat template and its embedding fit together."""
    from bridge.rollouts import chat_template
    from bridge.rollouts.vocabulary import Vocabulary
    from bridge.weights import skeleton

    tokenizer = skeleton.tokenizer(model)
    vocabulary = Vocabulary.of(tokenizer, model)
    ids: list[int] = []
    if tokenizer.chat_template is not None:
        ids = chat_template.apply_chat_template(tokenizer, [chat_template.USER], tokenize=True)
    largest = max(ids, default=-1)
    tokens = Tokens(
        num_tokens=len(tokenizer),
        num_embeddings=vocabulary.num_embeddings,
        beyond=vocabulary.beyond(tokenizer),
        chat_is_beyond=vocabulary.num_embeddings is not None and largest >= vocabulary.num_embeddings,
        has_template=tokenizer.chat_template is not None,
        end_of_turn=vocabulary.end_of_turn,
        end_id=vocabulary.end_id,
        stops_there=not vocabulary.end_ids,
    )
    _report(tokens=tokens.model_dump())


QUESTIONS: Mapping[Question, Callable[[str], None]] = {
    "imports": _imports,
    "cuda": _cuda,
    "tokens": _tokens,
    "build": _build,
}


def answer(model: str, *questions: Question) -> None:
    for question in questions:
        QUESTIONS[question](model)


if __name__ == "__main__":
    sys.exit(exit_code(answer, *sys.argv[1:]))
