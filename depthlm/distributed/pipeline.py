"""The settings of a pipeline, and how its stages and their replicas are laid out over ranks: P adjacent ranks each."""

from dataclasses import dataclass

from depthlm.fields import key


@dataclass(frozen=True)
class Pipeline:
    """A pipeline: the ranks over which the layers of a model are spread."""

    stages: int = key(
        1,
        "stages P; P adjacent ranks are a pipeline, and the ranks / P pipelines share the batch; 1: no pipeline",
        minimum=1,
        on_resume="logged",
    )
    chunks: int = key(
        1, "chunks V of consecutive layers per stage; chunk j is on stage j mod P", minimum=1, on_resume="logged"
    )
    caching: bool = key(
        True,
        "whether a stage keeps what it received for its earlier chunks, so that only new tensors are sent (Attention "
        "Residuals, arXiv 2603.15031, section 4.1); false: all that later layers need is sent each time",
        on_resume="logged",
    )

    def replicas(self, ranks: int) -> int:
        """Return the number of pipelines among so many ranks; each has a share of the batch."""
        return max(1, ranks // self.stages)
