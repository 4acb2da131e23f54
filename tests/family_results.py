"""Results of the family proofs, kept as JSON, and docs/families.md, generated from them.

`python -m tests.family_results` regenerates the page, and `python -m tests.family_results FILE` with what
`pytest tests/gpu/test_families.py --record-into FILE` found. The proof itself is `family_proof.py`.
"""

import dataclasses
import fcntl
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.core.process import ProcessIdentity
from tests.models.families import FAMILIES, ON_GPUS

ROOT = Path(__file__).parents[1]
RESULTS = {
    device: ROOT / "benchmarks" / "results" / f"families-{device}.json" for device in ("cpu", "gpu", "parts", "readers")
}
"""Result files by device, of tensor parallelism without a server, and of other programs that read what was saved."""
ORDER = (*FAMILIES, *ON_GPUS)
"""The families, in row order."""
NUM_PARTS = (2, 4)
"""Numbers of parts into which every family is cut."""
PAGE = ROOT / "docs" / "families.md"
INTRODUCTION = """\
# Families

`make families` proves the families on a real vLLM on the CPU, with tiny configurations, random weights and default
settings: each parameter of the transformers model is matched to elements of vLLM's; log-probs agree before training;
`bridge train` takes three steps in place; then the server agrees with the saved checkpoint in plain transformers and
no longer with the old weights; and `bridge verify` passes. This page is generated from the results.

Phi-3.5-mini and Phi-4-mini have RoPE that depends on length (`longrope`). vLLM uses the long factors for every
sequence if `--max-model-len` exceeds `original_max_position_embeddings`, and the short ones otherwise. The trainer
does the same, while plain transformers chooses by the longest sequence of a batch. `dynamic` RoPE is trained up to
`max_position_embeddings`, where vLLM's frequencies end.

Qwen3.5, Qwen3.5-MoE and Qwen3-Next have layers with a state, GatedDeltaNet. The trainer runs them on each packed
sequence by itself, as rows padded at their end, and completions do not share their prompt there. `A_log` is float32 on
both sides, as vLLM keeps it. With CUDA, install `flash-linear-attention` and `causal-conv1d`: without them transformers
uses its much slower reference code.

Buffers that a model's files hold, such as the router's bias of DeepSeek-V3 and GLM-4.5, or Gemma 4's `layer_scalar`,
lie in the server's memory like weights. They are never trained, and every checkpoint holds them unchanged. Gemma 4 is
tested as its smaller models are: layers share keys and values, and tokens have an embedding per layer. Its difference
in the table is bf16's: it does not scale attention's scores, so that rounding weighs more. In float32, vLLM 0.32 and
transformers differ by 7e-6 nats on average and 1.4e-4 at most (551 tokens, 2026-11-26).

Mixtures of experts are tested with router replay: the trainer and plain transformers compute with the experts that the
server reported (`rerouted_share` below 5 %). Without it an expert that rounding exchanges would differ by more than a
wrong weight, and in Qwen3.5-MoE and Qwen3-Next for all tokens that follow.

Of a language model inside something larger (`...ForConditionalGeneration`), the language model is trained in place. The
other parts stay unchanged in the server's memory. They cost the trainer nothing, and every checkpoint holds them. Only
`--mode shared_vllm` trains such models, and without a KL divergence. For them, and for Qwen3.5's text model, vLLM needs
torchvision.

Prompts may have [images](environments.md#images) with Qwen3-VL, Qwen3.5, Qwen3.5-MoE and Mistral 3; the others are
trained on text alone. With one and two images vLLM 0.32 and the trainer differ as on text: by 0.004, 0.013 and 0.015
nats on average with Qwen's (bf16, before training), and by 0.8, 0.2 and 0.4 if the trainer computes with another image
of the same size. In float32, Qwen3-VL comes to 4e-7 (`pytest tests/cpu/test_images.py`, 2026-11-26).
Mistral 3 differs by 0.003, and by 0.6 with the other image.

vLLM serves families with `TransformersForCausalLM` through its Transformers backend.

A family that is not in this table may still work. There is no code per family: Bridge records the layout from vLLM's
own `load_weights` ([`loading.py`](../patches/bridge_patches/loading.py)), runs the same checks, and refuses what does
not pass by name.

"""
COLUMNS = (
    "family", "transformers", "vLLM", "fused in vLLM", "before", "after", "moved",
    *(f"TP {number}" for number in NUM_PARTS),
    "on a GPU: parameters", "GPU: before", "GPU: after", "GPU: moved",
)  # fmt: skip
READING = """
`before`, `after` and `moved` are mean log-prob differences over sampled tokens, in nats: the server against the
weights that it loaded, the server against the checkpoint of step 3, and after the steps against the old weights.

`GPU` is the same proof with more than 100 million parameters on a Hopper GPU, with torch.compile and CUDA graphs
(`pytest tests/gpu/test_families.py`). A dash: not run there, or refused.

"""
WINDOWS = """
On the GPU, Mistral and Phi-3 ran with a window of 4,096 tokens, longer than `--max-model-len`. With a shorter window in
every layer, vLLM 0.33's CUDA graphs decode incorrectly there: log-probs differ from `--enforce-eager` by 0.8 nats per
token, on untouched weights, where 0.008 is normal. For such models Bridge therefore keeps attention out of the graphs
by default (`--compilation-config '{"cudagraph_mode": "PIECEWISE"}'`): Mistral with a window of 512 then differs by
0.0079 before and after training. Gemma 2, with a window in every other layer, is not affected.

Phi-2's row on the GPU proves little: its three steps moved it to probabilities of 1, so that 0.0000 is what is left to
differ. It would take a lower learning rate; its row on the CPU has none of this.
"""
PARTS = """
`TP 2` and `TP 4` are without vLLM: as many ranks compute with their parts of the weights in float32, cut as vLLM cuts
them (4 parts share 2 KV heads by pairs, and the vocabulary is padded). The number is the largest relative difference
from the whole model, of log-probs, entropies and every gradient (`pytest tests/unit/passes/test_parallel.py`).
A trainer repeats the proof on a layer of each kind before it trains, and refuses what differs.

## Refused

The error names the parameters, the reason and the alternative; the exit code is 4. What the configuration reveals is
refused before vLLM starts. `bridge doctor --model MODEL` reports it for every mode.

"""
REFUSED_COLUMNS = ("what", "why", "instead")
REFUSED = (
    ("FP8, AWQ, GPTQ, bitsandbytes", "quantized: no values that an optimizer can update", "the unquantized model"),
    ("encoders, encoder-decoders", "not a causal language model", "another model"),
    (
        "a language model inside something larger, with `lora_only` or `none`, or as `--reference-model`",
        "the trainer loads no such model itself",
        "`shared_vllm` without `--kl-coef`",
    ),
    (
        "Gemma 3 with its vision model, as transformers 5.19 saves it",
        "vLLM 0.32 knows its files by their older names (`vision_tower.vision_model`)",
        "its text model, `Gemma3ForCausalLM`",
    ),
    (
        "images with Gemma 3 and Gemma 4",
        "an image's tokens attend to each other in both directions (in larger models of Gemma 4), and packs are causal",
        "text prompts, or a family with tested images",
    ),
    (
        "MiniMax-M2 on a CPU",
        "vLLM 0.32's router for CPUs takes scores by softmax alone (an assertion in its log)",
        "a GPU, where it passes the proof",
    ),
    (
        "MiniMax-M2 with transformers 5.17",
        "it ignores `rotary_dim`, which vLLM reads, and rotates whole heads",
        "transformers from 5.18 on, or `partial_rotary_factor` beside it, as in the proof",
    ),
    (
        "a family that transformers does not have, but code that comes with the model",
        "Bridge runs no such code; with `--trust-remote-code` both sides still build transformers' own class",
        "a family that transformers has",
    ),
    (
        "tied by its configuration, with another head in its files",
        "vLLM 0.26 drops the head, vLLM 0.32 and transformers 5 use it",
        '`"tie_word_embeddings": false` in its `config.json`',
    ),
    (
        "an adapter of the head (`--lora-target-modules lm_head`), or a head wrapped in a loop of your own",
        "log-probabilities are computed from the head's weight alone",
        "leave the head out",
    ),
    (
        "gpt-oss",
        "vLLM keeps its experts transposed, and on a CPU rewrites them for a kernel after loading",
        "`lora_only`, `none`",
    ),
    (
        "Gemma 4 with `attention_k_eq_v`",
        "vLLM copies each layer's keys twice, so that a step would change one copy alone",
        "`lora_only`, `none`",
    ),
    ("sparse latent attention", "vLLM computes with weights derived from `kv_b_proj`", "`lora_only`, `none`"),
    ("latent attention with `VLLM_MLA_DISABLE=0`", "the same: `W_UV`, `W_UK_T`", "Bridge's own setting, 1"),
    ("experts packed for a kernel", "vLLM rewrites them after loading", "`--moe-backend triton`, Bridge's own setting"),
    ("a weight with another dtype than the model", "its bytes differ from the trained ones", "`--dtype`"),
    (
        "expert parallelism, offloading, speculation with a draft model",
        "weights that move, or a second set of them",
        "turn it off; speculate by `ngram`",
    ),
    (
        "Llama 4's text model and ModernBERT's decoder; MPT, BLOOM",
        "transformers finds no decoder in them, or they take no positions, so sequences cannot be packed",
        "another model",
    ),
    (
        "`longrope` or `dynamic` RoPE in vLLM's Transformers backend",
        "frequencies change with each batch",
        "another model",
    ),
    ("`longrope` of PhiMoE", "transformers and vLLM compute it differently", "another model"),
    (
        "tensor parallelism where a layer in parts differs from the whole one: StableLM's norms, Gemma 4's shared keys",
        "what parts compute follows from the layout alone, and is compared layer by layer before training",
        "`--tensor-parallel-size 1`",
    ),
    (
        "weights that vLLM computes, transposes, permutes or drops while loading",
        "different bytes on both sides",
        "`lora_only`, `none`",
    ),
)

