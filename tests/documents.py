"""The code blocks of README.md and docs/, and how tests run each of them exactly as written.

A block is named by its first line, without a trailing comment. A block that is not in `TRIALS` fails a test.
`tests/cli/test_documents.py` runs them, in a folder with a model `MODEL` and everything else that a page names.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(?<!`)`(bridge [a-z-]+ [^`]+)`(?!`)")
"""A command inside a sentence or a table."""


@dataclass(frozen=True)
class Trial:
    """How a block is tested."""

    how: Literal["run", "file", "tested", "left out"]
    """`run`: its commands or its program; `file`: written beside the commands of its page, which use it; `tested`:
    another test runs it; `left out`: its flags are checked, and nothing is run."""
    why: str = ""
    """The file of the other test, or what this environment lacks."""
    is_slow: bool = False


RUN, SLOW, FILE = Trial("run"), Trial("run", is_slow=True), Trial("file")


def tested(file: str) -> Trial:
    return Trial("tested", file)


def left_out(why: str) -> Trial:
    return Trial("left out", why)


PICTURE, PACKAGES, GPUS = left_out("no code"), left_out("installs packages"), tested("tests/cpu/test_gpus.py")
ATROPOS = tested("tests/cpu/test_atropos.py")
TRIALS: Mapping[str, Mapping[str, Trial]] = {
    "README.md": {
        "most other systems                           Bridge": PICTURE,
        "pip install '.[gpu]'": PACKAGES,
        "bridge run --model Qwen/Qwen2.5-0.5B-Instruct --environment gsm8k --training-steps 100": SLOW,
        "# my_task.py": FILE,
        "make demo": tested("tests/cpu/test_demo.py"),
    },
    "docs/architecture.md": {
        "bridge run         import bridge        for_trl         bridge tinker": PICTURE,
        "with mode.publish(update) as window:": left_out("a piece of the trainer"),
    },
    "docs/atropos.md": {
        "pip install atroposlib==0.4.0": ATROPOS,
        "bridge serve-vllm --model MODEL": ATROPOS,
        "bridge run --model MODEL --gpus 4 --port 9001 --rollouts atropos --atropos-url http://127.0.0.1:8000"
        " --batch-size 256": left_out("four GPUs"),
        "# python environments/gsm8k_server.py serve --config servers.yaml"
        " --env.rollout_server_url http://127.0.0.1:8000 ...": left_out("several servers"),
        "# servers.yaml: the same server twice, on purpose": ATROPOS,
        "bridge serve-vllm --model MODEL -- --api-key KEY": ATROPOS,
        "VLLM_API_KEY=KEY bridge env gsm8k --model MODEL --atropos-url http://127.0.0.1:8000"
        " --server-url http://127.0.0.1:9001": ATROPOS,
        "step 3/100  24 groups sent  reward 0.412  5,310 tok/s  queue 1.5 batches": PICTURE,
    },
    "docs/distillation.md": {
        "bridge distill --model MODEL --teacher TEACHER --environment gsm8k": RUN,
        "bridge distill --config examples/recipes/distill.toml --model MODEL --teacher TEACHER": SLOW,
        '{"prompt": "What is 17 + 25?", "answer": "42", "hint": "The answer is 42. Answer with the number alone."}': (
            FILE
        ),
        "bridge distill --model MODEL --teacher self --environment jsonl --data problems.jsonl": RUN,
        "bridge run --model MODEL --environment gsm8k --teacher TEACHER --teacher-weight 0.1": SLOW,
        "import bridge": RUN,
    },
    "docs/environments.md": {
        "# calculator.py": FILE,
        "bridge run --model MODEL --environment calculator.py:Calculator": RUN,
        "bridge demo --model-only tiny": tested("tests/cpu/test_tools.py"),
        "bridge run --config examples/recipes/word_problems.toml --model MODEL": SLOW,
        "bridge run --model MODEL --environment gsm8k": SLOW,
        '{"prompt": "How many days are in a leap year?", "answer": "366"}': FILE,
        "bridge run --model MODEL --environment jsonl --data problems.jsonl": SLOW,
        '{"prompt": [{"role": "user", "content": "Which color?"}], "images": ["images/1.png"], "answer": "red"}': (
            tested("tests/cpu/test_images.py")
        ),
        "bridge run --model Qwen/Qwen3-VL-2B-Instruct --environment jsonl --data pictures.jsonl": tested(
            "tests/cpu/test_images.py"
        ),
        "bridge run --model MODEL --environment gsm8k --reward math,format=0.2,rewards.py:brief=0.1": SLOW,
        "# rewards.py": FILE,
        "# my_task.py": FILE,
        "bridge run --model MODEL --environment my_task.py:MyTask": SLOW,
        "# sums.py": FILE,
        "bridge run --model MODEL --environment sums.py:Sums": SLOW,
        "bridge run --model MODEL --environment calculator.py:Calculator --max-turns 4 --max-new-tokens 512"
        " --tool-timeout-s 10": SLOW,
        "# agent.py": FILE,
        "bridge run --model MODEL --environment agent.py:Adder --max-turns 4 --max-new-tokens 512"
        " --reward-processes 16": RUN,
        "# smolagents, in `run`": tested("tests/unit/agents/test_clients.py"),
        "# other_python.py": tested("tests/unit/agents/test_agent_runs.py"),
        "make verifiers": tested("tests/cpu/test_packages.py"),
    },
    "docs/library.md": {
        "import bridge": SLOW,
        "# advantages of your own": SLOW,
        "# a distribution over tokens as the target": SLOW,
        "# a loop that resumes": SLOW,
        "+import bridge": tested("tests/cpu/test_trl.py"),
        "RLOOTrainer(**bridge.for_trl(policy, args), args=args, reward_funcs=right, train_dataset=dataset)": tested(
            "tests/unit/test_trl.py"
        ),
    },
    "docs/tinker.md": {
        "pip install 'tinker>=0.25,<0.39'": left_out("a model of the hub; tests/unit/tinker/test_client.py is alike"),
    },
    "docs/looking.md": {
        "jq -r 'select(.step == 40) | .completions | max_by(.reward).text' runs/*/rollouts.jsonl": left_out(
            "jq, TensorBoard and Weights & Biases"
        ),
        "jq -r '.completions[].turns[]? | select(.role == \"assistant\").tool_calls[]?.name' runs/*/rollouts.jsonl"
        " | sort | uniq -c": left_out("jq"),
        "bridge report runs/20261121-1040-gsm8k": RUN,
        "bridge export runs/one/checkpoints/step_100 --out my-model": left_out("the second command needs the hub"),
        "vllm serve BASE --enable-lora --lora-modules mine=runs/two/checkpoints/adapter_step_100": left_out("vLLM"),
    },
    "docs/lora.md": {
        "bridge run --model MODEL --mode lora_only --lora-r 8 --environment arithmetic --training-steps 3"
        " --run-dir runs/lora": SLOW,
        "# load_adapter.py": left_out("the adapter of a run"),
        "vllm serve MODEL --enable-lora --max-lora-rank 8 --lora-modules"
        " mine=runs/lora/checkpoints/adapter_step_3": left_out("two servers"),
    },
    "docs/training.md": {
        "bridge run --config examples/recipes/sft_then_rl.toml --model MODEL": SLOW,
        "bridge run --config examples/recipes/dpo.toml --model MODEL --reference-model MODEL": SLOW,
        "# my_loss.py": FILE,
        "bridge run --model Qwen/Qwen2.5-0.5B-Instruct --environment gsm8k --loss my_loss.py:plain_clip": SLOW,
        "bridge run --model MODEL --environment arithmetic --training-steps 2 --quantization fp8_per_block": SLOW,
    },
    "docs/scaling.md": {
        "bridge run --model MODEL --gpus 4 --batch-size 256": GPUS,
        "bridge run --model MODEL --tensor-parallel-size 2": tested("tests/cpu/test_tensor_parallel.py"),
        "bridge run --model MODEL --gpus 8 --context-parallel-size 2 --max-new-tokens 131072": tested(
            "tests/cpu/test_context_parallel.py"
        ),
        "bridge serve-vllm --model MODEL --tensor-parallel-size 2": tested("tests/cpu/test_servers.py"),
        "bridge run --model MODEL --mode none --reload transfer --trainer-device cuda:1": tested(
            "tests/cpu/test_transfer.py"
        ),
        "bridge run --model MODEL --gpus 8 --hosts 2 --rendezvous 10.0.0.1:29400 --batch-size 256": tested(
            "tests/cpu/test_hosts.py"
        ),
        "#!/bin/bash": left_out("a Slurm cluster"),
        "bridge run --ray --model MODEL --gpus 8 --hosts 2 --batch-size 256 --save-path /shared/saved --restarts 3": (
            tested("tests/cli/test_on_ray.py")
        ),
    },
}
"""The blocks of each page, in order."""
SPANS = (
    "bridge plan --model MODEL --gpu-memory 140",
    "bridge init FOLDER",
    "bridge report RUN",
    "bridge export CHECKPOINT --out FOLDER",
)
"""Commands of README's table that need no server, and are run one after the other."""


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    page: str
    kind: str
    text: str

    @property
    def name(self) -> str:
        return re.split(r"\s{2,}#", self.text.strip().splitlines()[0].removesuffix(" \\"))[0].strip()

    @property
    def trial(self) -> Trial:
        return TRIALS[self.page][self.name]


def blocks(*pages: str) -> list[Block]:
    """Return all blocks of these pages, or of all pages."""
    return [
        Block(page, kind, text) for page in pages or PAGES for kind, text in BLOCK.findall((ROOT / page).read_text())
    ]


def commands(text: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the commands of a shell block: the variables before each, and its words."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        variables = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, variables[name] = words.pop(0).partition("=")
        if words:
            yield variables, words
