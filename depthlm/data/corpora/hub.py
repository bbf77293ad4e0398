"""Where a corpus of the Hugging Face hub lies, file by file, at one commit; and the tokenizer of a model there."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from depthlm.data.errors import DataError

# `datasets` and `huggingface_hub` take a second to import, and most runs need neither: each function imports them.

# Other files (scripts, LICENSE.txt) are no text.
_FORMATS = [".parquet", ".jsonl", ".json"]

# Each block is a request of its own, repeated where the connection drops; the hub limits requests per minute.
_BLOCK = 2**24

_TOKENIZER = "tokenizer.json"


class HubFile(NamedTuple):
    """A file of a dataset: its path in the repository, and a url for `open_url` that holds the commit."""

    name: str
    url: str


def hub_files(
    repo: str, subset: str | None, revision: str | None, splits: Sequence[str]
) -> tuple[str, dict[str, list[HubFile]]]:
    """The commit that the revision (null: main) means now, and the files of each split.

    The repository's README says what a subset (null: its default) and a split are; where it does not, a subset is a
    folder, and a split goes by names, as `train/` or `val.jsonl`. No data file is read, and no code of the repository.

    Raises DataError for a repository, revision, subset or split that is not there, or a hub that cannot be reached.
    """
    # Not `load_dataset_builder`: beside a folder train/ it does not see val.jsonl; it leaves out, or refuses, files of
    # two formats where there is no README; takes a local folder or an old cache for the repository; and asks two more
    # servers, for minutes where a firewall swallows the question.
    from huggingface_hub import HfApi, constants

    where = f"{repo} at {revision}" if revision else repo
    with _explained(where, repo, revision):
        wait = constants.HF_HUB_ETAG_TIMEOUT
        info = HfApi().dataset_info(repo, revision=revision, timeout=wait, expand=["sha"])
        assert info.sha is not None
        root = f"hf://datasets/{info.id}@{info.sha}"
        base, patterns = _splits(root, subset, _configs(info.id, info.sha), where)
        found = {split: _matching(base, patterns.get(split, [])) for split in splits}
        if missing := [split for split in splits if not found[split]]:
            there = [split for split in patterns if _matching(base, patterns[split])]
            if not there:
                remedy = "Set data.hub to another, or for one of a script try data.revision=refs/convert/parquet."
                raise DataError(f"no file of text ({', '.join(_FORMATS)})", where, remedy)
            remedy = f"Set data.split and data.validation_split to some of: {', '.join(there)}."
            raise DataError(f"no such split {missing[0]!r}", f"{where}, subset {subset}" if subset else where, remedy)
    files = {split: [HubFile(url.removeprefix(f"{root}/"), url) for url in found[split]] for split in splits}
    return info.sha, files


def open_url(url: str) -> BinaryIO:
    """A file of the hub, seekable, read in blocks; a dropped connection is taken up again for about half a minute.

    Raises DataError, also while reading, for a file that is not there or a hub that cannot be reached.
    """
    from huggingface_hub import HfFileSystem

    repo, _, rest = url.removeprefix("hf://datasets/").partition("@")
    explained = partial(_explained, url, repo, rest.partition("/")[0])
    with explained():
        return io.BufferedReader(_Stream(HfFileSystem().open(url, "rb", block_size=_BLOCK), explained))


def hub_tokenizer(name: str) -> str:
    """The text of a model's tokenizer.json, from the hub's cache where the hub cannot be reached.

    Raises DataError where neither has it.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache

    with _explained(name, name, model=True):
        try:
            # The download alone would repeat itself for minutes before it gives up.
            HfApi().model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT, expand=["sha"])
            path = hf_hub_download(name, _TOKENIZER)
        except Exception as error:
            cached = try_to_load_from_cache(name, _TOKENIZER) if _is_away(error) else None
            if not isinstance(cached, str):
                raise
            path = cached
        return Path(path).read_bytes().decode("utf-8")


def _configs(repo: str, commit: str) -> dict[str, dict[str, Any]]:
    """The subsets that the README defines, each with its `data_files`, `data_dir` and `default`, where it has them."""
    from huggingface_hub import hf_hub_download, metadata_load
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        card = metadata_load(hf_hub_download(repo, "README.md", repo_type="dataset", revision=commit))
    except RemoteEntryNotFoundError:
        return {}
    return {str(config["config_name"]): config for config in (card or {}).get("configs") or ()}