READ_COLUMNS = ("family", "folders", "transformers 4", "vLLM", "transformers 4 on the source itself")
READ_BY = """
## Read by others

`make readers` saves the tiny model of each family as a checkpoint, exports it, and exports an adapter of it: from a
source that transformers 5 wrote, and from one whose configuration and tokenizer transformers 4 wrote. Each folder is
then read by transformers 5 and 4 and by the code with which vLLM reads a configuration. Sizes, RoPE, dtype, end tokens
and the tokens of a text have to be the same everywhere. The table has the largest difference of log-probs in float32
between transformers 4 and 5, in nats; a dash: transformers 4 has no such class. The last column shows what would be
lost without the earlier form: the source as transformers 5 writes it, read by transformers 4.

vLLM runs without its kernels: `get_config`, and `ModelConfig` where there is no vision model. vLLM 0.26 refuses two
sources, too: it has no `Qwen3_5ForCausalLM`, and does not read Gemma 4's configuration with transformers 5.19.
A tokenizer's tokens are copied unchanged. The configuration of one that transformers 5 wrote gets the class and the
list of special tokens that transformers 4 reads, too.

In DeepSeek-V2 transformers 4 leaves YaRN's `mscale_all_dim` out of the scale of attention, whatever the configuration
says: 0.7 nats for the tiny model. The reader multiplies it in, as DeepSeek's own code and transformers 5 do.

"""

