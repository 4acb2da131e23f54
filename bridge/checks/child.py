"""Run parts of the checks in another process with a time limit, where a crash or a hang is harmless.

`python -m bridge.checks.child PROGRAM ARGUMENT...` is one of `PROGRAMS`. `facts` prints each fact at once: imports are
slow, and a crash must not lose what was found before it.
"""

import ctypes
import importlib
import importlib.util
import json
import mmap
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

import bridge
from bridge.core.interrupt import acting_interrupt, deferred_interrupt, wait_until
from bridge.errors import BridgeError, first_line, with_class
from bridge.server.manifest import CudaHandle, Record

Began = Callable[[subprocess.Popen[str]], object]
"""Gets a process once it runs."""
MODULE = "bridge.checks.child"
POLL_S = 0.1
ERROR = "error: "
"""Start of the line on stderr that says why a program of ours failed."""
_ROOT = str(Path(bridge.__file__).parents[1])
_START = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"
FACTS_TIMEOUT_S, WRITER_TIMEOUT_S, TOKENS_TIMEOUT_S = 120.0, 60.0, 120.0
COMPANIONS = ("torchvision",)
"""transformers imports them if they are installed: a broken one breaks text models too."""
MODEL_CLASSES = ("AutoModelForCausalLM", "AutoTokenizer")
IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, NameError, TypeError, ValueError)
MEMFD_MARK = b"bridge was here"
MARK = 20_261
"""The number that the second process writes over CUDA IPC."""
DTYPE = "float32"
"""A type that a manifest may name and that holds the mark exactly."""
NUM_ELEMENTS, MARKED_ELEMENT = 1024, 321
READ = "read "
"""Prefix of a program's last line, before the value that it read."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended."""

    returncode: int | None
    """Its exit status, negative for a signal; None: it was killed at the time limit."""
    stdout: str = ""
    last_error_line: str = ""
    """Its line `error: ...`, else the last line on stderr; empty if there is none."""

    def trouble(self) -> str | None:
        """Return in a few words why it failed; None if it did not."""
        if self.returncode == 0:
            return None
        if self.returncode is None:
            return "no answer within the time limit"
        if self.returncode < 0:
            return f"Python was killed by {signal.Signals(-self.returncode).name}"
        return self.last_error_line or f"exit status {self.returncode}"


def run_child(
    *arguments: str,
    timeout_s: float,
    stdin: str = "",
    own_group: bool = True,
    module: str = MODULE,
    began: Began | None = None,
) -> Ended:
    """Run `python -m module`, without the current folder on the path, and wait until it ends.

    A child of a child stays in its parent's process group (`own_group=False`), so that killing the group kills both.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _START, _ROOT, module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=own_group,
    )
    returncode = None
    try:
        if began is not None:
            began(process)
        stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        returncode = process.returncode
    except BaseException as error:
        if own_group:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the child leads its own group: nobody else is in it
        else:
            process.kill()
        stdout, stderr = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    own = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]  # libraries may warn after it
    return Ended(returncode=returncode, stdout=stdout, last_error_line=(own or lines or [""])[-1])


def run_children(run: Callable[[int, Began], str], count: int) -> list[str]:
    """Return `run(index, began)` of each index, all at the same time; if one fails, or on Ctrl-C, all processes end."""
    processes: list[subprocess.Popen[str]] = []

    def have_ended(seconds: float) -> bool:
        ended, running = wait(results, timeout=seconds, return_when=FIRST_EXCEPTION)
        for result in ended:
            result.result()
        return not running

    with deferred_interrupt(), ThreadPoolExecutor(count) as pool:
        results = [pool.submit(run, index, processes.append) for index in range(count)]
        try:
            with acting_interrupt():
                wait_until(have_ended)
        finally:  # they would wait for each other
            while wait(results, timeout=POLL_S).not_done:
                for process in processes:
                    process.kill()
    return [result.result() for result in results]


class Gpu(Record):
    """One GPU that this process can use."""

    uuid: str
    """As nvidia-smi prints it."""
    name: str
    total_bytes: int
    free_bytes: int | None
    """None: the driver does not report it."""
    error: str | None = None
    """Why the driver does not report it."""


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
    trouble: str | None = None
    """How the child failed, and at what; None: it did not."""

    def import_error(self, module: str) -> str | None:
        """Return why `module` cannot be imported; None: it can."""
        return self.imports.get(module, self.trouble or "not tried")


class Tokens(Record):
    """The tokens of a model, as its tokenizer, its chat template and its embedding have them."""

    num_tokens: int
    num_embeddings: int | None
    """None: the configuration does not say it."""
    beyond: str
    """Which tokens have no embedding; empty: all have one."""
    chat_is_beyond: bool
    """Whether every prompt of chat messages has one of them."""
    has_template: bool
    end_of_turn: str
    """The token that ends a turn in the chat template; empty: none does."""
    end_id: int | None
    stops_there: bool
    """Whether a server of the model stops at it by itself."""


def tokens(model: str) -> Tokens | str:
    """Return the tokens of a model, or why they are unknown."""
    ended = run_child("tokens", model, timeout_s=TOKENS_TIMEOUT_S)
    lines = [line.removeprefix(READ) for line in ended.stdout.splitlines() if line.startswith(READ)]
    return Tokens.model_validate_json(lines[-1]) if lines else ended.trouble() or "no answer"


def gather() -> Facts:
    """Run the child. Never raises, whatever state torch and the driver are in."""
    return parse(run_child("facts", timeout_s=FACTS_TIMEOUT_S))


def parse(ended: Ended) -> Facts:
    """Merge the child's lines, one JSON object each; `doing` names what it began last."""
    known: dict[str, Any] = {"imports": {}, "doing": "start"}
    for line in ended.stdout.splitlines():
        if line.startswith('{"probe": '):  # else a library printed it
            facts = json.loads(line)["probe"]
            known |= {**facts, "imports": known["imports"] | facts.get("imports", {})}
    doing, trouble = known.pop("doing"), ended.trouble()
    return Facts.model_validate(known | {"trouble": f"{trouble} ({doing})" if trouble else None})


