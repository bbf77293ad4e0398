"""The schema: every key a run can set, its type, its default, its bounds and what it means."""

from dataclasses import dataclass, field
from typing import Any, Optional

from depthlm.config.schema.experiment import Budget, Experiment
from depthlm.fields import key
from depthlm.kernels import CHOICES
from depthlm.machine.environment import DEVICES
from depthlm.model.shape import Backbone, Size


@dataclass
class Model:
    """The depth mechanism: a connection and an attention, each built from its `_target_`."""

    name: str = key("", "name of the mechanism, for reports")
    connection: dict[str, Any] = key({}, "how a sublayer reads from and writes to the depth stream")
    attention: dict[str, Any] = key({}, "which keys and values of earlier layers an attention may use")
    loops: int = key(1, "passes through the same layers; each pass has connections of its own", minimum=1)


SHARD_TOKENS = 128_000_000


@dataclass
class Source:
    """Where one body of text lies: on the hub, in local files, or here as token files already."""

    hub: Optional[str] = key(None, "dataset of the Hugging Face hub that the text is streamed from")
    subset: Optional[str] = key(None, "hub: its configuration; null: the only one, or the default")
    revision: Optional[str] = key(None, "hub: branch, tag or commit; null: main")
    split: Optional[str] = key(None, "hub: the split that is read; null: train (of data.validation: validation)")
    validation_split: Optional[str] = key(
        None, "hub: the split that is held out; null: documents chosen by a hash of their names"
    )
    source: Optional[str] = key(None, "folder or file of raw text, read instead of the hub; null: the corpus' own")
    files: Optional[str] = key(None, "source: pattern of the files below the folder; null: all of these suffixes")
    validation_files: Optional[str] = key(
        None, "source: pattern of the files that are held out; null: documents chosen by a hash of their names"
    )
    suffixes: Optional[list[str]] = key(None, "files read from a folder of text")
    text_field: Optional[str] = key(None, "field of a JSON object, or column of a parquet file, with the text")
    path: Optional[str] = key(None, "folder of the token files; null: data/tokens/<name>-<digest of the settings>")
    weight: Optional[float] = key(None, "of a mixture: the share of the tokens, relative to the others", above=0)
    license: Optional[str] = key(None, "a note")
    text_bytes: Optional[Any] = key(None, "about how much text there is; for estimates alone", minimum=1, count=True)
    num_tokens: Optional[Any] = key(None, "about how many tokens that makes; for estimates", minimum=1, count=True)
    download_bytes: Optional[Any] = key(None, "about how much the hub sends; for estimates", minimum=1, count=True)


