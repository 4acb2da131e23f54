"""Agents for the tests' worker processes, written with the `openai` client; some misbehave in every possible way."""

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
from openai import AsyncOpenAI, OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add the length of a text.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


TLS = ssl.create_default_context()
"""Shared by all clients, because each would read the certificates again."""


def sync_client(base_url: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key="none", http_client=openai.DefaultHttpxClient(verify=TLS))


def async_client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="none", http_client=openai.DefaultAsyncHttpxClient(verify=TLS))


class Problems:
    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(10):
            yield {"prompt": f"Begin at {number}: ", "start": number}

    def held_out(self) -> list[dict[str, Any]]:
        return [{"prompt": "Begin at 50: ", "start": 50}]


class Calling(Problems):
    """Calls a tool as long as the model wants to."""

    def run(self, problem: dict[str, Any], base_url: str) -> Any:
        client = sync_client(base_url)
        messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
        total = problem["start"]
        while True:
            answer = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            message = answer.choices[0].message
            if not message.tool_calls:
                return {"total": total, "brief": -len(message.content or "") / 1000}
            messages.append(message)
            for call in message.tool_calls:
                total += len(json.loads(call.function.arguments)["text"])  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})


class Chatting(Problems):
    """Continues the chat with the received answers, without sending the reasoning back."""

    system: tuple[dict[str, str], ...] = ({"role": "system", "content": "Be brief."},)

    async def run(self, problem: dict[str, Any], base_url: str) -> float:
        client = async_client(base_url)
        messages: list[Any] = [*self.system]
        for question in (problem["prompt"], "And then?", "And at last?"):
            messages.append({"role": "user", "content": question})
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return float(len(messages))


class ChattingWithoutSystem(Chatting):
    """Like `Chatting`, for a template without a system message."""

    system = ()


class Stopping(Problems):
    """Ends its turns at custom stop strings."""

    async def run(self, problem: dict[str, Any], base_url: str) -> float:
        client = async_client(base_url)
        messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
        num_stopped = 0
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages, stop=["e", " t"])
            (choice,) = answer.choices
            assert not any(stop in (choice.message.content or "") for stop in ("e", " t"))
            num_stopped += choice.finish_reason == "stop"
            messages += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "So?"}]
        return float(num_stopped)


class PerTurn(Chatting):
    """Returns a reward per turn."""

    async def run(self, problem: dict[str, Any], base_url: str) -> Any:
        await super().run(problem, base_url)
        return [0.0, 0.5, 1.0]


class Branching(Problems):
    """Has a sub-agent, tries one turn twice, and shortens its history."""

    def run(self, problem: dict[str, Any], base_url: str) -> float:
        client = sync_client(base_url)

        def exchanged(messages: list[Any]) -> list[Any]:
            answer = client.chat.completions.create(model="m", messages=messages)
            return [*messages, answer.choices[0].message.model_dump(exclude_none=True)]

        begun = exchanged([{"role": "user", "content": problem["prompt"]}])
        exchanged([{"role": "system", "content": "Help."}, {"role": "user", "content": f"{problem['prompt']}help"}])
        one, other = (exchanged([*begun, {"role": "user", "content": "Go on."}]) for _ in range(2))
        exchanged([*other, {"role": "user", "content": "And then?"}])
        exchanged([*one[-2:], {"role": "user", "content": "And then?"}])
        return float(problem["start"] + len(one))


class Parallel(Problems):
    """Asks three sub-agents concurrently, and a fourth one about their answers."""

    async def run(self, problem: dict[str, Any], base_url: str) -> float:
        async with async_client(base_url) as client:

            async def answered(*questions: str) -> str:
                messages: list[Any] = [{"role": "user", "content": question} for question in questions]
                answer = await client.chat.completions.create(model="m", messages=messages)
                return str(answer.choices[0].message.content)

            answers = await asyncio.gather(*(answered(problem["prompt"], f"{number}?") for number in range(3)))
            return float(len(await answered(*answers)))


class Scored(Problems):
    """Returns no reward, so `score` provides it."""

    def run(self, problem: dict[str, Any], base_url: str) -> None:
        client = sync_client(base_url)
        for chunk in client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": problem["prompt"]}], stream=True,
            stream_options={"include_usage": True},
        ):  # fmt: skip
            if chunk.usage:
                self.used = chunk.usage.total_tokens
            else:
                self.text = chunk.choices[0].delta.content

    def score(self, problem: dict[str, Any], completion: str) -> float:
        assert completion == self.text
        return float(self.used + 0 * problem["start"])


class Meeting(Problems):
    """Finishes only once more agents run in this process than an event loop has threads for."""

    SIZE = 40
    all_there = threading.Barrier(SIZE)

    def run(self, problem: dict[str, Any], base_url: str) -> float:
        client = sync_client(base_url)
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": problem["prompt"]}])
        self.all_there.wait(60)
        return 1.0


