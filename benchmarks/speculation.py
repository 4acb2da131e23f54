"""Speed of n-gram speculation on repetitive text: two servers on one GPU, queried alternately.

    python -m benchmarks.speculation --size 1.5b --requests 8

With vLLM's dummy weights, greedy sampling repeats itself immediately, so every draft is accepted: this is the largest
possible gain from speculation. `--requests 256` shows what drafts cost a busy server.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks import _results, _servers
from benchmarks._models import SIZES, make_model
from benchmarks._results import say
from bridge.server.client import open_async_http
from bridge.server.protocol import COMPLETIONS

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
PATTERN = 16
"""Number of tokens after which a prompt repeats itself."""


def main() -> None:
    """Measure every number of requests on both servers; write the results."""
    flags = _results.parser(__doc__)
    flags.add_argument("--size", choices=SIZES, default="1.5b")
    flags.add_argument("--requests", type=int, nargs="+", default=[8, 64, 256], help="completions in flight")
    flags.add_argument("--tokens", type=int, default=512, help="tokens of each")
    flags.add_argument("--rounds", type=int, default=5, help="rounds per server, alternating")
    options = flags.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(options.size, folder / "model")
        plain = _servers.serve_command(model, folder / "plain")
        drafting = _servers.serve_command(model, folder / "drafting")
        drafting = replace(drafting, argv=(*drafting.argv, "--speculative-config", json.dumps(NGRAM)))
        for name in ("plain", "drafting"):
            (folder / name).mkdir()
        with (
            _servers.served(plain, folder / "plain.log") as one,
            _servers.served(drafting, folder / "drafting.log") as other,
        ):
            rows = [measure((one, other), str(model), count, options) for count in options.requests]
    path = _results.write("speculation", {"size": options.size, "ngram": NGRAM, "rows": rows}, options.out)
    cells = [["requests", "plain tokens/s", "drafting tokens/s", "ratio"]]
    cells += [[f"{row['requests']:.0f}", *(f"{row[name]:.0f}" for name in ("plain", "drafting")),
               f"{row['ratio']:.2f}x"] for row in rows]  # fmt: skip
    say(f"{path}\n{_results.table(cells)}")


def measure(urls: tuple[str, str], model: str, count: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the medians of both servers and of the per-round ratios, after one warm-up round."""
    rates: list[list[float]] = [[], []]
    for number in range(options.rounds + 1):
        for index in sorted((0, 1), reverse=number % 2 == 1):
            rates[index].append(asyncio.run(one_round(urls[index], model, count, options.tokens)))
    plain, drafting = (column[1:] for column in rates)
    ratio = statistics.median(fast / slow for fast, slow in zip(drafting, plain, strict=True))
    medians = {"plain": statistics.median(plain), "drafting": statistics.median(drafting)}
    return {"requests": count, **medians, "ratio": ratio}


async def one_round(url: str, model: str, count: int, num_tokens: int) -> float:
    """Sample greedily, with log-probabilities as in rollouts; return tokens/s."""
    prompts = [[5 + (number + position) % PATTERN for position in range(8 * PATTERN)] for number in range(count)]
    body = {"model": model, "max_tokens": num_tokens, "temperature": 0.0, "seed": 0, "n": 1}
    begun = time.perf_counter()
    async with open_async_http(timeout_s=600) as http:
        answers = await asyncio.gather(
            *(http.post(f"{url}{COMPLETIONS}", json={**body, "prompt": prompt}) for prompt in prompts)
        )
    seconds = time.perf_counter() - begun
    choices = [choice for answer in answers for choice in answer.raise_for_status().json()["choices"]]
    return sum(len(choice["token_ids"]) for choice in choices) / seconds


if __name__ == "__main__":
    main()
