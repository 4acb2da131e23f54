"""Fetch a model's config.json from the hub before vLLM starts, which takes minutes to report that it is missing.

This module also uploads the folder that `bridge export` wrote.
"""

import os
import shlex
from pathlib import Path

from huggingface_hub import HfApi, constants, errors, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from bridge.core.concurrency import in_thread, result_of
from bridge.core.foreign_code import shortened
from bridge.core.paths import CONFIG_NAME
from bridge.errors import UsageError

REQUEST_LIMIT_S = 5.0
LIMIT_S = 10.0
"""Limit for all requests together, because a DNS lookup has no timeout of its own."""
UNREACHABLE = ("ConnectError", "ConnectTimeout", "ConnectionError", "TimeoutError")
"""Names of connection errors: which HTTP library huggingface_hub uses depends on its version."""
ELSEWHERE = "VLLM_USE_MODELSCOPE"
"""Environment variable that makes vLLM load models from a different hub."""


def fetch_config(model: str) -> Path | None:
    """Return the folder with the configuration of `model` in the hub's cache, downloading it if needed.

    None if vLLM would load the model from somewhere else.

    Raises:
        UsageError: the hub does not have the model or its configuration, or does not answer.
    """
    if "://" in model or os.environ.get(ELSEWHERE, "").lower() in {"1", "true"}:
        return None
    try:
        return result_of(in_thread(lambda: _download(model), "download"), LIMIT_S).parent
    except Exception as error:  # the exceptions differ between versions of huggingface_hub
        why, hint = _cause_and_hint(error, model)
        raise UsageError(f"--model {model}: {why}", hint=hint) from error


def _cause_and_hint(error: Exception, model: str) -> tuple[str, str]:
    """Return why the configuration could not be fetched, and what to do."""
    hub = f"the hub at {constants.ENDPOINT}"
    if isinstance(error, errors.HFValidationError):
        return f"no such folder in {Path.cwd()}, and not a name on the hub", "--model ORGANISATION/NAME"
    if isinstance(error, errors.GatedRepoError):
        return f"{hub} requires that you accept its terms", "accept them there, then: hf auth login"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{hub} has no such model, or hides it from you", "for a private model: hf auth login"
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"{hub} has no {CONFIG_NAME} for it", "choose a model in transformers' format"
    return (
        f"not downloaded yet, and {'HF_HUB_OFFLINE is set' if constants.HF_HUB_OFFLINE else _no_answer(error)}",
        f"name a folder, or download it on a machine with network access: hf download {model}",
    )


def _no_answer(error: Exception) -> str:
    root: BaseException = error  # huggingface_hub raises its own error from the root cause
    while root.__cause__ is not None:
        root = root.__cause__
    return f"the hub at {constants.ENDPOINT} does not answer ({shortened(root, 100) or f'within {LIMIT_S:g} s'})"


def why_unreachable(data_set: str) -> str:
    """Return why the hub cannot be reached for `data_set`; empty if it can, or if it is merely slow.

    The `datasets` library itself would retry for half a minute.
    """
    try:
        asked = in_thread(
            lambda: get_hf_file_metadata(
                hf_hub_url(data_set, "README.md", repo_type="dataset"), timeout=REQUEST_LIMIT_S
            ),
            "hub",
        )
        result_of(asked, LIMIT_S)
    except Exception as error:  # noqa: BLE001  as above
        return _no_answer(error) if type(error).__name__ in UNREACHABLE else ""
    return ""


def _download(model: str) -> Path:
    if not constants.HF_HUB_OFFLINE:  # a download would retry for half a minute
        get_hf_file_metadata(hf_hub_url(model, CONFIG_NAME), timeout=REQUEST_LIMIT_S)
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        return Path(hf_hub_download(model, CONFIG_NAME, etag_timeout=REQUEST_LIMIT_S))
    finally:
        if shown:
            enable_progress_bars()


def check_push(repo: str) -> None:
    """Check that `repo` is a valid name and that the user is logged in, before any long work.

    Raises:
        UsageError: the name is invalid, the user is not logged in, or the hub does not answer.
    """
    try:
        hf_hub_url(repo, CONFIG_NAME)  # checks the name
        HfApi().whoami()
    except Exception as error:  # as above
        raise UsageError(
            f"--push {repo}: {shortened(error, 200)}", hint="log in with: hf auth login; a name is ORGANISATION/NAME"
        ) from error


def push(folder: Path, repo: str, *, leave_out: str) -> str:
    """Upload the files of `folder` except `leave_out`, and return the URL of the repository's page.

    A repository that does not exist is created as a private one.

    Raises:
        UsageError: the hub refuses the upload, or does not answer.
    """
    api = HfApi()
    try:
        page = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=page.repo_id, folder_path=folder, ignore_patterns=[leave_out])
    except Exception as error:  # as above
        retry = f"hf upload {shlex.quote(repo)} {shlex.quote(str(folder))} --exclude {leave_out}"
        raise UsageError(f"--push {repo}: {shortened(error, 200)}", hint=f"the folder is complete; {retry}") from error
    return str(page)
