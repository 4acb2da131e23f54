"""What the proof of each family found, kept as JSON, and the table in the docs that is made of it.

Not covered: the proof itself (`family_proof.py`). `python -m tests.family_results` writes the docs anew.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.models.families import FAMILIES

ROOT = Path(__file__).parents[1]
RESULTS = {device: ROOT / "benchmarks" / "results" / f"families-{device}.json" for device in ("cpu", "gpu")}
"""Where what the proofs found is kept, by where they ran."""
PAGE = ROOT / "docs" / "families.md"
INTRODUCTION = """\
# Families

Nobody trusts a list: every row was proved by `make families`, from a tiny configuration with random weights on the
real vLLM on a CPU, started with the defaults that a user gets. Every parameter of the transformers class and every
element of vLLM's has a partner; log-probabilities agree before; three steps are taken in place through `bridge train`;
the server then agrees with the saved checkpoint in plain transformers, and not with the weights before; `bridge verify`
passes. This page is made of what those proofs wrote.

Phi-3.5-mini and Phi-4-mini have RoPE that depends on the length (`longrope`). vLLM takes the long factors for every
sequence as soon as `--max-model-len` exceeds `original_max_position_embeddings`, and the short ones otherwise. The
trainer takes what the server takes; plain transformers takes what the longest sequence of a batch needs. `dynamic` RoPE
is trained up to `max_position_embeddings`: vLLM has no frequencies beyond.

A family that is missing here is no special case: its layout, like that of each one here, is learnt from vLLM's own
`load_weights` ([`patches/loading.py`](../patches/loading.py)), and it passes the same checks or is refused by name.

"""
COLUMNS = ("family", "transformers", "vLLM", "held together in vLLM", "before", "after", "moved", "versions")
ON_A_GPU = """
The same proof at more than 100 million parameters on a Hopper GPU, torch.compile and CUDA graphs on
(`pytest tests/gpu/test_families.py`):

"""
ON_A_GPU_COLUMNS = ("family", "parameters", "before", "after", "moved", "versions")
WINDOWS = """
Mistral and Phi-3 were run with a window of 4,096 tokens, longer than a sequence may be there (`--max-model-len`). Where
every layer has a shorter one, vLLM 0.33's CUDA graphs decoded something else on that GPU than vLLM did with
`--enforce-eager`: by 0.8 nats a token, against 0.008, with weights that nobody had touched. Unless you choose, Bridge
therefore leaves attention out of the graphs of such models (`--compilation-config '{"cudagraph_mode": "PIECEWISE"}'`):
Mistral with a window of 512 came to 0.0079 before and after the steps. Gemma 2, with a window in every other layer, is
right as it is.
"""
READING = """
`before`, `after` and `moved` are means of the difference of log-probabilities over sampled tokens, in nats: the server
against the weights that it loaded, against the checkpoint of step 3, and after the steps against the weights before.

## Refused

One line says which parameters, why, and what to use instead, with exit code 4. What a configuration shows is refused
before vLLM starts, and `bridge doctor --model MODEL` tells it for every mode.

"""
REFUSED_COLUMNS = ("what", "why", "instead")
REFUSED = (
    ("FP8, AWQ, GPTQ, bitsandbytes", "no plain numbers that an optimizer could step", "the unquantised model"),
    ("encoders, with decoders or without; models of several parts", "not what `AutoModelForCausalLM` makes", "another"),
    (
        "DeepSeek-V3's `mlp.gate.e_score_correction_bias`",
        "a float32 parameter in vLLM, and none in transformers",
        "`lora_only`, `none`",
    ),
    ("sparse latent attention", "vLLM computes with what it derives from `kv_b_proj`", "`lora_only`, `none`"),
    ("latent attention with `VLLM_MLA_DISABLE=0`", "the same: `W_UV`, `W_UK_T`", "Bridge's own setting, 1"),
    ("experts that a kernel packs", "vLLM rewrites them after loading", "`--moe-backend triton`, Bridge's own setting"),
    ("a weight of another type than the model's", "its bytes are not those that are trained", "`--dtype`"),
    ("speculative decoding, expert parallelism, offloading", "another set of weights, or one that moves", "without it"),
    (
        "Llama 4's text model and ModernBERT's decoder; MPT, BLOOM",
        "transformers finds no decoder in them; they take no positions, so that sequences cannot be packed",
        "another",
    ),
    (
        "`longrope` or `dynamic` RoPE in vLLM's Transformers backend",
        "its frequencies change with each batch",
        "another",
    ),
    ("`longrope` of PhiMoE", "transformers computes it in another way than vLLM", "another"),
    (
        "whatever vLLM computes, transposes, permutes or leaves out while it loads",
        "not the same bytes on both sides",
        "`lora_only`, `none`",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one proof found."""

    transformers_class: str
    """Class of the trainer's model."""
    vllm_class: str
    """Class of the server's."""
    together: tuple[str, ...]
    """Parameters of the model that lie in one of the server's, by their last names."""
    before: float
    """Mean difference of log-probabilities before the steps, in nats."""
    after: float
    """The same after them, against the saved checkpoint."""
    moved: float
    """What the steps changed, against the weights before."""
    versions: str
    """Of vLLM, torch and transformers."""
    num_parameters: int
    """Of the model."""


def record(family: str, result: Result, *, device: str) -> None:
    """Put the result of `family` on `device` into its file, in the order of the families, and into the page."""
    found = {**load(device), family: dataclasses.asdict(result)}
    ordered = {name: found[name] for name in FAMILIES if name in found}
    RESULTS[device].write_text(json.dumps(ordered, indent=2, ensure_ascii=False) + "\n")
    PAGE.write_text(page(load("cpu"), load("gpu")))


def load(device: str) -> dict[str, dict[str, object]]:
    """Return all results by family; none where there is no file."""
    path = RESULTS[device]
    found: dict[str, dict[str, object]] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def page(on_cpu: Mapping[str, Mapping[str, object]], on_gpu: Mapping[str, Mapping[str, object]]) -> str:
    """Return the page of the docs."""
    rows = [_row(family, Result(**found)) for family, found in on_cpu.items()]  # type: ignore[arg-type]
    large = [_large_row(family, Result(**found)) for family, found in on_gpu.items()]  # type: ignore[arg-type]
    tables = INTRODUCTION + _table(COLUMNS, rows)
    if large:
        tables += ON_A_GPU + _table(ON_A_GPU_COLUMNS, large) + WINDOWS
    return tables + READING + _table(REFUSED_COLUMNS, REFUSED)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ("---",) * len(columns), *rows))


def _row(family: str, result: Result) -> tuple[str, ...]:
    together = "; ".join(f"`{names}`" for names in result.together) or "nothing"
    return (family, result.transformers_class, result.vllm_class, together, *_numbers(result), result.versions)


def _large_row(family: str, result: Result) -> tuple[str, ...]:
    return (family, f"{result.num_parameters:,}", *_numbers(result), result.versions)


def _numbers(result: Result) -> tuple[str, ...]:
    return tuple(f"{number:.4f}" for number in (result.before, result.after, result.moved))


if __name__ == "__main__":
    PAGE.write_text(page(load("cpu"), load("gpu")))
