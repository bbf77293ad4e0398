"""Pushing an export to the Hugging Face Hub."""

import shlex
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import httpx, validate_repo_id

import depthlm
from depthlm.errors import UserError

# the code of an earlier export with another mechanism
STALE = ["depthlm_*.py", "modeling_depthlm.py"]
LOG_IN = (
    "run `hf auth login`, or set HF_TOKEN, with a token that may write (from https://huggingface.co/settings/tokens)"
)


def check_push(repository: str) -> None:
    """Raise UserError, without a request, if nothing can be pushed to a repository: its name, no token, no network."""
    try:
        validate_repo_id(repository)
        is_valid = "/" in repository
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise UserError(
            f"push_to={repository}: must be <owner>/<name>, with letters, digits and single `-`, `_` or `.` inside, "
            "as in push_to=me/mhc-360m"
        )
    if constants.is_offline_mode():
        raise UserError(f"push_to={repository}: HF_HUB_OFFLINE is set, so nothing can be pushed; unset it")
    if get_token() is None:
        raise UserError(f"push_to={repository}: there is no token of the Hub; {LOG_IN}")


def push(folder: Path, repository: str, private: bool | None = None) -> str:
    """Create a model repository of the hub where it does not exist, upload an export, and return its address.

    Files of the repository that the export lacks are kept, except the code of an earlier export. private: whether a new
    repository is private; None: the default of its owner.

    Raises UserError if the hub refuses it or cannot be reached, or if the repository exists and is not as private as
    requested. The folder is not changed, and the same call resumes.
    """
    api = HfApi()
    try:
        page = api.create_repo(repository, private=private, exist_ok=True)
        if private is not None and api.model_info(repository).private is not private:
            is_now = "public" if private else "private"
            raise UserError(
                f"push_to={repository}: the repository exists and is {is_now}; change that in its settings, "
                f"{page}/settings, or leave out private=. Nothing was pushed"
            )
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=f"Upload an export of depthlm {depthlm.__version__}",
            delete_patterns=STALE,
        )
    except (httpx.HTTPError, OSError, ValueError, RuntimeError, TypeError, AttributeError, LookupError) as error:
        again = f"hf upload {shlex.quote(repository)} {shlex.quote(str(folder))}"
        raise UserError(
            f"push_to={repository}: {_explain(error, repository)}. The export is in {folder}; repeat the command, or "
            f"run {again}"
        ) from error
    return str(page)


def _explain(error: BaseException, repository: str) -> str:
    """Return what went wrong, and what to do."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        # the upload of one file
        error = error.__cause__
    if isinstance(error, (TypeError, AttributeError, LookupError)):
        # the library does not check the content of answers
        return f"what the hub answered is not as expected ({type(error).__name__}: {error}); try again later"
    if not isinstance(error, HfHubHTTPError):
        words = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, (httpx.TransportError, ConnectionError, TimeoutError)):
            return f"the hub at {constants.ENDPOINT} cannot be reached ({words}); check the network"
        return f"the files cannot be uploaded ({words})"
    status = error.response.status_code
    answer = f"HTTP status {status}" + (f", {error.server_message}" if error.server_message else "")
    if status == 401:
        return f"the hub refuses the token ({answer}); {LOG_IN}"
    if status == 403:
        owner = repository.partition("/")[0]
        return f"the token may not write there ({answer}); use one that may write to {owner}, or give another owner"
    if status == 404:
        return f"no such repository or owner ({answer}); check the name, and that the token may see it"
    if status == 429 or status >= 500:
        return f"the hub is busy or unavailable ({answer}); wait"
    return f"the hub refuses the request ({answer})"
