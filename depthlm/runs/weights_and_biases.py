"""Weights & Biases: online if there is an API key, otherwise offline in the run directory."""

import logging
import netrc
import os
import secrets
import shutil
import sys
import threading
import urllib.parse
from contextlib import suppress
from pathlib import Path
from typing import Any

from depthlm.config.schema import Tracker as TrackerConfig
from depthlm.files import read_json
from depthlm.run_directory import RunDirectory, is_checkpoint, step_of
from depthlm.runs.checkpoints import WEIGHTS
from depthlm.runs.records import read_metrics

log = logging.getLogger("depthlm")

# seconds within a service's START that wandb.init waits for the server; maximum seconds for uploading weights
ANSWER, UPLOAD = 20, 3000.0


class WeightsAndBiases:
    """A W&B run.

    artifacts: which weights are uploaded, as in the configuration. repeat_to: the step up to which the rows of earlier
    processes are recorded again, from metrics.jsonl, so that the folder of this process replaces theirs; 0: none.
    """

    name = "W&B"

    def __init__(self, run: Any, directory: Path, artifacts: str, repeat_to: int = 0) -> None:
        self.run, self.directory, self.artifacts = run, RunDirectory(directory), artifacts
        self.repeat_to = repeat_to
        self.id: str | None = run.id
        self.upload_seconds = 0.0 if artifacts == "none" else UPLOAD
        self.advice = f"metrics.jsonl is still written, and `wandb sync` uploads what is in {self.directory.wandb}"
        self.uploaded = self._newest()

    def log(self, row: dict[str, Any]) -> None:
        """Log a row at its step, and upload a checkpoint written since the last row, if all are uploaded."""
        self._repeat()
        self._record(row)
        if self.artifacts == "all" and (newest := self._newest()) is not None and newest != self.uploaded:
            self._upload(newest)

    def alert(self, title: str, text: str, step: int) -> None:
        """Send an alert, which W&B passes on by e-mail or Slack as the user has set there."""
        self.run.alert(title=title, text=f"step {step}: {text}", level="WARN", wait_duration=300)

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Record the summary, upload the weights and the loss curve of a complete run, and finish."""
        self._repeat()
        self.run.summary.update(summary or {})
        newest = self._newest()
        if summary is not None and self.artifacts != "none" and newest is not None:
            log.info("uploading the weights of %s to W&B", newest.name)
            self._upload(newest, "final")
        self.run.finish()

    def _record(self, row: dict[str, Any]) -> None:
        self.run.log({name: row[name] for name in row if name != "step"}, step=row["step"])

    def _repeat(self) -> None:
        last, self.repeat_to = self.repeat_to, 0
        if last == 0:
            return
        for row in read_metrics(self.directory.metrics):
            if row["step"] <= last:
                self._record(row)
        self.run.summary.update(read_json(self.directory.summary))
        for folder in offline_folders(self.directory, self.run.id):
            if folder != Path(self.run.dir).parent:
                shutil.rmtree(folder, ignore_errors=True)

    def _newest(self) -> Path | None:
        folders = (folder for folder in self.directory.checkpoint_folders() if is_checkpoint(folder))
        return next(folders, None)

    def _upload(self, checkpoint: Path, *aliases: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"run-{self.id}", type="model", metadata={"step": step_of(checkpoint)})
        for file in (self.directory.config, checkpoint / WEIGHTS, self.directory.loss_curve):
            # a checkpoint may be deleted as soon as newer ones are complete
            with suppress(FileNotFoundError, ValueError):
                artifact.add_file(str(file))
        self.run.log_artifact(artifact, aliases=["latest", checkpoint.name, *aliases])
        self.uploaded = checkpoint

    def give_up(self) -> None:
        """Detach from the W&B service."""
        give_up()


def start(
    config: TrackerConfig, directory: Path, settings: dict[str, Any], run_id: str | None, resumed_at: int | None
) -> WeightsAndBiases | None:
    """Start or continue the W&B run of a directory; None, after a warning, if it starts neither online nor offline.

    resumed_at: the step after which this process trains; None: it does not train, but records results. A run that was
    always offline continues in one folder.
    """
    run = init(
        config,
        entity=config.entity,
        group=config.group or settings["experiment"]["name"] or None,
        tags=[*dict.fromkeys([*tags(settings), *config.tags])],
        name=directory.name,
        id=run_id,
        dir=directory,
        config=settings,
    )
    if run is None:
        return None
    paths = RunDirectory(directory)
    # weights that were recorded to be uploaded are in the folders, and may have been removed since
    kept = ("all",) if resumed_at is not None else ("all", "last")
    repeats = settings["tracker"]["artifacts"] not in kept and run.offline and not was_uploaded(paths, run.id)
    last = sys.maxsize if resumed_at is None else resumed_at
    return WeightsAndBiases(run, directory, config.artifacts, last if repeats else 0)


def offline_folders(directory: RunDirectory, run_id: str) -> list[Path]:
    """Return the folders that the processes of a run have written offline."""
    return sorted(directory.wandb.absolute().glob(f"offline-run-*-{run_id}"))


def was_uploaded(directory: RunDirectory, run_id: str) -> bool:
    """Return whether the server has rows of this run: a process was online, or `wandb sync` has uploaded a folder."""
    online = any(directory.wandb.glob(f"run-*-{run_id}"))
    return online or any(any(folder.glob("*.synced")) for folder in offline_folders(directory, run_id))


def init(tracker: TrackerConfig, *, dir: Path, **arguments: Any) -> Any:
    """Start or continue a W&B run: online if possible, otherwise offline; None, after a warning, if neither works.

    dir: where W&B creates its folder; arguments: further ones of wandb.init.
    """
    import wandb

    # W&B's own error reports delay the end of the process by half a minute if the server does not answer
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    for mode in (chosen := modes(tracker)):
        try:
            run = wandb.init(
                project=tracker.project,
                resume="allow",
                mode=mode,  # type: ignore[arg-type]
                # W&B's service resolves a relative path against the working directory it was started in
                dir=dir.absolute(),
                settings=wandb.Settings(init_timeout=ANSWER, console="off", silent=True),
                # WANDB_RUN_ID would be that of every run of a shell or a sweep, which the server would take for one run
                **{**arguments, "id": arguments.get("id") or secrets.token_hex(4)},
            )
            for handler in logging.getLogger("wandb").handlers:
                # on a full disk, W&B's own log would print a traceback for each line
                handler.handleError = lambda record: None  # type: ignore[method-assign]
            where = run.url if mode == "online" else "offline in the folder wandb/; `wandb sync` uploads it"
            log.info("W&B run %s: %s", run.id, where)
            return run
        except Exception as error:
            last = mode == chosen[-1]
            log.warning("W&B %s failed (%s)%s", mode, error, "; metrics.jsonl is still written" if last else "")
    return None


def modes(config: TrackerConfig) -> list[str]:
    """Return the modes to try, in order."""
    environment_mode = os.environ.get("WANDB_MODE")
    offline = environment_mode in ("offline", "dryrun") or not has_key()
    if config.mode == "offline" or (config.mode == "auto" and offline):
        return ["offline"]
    return ["online", "offline"]


def tags(settings: dict[str, Any]) -> list[str]:
    """Return the tags of every run: its mechanism, size and data."""
    return [settings[group]["name"] for group in ("model", "size", "data")]


def give_up() -> None:
    """Detach from the W&B service; otherwise the process would wait for it at exit."""

    def teardown() -> None:
        # SystemExit carries the exit code of the service
        with suppress(Exception, SystemExit):
            import wandb

            wandb.teardown()

    # teardown first unregisters its exit hook, and may then hang, so it runs in a thread
    thread = threading.Thread(target=teardown, name="wandb end", daemon=True)
    thread.start()
    thread.join(1.0)


def has_key() -> bool:
    """Return whether a W&B key is set, in WANDB_API_KEY or in netrc (`wandb login`), without asking the server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
