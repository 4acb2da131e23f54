"""An Atropos environment that runs in its own process: it rewards ASCII, in one turn or in two.

One turn uses Atropos' own bookkeeping. In two turns, text that the model did not write, like a tool's answer, comes in
between. There Atropos' bookkeeping would mask the first turn (`ManagedServer.completion`, atroposlib 0.4.0).
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

SAMPLING = {"max_tokens": 8, "temperature": 1.0, "top_p": 1.0}
INTERLUDE = " tool: go on "


@dataclass
class Sequence:
    """The tokens that the model read and wrote."""

    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    written: list[int] = field(default_factory=list)

    def read(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.masks += [-100] * len(tokens)
        self.logprobs += [1.0] * len(tokens)

    def write(self, tokens: list[int], logprobs: list[float]) -> None:
        self.tokens += tokens
        self.masks += tokens
        self.logprobs += logprobs
        self.written += tokens


class Letters(BaseEnv):
    """Prompts of a few characters; the reward is the share of ASCII in the completion."""

    name = "letters"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig]:
        """Return a single server instead of a list, like Atropos' own GSM8K."""
        config = BaseEnvConfig(use_wandb=False, wandb_name=cls.name, total_steps=-1)
        return config, APIServerConfig(base_url="http://localhost:9001/v1", api_key="x")

    async def setup(self) -> None:
        self.number = 0

    async def get_next_item(self) -> dict[str, Any]:
        self.number += 1
        return {"prompt": f"say {self.number % 40}:", "in_turns": self.number % 2 == 1}

    async def collect_trajectories(self, item: dict[str, Any]) -> tuple[ScoredDataGroup, list[Any]]:
        sequences = await (self._in_turns if item["in_turns"] else self._at_once)(item["prompt"])
        group = ScoredDataGroup(
            tokens=[sequence.tokens for sequence in sequences],
            masks=[sequence.masks for sequence in sequences],
            scores=[self._score(sequence.written) for sequence in sequences],
            inference_logprobs=[sequence.logprobs for sequence in sequences],
            generation_params={"temperature": SAMPLING["temperature"]},
        )
        return group, []

    async def evaluate(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no evaluation."""

    def _score(self, written: list[int]) -> float:
        text = self.tokenizer.decode(written, skip_special_tokens=True)
        return sum(map(str.isascii, text)) / max(1, len(text))

    async def _at_once(self, prompt: str) -> list[Sequence]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=prompt, n=self.config.group_size, **SAMPLING)
            nodes = managed.get_state()["nodes"]
        return [
            Sequence(node.tokens, node.masked_tokens, node.logprobs, [t for t in node.masked_tokens if t != -100])
            for node in nodes
        ]

    async def _in_turns(self, prompt: str) -> list[Sequence]:
        return await asyncio.gather(*[self._two_turns(prompt) for _ in range(self.config.group_size)])

    async def _two_turns(self, prompt: str) -> Sequence:
        sequence = Sequence([], [], [])
        for text in (prompt, INTERLUDE):
            sequence.read(self.tokenizer.encode(text, add_special_tokens=False))
            _, (tokens,), (logprobs,), _ = await self.server.tokens_and_logprobs_completion(
                prompt=text, input_ids=list(sequence.tokens), n=1, **SAMPLING
            )
            sequence.write(tokens, logprobs)
        return sequence


if __name__ == "__main__":
    Letters.cli()
