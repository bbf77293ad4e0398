"""The schema: every key a run can set, with its type, default, bounds and meaning.

Data, optimizers and the decoder define their own keys.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from depthlm.config.experiment import Budget, Experiment
from depthlm.counts import Count
from depthlm.data.settings import Data
from depthlm.distributed.pipeline import Pipeline
from depthlm.fields import key, section
from depthlm.machine.environment import Device
from depthlm.model.shape import Backbone, Parametrization, Size
from depthlm.ops import KernelChoice
from depthlm.optimizers import Optimizer

# the default size of the buckets in which gradients are reduced. At ZeRO 0 it is small enough that a model has several,
# of which all but the last are reduced during the backward pass; above, it is DeepSpeed's own default
REPLICATED_BUCKET, SHARDED_BUCKET = 10_000_000, 500_000_000
# an integer must not be read as true or false
Recomputation = StrictBool | Literal["selective"] | Annotated[int, Field(strict=True, ge=1)]


@dataclass(frozen=True)
class Model:
    """The depth mechanism: a connection and an attention, each an instance of its `_target_` class."""

    name: str = key("", "name of the mechanism in reports")
    connection: dict[str, Any] = key({}, "how a sublayer reads from and writes to the depth stream")
    attention: dict[str, Any] = key({}, "which keys and values of earlier layers an attention reads")
    loops: int = key(1, "number of passes through the same layers; each pass has its own connections", minimum=1)


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run, as a multiple of optimizer.lr."""

    name: Literal["cosine", "inverse_sqrt", "wsd", "constant"] = key("cosine", "shape after the warm-up")
    warmup_ratio: float | None = key(None, "linear warm-up, as a share of the run", minimum=0, maximum=1)
    warmup_steps: int | None = key(None, "linear warm-up, in steps", minimum=0)
    min_lr_ratio: float = key(0.1, "minimum learning rate, as a share of the peak", minimum=0, maximum=1)
    decay_ratio: float = key(0.2, "wsd: length of the final linear decay, as a share of the run", minimum=0, maximum=1)


