"""The schema: every key a run can set, with its type, default, bounds and meaning."""

from dataclasses import dataclass
from typing import Any, Optional, Union

from depthlm.config.schema.deepspeed import DeepSpeed
from depthlm.config.schema.evaluation import Evaluation
from depthlm.config.schema.experiment import Budget, Experiment
from depthlm.fields import TINY, key, section
from depthlm.machine.environment import DEVICES
from depthlm.model.shape import Backbone, Size
from depthlm.ops import CHOICES


@dataclass
class Model:
    """The depth mechanism: a connection and an attention, each an instance of its `_target_` class."""

    name: str = key("", "name of the mechanism in reports")
    connection: dict[str, Any] = key({}, "how a sublayer reads from and writes to the depth stream")
    attention: dict[str, Any] = key({}, "which keys and values of earlier layers an attention reads")
    loops: int = key(1, "number of passes through the same layers; each pass has its own connections", minimum=1)


SHARD_TOKENS = 128_000_000


@dataclass
class Source:
    """A source of text: a dataset of the Hugging Face hub, local files, or token files that are already prepared."""

    hub: Optional[str] = key(None, "dataset of the Hugging Face hub from which the text is streamed", outside=True)
    subset: Optional[str] = key(None, "hub: configuration of the dataset; null: its only or default one")
    revision: Optional[str] = key(None, "hub: branch, tag or commit of the dataset; null: main")
    split: Optional[str] = key(None, "hub: split to read; null: train (in data.validation: validation)")
    validation_split: Optional[str] = key(
        None, "hub: split used for validation; null: documents chosen by a hash of their names"
    )
    source: Optional[str] = key(
        None, "folder or file of raw text, read instead of the hub; null: the default of the corpus", outside=True
    )
    files: Optional[str] = key(
        None, "source: glob pattern of the files to read; null: all files with one of the suffixes", outside=True
    )
    validation_files: Optional[str] = key(
        None,
        "source: glob pattern of the validation files; null: documents chosen by a hash of their names",
        outside=True,
    )
    suffixes: Optional[list[str]] = key(None, "suffixes of the files to read from a folder of text")
    text_field: Optional[str] = key(None, "JSON field or parquet column that contains the text")
    path: Optional[str] = key(
        None, "folder of the token files; null: data/tokens/<name>-<hash of the settings>", outside=True
    )
    weight: Optional[float] = key(None, "mixture: share of the tokens, relative to the other sources", above=0)
    license: Optional[str] = key(None, "license of the text; informational", on_resume="free")
    text_bytes: Optional[Any] = key(
        None, "approximate size of the text in bytes; only for estimates", minimum=1, count=True, on_resume="free"
    )
    num_tokens: Optional[Any] = key(
        None, "approximate number of tokens; only for estimates", minimum=1, count=True, on_resume="free"
    )
    download_bytes: Optional[Any] = key(
        None, "approximate download size in bytes; only for estimates", minimum=1, count=True, on_resume="free"
    )


