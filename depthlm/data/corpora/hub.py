"""The files of a dataset on the Hugging Face hub at one commit, and the tokenizer of a model on the hub."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from depthlm.data.corpora.formats import TextFile
from depthlm.errors import DataError

# `datasets` and `huggingface_hub` take a second to import, and most runs need neither, so each function imports them.

# The formats of data files; others (scripts, LICENSE.txt) are ignored.
_FORMATS = [".parquet", ".jsonl", ".json"]

# Bytes per request. If the connection drops, a request is repeated; the hub limits requests per minute.
_BLOCK = 2**24

_TOKENIZER = "tokenizer.json"


def hub_files(
    repo: str, subset: str | None, revision: str | None, splits: Sequence[str]
) -> tuple[str, dict[str, list[TextFile]]]:
    """Return the commit to which the revision (null: main) resolves, and the files of each split, for `open_url`.

    The repository's README defines the subsets (null: its default) and splits; without a definition, a subset is a
    folder, and a split follows from names such as `train/` or `val.jsonl`. This reads no data files and runs no code of
    the repository.

    Raises DataError for a repository, revision, subset or split that does not exist, or a hub that cannot be reached.
    """
    # `load_dataset_builder` is unsuitable: it ignores val.jsonl next to a folder train/; without a README it skips or
    # refuses files of two formats; it may use a local folder or an old cache instead of the repository; and it contacts
    # two more servers, which takes minutes behind a firewall that drops packets.
    from huggingface_hub import HfApi, constants

    where = f"{repo} at {revision}" if revision else repo
    with _explain_errors(where, repo, revision):
        wait = constants.HF_HUB_ETAG_TIMEOUT
        info = HfApi().dataset_info(repo, revision=revision, timeout=wait, expand=["sha"])
        if not isinstance(info.id, str) or not isinstance(info.sha, str):
            raise TypeError("no name or commit of the repository")
        root = f"hf://datasets/{info.id}@{info.sha}"
        base, patterns = _splits(root, subset, _configs(info.id, info.sha, where), where)
        urls = {split: _find_matching(base, patterns.get(split, [])) for split in splits}
        if missing := [split for split in splits if not urls[split]]:
            available = [split for split in patterns if _find_matching(base, patterns[split])]
            if not available:
                remedy = "Set data.hub to another; for one with a script, try data.revision=refs/convert/parquet."
                raise DataError(f"no file of text ({', '.join(_FORMATS)})", where, remedy)
            remedy = f"Set data.split and data.validation_split to some of: {', '.join(available)}."
            raise DataError(f"no such split {missing[0]!r}", f"{where}, subset {subset}" if subset else where, remedy)
    files = {split: [TextFile(url.removeprefix(f"{root}/"), url) for url in urls[split]] for split in splits}
    return info.sha, files


def open_url(url: str) -> BinaryIO:
    """Open a file of the hub: seekable, read in blocks; a dropped connection is retried for about half a minute.

    Raises DataError, also while reading, for a file that does not exist or a hub that cannot be reached.
    """
    from huggingface_hub import HfFileSystem
    from huggingface_hub.hf_file_system import HfFileSystemFile

    repo, _, rest = url.removeprefix("hf://datasets/").partition("@")
    revision = rest.partition("/")[0]

    class File(HfFileSystemFile):
        """A file of the hub; errors while reading are raised as DataError."""

        def read(self, length: int | None = -1) -> bytes:
            # without a number, the library reads the file in one piece, which is not repeated
            size = self.size - self.loc if length is None or length < 0 else length
            with _explain_errors(url, repo, revision):
                return super().read(size)

    with _explain_errors(url, repo, revision):
        return io.BufferedReader(File(HfFileSystem(), url, block_size=_BLOCK))


def hub_tokenizer(name: str, others: Sequence[str] = ()) -> dict[str, bytes]:
    """Return the content of a model's tokenizer.json, and of those of `others` that exist beside it, by name.

    Where the hub cannot be reached, they come from the local cache. Raises DataError where neither has the tokenizer.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import RemoteEntryNotFoundError

    load: Callable[[str, str], Any] = hf_hub_download
    with _explain_errors(name, name, model=True):
        try:
            # Without this request, an unreachable hub makes the download retry for minutes.
            HfApi().model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT, expand=["sha"])
            path = load(name, _TOKENIZER)
        except Exception as error:
            load = try_to_load_from_cache
            if not _is_unreachable(error) or not isinstance(path := load(name, _TOKENIZER), str):
                raise
        contents = {_TOKENIZER: Path(path).read_text("utf-8").encode()}
    for file in others:
        with _explain_errors(name, name, model=True), suppress(RemoteEntryNotFoundError):
            # the cache gives no path for a file that it lacks
            if isinstance(path := load(name, file), str):
                contents[file] = Path(path).read_bytes()
    return contents