@dataclass
class Data(Source):
    """A corpus: raw text in, token files out. With `sources`, a mixture: each takes from here what it leaves out."""

    name: str = key("", "name of the corpus; also of its validation set")
    sources: dict[str, Any] = key(
        {}, "the sources of a mixture by name, each with keys as above: data.sources.a.hub=..."
    )
    validation: dict[str, Any] = key(
        {}, "further validation sets by name, each with a loss and perplexity of its own: data.validation.a.source=..."
    )
    split: Optional[str] = key("train", "hub: the split to train on")
    suffixes: Optional[list[str]] = key(
        [".txt", ".md", ".py", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet"],
        "files read from a folder of text",
    )
    text_field: Optional[str] = key("text", "field of a JSON object, or column of a parquet file, with the text")
    tokenizer: str = key(
        "bpe", "bpe: trained once on the corpus; bytes: 256 bytes; else a tokenizer.json, or a model of the hub"
    )
    vocab_size: int = key(
        4096, "vocabulary of the tokenizer `bpe`, its special token included, or of the hub's", minimum=260
    )
    pad_vocab_multiple: int = key(
        64, "the model's vocabulary is the tokenizer's, raised to a multiple of this", minimum=1
    )
    max_tokens: Optional[Any] = key(
        None,
        "prepare, and train on, the first so many tokens of the corpus (10B parses); null: all",
        minimum=1,
        count=True,
    )
    fraction: float = key(1.0, "train on this first part of the tokens prepared", above=0, maximum=1)
    validation_fraction: float = key(
        0.05, "share of the documents held out by a hash of their names", above=0, maximum=0.5
    )
    shuffle_seed: Optional[int] = key(None, "seed of the order of the samples; null: the run's seed", minimum=0)
    document_mask: bool = key(False, "attention and positions stay inside a document")
    on_bad_document: str = key(
        "error",
        "a document that is not UTF-8, not JSON or without its text field ends the preparation, or is left out "
        "and counted",
        choices=("error", "skip"),
    )
    shard_tokens: Any = key(SHARD_TOKENS, "tokens of one token file", minimum=1, count=True)
    num_workers: int = key(0, "processes that read batches ahead; they do not change the order", minimum=0)


@dataclass
class Optimizer:
    """One optimizer for all parameters; what takes no weight decay is said by each module."""

    name: str = key("adamw", "muon: hidden matrices by Muon, everything else by AdamW", choices=("adamw", "muon"))
    lr: float = key(1e-3, "peak learning rate", above=0)
    weight_decay: float = key(0.1, "decoupled weight decay of the matrices", minimum=0)
    betas: list[float] = key([0.9, 0.95], "decay rates of AdamW's two moments")
    eps: float = key(1e-8, "epsilon of AdamW", above=0)
    momentum: float = key(0.95, "momentum of Muon", minimum=0, maximum=0.9999)
    ns_steps: int = key(5, "Newton-Schulz iterations of Muon", minimum=1)


@dataclass
class Schedule:
    """Learning rate over the run, as a multiple of optimizer.lr."""

    name: str = key("cosine", "shape after the warm-up", choices=("cosine", "inverse_sqrt", "wsd", "constant"))
    warmup_ratio: Optional[float] = key(None, "linear warm-up, as a share of the run", minimum=0, maximum=1)
    warmup_steps: Optional[int] = key(None, "linear warm-up, in steps", minimum=0)
    min_lr_ratio: float = key(0.1, "floor, as a share of the peak", minimum=0, maximum=1)
    decay_ratio: float = key(0.2, "wsd: share of the run in its final linear decay", minimum=0, maximum=1)


@dataclass
class Training:
    """The loop."""

    max_steps: Optional[int] = key(
        None, "length of the run in steps; one of max_steps, max_tokens and max_epochs", minimum=1
    )
    max_tokens: Optional[Any] = key(
        None, "length of the run in tokens (10B parses), rounded up to whole steps", minimum=1, count=True
    )
    max_epochs: Optional[int] = key(
        None, "length of the run in passes over the training tokens, each in an order of its own", minimum=1
    )
    batch_size: int = key(32, "sequences of one step, over all ranks", minimum=1)
    batch_tokens: Optional[Any] = key(
        None, "the batch in tokens instead of sequences; divides by sequence_length", minimum=1, count=True
    )
    micro_batch_size: Optional[int] = key(
        None, "sequences of one forward pass on one rank; null: the rank's whole share", minimum=1
    )
    sequence_length: int = key(512, "tokens of a sequence", minimum=1)
    gradient_clipping: float = key(1.0, "largest norm of the whole gradient; 0: no clipping", minimum=0)
    z_loss: float = key(0.0, "weight of mean(logsumexp(logits)^2) in the loss", minimum=0)
    activation_checkpointing: bool = key(False, "recompute each layer in the backward pass instead of storing it")
    compile: bool = key(False, "torch.compile of each sublayer and of the loss")
    num_threads: Optional[int] = key(
        None, "CPU threads of one rank; null: the cores this process may use, shared by its ranks", minimum=1
    )
    on_bad_numbers: str = key(
        "skip",
        "a loss or gradient that is not finite never reaches the weights. skip: that batch is left out; rewind: so are "
        "all since the last regular checkpoint, whose state comes back; stop: the run ends",
        choices=("skip", "rewind", "stop"),
    )
    max_skipped: int = key(
        10,
        "batches in a row left out (or rewinds to the same checkpoint) before the run ends",
        minimum=0,
    )
    spike_deviations: Optional[float] = key(
        6.0, "a loss so many standard deviations above the running mean is a spike; null: no loss is", above=0
    )
    spike_window: int = key(128, "losses of which mean and deviation are taken, once half as many are there", minimum=2)
    on_spike: str = key("log", "log: a spike is told; skip: its batch is left out too", choices=("log", "skip"))
    checkpoint_every: int = key(100, "steps between regular checkpoints; the last step always has one", minimum=1)
    checkpoint_minutes: Optional[float] = key(
        None, "save also when so many minutes have passed since the last checkpoint", above=0
    )
    keep_last: int = key(2, "newest checkpoints kept", minimum=1)
    keep_every: Optional[int] = key(
        None, "checkpoints of steps that are a multiple of this are kept for ever", minimum=1
    )
    async_checkpoint: bool = key(
        False, "copy the state to memory, and write it while training goes on; needs memory for the copy"
    )
    rank_timeout: float = key(
        60.0, "seconds without a sign of life of a rank, after which all the others end", minimum=1
    )
    stall_timeout: float = key(30.0, "minutes in which a living rank may do nothing new, after which all end", above=0)
    validate_every: Optional[int] = key(100, "steps between validations; null: at the end only", minimum=1)
    validation_tokens: Optional[Any] = key(
        None, "at most so many tokens of each validation set; null: all", minimum=1, count=True
    )
    log_every: int = key(10, "steps between rows of metrics.jsonl and of the log", minimum=1)
    log_blocks_every: Optional[int] = key(
        None,
        "measure every so many steps, and at the first, how large each sublayer's output and the gradient there are "
        "(blocks.jsonl, drawn by `python -m depthlm inspect`); null: never",
        minimum=1,
    )
    stop_after: Optional[int] = key(
        None, "end after this step, with a checkpoint; schedule and name stay those of the whole run", minimum=1
    )
    profile: bool = key(False, "write a trace of steps 3 to 5 to profile/trace.json (open it in ui.perfetto.dev)")
    sample: Optional[str] = key(None, "prompt of the sample text at the end; null: none")


@dataclass
class DeepSpeed:
    """How the states are spread over ranks."""

    stage: int = key(
        0,
        "ZeRO stage: 0 replicates all, 1 shards the optimizer, 2 the gradients too, 3 the weights too",
        minimum=0,
        maximum=3,
    )
    offload: str = key(
        "none", "ZeRO 3: where weights and optimizer states rest while they are not used", choices=("none", "cpu")
    )
    reduce_bucket_size: Any = key(
        "500M", "ZeRO 1 and above: numbers of gradient that are reduced at once", minimum=1, count=True
    )
    allgather_bucket_size: Any = key(
        "500M", "ZeRO 1 and 2: numbers of weight that are gathered at once after the update", minimum=1, count=True
    )
    prefetch_bucket_size: Any = key(
        "50M", "ZeRO 3: numbers of weight that are gathered ahead of their use", minimum=0, count=True
    )
    overlap_comm: bool = key(False, "ZeRO 1 and above: reduce gradients while the backward pass goes on")
    communication_data_type: str = key(
        "auto",
        "number format in which ZeRO 1 and above reduce gradients over the ranks; auto: that of the weights",
        choices=("auto", "fp32", "bf16", "fp16"),
    )


@dataclass
class Precision:
    """Number format of the forward and backward pass."""

    name: str = key(
        "auto", "auto: bf16 where the device is fast at it, else fp32", choices=("auto", "fp32", "bf16", "fp16")
    )
    initial_scale_power: int = key(16, "fp16: the dynamic loss scale starts at two to this power", minimum=0)
    loss_scale_window: int = key(1000, "fp16: steps without overflow before the scale doubles", minimum=1)
    hysteresis: int = key(2, "fp16: overflows before the scale halves", minimum=1)
    min_loss_scale: int = key(1, "fp16: the scale does not go below", minimum=1)


@dataclass
class Tracker:
    """Where curves go besides metrics.jsonl."""

    name: str = key("wandb", "service", choices=("wandb", "none"))
    mode: str = key("auto", "auto: online with a key, else offline", choices=("auto", "online", "offline"))
    project: str = key("depthlm", "W&B project")
    entity: Optional[str] = key(None, "W&B team or user; null: the key's own")


@dataclass
class Config:
    """One run."""

    seed: int = key(1, "seed of the weights and of the order of the data", minimum=0, maximum=2**63 - 1)
    output_dir: Optional[str] = key(
        None, "the run directory; null: outputs/<experiment or default>/<name made from the overrides>"
    )
    resume: str = key(
        "auto",
        "auto: resume from the newest valid checkpoint; extend: also where the run is to be longer than it was, "
        "finished or not; retrain: also where a finished run has lost its last checkpoint, or none is valid; never: "
        "refuse a directory that holds a run",
        choices=("auto", "extend", "retrain", "never"),
    )
    fork_from: Optional[str] = key(
        None,
        "start with weights, optimizer and step of this run directory's newest whole checkpoint, or of this "
        "checkpoint, under the settings given here; a run that has a checkpoint of its own resumes that",
    )
    import_from: Optional[str] = key(
        None,
        "start with the weights of this run directory's newest whole checkpoint, of this checkpoint, or of this folder "
        "of Hugging Face (Qwen3, OLMo2, an export), also of vanilla's in another mechanism; optimizer and step start "
        "anew, and a run that has a checkpoint of its own resumes that",
    )
    deterministic: bool = key(False, "allow only operations that give the same bits each time")
    device: str = key(
        "auto",
        "auto: the GPU, or the CPU where there is none; a GPU that torch cannot use is an error, unless cpu is given",
        choices=DEVICES,
    )
    kernels: str = key(
        "auto",
        "operators over depth: triton, fused kernels; torch, plain PyTorch; auto, triton on a GPU where it can",
        choices=CHOICES,
    )
    memory: str = key(
        "check",
        "check: compare the memory estimate with what the machine has, before anything is built, and stop where it "
        "does not fit; ignore: start anyway",
        choices=("check", "ignore"),
    )
    dry_run: bool = key(False, "check, print what is derived, take a full-size step (twice, to time it), and stop")
    model: Model = field(default_factory=Model)
    backbone: Backbone = field(default_factory=Backbone)
    size: Size = field(default_factory=Size)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    training: Training = field(default_factory=Training)
    deepspeed: DeepSpeed = field(default_factory=DeepSpeed)
    precision: Precision = field(default_factory=Precision)
    tracker: Tracker = field(default_factory=Tracker)
    budget: Budget = field(default_factory=Budget)
    experiment: Experiment = field(default_factory=Experiment)
