"""Find out before vLLM starts that the hub has no such model, or cannot be reached; vLLM takes minutes to say so.

Not covered: what the model's configuration says (`model.py`), and its weights.
"""

import difflib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from bridge.core.foreign_code import shortened
from bridge.errors import UsageError

REQUEST_LIMIT_S = 5.0
LIMIT_S = 10.0
"""Limit for all requests together, because a DNS lookup has no time limit of its own."""
ELSEWHERE = "VLLM_USE_MODELSCOPE"
"""Lets vLLM take models from another hub."""


def check(model: str, outer: Mapping[str, str] = os.environ) -> None:
    """Download the configuration of `model`, a name on the hub, into the hub's cache.

    Raises:
        UsageError: the hub has no such model, or no configuration of it, or cannot be asked.
    """
    if "://" in model or outer.get(ELSEWHERE, "").lower() in {"1", "true"}:
        return
    from huggingface_hub import constants, errors

    cached = f"did you mean {', or '.join(near)}? " if (near := _near(model, Path(constants.HF_HUB_CACHE))) else ""
    hub = f"the hub at {constants.ENDPOINT}"
    try:
        _within(LIMIT_S, lambda: _download(model))
    except errors.HFValidationError as error:
        why, remedy = f"no such folder, seen from {Path.cwd()}, and no name on the hub", "--model ORGANISATION/NAME"
        raise _refusal(model, why, cached + remedy) from error
    except errors.GatedRepoError as error:
        why, remedy = f"{hub} gives it only to those who accepted its terms", "accept them there, then: hf auth login"
        raise _refusal(model, why, remedy) from error
    except errors.RepositoryNotFoundError as error:
        why, remedy = f"{hub} has no such model, or does not show it to you", "for a private model: hf auth login"
        raise _refusal(model, why, cached + remedy) from error
    except Exception as error:  # requests fail in ways that differ between versions of huggingface_hub
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            why, remedy = f"{hub} has no config.json of it", "choose a model in the format of transformers"
            raise _refusal(model, why, cached + remedy) from error
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} cannot be asked{_cause(error)}"
        remedy = f"give a folder, or download it where there is a network: hf download {model}"
        raise _refusal(model, f"not downloaded yet, and {offline}", cached + remedy) from error


def _download(model: str) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if not constants.HF_HUB_OFFLINE:  # a download would try again for half a minute
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=REQUEST_LIMIT_S)
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        hf_hub_download(model, "config.json", etag_timeout=REQUEST_LIMIT_S)
    finally:
        if shown:
            enable_progress_bars()


def _within(seconds: float, action: Callable[[], None]) -> None:
    """Run `action` and raise what it raises; after so many seconds it is left alone.

    Raises:
        TimeoutError: it takes longer.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  raised below, in the caller's thread
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer in {seconds:g} s")
    if raised:
        raise raised[0]


def _near(model: str, cache: Path) -> list[str]:
    """Return names like it of which the cache holds something; its folders are called `models--ORGANISATION--NAME`."""
    names = {folder.name.removeprefix("models--").replace("--", "/") for folder in cache.glob("models--*")} - {model}
    return difflib.get_close_matches(model, sorted(names), n=2, cutoff=0.8)


def _cause(error: BaseException) -> str:
    """Return what stands at the root of an error, which huggingface_hub wraps in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f" ({shortened(error, 100)})" if str(error) else ""


def _refusal(model: str, why: str, remedy: str) -> UsageError:
    return UsageError(f"--model {model}: {why}", remedy=remedy)
