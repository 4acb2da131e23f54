r"""The parts of FP8 on one GPU: quantizing a model's weights, and the matrix products of vLLM's FP8 kernels.

    python -m benchmarks.fp8 --sizes 7b --rows 64
    python -m benchmarks.fp8 --sizes 7b --generation fp8_per_block fp8_per_channel --requests 64

For each size, the linear layers of the full model are in memory, so that no cache holds them. `refresh` is the time
that an update adds inside the fence. `products` is one pass of the given number of rows through all of these layers, in
a CUDA graph, including the rounding of inputs: in bf16, and with each of vLLM's kernels. A kernel that cannot run here
is listed with the reason.

Inputs are rounded here by a separate kernel before each product. A compiled server rounds them in the kernel of the
preceding norm or activation, except after attention, so `products` is an upper bound for a server.

With `--generation`, servers on the same GPU generate in alternation, as in a run (groups of 8 completions, with
log-probabilities): one in bf16, and one for each kind of FP8. DeepGEMM compiles for the shapes of the requests in the
first round, which is not counted.

Not covered: whole steps, for which the flag `--quantization` goes into `--ours` of `grpo.py`:

    python -m benchmarks.grpo --sizes 7b --dummy-weights --trl --share 0.4 --steps 6 --ours \
        "adamw-4bit --gradient-checkpointing" "adamw-4bit --gradient-checkpointing --quantization fp8_per_block"
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.utils import deep_gemm

from benchmarks._models import SIZES, make_model, model_config
from benchmarks._results import say, table, write
from benchmarks._servers import parser, rates, serve_command, served
from bridge.types import Quantization
from bridge.weights import fp8

HOWS: tuple[Quantization, ...] = ("fp8_per_block", "fp8_per_channel")
Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A matrix product: (inputs, values, scales) -> outputs."""
ROUNDS = 20


def main() -> None:
    """Measure each size."""
    flags = parser(__doc__, rounds=6)
    flags.add_argument("--sizes", nargs="+", choices=SIZES, default=["7b"])
    flags.add_argument("--rows", type=int, nargs="+", default=[64], help="rows of a product: sequences decoded at once")
    flags.add_argument("--generation", nargs="+", choices=HOWS, help="compare servers with one in bf16")
    flags.add_argument("--share", type=float, default=0.3, help="share of the GPU for each server")
    options = flags.parse_args()
    measured = generation if options.generation else measure
    results = {size: measured(size, options) for size in options.sizes}
    say(f"written: {write('fp8', results, options.out)}")