def _configs(repo: str, commit: str, where: str) -> dict[str, dict[str, Any]]:
    """Return the subsets that the README defines, by name, with their `data_files`, `data_dir` and `default` if set.

    Raises DataError if its definition is not a list of objects with names.
    """
    from huggingface_hub import hf_hub_download, metadata_load
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        card = metadata_load(hf_hub_download(repo, "README.md", repo_type="dataset", revision=commit))
    except RemoteEntryNotFoundError:
        return {}
    configs = (card or {}).get("configs") or []
    if not isinstance(configs, list) or not all(
        isinstance(entry, dict) and "config_name" in entry for entry in configs
    ):
        what = "its README.md must define its subsets as a list of objects, each with a `config_name`"
        raise DataError(what, where, "Set data.hub or data.revision to another, or data.source=<folder> to a copy.")
    return {str(entry["config_name"]): entry for entry in configs}


def _splits(
    root: str, subset: str | None, configs: dict[str, dict[str, Any]], where: str
) -> tuple[str, dict[str, list[str]]]:
    """Return the folder of the subset, and each split's patterns below that folder."""
    from datasets.data_files import sanitize_patterns
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem()
    if not configs:
        base = f"{root}/{subset}" if subset else root
        if subset and not hub.isdir(base):
            folders = [path.rpartition("/")[2] for path in hub.glob(f"{root}/*") if hub.isdir(path)]
            remedy = f"Set data.subset to null, or to a folder of it: {', '.join(folders) or 'there are none'}."
            raise DataError(f"no such subset {subset!r}", where, remedy)
        return base, _guess_patterns(base)
    defaults = [name for name in configs if name == "default" or configs[name].get("default") or len(configs) == 1]
    name = subset or next(iter(defaults), None)
    if name is None or name not in configs:
        what = "none of several subsets is chosen" if name is None else f"no such subset {name!r}"
        raise DataError(what, where, f"Set data.subset to one of: {', '.join(configs)}.")
    config = configs[name]
    base = f"{root}/{config['data_dir']}" if config.get("data_dir") else root
    return base, sanitize_patterns(config["data_files"]) if config.get("data_files") else _guess_patterns(base)


def _guess_patterns(base: str) -> dict[str, list[str]]:
    from datasets.data_files import DEFAULT_PATTERNS_SPLIT_IN_FILENAME, EmptyDatasetError, get_data_patterns

    try:
        patterns_by_split = get_data_patterns(base)
    except EmptyDatasetError:
        return {}
    beside_folders = {
        str(split): [pattern.removeprefix("**/") for pattern in patterns]
        for split, patterns in DEFAULT_PATTERNS_SPLIT_IN_FILENAME.items()
    }
    return beside_folders | {str(split): patterns for split, patterns in patterns_by_split.items()}


def _find_matching(base: str, patterns: list[str]) -> list[str]:
    from datasets.data_files import DataFilesList

    try:
        # Patterns overlap, but each file must be read only once.
        return list(dict.fromkeys(DataFilesList.from_patterns(patterns, base, _FORMATS)))
    except FileNotFoundError:
        return []


@contextmanager
def _explain_errors(where: str, repo: str, revision: str | None = None, model: bool = False) -> Iterator[None]:
    """Raise the libraries' errors as DataErrors that say what to do."""
    import yaml
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    key, copy = ("data.tokenizer", "data.tokenizer=<its path>") if model else ("data.hub", "data.source=<folder>")
    try:
        yield
    except (httpx.HTTPError, errors.HFValidationError, errors.EntryNotFoundError, OSError) as error:
        # The libraries raise FileNotFoundError from the actual error.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        if isinstance(cause, errors.GatedRepoError):
            what = "the repository is gated: its owner requires consent"
            remedy = f"Agree to its terms on its hub page and run `hf auth login`, or set {copy}."
        elif isinstance(cause, (errors.RepositoryNotFoundError, errors.HFValidationError)):
            what = "no such repository on the hub"
            remedy = f"It may have moved, or be private or gated: set {key}, run `hf auth login`, or set {copy}."
        elif isinstance(cause, errors.RevisionNotFoundError):
            what, remedy = "no such revision", "Set data.revision to a branch, tag or commit of the repository."
        elif isinstance(cause, (errors.RemoteEntryNotFoundError, FileNotFoundError)) and not _is_unreachable(cause):
            what = f"no {_TOKENIZER} in the repository" if model else "no such file on the hub"
            remedy = f"Set {key} to another, or {copy}."
        else:
            what = f"the Hugging Face hub cannot be read ({_reason(cause)})"
            options = f" {_TOKENIZER}" if model else " --repo-type dataset"
            options += f" --revision {revision}" if revision else ""
            remedy = f"With internet access, run `hf download {repo}{options} --local-dir <folder>`, then set {copy}."
        raise DataError(what, where, remedy) from error
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError, yaml.YAMLError) as error:
        # the libraries do not check the content of responses and files, which may have null in place of an object
        what = f"what the Hugging Face hub answered is not as expected ({type(error).__name__}: {_reason(error)})"
        raise DataError(what, where, f"Try again later, set {key} to another, or set {copy}.") from error


def _reason(error: BaseException) -> str:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, HfHubHTTPError):
        return f"HTTP status {error.response.status_code}"
    return next(iter(str(error).split("\n")), "") or type(error).__name__


def _is_unreachable(error: BaseException) -> bool:
    """Return whether the hub did not answer, or answered that it is unavailable."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError, httpx.TransportError))