@dataclass(frozen=True)
class Training:
    """The training loop: length, batch, checkpoints, validation and logging."""

    max_steps: Count | None = key(
        None, "length of the run in steps; give one of max_steps, max_tokens and max_epochs", minimum=1
    )
    max_tokens: Count | None = key(
        None, "length of the run in tokens (such as 10B), rounded up to whole steps", minimum=1
    )
    max_epochs: int | None = key(
        None, "length of the run in passes over the training tokens, each in a different order", minimum=1
    )
    batch_size: int = key(32, "sequences per step, over all ranks", minimum=1)
    batch_tokens: Count | None = key(
        None, "tokens per step, instead of batch_size; a multiple of sequence_length", minimum=1
    )
    micro_batch_size: int | None = key(
        None,
        "sequences per forward pass on one rank; null: the rank's whole share of the batch",
        minimum=1,
        on_resume="logged",
    )
    sequence_length: int = key(512, "tokens per sequence", minimum=1)
    gradient_clipping: float = key(1.0, "maximum norm of the whole gradient; 0: no clipping", minimum=0)
    z_loss: float = key(0.0, "weight of mean(logsumexp(logits)^2) in the loss", minimum=0)
    activation_checkpointing: Recomputation = key(
        False,
        "what the backward pass recomputes instead of storing it. true: each layer; n: every n-th layer; selective: "
        "each layer, except matrix products and attention, which are stored",
        on_resume="logged",
    )
    compile: Literal["auto", True, False] = key(
        "auto", "torch.compile of each sublayer and of the loss; auto: on a GPU, except with ZeRO 3", on_resume="logged"
    )
    cuda_graphs: Literal["auto", True, False] = key(
        "auto", "replay each micro-batch as a CUDA graph; auto: on a GPU with ZeRO 0", on_resume="logged"
    )
    num_threads: int | None = key(
        None,
        "CPU threads per rank; null: OMP_NUM_THREADS, or the available cores, divided by the ranks of the node",
        minimum=1,
        on_resume="free",
    )
    on_nonfinite: Literal["skip", "rewind", "stop"] = key(
        "skip",
        "what to do with a non-finite loss or gradient, which never updates the weights. skip: skip the batch; rewind: "
        "return to the last regular checkpoint and skip all batches since; stop: end the run",
        on_resume="logged",
    )
    max_skipped: int = key(
        10,
        "maximum number of bad batches (or rewinds) without an update that is kept in between; one more ends the run",
        minimum=0,
        on_resume="logged",
    )
    spike_deviations: float | None = key(
        6.0,
        "a loss this many standard deviations above the running mean is a spike; null: no detection",
        above=0,
        on_resume="logged",
    )
    spike_window: int = key(
        128, "recent losses for the mean and deviation; detection starts at half as many", minimum=2, on_resume="logged"
    )
    on_spike: Literal["log", "skip"] = key("log", "log: log the spike; skip: also skip its batch", on_resume="logged")
    checkpoint_every: int = key(
        100, "steps between regular checkpoints; the last step is always saved", minimum=1, on_resume="free"
    )
    checkpoint_minutes: float | None = key(
        None, "also save when this many minutes have passed since the last checkpoint", above=0, on_resume="free"
    )
    keep_last: int = key(2, "number of newest checkpoints to keep", minimum=1, on_resume="free")
    keep_every: int | None = key(
        None, "keep every checkpoint whose step is a multiple of this", minimum=1, on_resume="free"
    )
    async_checkpoint: bool = key(
        False,
        "copy the state to host memory and write it while training continues; needs memory for the copy",
        on_resume="free",
    )
    rank_timeout: float = key(
        60.0, "seconds without a heartbeat from a rank after which all other ranks end", minimum=1, on_resume="free"
    )
    stall_timeout: float = key(
        30.0, "minutes without progress of a live rank after which all ranks end", above=0, on_resume="free"
    )
    validate_every: int | None = key(
        100, "steps between validations; null: only at the end", minimum=1, on_resume="free"
    )
    validation_tokens: Count | None = key(None, "maximum number of tokens of each validation set; null: all", minimum=2)
    validation_document_tokens: int | None = key(
        None,
        "measure validation losses with one document per row, without context from the document before it; a document "
        "of more tokens than this has several rows; null: consecutive sequences of sequence_length",
        minimum=1,
    )
    log_every: int = key(10, "steps between rows of metrics.jsonl and lines of the log", minimum=1, on_resume="free")
    log_blocks_every: int | None = key(
        None,
        "steps between measurements of the magnitude of each sublayer's output and of its gradient, also made at the "
        "first step (blocks.jsonl, drawn by reports with `curves: [depth]`); null: never",
        minimum=1,
        on_resume="free",
    )
    stop_after: int | None = key(
        None,
        "end after this step, with a checkpoint; schedule and name remain those of the whole run",
        minimum=1,
        on_resume="free",
    )
    profile: bool = key(
        False, "write a trace of steps 3 to 5 to profile/trace.json (open it in ui.perfetto.dev)", on_resume="free"
    )
    sample: str | None = key(None, "prompt of the text that is sampled at the end; null: none", on_resume="free")
    pipeline: Pipeline = section(Pipeline)


@dataclass(frozen=True)
class Precision:
    """The dtype of the forward and backward pass."""

    name: Literal["auto", "fp32", "bf16", "fp16"] = key("auto", "auto: bf16 if the device is fast at it, else fp32")
    fp32_residual: bool = key(
        False, "at ZeRO 0 with bf16, keep the residual stream in fp32 instead of bf16, which moves twice the bytes"
    )
    tf32: bool = key(
        True, "compute fp32 matrix products on a GPU in TF32, with 10 bits of mantissa", on_resume="logged"
    )
    initial_scale_power: int = key(16, "fp16: the dynamic loss scale starts at 2 to this power", minimum=0)
    loss_scale_window: int = key(1000, "fp16: steps without overflow before the scale doubles", minimum=1)
    hysteresis: int = key(2, "fp16: overflows before the scale halves", minimum=1)
    min_loss_scale: int = key(1, "fp16: minimum loss scale", minimum=1)