def measure(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of refreshes and products for one size."""
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 50 for shape in shapes(size)]
    num_bytes = sum(weight.nbytes for weight in weights)
    result: dict[str, Any] = {"gib": num_bytes / 2**30, "refresh": {}, "products": {}}
    for how in HOWS:
        made = [fp8.quantized(weight, how) for weight in weights]
        result["refresh"][how] = milliseconds(partial(refresh, weights, made, how))
        for name, product in products(how):
            for rows in options.rows:
                result["products"][f"{name}, {rows} rows"] = passed(product, made, rows)
    for rows in options.rows:
        plain = [(weight, weight) for weight in weights]
        result["products"][f"bf16, {rows} rows"] = passed(
            lambda x, weight, _: functional.linear(x, weight), plain, rows
        )
    say(f"{size}: {result['gib']:.1f} GiB of linear layers in bf16; milliseconds")
    figures = {**{f"refresh, {how}": ms for how, ms in result["refresh"].items()}, **result["products"]}
    print(table([(name, f"{ms:.2f}" if isinstance(ms, float) else ms) for name, ms in figures.items()]))
    return result


def generation(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return tokens/s of each server and round, and the median of the per-round ratios to bf16."""
    names: list[Quantization | None] = [None, *options.generation]
    with TemporaryDirectory(prefix="bridge-bench-") as scratch, ExitStack() as running:
        model, urls = make_model(size, Path(scratch) / "model"), list[str]()
        for how in names:
            folder = Path(scratch) / (how or "bf16")
            command = serve_command(model, folder, share=options.share, quantization=how)
            urls.append(running.enter_context(served(command, folder / f"{folder.name}.log")))
        plain, *others = rates(urls, options, as_rollouts=True)
    result: dict[str, Any] = {"bf16": {"tokens_per_s": statistics.median(plain), "rounds": plain}}
    for how, rounds in zip(options.generation, others, strict=True):
        ratios = [fast / slow for fast, slow in zip(rounds, plain, strict=True)]
        result[how] = {
            "tokens_per_s": statistics.median(rounds), "over_bf16": statistics.median(ratios), "rounds": rounds,
        }  # fmt: skip
    say(f"{size}: {json.dumps(result, indent=1)}")
    return result


def shapes(size: str) -> Iterator[tuple[int, int]]:
    """Yield the shapes of a model's linear layers, as vLLM fuses them."""
    config = model_config(size)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query, key_value = head * config.num_attention_heads, head * config.num_key_value_heads
    for _ in range(config.num_hidden_layers):
        yield query + 2 * key_value, config.hidden_size
        yield config.hidden_size, query
        yield 2 * config.intermediate_size, config.hidden_size
        yield config.hidden_size, config.intermediate_size


def refresh(weights: list[Tensor], made: list[tuple[Tensor, Tensor]], how: Quantization) -> None:
    for weight, (values, scales) in zip(weights, made, strict=True):
        fp8.quantize(weight, values, scales, how)


def products(how: Quantization) -> Iterator[tuple[str, Product]]:
    """Yield vLLM's kernels by name."""
    bf16 = torch.bfloat16

    def channel(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        rounded, of_rows = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        product: Tensor = ops.cutlass_scaled_mm(rounded, values.t(), scale_a=of_rows, scale_b=scales, out_dtype=bf16)
        return product

    def cutlass(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        rounded, of_rows = fp8_utils.per_token_group_quant_fp8(x, 128, column_major_scales=True, use_ue8m0=False)
        product: Tensor = ops.cutlass_scaled_mm(rounded, values.T, scale_a=of_rows, scale_b=scales.T, out_dtype=bf16)
        return product

    def deep(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        rounded, of_rows = fp8_utils.per_token_group_quant_fp8(
            x, 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=False
        )
        product = x.new_empty(x.shape[0], values.shape[0])
        deep_gemm.fp8_gemm_nt((rounded, of_rows), (values, scales), product, is_deep_gemm_e8m0_used=False)
        return product

    def triton(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        rounded, of_rows = fp8_utils.per_token_group_quant_fp8(x, 128, use_ue8m0=False)
        product: Tensor = fp8_utils.w8a8_triton_block_scaled_mm(rounded, values, of_rows, scales, [128, 128], bf16)
        return product

    if how == "fp8_per_channel":
        yield "fp8_per_channel, CUTLASS", channel
    else:
        yield from (
            ("fp8_per_block, DeepGEMM", deep), ("fp8_per_block, CUTLASS", cutlass), ("fp8_per_block, Triton", triton),
        )  # fmt: skip


def passed(product: Product, weights: list[tuple[Tensor, Tensor]], rows: int) -> float | str:
    """Return the milliseconds of one pass through all layers, or the reason why it failed."""
    inputs = {values.shape[1]: torch.randn(rows, values.shape[1], device="cuda").bfloat16() for values, _ in weights}

    def run() -> None:
        for values, scales in weights:
            product(inputs[values.shape[1]], values, scales)

    try:
        run()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    except (RuntimeError, AssertionError, ImportError) as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:90]
    return milliseconds(graph.replay)


def milliseconds(work: Callable[[], None]) -> float:
    """Return the median time of `work` on the GPU."""
    times = list[float]()
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    main()