def _facts() -> None:
    """Print the facts; what is most likely to hang or crash comes last."""
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
    """Import `name` and its lazily loaded `members`, report whether that worked, and return it."""
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


def _write_memfd(path: str) -> None:
    with open(path, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as memory:  # noqa: PTH123
        memory[: len(MEMFD_MARK)] = MEMFD_MARK


def _export_cuda(uuid: str) -> None:
    """Share zeros, let another process write the mark, and print what is there then."""
    import torch

    from bridge.weights import cuda_ipc

    tensor = torch.zeros(NUM_ELEMENTS, dtype=getattr(torch, DTYPE), device=cuda_ipc.device_of(uuid))
    torch.cuda.synchronize(tensor.device)
    handle = cuda_ipc.export(tensor).model_dump_json()
    writer = run_child("write-cuda", uuid, timeout_s=WRITER_TIMEOUT_S, stdin=handle, own_group=False)
    if trouble := writer.trouble():
        raise RuntimeError(f"the second process: {trouble}")
    torch.cuda.synchronize(tensor.device)
    sys.stdout.write(f"{READ}{int(tensor[MARKED_ELEMENT].item())}\n")


def _write_cuda(uuid: str) -> None:
    """Open the exporter's memory, whose handle is on stdin, and write the mark into it."""
    import torch

    from bridge.weights import cuda_ipc

    handle = CudaHandle.model_validate_json(sys.stdin.read())
    device = cuda_ipc.device_of(uuid)
    torch.cuda.init()  # the opener expects an initialized CUDA
    tensor = torch.empty(0, dtype=getattr(torch, handle.dtype), device=device)
    tensor.set_(cuda_ipc.open_storage(handle, device), handle.tensor_offset, handle.shape, handle.stride)
    tensor[MARKED_ELEMENT] = MARK
    torch.cuda.synchronize(device)


def _build(model: str) -> None:
    """Build the class of `model` without its weights, and name the tensors of its files."""
    import torch

    from bridge.weights import model_folder, skeleton

    empty = skeleton.build(model, torch.bfloat16)
    model_folder.saved_form(empty, model_folder.state(empty))


def _tokens(model: str) -> None:
    """Print what the tokenizer of `model`, its chat template and its embedding have to do with each other."""
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
    sys.stdout.write(f"{READ}{tokens.model_dump_json()}\n")


PROGRAMS: dict[str, Callable[..., None]] = {
    "facts": _facts,
    "write-memfd": _write_memfd,
    "export-cuda": _export_cuda,
    "write-cuda": _write_cuda,
    "build": _build,
    "tokens": _tokens,
}


def exit_code(program: Callable[..., None], *arguments: str) -> int:
    """Run a child's program and return its exit code; the last line on stderr says why it failed."""
    try:
        program(*arguments)
    except (BridgeError, OSError, RuntimeError, ValueError) as error:
        traceback.print_exc()
        sys.stderr.write(f"{ERROR}{first_line(error)}\n")
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(PROGRAMS[sys.argv[1]], *sys.argv[2:]))