@dataclass(frozen=True)
class DeepSpeed:
    """How DeepSpeed shards weights, gradients and optimizer states over the ranks."""

    stage: int = key(
        0,
        "ZeRO stage: 0 replicates everything, 1 shards the optimizer, 2 also the gradients, 3 also the weights",
        minimum=0,
        maximum=3,
        on_resume="logged",
    )
    experts: int = key(
        1,
        "ZeRO 0 to 2: ranks over which the experts of a layer are spread; divides the number of ranks and "
        "size.num_experts. Tokens are sent to the ranks of their experts (docs/experts.md)",
        minimum=1,
        on_resume="logged",
    )
    offload: Literal["none", "cpu"] = key(
        "none", "ZeRO 3: where weights and optimizer states are kept while not in use", on_resume="logged"
    )
    reduce_bucket_size: Count | None = key(
        None, "gradient elements to reduce at once; null: 10M at ZeRO 0, else 500M", minimum=1, on_resume="free"
    )
    allgather_bucket_size: Count = key(
        SHARDED_BUCKET, "ZeRO 1 and 2: weight elements to gather at once after the update", minimum=1, on_resume="free"
    )
    prefetch_bucket_size: Count = key(
        50_000_000, "ZeRO 3: weight elements to gather ahead of their use", minimum=0, on_resume="free"
    )
    overlap_comm: bool = key(
        False,
        "ZeRO 1 and above: reduce gradients during the backward pass, as ZeRO 0 does without CUDA graphs",
        on_resume="free",
    )
    communication_data_type: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto", "dtype in which gradients are reduced over the ranks; auto: that of the weights", on_resume="logged"
    )

    def bucket_elements(self, stage: int) -> int:
        """Return how many gradient elements are reduced at once at a stage, which need not be the configured one."""
        return self.reduce_bucket_size or (REPLICATED_BUCKET if stage == 0 else SHARDED_BUCKET)


@dataclass(frozen=True)
class Evaluation:
    """Evaluations of checkpoints during training: losses on other sets, and tasks of lm-eval."""

    every: int | None = key(
        None,
        "steps between evaluations, a multiple of training.checkpoint_every; the last checkpoint of the run is "
        "evaluated as well; null: none",
        minimum=1,
    )
    tasks: list[str] | None = key(
        None,
        "paper (Depth-Attention's eight), moda (MoDA's ten), lm-eval tasks, python_words (needs no download), or YAML "
        "files of tasks",
        outside=True,
    )
    shots: list[int] | None = key(None, "examples before a question; null: 0,5 for tasks=paper, otherwise 0")
    sets: list[str] | None = key(None, "folders of token files whose loss is measured in full", outside=True)
    batch_size: int = key(16, "sequences per batch of one rank; does not affect the results", minimum=1)
    limit: int | None = key(None, "use only the first questions of each task", minimum=1)


@dataclass(frozen=True)
class Tracker:
    """The services that record a run, in addition to metrics.jsonl."""

    wandb: bool = key(False, "record with Weights & Biases")
    tensorboard: bool = key(False, "write TensorBoard's event files to the run directory")
    mode: Literal["auto", "online", "offline"] = key(
        "auto", "W&B; auto: online if there is an API key, otherwise offline"
    )
    project: str = key("depthlm", "project of W&B")
    entity: str | None = key(None, "W&B team or user; null: the default of the API key")
    group: str | None = key(None, "group of the run in W&B; null: the name of its experiment")
    tags: list[str] = key([], "W&B tags, besides the mechanism, the size and the data")


