"""Run every check of `bridge doctor` on facts that make it fail; `FINDINGS` lists the results."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from bridge.checks import Check, hardware, model, server, software
from bridge.checks.probe import Facts, Gpu, Tokens
from bridge.checks.server import Process
from bridge.core.process import ProcessIdentity
from bridge.core.python_child import Ended
from bridge.server import manifest as manifests
from bridge.server.client import BridgeClient
from bridge.server.protocol import Finiteness, Holder, Status
from bridge_cli import doctor
from tests.unit.checks_sample import CPU_FACTS, GIB, UUID, cuda_handle, gpu_facts, manifest, shared_memory_handle

SERVER = ProcessIdentity(pid=4711, start_ticks=1, pid_namespace=ProcessIdentity.current().pid_namespace)
TRAINER = Holder(processes=(SERVER.model_copy(update={"pid": 4712}),))
URL = "http://127.0.0.1:9001"
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
PLUGINS = {"vllm.general_plugins": ["bridge"], "vllm.endpoint_plugins": ["bridge_routes"]}
BAD_VALUES = {
    "VLLM_PORT": "tcp://10.0.0.1:8000", "VLLM_USE_MODELSCOPE": "True", "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1.5",
}  # fmt: skip
Findings = Iterator[Check]


def software_findings() -> Findings:
    no_torch = Facts(imports={"torch": "OSError: libcudart.so.13: cannot open shared object file"})
    broken = CPU_FACTS.model_copy(update={"imports": {"torchvision": "RuntimeError: operator torchvision::nms"}})
    loads = CPU_FACTS.model_copy(update={"imports": {"torchvision": None}})
    yield software.operating_system("darwin")
    yield software.packages_complete(["httpx>=0.27", "rich>=13"], {"rich": "12.0"}.get)
    yield software.python_version((3, 10))
    yield software.python_version((3, 14))
    yield software.torch_build(no_torch, "cuda")
    yield software.torch_build(CPU_FACTS, "cuda")
    yield software.vllm_build({"vllm": "0.33.0", "vllm-cpu": "0.32.0"}, "cuda", server_lives=False)
    yield software.vllm_build({"vllm-cpu": "0.32.0"}, "cuda", server_lives=False)
    yield software.vllm_build({}, "cuda", server_lives=False)
    yield software.vllm_build({}, "cuda", server_lives=True)
    yield software.vllm_requirement("vllm 0.33.0", ["torch==2.13.0"], "torch", "2.11.0")
    yield software.transformers_imports(CPU_FACTS.model_copy(update={"imports": {"transformers": "x"}}), None)
    failing = {"transformers": "RuntimeError: operator torchvision::nms does not exist"}
    yield software.transformers_imports(CPU_FACTS.model_copy(update={"imports": failing}), "5.19.0")
    yield software.torchvision_fits(broken, "0.28.0")
    yield software.torchvision_fits(loads, "0.28.0+cu130")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bridge.py").touch()
        yield software.nothing_shadows(Path(folder))
    torch = mock.Mock(origin="/venv/lib/python3.12/site-packages/torch/__init__.py", cached="/venv/torch.pyc")
    with mock.patch("importlib.util.find_spec", return_value=torch):
        yield software.bytecode_kept("torch")
    yield software.plugins_registered({**PLUGINS, "vllm.endpoint_plugins": []})
    with mock.patch("bridge_patches.compatibility.installed_version", return_value="0.99.0"):
        yield doctor.patches_fit()


def hardware_findings() -> Findings:
    hidden = gpu_facts().model_copy(update={"gpus": (), "cuda_error": "CUDA unknown error"})
    (gpu,) = gpu_facts(free_gib=20).gpus
    silent = Gpu(uuid=UUID, name=gpu.name, total_bytes=gpu.total_bytes, free_bytes=None, error="CUDA error: unknown")
    visible: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": ""}
    yield hardware.gpu_visible(CPU_FACTS, "cuda", {}, driver_loaded=False)
    yield hardware.gpu_visible(CPU_FACTS, "cuda", {}, driver_loaded=True)
    yield hardware.gpu_visible(hidden, "cuda", visible, driver_loaded=True)
    yield hardware.gpu_visible(hidden, "cuda", {}, driver_loaded=True)
    yield hardware.driver_runs_torch(gpu_facts(driver_cuda=None).model_copy(update={"trouble": None}))
    yield hardware.driver_runs_torch(gpu_facts(driver_cuda="12.8"))
    yield hardware.gpu_memory(silent, server_lives=False)
    yield hardware.gpu_memory(gpu, server_lives=False)
    yield hardware.gpu_memory(gpu.model_copy(update={"free_bytes": GIB}), server_lives=True)
    yield hardware.main_memory(2 * GIB, None)
    yield hardware.main_memory(64 * GIB, 2 * GIB)
    yield hardware.shm_space(None)
    yield hardware.shm_space(2**25)
    yield from shared_memory_findings()
    yield from cuda_ipc_findings()


def shared_memory_findings() -> Findings:
    denied = PermissionError(13, "Permission denied")
    for trial in (Ended(returncode=1, last_error_line="Permission denied"), Ended(returncode=0)):
        with mock.patch.object(hardware, "run_child", return_value=trial):
            yield hardware.over_memfd()
    with mock.patch.object(os, "memfd_create", side_effect=denied):
        yield hardware.over_memfd()
    with mock.patch.object(os, "posix_fallocate", side_effect=OSError(12, "Cannot allocate memory")):
        yield hardware.over_memfd()


def cuda_ipc_findings() -> Findings:
    yield hardware.judge_trial(Ended(returncode=0, stdout=f"{hardware.READ}0\n"), {})
    for signs, _, _ in (*hardware.SURE, *hardware.LIKELY):
        yield hardware.judge_trial(Ended(returncode=1, last_error_line=f"... {signs[0]} ..."), {})
    expandable = {hardware.ALLOCATOR_VARIABLES[-1]: hardware.EXPANDABLE}
    yield hardware.judge_trial(Ended(returncode=1, last_error_line="any other error"), expandable)
    yield hardware.judge_trial(Ended(returncode=1, last_error_line="any other error"), {})


def environment_findings() -> Findings:
    yield from software.environment_variables(BAD_VALUES, "cpu")


def model_findings() -> Findings:
    """Yield one finding per obstacle, for the first mode that it rules out."""
    latent = {"kv_lora_rank": 512, "index_topk": 2048, "architectures": ["DeepseekV32ForCausalLM"]}
    for config in (
        {"quantization_config": {"quant_method": "fp8"}},
        {"is_encoder_decoder": True},
        {"model_type": "qwen2_5_vl", "text_config": {"hidden_size": 8}},
        {"architectures": ["BertModel"]},
        latent,
    ):
        with mock.patch.object(model, "unbuildable", return_value=[]):
            yield next(check for check in model.modes("MODEL", config) if check.status != "PASS")
    with tempfile.TemporaryDirectory() as folder:
        yield from model.saving(folder)
    tokens = Tokens(
        num_tokens=151_669, num_embeddings=151_665, beyond="", chat_is_beyond=False, has_template=True,
        end_of_turn="<|im_end|>", end_id=151_645, stops_there=True,
    )  # fmt: skip
    beyond = "4 tokens of the tokenizer are beyond the model's 151,665 embeddings, the first: '<think>' (151665)"
    yield from model.tokens(Facts(trouble="no usable tokenizer"))
    for changes in (
        {"stops_there": False}, {"end_of_turn": "", "end_id": None}, {"has_template": False}, {"num_embeddings": None},
        {"beyond": beyond}, {"beyond": beyond, "chat_is_beyond": True},
    ):  # fmt: skip
        yield from model.tokens(Facts(tokens=tokens.model_copy(update=changes)))


def server_findings() -> Findings:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(mock.patch.dict(os.environ, {"LOGDIR": ""}))
        stack.enter_context(mock.patch.object(manifests, "DEFAULT_FOLDER", folder))
        stack.enter_context(mock.patch.object(Path, "cwd", return_value=folder))
        stack.enter_context(mock.patch("socket.gethostname", return_value="this-host"))
        yield from manifest_findings(folder / manifests.MANIFEST_NAME)
    yield server.same_versions(of_server(), {"bridge": "0.1.0", "torch": "2.11.0"})
    yield server.same_gpu(of_server(backend="cuda_ipc", gpu_uuid=UUID, ipc_handles={"w": cuda_handle()}), [])
    with mock.patch("builtins.open", side_effect=PermissionError(13, "Permission denied")):
        yield server.weights_open(of_server(ipc_handles={"w": shared_memory_handle("/proc/4711/fd/9")}))
    with tempfile.NamedTemporaryFile() as short:
        yield server.weights_open(of_server(ipc_handles={"w": shared_memory_handle(short.name)}))
    yield from answer_findings()
    yield from port_findings()
    yield server.engines_have_servers([Process(4711, "VLLM::EngineCore", (1,))])


def manifest_findings(path: Path) -> Findings:
    def written(**changes: Any) -> None:
        manifests.write(of_server(**changes), path)

    yield from server.examine(path).checks
    for text in ('{"model": "', "[]", '{"ipc_handles": {}}', '{"schema_version": 9}'):
        path.write_text(text)
        path.chmod(0o600)
        yield from server.examine(path).checks
    path.write_text("{}")
    path.chmod(0o666)
    yield from server.examine(path).checks
    path.unlink()
    elsewhere = {"boot_id": "another", "host": "other-host"}
    foreign = {"server": SERVER.model_copy(update={"pid_namespace": "pid:[1]"})}
    for changes in (elsewhere, foreign, {}):
        written(**changes)
        yield from server.examine(path).checks
    yield from server.others(None)
    written(server=ProcessIdentity.current())
    yield from server.others(None)
    with mock.patch.object(Path, "is_file", side_effect=PermissionError(13, "Permission denied")):
        yield from server.others(None)


def answer_findings() -> Findings:
    """Yield one finding per wrong answer of a server."""
    status = Status(model=MODEL, version=7, state="serving", server=SERVER)
    held: dict[str, Any] = {"holder": TRAINER}
    paused = status.model_copy(update=held | {"state": "paused"})
    torn = status.model_copy(update=held | {"state": "torn"})

    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[Errno 111] Connection refused")

    yield finding_on(server._health, refuse)
    yield finding_on(server._health, lambda _: httpx.Response(503))
    yield finding_on(server._fence, refuse)
    yield finding_on(server._fence, lambda _: httpx.Response(404))
    yield finding_on(server._fence, lambda _: httpx.Response(200, text="{}"))
    yield finding_on(server._fence, lambda _: httpx.Response(200, text=torn.model_dump_json()))
    yield finding_on(server._fence, lambda _: httpx.Response(200, text=paused.model_dump_json()))
    numbers = Finiteness(num_tensors=290, not_finite=("model.norm.weight",))

    def poisoned(request: httpx.Request) -> httpx.Response:
        document = status if request.url.path.endswith("status") else numbers
        return httpx.Response(200, text=document.model_dump_json())

    yield finding_on(server._numbers, poisoned)


def finding_on(
    check: Callable[[BridgeClient, manifests.Manifest], Check], answer: Callable[[httpx.Request], httpx.Response]
) -> Check:
    with BridgeClient(of_server(), timeout_s=1.0) as client:
        client._http = httpx.Client(base_url=URL, transport=httpx.MockTransport(answer))
        return check(client, of_server())


def port_findings() -> Findings:
    with mock.patch.object(server, "listening", dict):
        yield server.port(9001, SERVER.pid)
    for pid, others in ((4711, {}), (None, {}), (4711, {4711: "--vllm-config-path PATH"})):
        listener = Process(pid=pid, command="" if pid is None else "python -m http.server 9001")
        with (
            mock.patch.object(server, "listening", return_value={9001: 4711}),
            mock.patch.object(server, "describe", return_value=listener),
        ):
            yield server.port(9001, None, others)


def of_server(**changes: Any) -> manifests.Manifest:
    return manifest(**{"model": MODEL, "url": URL, "server": SERVER} | changes)


FINDINGS: Mapping[str, Callable[[], Findings]] = {
    "Software": software_findings,
    "Hardware": hardware_findings,
    "Environment": environment_findings,
    "Model": model_findings,
    "Server": server_findings,
}
"""Section of `bridge doctor` -> what its checks can find."""
