"""Await several coroutines at once."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def together(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results in order; if one raises, the others are cancelled, and have ended when this raises it."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