Results = Mapping[str, Mapping[str, object]]
"""Results by family."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one proof."""

    transformers_class: str
    """Class of the trainer's model."""
    vllm_class: str
    """Class of the server's model."""
    together: tuple[str, ...]
    """Last names of the parameters that share one of the server's."""
    before: float
    """Mean log-prob difference before training, in nats."""
    after: float
    """Mean log-prob difference after training, against the saved checkpoint."""
    moved: float
    """Mean log-prob difference after training, against the old weights."""
    versions: str
    """Versions of vLLM, torch and transformers."""
    num_parameters: int
    """Parameters of the model."""


def record(family: str, result: Result) -> None:
    """Write the result of `family` on the CPU to its file, and to the page."""
    _add("cpu", {family: dataclasses.asdict(result)})


def record_parts(family: str, num_parts: int, difference: float) -> None:
    """Write the difference between `family` in parts and the full model to its file, and to the page."""
    of_family = {**load("parts").get(family, {}), str(num_parts): difference}
    _add("parts", {family: dict(sorted(of_family.items()))})


def record_readers(results: Results) -> None:
    """Write to their file and to the page how other programs read each family's folders."""
    _add("readers", results)


def claim(family: str, file: Path) -> bool:
    """Claim `family` in `file` for this process; return False if it has a result or another process claimed it."""
    with _appended(file) as (lines, add):
        known = [line for line in lines if line["family"] == family]
        if any(line["result"] or ProcessIdentity(**line["process"]).is_alive() for line in known):
            return False
        add({"family": family, "process": ProcessIdentity.current().model_dump(), "result": None})
    return True


def write(family: str, result: Result, file: Path) -> None:
    """Append a result, as one line."""
    with _appended(file) as (_, add):
        add({"family": family, "result": dataclasses.asdict(result)})