@dataclass(frozen=True)
class Config:
    """The configuration of one run."""

    seed: int = key(1, "seed of the weights and of the order of the data", minimum=0, maximum=2**63 - 1, protocol=False)
    name: str | None = key(
        None,
        "name of the run: its folder, and what tables and legends call it; null: made from the mechanism, the size, "
        "the seed and what else differs from the default, as in mhc-tiny-seed1-lr1e-3",
        on_resume="free",
    )
    output_dir: str | None = key(
        None, "run directory; null: outputs/<experiment or default>/<name of the run>", on_resume="free"
    )
    resume: Literal["auto", "extend", "retrain", "never"] = key(
        "auto",
        "auto: resume from the newest valid checkpoint; extend: also allow a longer run than before, finished or not; "
        "retrain: also start a run again whose checkpoints are lost or damaged, finished or not; never: "
        "refuse a directory that contains a run",
        on_resume="free",
    )
    fork_from: str | None = key(
        None,
        "start with the weights, optimizer and step of this checkpoint, or of the newest complete checkpoint of this "
        "run directory, under the settings given here; a run that already has a checkpoint resumes from its own",
        protocol=False,
        outside=True,
    )
    init_from: str | None = key(
        None,
        "start with the weights of this checkpoint, of the newest complete checkpoint of this run directory, or of "
        "this Hugging Face folder (Qwen3, OLMo2, an export); another mechanism may start from vanilla weights. "
        "Optimizer and step start from scratch; a run that already has a checkpoint resumes from its own",
        protocol=False,
        outside=True,
    )
    deterministic: bool = key(False, "allow only operations with bitwise reproducible results", on_resume="logged")
    device: Device = key(
        "auto",
        "auto: the GPU, or the CPU if there is none; a GPU that torch cannot use is an error unless cpu is given",
        on_resume="logged",
    )
    kernels: KernelChoice = key(
        "auto",
        "operators over depth. triton: fused kernels; torch: PyTorch; auto: triton on a GPU that supports it; "
        "naive: their definitions, slow, to check the others",
        on_resume="logged",
    )
    memory: Literal["check", "ignore"] = key(
        "check",
        "check: compare the memory estimate with the memory of the machine before anything is built, and stop if it "
        "does not fit; ignore: start anyway",
        on_resume="free",
    )
    dry_run: bool = key(
        False, "check, print the derived values, run one full-size step (twice, to time it), and stop", on_resume="free"
    )
    price: float | None = key(
        None,
        "price of a GPU hour in US dollars; summary and dry_run print the cost of the run",
        above=0,
        on_resume="free",
    )
    model: Model = section(Model, protocol=False)
    backbone: Backbone = section(Backbone)
    size: Size = section(Size)
    parametrization: Parametrization = section(Parametrization)
    data: Data = section(Data)
    optimizer: Optimizer = section(Optimizer)
    schedule: Schedule = section(Schedule)
    training: Training = section(Training)
    deepspeed: DeepSpeed = section(DeepSpeed)
    precision: Precision = section(Precision, protocol=False)
    evaluation: Evaluation = section(Evaluation, on_resume="free")
    tracker: Tracker = section(Tracker, on_resume="free", outside=True)
    budget: Budget = section(Budget)
    code: dict[str, str] = key(
        {},
        "SHA-256 of the source of each class from outside depthlm and of the local modules that it imports, by class; "
        "always computed",
        protocol=False,
    )
    differences: dict[str, str] = key(
        {}, "the settings that the name has after the seed, with their values; always computed", on_resume="free"
    )
    experiment: Experiment = section(Experiment, on_resume="free")


def run_steps(config: Config, windows: int | None = None) -> int | None:
    """Return the steps of the whole run. `max_tokens` is rounded up to whole steps, `max_epochs` down to whole batches.

    windows: number of sequences in the training tokens; None if unknown. The result is None then for `max_epochs`, and
    always without a length.
    """
    training = config.training
    if training.max_steps is not None:
        return training.max_steps
    if training.max_epochs is not None:
        return None if windows is None else max(1, training.max_epochs * windows // training.batch_size)
    if training.max_tokens is None:
        return None
    return math.ceil(training.max_tokens / (training.batch_size * training.sequence_length))


def warmup_steps(config: Config, steps: int) -> int:
    """Return the steps of the linear warm-up in a run of `steps` steps."""
    schedule = config.schedule
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return round((schedule.warmup_ratio or 0.0) * steps)
