"""Language models of the harness (lm-eval): a decoder of this process, and one whose requests all ranks compute."""

from collections.abc import Sequence
from functools import partialmethod
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from depthlm.distributed.calls import Call
from depthlm.errors import UserError

# requests of each rank between two moments at which a run can stop or log progress
CHUNK = 256


class HarnessLM(HFLM):
    """The harness's model for transformers, which ends with an empty AssertionError for some lengths of an answer."""

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        text, answer = super()._encode_pair(context, continuation)
        if not answer:
            raise UserError(
                f"the tokenizer merges the answer {continuation!r} with the end of the text before it, "
                f"{context[-20:]!r}, so it has no token of its own; begin the answers of this task with a space, or "
                "move the end of its questions into them"
            )
        if len(answer) > self.max_length:
            raise UserError(
                f"an answer of {len(answer)} tokens, {continuation[:20]!r}..., does not fit into the run's context of "
                f"{self.max_length}; leave out the task, or train with a larger training.sequence_length"
            )
        return text, answer


class SharedLM(LM):
    """Appears to the harness as a single process; `call` distributes the requests over the ranks in turn."""

    def __init__(self, call: Call, ranks: int) -> None:
        super().__init__()
        self.call, self.ranks = call, ranks

    def _share(self, name: str, requests: Sequence[Instance]) -> list[Any]:
        """Return the results of requests, in their order. name: of the method of the harness's language models."""
        results: list[Any] = []
        step = CHUNK * self.ranks
        for first in range(0, len(requests), step):
            arguments = [request.args for request in requests[first : first + step]]
            parts = self.call(name, arguments)
            results += [parts[number % self.ranks][number // self.ranks] for number in range(len(arguments))]
        return results

    loglikelihood = partialmethod(_share, "loglikelihood")
    loglikelihood_rolling = partialmethod(_share, "loglikelihood_rolling")
    generate_until = partialmethod(_share, "generate_until")


def compute_part(lm: Any, name: str, arguments: Sequence[tuple[Any, ...]], rank: int, ranks: int) -> list[Any]:
    """Return a rank's results of the requests with these arguments. lm: this rank's language model of the harness."""
    requests = [Instance(request_type=name, doc={}, arguments=values, idx=0) for values in arguments[rank::ranks]]
    return getattr(lm, name)(requests, disable_tqdm=True) if requests else []