@contextmanager
def _appended(file: Path) -> Iterator[tuple[list[dict[str, Any]], Callable[[object], object]]]:
    """Lock the file inside the block; yield its lines, and a function that appends one."""
    with file.open("a+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        opened.seek(0)
        text = opened.read()
        if text and not text.endswith("\n"):
            opened.write("\n")
        yield _lines(text), lambda line: opened.write(f"{json.dumps(line)}\n")


def _lines(text: str) -> list[dict[str, Any]]:
    """Return the complete lines; families whose lines are truncated are checked again."""
    lines = list[dict[str, Any]]()
    for line in text.splitlines():
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def collect(file: Path) -> None:
    """Add the results of a GPU in `file` to the others, and to the page."""
    _add("gpu", {line["family"]: line["result"] for line in _lines(file.read_text()) if line["result"]})


def _add(device: str, results: Results) -> None:
    """Add results to their file, in the order of the families, and write the page."""
    known = {**load(device), **results}
    ordered = {name: known[name] for name in ORDER if name in known}
    RESULTS[device].write_text(json.dumps(ordered, indent=2, ensure_ascii=False) + "\n")
    PAGE.write_text(page(*map(load, RESULTS)))


def load(device: str) -> dict[str, dict[str, object]]:
    """Return all results by family; empty if there is no file."""
    path = RESULTS[device]
    results: dict[str, dict[str, object]] = json.loads(path.read_text()) if path.is_file() else {}
    return results


def page(cpu: Results, gpu: Results, in_parts: Results, readers: Results | None = None) -> str:
    """Return the page of the docs."""
    on_cpu, on_gpu = (
        {family: Result(**fields) for family, fields in results.items()}  # type: ignore[arg-type]
        for results in (cpu, gpu)
    )
    rows = [
        _row(family, on_cpu.get(family), on_gpu.get(family), in_parts.get(family, {}))
        for family in ORDER
        if family in on_cpu or family in on_gpu
    ]
    table = _table(COLUMNS, rows) + READING + _versions("the CPU", on_cpu) + _versions("a GPU", on_gpu)
    return (
        INTRODUCTION
        + table
        + (WINDOWS if on_gpu else "")
        + PARTS
        + _table(REFUSED_COLUMNS, REFUSED)
        + _read_by(readers or {})
    )


def _read_by(readers: Results) -> str:
    if not readers:
        return ""
    rows = [
        (family, str(found["folders"]), _nats(found["transformers_4"]), str(found["vllm"]), _nats(found["source"]))
        for family, found in readers.items()
    ]
    versions = sorted({str(found["versions"]) for found in readers.values()})
    return READ_BY + _table(READ_COLUMNS, rows) + "".join(f"\n- {version}\n" for version in versions)


def _nats(difference: object) -> str:
    """Format a difference; None: the class does not exist. A string is an error, and is returned."""
    return "-" if difference is None else f"{difference:.1g}" if isinstance(difference, float) else str(difference)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ("---",) * len(columns), *rows))


def _row(family: str, cpu: Result | None, gpu: Result | None, in_parts: Mapping[str, object]) -> tuple[str, ...]:
    known = cpu or gpu
    assert known is not None
    together = "; ".join(f"`{names}`" for names in known.together) or "nothing"
    differences = [in_parts.get(str(number)) for number in NUM_PARTS]
    apart = ["-" if difference is None else f"{difference:.0e}" for difference in differences]
    size = "-" if gpu is None else f"{gpu.num_parameters:,}"
    names = family, known.transformers_class, known.vllm_class, together
    return (*names, *_numbers(cpu), *apart, size, *_numbers(gpu))


def _numbers(result: Result | None) -> tuple[str, ...]:
    numbers = () if result is None else (result.before, result.after, result.moved)
    return tuple(f"{number:.4f}" for number in numbers) or ("-",) * 3


def _versions(where: str, results: Mapping[str, Result]) -> str:
    """Return the versions that ran on a device, with the families if there are several versions."""
    families: dict[str, list[str]] = {}
    for family, result in results.items():
        families.setdefault(result.versions, []).append(family)
    if len(families) == 1:
        return f"- On {where}: {next(iter(families))}\n"
    return "".join(f"- On {where}: {versions}: {', '.join(names)}\n" for versions, names in families.items())


if __name__ == "__main__":
    if sys.argv[1:]:
        collect(Path(sys.argv[1]))
    PAGE.write_text(page(*map(load, RESULTS)))