class Streaming(Problems):
    """Reads a stream as most programs do: each chunk has a choice, unless the usage was requested."""

    def run(self, problem: dict[str, Any], base_url: str) -> float:
        client, text = sync_client(base_url), ""
        for chunk in client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": problem["prompt"]}], stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        return float(len(text))


class Parsing(Problems):
    """Uses a client that raises when a turn is truncated."""

    def run(self, problem: dict[str, Any], base_url: str) -> float:
        client = sync_client(base_url)
        client.chat.completions.parse(model="m", messages=[{"role": "user", "content": problem["prompt"]}])
        return 1.0


class ParsingScored(Parsing):
    """Like `Parsing`, with its own score."""

    def score(self, problem: dict[str, Any], completion: str) -> float:
        return 3.0 if completion and problem else -1.0


class Misbehaving(Problems):
    """Misbehaves in the way that the model's answer names."""

    def run(self, problem: dict[str, Any], base_url: str) -> Any:
        client = sync_client(base_url)
        messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
        how = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
        return getattr(self, f"_{how}")(client, messages)

    def _returns(self, *_: Any) -> float:
        return 1.0

    def _raises(self, *_: Any) -> None:
        raise ValueError("two\nlines")

    def _exits(self, *_: Any) -> None:
        sys.exit(3)

    def _cancels(self, *_: Any) -> None:
        raise asyncio.CancelledError

    def _prints(self, *_: Any) -> int:
        sys.stdout.write("noise " * 1000)
        os.write(1, b"more noise")
        return 1

    def _forks(self, *_: Any) -> int:
        return 1 if os.fork() else 2

    def _hangs(self, *_: Any) -> None:
        subprocess.Popen(["sleep", "1234.5"])
        time.sleep(1000)

    def _dies(self, *_: Any) -> None:
        os._exit(7)

    def _answers(self, *_: Any) -> str:
        return "1.0"

    def _forgets(self, *_: Any) -> None:
        return None

    def _asks_two(self, client: OpenAI, messages: list[Any]) -> float:
        client.chat.completions.create(model="m", messages=messages, n=2)
        return 1.0

    def _spins(self, client: OpenAI, messages: list[Any]) -> float:
        while True:
            client.chat.completions.create(model="m", messages=messages)

    def _leaves(self, client: OpenAI, messages: list[Any]) -> float:
        """End while a request of another thread is in flight."""
        requested = Path(os.environ["STARTED_IN"]) / uuid.uuid4().hex  # created by the server, which answers later

        def ask() -> None:
            with contextlib.suppress(openai.OpenAIError):
                client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": f"slowly {requested.name}"}]
                )

        threading.Thread(target=ask).start()
        while not requested.exists():
            time.sleep(0.01)
        return 1.0


class HalfCharacters(Problems):
    """Sends a lone surrogate, which JSON allows, in a message, a tool and an invented call."""

    def run(self, problem: dict[str, Any], base_url: str) -> float:
        called = {"name": "add", "arguments": json.dumps({"text": "\ud83d"})}
        messages = [
            {"role": "user", "content": f"{problem['prompt']}\ud83d"},
            {"role": "assistant", "tool_calls": [{"id": "one", "type": "function", "function": called}]},
            {"role": "tool", "tool_call_id": "one", "content": "\ude00"},
        ]
        described = {"name": "add", "description": "\ud83d", "parameters": {"type": "object", "properties": {}}}
        body = {"messages": messages, "tools": [{"type": "function", "function": described}]}
        answer = httpx.post(f"{base_url}/chat/completions", content=json.dumps(body), timeout=60)
        answer.raise_for_status()
        return 1.0


class Proxied(Calling):
    """Returns whether another host is reached without a proxy."""

    def run(self, problem: dict[str, Any], base_url: str) -> Any:
        super().run(problem, base_url)
        return float(bool(urllib.request.proxy_bypass("example.org")))


class Silent(Problems):
    """Never sends a request."""

    async def run(self, problem: dict[str, Any], base_url: str) -> float:
        await asyncio.sleep(0)
        assert base_url.endswith("/v1")
        return float(problem["start"])


class Listing(Problems):
    """Requests every route."""

    def run(self, problem: dict[str, Any], base_url: str) -> float:
        client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
        (model,) = client.models.list()
        answer = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": [{"type": "text", "text": problem["prompt"]}]}],
            temperature=0.1, max_completion_tokens=3,
        )  # fmt: skip
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        for other in (base_url.replace("/v1", "x/v1"), base_url):
            try:
                OpenAI(base_url=other, api_key="none", max_retries=0).completions.create(model="m", prompt="hello")
            except openai.NotFoundError:
                continue
            raise AssertionError(other)
        return 1.0