@dataclass
class Data(Source):
    """A corpus, tokenized from raw text; or a mixture of `sources`, whose unset keys take the values given here."""

    name: str = key("", "name of the corpus and of its validation set")
    sources: dict[str, Any] = key(
        {}, "sources of a mixture by name, each with the keys of a source: data.sources.a.hub=..."
    )
    validation: dict[str, Any] = key(
        {}, "additional validation sets by name, each with its own loss and perplexity: data.validation.a.source=..."
    )
    split: Optional[str] = key("train", "hub: split to train on")
    suffixes: Optional[list[str]] = key(
        [".txt", ".md", ".py", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet"],
        "suffixes of the files to read from a folder of text",
    )
    text_field: Optional[str] = key("text", "JSON field or parquet column that contains the text")
    tokenizer: str = key(
        "bpe",
        "bpe: trained once on the corpus; bytes: the 256 bytes; otherwise a tokenizer.json or a model of the hub",
        outside=True,
    )
    end_of_text: Optional[str] = key(
        None,
        "token that ends a document; null: the one that generation_config.json, config.json or tokenizer_config.json "
        "beside the tokenizer.json names, else the added token with a usual name, such as <|endoftext|>",
        on_resume="logged",
    )
    max_unknown: float = key(
        0.1,
        "share of unknown tokens above which preparing is refused; from a tenth of a percent on, there is a warning",
        minimum=0,
        maximum=1,
        on_resume="free",
    )
    vocab_size: int = key(4096, "vocabulary size of the tokenizer, including the special token of `bpe`", minimum=260)
    pad_vocab_multiple: int = key(
        64, "the model's vocabulary size is that of the tokenizer, rounded up to a multiple of this", minimum=1
    )
    max_tokens: Optional[Any] = key(
        None,
        "prepare and train on only this many tokens, from the start of the corpus (such as 10B); null: all",
        minimum=1,
        count=True,
    )
    fraction: float = key(1.0, "train on this fraction of the prepared tokens, from the start", above=0, maximum=1)
    validation_fraction: float = key(
        0.05, "share of the documents used for validation, chosen by a hash of their names", above=0, maximum=0.5
    )
    shuffle_seed: Optional[int] = key(None, "seed of the order of the samples; null: the seed of the run", minimum=0)
    document_mask: bool = key(False, "attention and positions do not cross document boundaries")
    on_bad_document: str = key(
        "error",
        "what to do with a document that is not UTF-8, not JSON, too long or has no text field. error: stop the "
        "preparation; skip: skip and count it",
        choices=("error", "skip"),
    )
    max_document_bytes: Any = key(
        2**30, "most bytes of a document or line; a longer one is bad", minimum=1, count=True, on_resume="free"
    )
    shard_tokens: Any = key(SHARD_TOKENS, "tokens per token file", minimum=1, count=True)
    num_workers: int = key(
        0, "processes that prefetch batches; does not change their order", minimum=0, on_resume="free"
    )


@dataclass
class Optimizer:
    """One optimizer for all parameters. Each module declares which of its parameters have no weight decay.

    Each of betas, eps, momentum and ns_steps is passed to the class if it has an argument of that name.
    """

    name: str = key("", "name of the optimizer in reports")
    _target_: str = key("", "class of the optimizer, a subclass of torch.optim.Optimizer")
    lr: float = key(1e-3, "peak learning rate", above=0)
    weight_decay: float = key(0.1, "decoupled weight decay of the matrices", minimum=0)
    betas: list[float] = key([0.9, 0.95], "decay rates of the moments: two in AdamW, three in AdEMAMix")
    eps: float = key(1e-8, "epsilon, as in AdamW", minimum=TINY)
    momentum: Optional[float] = key(
        None, "momentum, as in Muon; null: the default of the class", minimum=0, maximum=0.9999
    )
    ns_steps: Optional[int] = key(None, "Newton-Schulz iterations of Muon; null: the default of the class", minimum=1)
    needs_matrices: bool = key(
        False,
        "whether the class computes with whole matrices; if so, it needs ZeRO 0, since ZeRO 1 to 3 give it flat parts",
        on_resume="free",
    )
    settings: dict[str, Any] = key({}, "arguments of the class; they take precedence over the keys above")


@dataclass
class Schedule:
    """The learning rate over the run, as a multiple of optimizer.lr."""

    name: str = key("cosine", "shape after the warm-up", choices=("cosine", "inverse_sqrt", "wsd", "constant"))
    warmup_ratio: Optional[float] = key(None, "linear warm-up, as a share of the run", minimum=0, maximum=1)
    warmup_steps: Optional[int] = key(None, "linear warm-up, in steps", minimum=0)
    min_lr_ratio: float = key(0.1, "minimum learning rate, as a share of the peak", minimum=0, maximum=1)
    decay_ratio: float = key(0.2, "wsd: length of the final linear decay, as a share of the run", minimum=0, maximum=1)


@dataclass
class Training:
    """The training loop: length, batch, checkpoints, validation and logging."""

    max_steps: Optional[int] = key(
        None, "length of the run in steps; give one of max_steps, max_tokens and max_epochs", minimum=1
    )
    max_tokens: Optional[Any] = key(
        None, "length of the run in tokens (such as 10B), rounded up to whole steps", minimum=1, count=True
    )
    max_epochs: Optional[int] = key(
        None, "length of the run in passes over the training tokens, each in a different order", minimum=1
    )
    batch_size: int = key(32, "sequences per step, over all ranks", minimum=1)
    batch_tokens: Optional[Any] = key(
        None, "tokens per step, instead of batch_size; a multiple of sequence_length", minimum=1, count=True
    )
    micro_batch_size: Optional[int] = key(
        None,
        "sequences per forward pass on one rank; null: the rank's whole share of the batch",
        minimum=1,
        on_resume="logged",
    )
    sequence_length: int = key(512, "tokens per sequence", minimum=1)
    gradient_clipping: float = key(1.0, "maximum norm of the whole gradient; 0: no clipping", minimum=0)
    z_loss: float = key(0.0, "weight of mean(logsumexp(logits)^2) in the loss", minimum=0)
    activation_checkpointing: Any = key(
        False,
        "what the backward pass recomputes instead of storing it. true: each layer; n: every n-th layer; selective: "
        "each layer, except matrix products and attention, which are stored",
        on_resume="logged",
    )
    compile: Union[bool, str] = key(
        "auto",
        "torch.compile of each sublayer and of the loss; auto: on a GPU, except with ZeRO 3",
        choices=("auto", True, False),
        on_resume="logged",
    )
    num_threads: Optional[int] = key(
        None,
        "CPU threads per rank; null: the available cores, divided by the ranks of the node",
        minimum=1,
        on_resume="free",
    )
    on_nonfinite: str = key(
        "skip",
        "what to do with a non-finite loss or gradient, which never updates the weights. skip: skip the batch; rewind: "
        "return to the last regular checkpoint and skip all batches since; stop: end the run",
        choices=("skip", "rewind", "stop"),
        on_resume="logged",
    )
    on_bad_numbers: Optional[str] = key(
        None, "the old name of training.on_nonfinite", choices=("skip", "rewind", "stop")
    )
    max_skipped: int = key(
        10,
        "maximum number of bad batches (or rewinds) without an update that is kept in between; one more ends the run",
        minimum=0,
        on_resume="logged",
    )
    spike_deviations: Optional[float] = key(
        6.0,
        "a loss this many standard deviations above the running mean is a spike; null: no detection",
        above=0,
        on_resume="logged",
    )
    spike_window: int = key(
        128,
        "number of recent losses for the mean and deviation; detection starts at half as many",
        minimum=2,
        on_resume="logged",
    )
    on_spike: str = key(
        "log", "log: log the spike; skip: also skip its batch", choices=("log", "skip"), on_resume="logged"
    )
    checkpoint_every: int = key(
        100, "steps between regular checkpoints; the last step is always saved", minimum=1, on_resume="free"
    )
    checkpoint_minutes: Optional[float] = key(
        None, "also save when this many minutes have passed since the last checkpoint", above=0, on_resume="free"
    )
    keep_last: int = key(2, "number of newest checkpoints to keep", minimum=1, on_resume="free")
    keep_every: Optional[int] = key(
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
    validate_every: Optional[int] = key(
        100, "steps between validations; null: only at the end", minimum=1, on_resume="free"
    )
    validation_tokens: Optional[Any] = key(
        None, "maximum number of tokens of each validation set; null: all", minimum=1, count=True
    )
    log_every: int = key(10, "steps between rows of metrics.jsonl and lines of the log", minimum=1, on_resume="free")
    log_blocks_every: Optional[int] = key(
        None,
        "steps between measurements of the magnitude of each sublayer's output and of its gradient, also made at the "
        "first step (blocks.jsonl, plotted by `python -m depthlm inspect`); null: never",
        minimum=1,
        on_resume="free",
    )
    stop_after: Optional[int] = key(
        None,
        "end after this step, with a checkpoint; schedule and name remain those of the whole run",
        minimum=1,
        on_resume="free",
    )
    profile: bool = key(
        False, "write a trace of steps 3 to 5 to profile/trace.json (open it in ui.perfetto.dev)", on_resume="free"
    )
    sample: Optional[str] = key(None, "prompt of the text that is sampled at the end; null: none", on_resume="free")


@dataclass
class Precision:
    """The dtype of the forward and backward pass."""

    name: str = key(
        "auto", "auto: bf16 if the device is fast at it, otherwise fp32", choices=("auto", "fp32", "bf16", "fp16")
    )
    tf32: bool = key(
        True, "compute fp32 matrix products on a GPU in TF32, with 10 bits of mantissa", on_resume="logged"
    )
    initial_scale_power: int = key(16, "fp16: the dynamic loss scale starts at 2 to this power", minimum=0)
    loss_scale_window: int = key(1000, "fp16: steps without overflow before the scale doubles", minimum=1)
    hysteresis: int = key(2, "fp16: overflows before the scale halves", minimum=1)
    min_loss_scale: int = key(1, "fp16: minimum loss scale", minimum=1)


@dataclass
class Tracker:
    """The services that record a run, in addition to metrics.jsonl."""

    wandb: bool = key(False, "record with Weights & Biases")
    tensorboard: bool = key(False, "write TensorBoard's event files to the run directory")
    trackio: bool = key(False, "record with Trackio")
    mode: str = key(
        "auto", "W&B; auto: online if there is an API key, otherwise offline", choices=("auto", "online", "offline")
    )
    project: str = key("depthlm", "project of W&B and Trackio")
    entity: Optional[str] = key(None, "W&B team or user; null: the default of the API key")
    group: Optional[str] = key(None, "group of the run in W&B and Trackio; null: the name of its experiment")
    tags: list[str] = key([], "W&B tags, besides the mechanism, the size and the data")
    artifacts: str = key(
        "none",
        "W&B artifacts; last: weights and loss curve of the complete run, all: also each checkpoint's weights",
        choices=("none", "last", "all"),
    )
    space: Optional[str] = key(None, "Hugging Face Space that shows Trackio's runs; null: only this machine")


@dataclass
class Config:
    """The configuration of one run."""

    seed: int = key(1, "seed of the weights and of the order of the data", minimum=0, maximum=2**63 - 1, protocol=False)
    output_dir: Optional[str] = key(
        None, "run directory; null: outputs/<experiment or default>/<name made from the overrides>", on_resume="free"
    )
    resume: str = key(
        "auto",
        "auto: resume from the newest valid checkpoint; extend: also allow a longer run than before, finished or not; "
        "retrain: also start a run again whose checkpoints are lost or damaged, finished or not; never: "
        "refuse a directory that contains a run",
        choices=("auto", "extend", "retrain", "never"),
        on_resume="free",
    )
    fork_from: Optional[str] = key(
        None,
        "start with the weights, optimizer and step of this checkpoint, or of the newest complete checkpoint of this "
        "run directory, under the settings given here; a run that already has a checkpoint resumes from its own",
        protocol=False,
        outside=True,
    )
    init_from: Optional[str] = key(
        None,
        "start with the weights of this checkpoint, of the newest complete checkpoint of this run directory, or of "
        "this Hugging Face folder (Qwen3, OLMo2, an export); another mechanism may start from vanilla weights. "
        "Optimizer and step start from scratch; a run that already has a checkpoint resumes from its own",
        protocol=False,
        outside=True,
    )
    import_from: Optional[str] = key(None, "the old name of init_from", protocol=False, outside=True)
    deterministic: bool = key(False, "allow only operations with bitwise reproducible results", on_resume="logged")
    device: str = key(
        "auto",
        "auto: the GPU, or the CPU if there is none; a GPU that torch cannot use is an error unless cpu is given",
        choices=DEVICES,
        on_resume="logged",
    )
    kernels: str = key(
        "auto",
        "operators over depth. triton: fused kernels; torch: PyTorch; auto: triton on a GPU that supports it; "
        "naive: their definitions, slow, to check the others",
        choices=CHOICES,
        on_resume="logged",
    )
    memory: str = key(
        "check",
        "check: compare the memory estimate with the memory of the machine before anything is built, and stop if it "
        "does not fit; ignore: start anyway",
        choices=("check", "ignore"),
        on_resume="free",
    )
    dry_run: bool = key(
        False, "check, print the derived values, run one full-size step (twice, to time it), and stop", on_resume="free"
    )
    model: Model = section(Model, protocol=False)
    backbone: Backbone = section(Backbone)
    size: Size = section(Size)
    data: Data = section(Data)
    optimizer: Optimizer = section(Optimizer)
    schedule: Schedule = section(Schedule)
    training: Training = section(Training)
    deepspeed: DeepSpeed = section(DeepSpeed)
    precision: Precision = section(Precision, protocol=False)
    evaluation: Evaluation = section(Evaluation, on_resume="free")
    tracker: Tracker = section(Tracker, on_resume="free", outside=True)
    budget: Budget = section(Budget)
    experiment: Experiment = section(Experiment, on_resume="free")
