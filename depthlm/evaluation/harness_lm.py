"""A causal language model of the harness that says which question it cannot score, and why."""

from lm_eval.models.huggingface import HFLM

from depthlm.errors import UserError


class HarnessLM(HFLM):
    """The harness's model for transformers, which ends with an empty AssertionError for an answer without a token."""

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        text, answer = super()._encode_pair(context, continuation)
        if not answer:
            raise UserError(
                f"the tokenizer merges the answer {continuation!r} with the end of the text before it, "
                f"{context[-20:]!r}, so it has no token of its own; begin the answers of this task with a space, or "
                "move the end of its questions into them"
            )
        return text, answer