def _splits(
    root: str, subset: str | None, configs: dict[str, dict[str, Any]], where: str
) -> tuple[str, dict[str, list[str]]]:
    """The folder of the subset, and the patterns below it of each split."""
    from datasets.data_files import sanitize_patterns
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem()
    if not configs:
        base = f"{root}/{subset}" if subset else root
        if subset and not hub.isdir(base):
            folders = [path.rpartition("/")[2] for path in hub.glob(f"{root}/*") if hub.isdir(path)]
            remedy = f"Set data.subset to null, or to a folder of it: {', '.join(folders) or 'there are none'}."
            raise DataError(f"no such subset {subset!r}", where, remedy)
        return base, _guessed(base)
    defaults = [name for name in configs if name == "default" or configs[name].get("default") or len(configs) == 1]
    name = subset or next(iter(defaults), None)
    if name is None or name not in configs:
        what = "none of several subsets is chosen" if name is None else f"no such subset {name!r}"
        raise DataError(what, where, f"Set data.subset to one of: {', '.join(configs)}.")
    config = configs[name]
    base = f"{root}/{config['data_dir']}" if config.get("data_dir") else root
    return base, sanitize_patterns(config["data_files"]) if config.get("data_files") else _guessed(base)


def _guessed(base: str) -> dict[str, list[str]]:
    from datasets.data_files import DEFAULT_PATTERNS_SPLIT_IN_FILENAME, EmptyDatasetError, get_data_patterns

    try:
        found = get_data_patterns(base)
    except EmptyDatasetError:
        return {}
    beside_folders = {
        str(split): [pattern.removeprefix("**/") for pattern in patterns]
        for split, patterns in DEFAULT_PATTERNS_SPLIT_IN_FILENAME.items()
    }
    return beside_folders | {str(split): patterns for split, patterns in found.items()}


def _matching(base: str, patterns: list[str]) -> list[str]:
    from datasets.data_files import DataFilesList

    try:
        # Patterns overlap, and no file must be read twice.
        return list(dict.fromkeys(DataFilesList.from_patterns(patterns, base, _FORMATS)))
    except FileNotFoundError:
        return []


class _Stream(io.RawIOBase):
    """A file of the hub; reading it raises DataError."""

    def __init__(self, file: Any, explained: Callable[[], AbstractContextManager[None]]) -> None:
        self._file, self._explained = file, explained

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._explained():
            return self._file.readinto(buffer)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def _explained(where: str, repo: str, revision: str | None = None, model: bool = False) -> Iterator[None]:
    """The libraries' errors as DataErrors that say what to do."""
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    key, copy = ("data.tokenizer", "data.tokenizer=<its path>") if model else ("data.hub", "data.source=<folder>")
    try:
        yield
    except (httpx.HTTPError, errors.HFValidationError, errors.EntryNotFoundError, OSError) as error:
        # They hide what they met behind FileNotFoundError.
        met = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        if isinstance(met, errors.GatedRepoError):
            what = "the owner of the repository asks for consent first"
            remedy = f"Agree on its page of the hub and run `hf auth login`, or set {copy}."
        elif isinstance(met, (errors.RepositoryNotFoundError, errors.HFValidationError)):
            what = "no such repository on the hub"
            remedy = f"It has moved, or is private or gated: set {key}, run `hf auth login`, or set {copy}."
        elif isinstance(met, errors.RevisionNotFoundError):
            what, remedy = "no such revision", "Set data.revision to a branch, tag or commit of the repository."
        elif isinstance(met, (errors.RemoteEntryNotFoundError, FileNotFoundError)) and not _is_away(met):
            what = f"no {_TOKENIZER} in the repository" if model else "no such file on the hub"
            remedy = f"Set {key} to another, or {copy}."
        else:
            what = f"the Hugging Face hub cannot be read ({_reason(met)})"
            options = f" {_TOKENIZER}" if model else " --repo-type dataset"
            options += f" --revision {revision}" if revision else ""
            remedy = f"On a machine with internet run `hf download {repo}{options} --local-dir <folder>`; set {copy}."
        raise DataError(what, where, remedy) from error


def _reason(error: BaseException) -> str:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, HfHubHTTPError):
        return f"it answers {error.response.status_code}"
    return next(iter(str(error).split("\n")), "") or type(error).__name__


def _is_away(error: BaseException) -> bool:
    """Whether the hub did not answer, or answered that it cannot now."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError, httpx.TransportError))
