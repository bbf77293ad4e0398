"""Training batches, each a pure function of its number; and validation batches, which contain a set once."""

import itertools
import signal
from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from depthlm.data.mixture import schedule
from depthlm.data.token_files import TokenFiles
from depthlm.errors import DataError, UserError

# Target of a position that has none: torch's cross entropy ignores it.
IGNORED = -100
# the longest n-gram whose repetitions are counted, as in OLMo2
_LONGEST_PERIOD = 13
# tokens that are searched for the ends of documents at once, and the smallest width of a row of a document
BLOCK, NARROWEST = 2**20, 32
_ROUNDS = 8
_MASK = 2**64 - 1


class Batches(Dataset[torch.Tensor]):
    """This rank's share of each global batch: batches[step] is [accumulation, micro_batch, sequence_length + 1].

    Window w of a source is its tokens w*T to w*T + T, where T = sequence_length: T inputs and the target of each. So a
    token is a target once in an epoch of its source. Of B = batch_size positions, rank r of R has r*B/R to (r+1)*B/R,
    so the global batch is the same for any R and any micro_batch (sequences per forward pass; None: all of the rank's).

    train: the tokens of each source. weights: the share of each in the samples, relative to the others; None: equal.
    max_repetitions: a sample in which an n-gram repeats so often has no targets (`inputs_and_targets`); None: all have.
    Raises DataError where a source has fewer tokens than one window, or batch_size is not a multiple of
    ranks * micro_batch.
    """

    def __init__(
        self,
        train: Mapping[str, TokenFiles],
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        micro_batch: int | None = None,
        max_repetitions: int | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.max_repetitions = max_repetitions
        self.names, self.tokens = tuple(train), tuple(train.values())
        self.sequence_length, self.batch_size, self.seed = sequence_length, batch_size, seed
        self.micro_batch = micro_batch or max(1, batch_size // ranks)
        if batch_size % (ranks * self.micro_batch):
            what = f"a batch of {batch_size} sequences is no multiple of {ranks} ranks x {self.micro_batch} sequences"
            raise DataError(what, "training.batch_size", "Change training.batch_size or training.micro_batch_size.")
        self.num_windows = [(len(tokens) - 1) // sequence_length for tokens in self.tokens]
        for tokens, windows in zip(self.tokens, self.num_windows, strict=True):
            if windows < 1:
                what = f"{len(tokens)} training tokens are fewer than one sequence of {sequence_length} and its target"
                remedy = "Give more text, a larger data.fraction, or a smaller training.sequence_length."
                raise DataError(what, tokens.folder, remedy)
        self.schedule = schedule(tuple((weights or {}).get(name, 1.0) for name in self.names))
        # seeding by name lets a source keep its order when another joins the mixture; a single source needs no name
        self.seeds = [(seed, key_of(*name.encode())) if len(train) > 1 else (seed,) for name in self.names]
        per_rank = batch_size // ranks
        self.positions = np.arange(rank * per_rank, (rank + 1) * per_rank)

    def __getitem__(self, step: int) -> torch.Tensor:
        length = self.sequence_length
        sources, windows = self.samples(step)
        samples = [self.tokens[s].read(int(w) * length, length + 1) for s, w in zip(sources, windows, strict=True)]
        for sample in samples:
            if self.max_repetitions is not None and most_repetitions(sample) >= self.max_repetitions:
                np.invert(sample, out=sample)
        return torch.from_numpy(np.stack(samples)).view(-1, self.micro_batch, length + 1)

    def samples(
        self, step: int, positions: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source, as an index into `names`, and the window of each sample of a step.

        positions: the samples' positions in the global batch; None: those of this rank.
        """
        numbers = step * self.batch_size + (self.positions if positions is None else positions)
        sources, numbers = self.schedule.locate(numbers)
        windows = np.empty_like(numbers)
        for source in np.unique(sources):
            of_source = sources == source
            windows[of_source] = sample_windows(self.seeds[source], numbers[of_source], self.num_windows[source])
        return sources, windows

    def windows(self, step: int) -> dict[str, list[int]]:
        """Return the windows of each source that occurs in the global batch of a step, in order."""
        sources, windows = self.samples(step, np.arange(self.batch_size))
        return {self.names[source]: windows[sources == source].tolist() for source in np.unique(sources)}

    def document_length(self, end_of_text: int, samples: int = 256) -> float:
        """Return the mean over the tokens of the first samples: the length of the token's document inside the window.

        Attention inside documents costs as much as attention over sequences of this length.
        """
        sources, windows = self.samples(0, np.arange(samples))
        squares = 0
        for source, window in zip(sources, windows, strict=True):
            tokens = self.tokens[source].read(int(window) * self.sequence_length, self.sequence_length)
            ends = np.flatnonzero(tokens == end_of_text) + 1
            squares += int(np.square(np.diff(ends, prepend=0, append=len(tokens))).sum())
        return squares / (samples * self.sequence_length)

    def count_seen(self, steps: int) -> dict[str, tuple[float, float]]:
        """Return, for each source after `steps` steps, its share of the samples and its number of epochs."""
        samples = steps * self.batch_size
        counts = self.schedule.count_seen(samples).tolist()
        rows = zip(self.names, counts, self.num_windows, strict=True)
        return {name: (count / max(samples, 1), count / windows) for name, count, windows in rows}


def loader(
    batches: Batches, first_step: int, last_step: int, *, num_workers: int = 0, pin_memory: bool = False
) -> Iterator[torch.Tensor]:
    """Yield the batches of steps first_step to last_step - 1, from 0, in order for any num_workers.

    Raises UserError if the workers cannot be started.
    """
    steps = range(first_step, last_step)
    try:
        return iter(
            DataLoader(
                batches,
                sampler=steps,
                batch_size=None,
                num_workers=num_workers,
                pin_memory=pin_memory,
                worker_init_fn=_prepare_worker,
            )
        )
    except OSError as error:
        raise UserError(
            f"data.num_workers={num_workers}: the workers cannot be started ({error}); their locks are in /dev/shm, so "
            "make room there, or give data.num_workers=0"
        ) from None


def inputs_and_targets(tokens_bt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs_bt and targets_bt of samples [b, T + 1]. Samples without targets have the complements of tokens."""
    ignored_bt = tokens_bt < 0
    return torch.where(ignored_bt, ~tokens_bt, tokens_bt)[:, :-1], tokens_bt.masked_fill(ignored_bt, IGNORED)[:, 1:]


def most_repetitions(tokens: NDArray[np.int64]) -> int:
    """Return how many times in a row an n-gram of 1 to 13 tokens occurs at most; incomplete ones do not count."""
    most = 1
    for period in range(1, min(_LONGEST_PERIOD, len(tokens) - 1) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        # the longest run of tokens that equal the one a period before
        longest = int(np.diff(differs, prepend=-1, append=len(tokens) - period).max()) - 1
        most = max(most, (longest + period) // period)
    return most


def sample_windows(seeds: tuple[int, ...], numbers: NDArray[np.int64], num_windows: int) -> NDArray[np.int64]:
    """Return the window of each sample of a source; numbers, [any shape], count the source's samples from 0.

    Each run of num_windows samples is an epoch: it has every window once, in its own order.
    """
    epochs = numbers // num_windows
    windows = np.empty_like(numbers)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        windows[in_epoch] = permute(numbers[in_epoch] % num_windows, num_windows, key_of(*seeds, int(epoch)))
    return windows


def permute(values: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Return the position of each value, [any shape] of 0 .. n-1, in the permutation of 0 .. n-1 given by the key.

    A Feistel network permutes 0 .. m-1, where m is the next power of four. A result outside 0 .. n-1 is permuted again
    until it falls inside, which keeps the function a bijection and takes fewer than four iterations on average.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = [_mix_int(key + (turn + 1) * 0x9E3779B97F4A7C15) for turn in range(_ROUNDS)]
    placed = _feistel(values.astype(np.uint64), half, keys)
    while (outside := placed >= np.uint64(n)).any():
        placed[outside] = _feistel(placed[outside], half, keys)
    return placed.astype(np.int64)


def key_of(*numbers: int) -> int:
    """Return a 64-bit key of non-negative integers; their order matters."""
    key = 0
    for number in numbers:
        key = _mix_int(key ^ _mix_int(number + 0x9E3779B97F4A7C15))
    return key


class DocumentRows(NamedTuple):
    """One document per row. end_of_text: the token that ends a document. longest: the most tokens of a row."""

    end_of_text: int
    longest: int


def validation_batches(
    tokens: TokenFiles,
    sequence_length: int,
    micro_batch: int,
    max_tokens: int | None = None,
    *,
    documents: DocumentRows | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (inputs [b, T], targets [b, T]) over the first max_tokens tokens; each but the first is a target once.

    Without `documents`, rows are windows in the order of the tokens, with T = sequence_length and b <= micro_batch.
    With them, a row is a document, predicted from the end-of-text token before it; one longer than `longest` has
    several rows. Rows of similar length come together, T <= longest, and b T is at most micro_batch * sequence_length,
    or b is 1. Rows are padded with inputs 0 and targets IGNORED.

    Each of several ranks takes every ranks-th row. All ranks get the same number of batches, since with ZeRO 3 they
    must run the model together: a rank that would have one batch fewer gets a last batch without targets.

    Raises DataError where there are fewer than two tokens.
    """
    total = min(len(tokens), max_tokens or len(tokens))
    if total < 2:
        raise DataError(f"{total} validation tokens leave nothing to predict", tokens.folder, "Give more text.")
    if documents is None:
        begins = np.arange(0, total - 1, sequence_length)
        ends, widths = np.minimum(begins + sequence_length, total - 1), np.full_like(begins, sequence_length)
    else:
        begins, ends = _documents(tokens, total, documents)
        powers = np.ceil(np.log2(np.maximum(ends - begins, NARROWEST))).astype(int)
        # rows of similar length come together, in few shapes
        widths = np.minimum(2**powers, documents.longest)
    for width in np.unique(widths).tolist():
        rows = np.stack((begins, ends), axis=1)[widths == width]
        size = max(1, micro_batch * sequence_length // width)
        for first in range(0, -(-len(rows) // ranks), size):
            # a row that begins at the end has no targets
            spans = rows[rank::ranks][first : first + size].tolist() or [(total, total)]
            samples = torch.from_numpy(np.stack([_row(tokens, begin, end, width) for begin, end in spans]))
            yield samples[:, :-1].clamp(min=0), samples[:, 1:].contiguous()


def _prepare_worker(worker: int) -> None:
    # schedulers signal the whole process group, but only the main process decides when its workers stop
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # batches go through a pipe: PyTorch would store them in /dev/shm, and wait forever for one that does not fit there
    ForkingPickler.register(torch.Tensor, lambda batch: (torch.from_numpy, (batch.numpy(),)))


def _feistel(values: NDArray[np.uint64], half: int, keys: list[int]) -> NDArray[np.uint64]:
    width, low = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> width, values & low
    for key in keys:
        left, right = right, left ^ (_mix(right + np.uint64(key)) & low)
    return left << width | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finaliser of splitmix64, which relies on unsigned integers wrapping around.
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _mix_int(x: int) -> int:
    return int(_mix(np.array([x & _MASK], dtype=np.uint64))[0])


def _documents(tokens: TokenFiles, total: int, documents: DocumentRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first input and the last target of each row."""
    blocks = ((start, tokens.read(start, min(BLOCK, total - start))) for start in range(0, total, BLOCK))
    found = [start + np.flatnonzero(block == documents.end_of_text) for start, block in blocks]
    bounds = np.unique(np.concatenate([[0], *found, [total - 1]]))
    rows = [
        (begin, min(begin + documents.longest, end))
        for first, end in itertools.pairwise(bounds.tolist())
        for begin in range(first, end, documents.longest)
    ]
    begins, ends = zip(*rows, strict=True)
    return np.array(begins), np.array(ends)


def _row(tokens: TokenFiles, begin: int, end: int, width: int) -> NDArray[np.int64]:
    """Return tokens begin to end, both included, padded to width + 1."""
    row = np.full(width + 1, IGNORED, dtype=np.int64)
    if begin < end:
        row[: end - begin + 1] = tokens.read(begin, end - begin + 1)
    return row
