"""An environment in which any model can improve: the reward is the share of vowels in its completion."""

from collections.abc import Iterator


class Vowels:
    """Prompts of a few characters; the reward is the share of vowels in the completion."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number in range(40):
            yield {"prompt": f"say {number}:"}

    def held_out(self) -> list[dict[str, str]]:
        """Return prompts that are not used for training."""
        return [{"prompt": f"say {number}:"} for number in range(40, 50)]

    def score(self, problem: dict[str, str], completion: str) -> float:
        """Return the share of vowels; 0 for an empty completion."""
        del problem
        return sum(character in "aeiou" for character in completion) / max(1, len(completion))
