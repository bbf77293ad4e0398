"""Load exports like a user who has transformers but not depthlm. Runs in a separate process.

python -I outside.py <requests.json> <answers.json>; a request is {folder, remote, tokens, texts}.
"""

import importlib.abc
import json
import sys


class Absent(importlib.abc.MetaPathFinder):
    """Makes depthlm and its dependencies appear not to be installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("depthlm", "hydra", "omegaconf", "own_mechanism"):
            raise ModuleNotFoundError(f"No module named {name!r}")


sys.meta_path.insert(0, Absent())
try:
    import depthlm  # noqa: F401
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("depthlm can be imported")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


def answer(folder, remote, tokens, texts):
    trust = {"trust_remote_code": True} if remote else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **trust)
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    ends = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    model.generation_config.eos_token_id = None
    tokens = torch.tensor(tokens)
    with torch.no_grad():
        output = model(tokens, labels=tokens)
    greedy = {"max_new_tokens": 4, "do_sample": False}
    # prompts of different lengths, padded on the left
    lengths = [tokens.shape[1] - 3 * row for row in range(len(tokens))]
    rows = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    beams = [
        model.generate(**batch, max_new_tokens=4, num_beams=3, do_sample=False, use_cache=cached).tolist()
        for cached in (True, False)
    ]
    low = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **trust)

    return {
        "class": type(model).__name__,
        "logits": output.logits.tolist(),
        "kept": model(tokens, logits_to_keep=2).logits.tolist(),
        "loss": output.loss.item(),
        "greedy": model.generate(tokens, **greedy)[:, tokens.shape[1] :].tolist(),
        "uncached": model.generate(tokens, use_cache=False, **greedy)[:, tokens.shape[1] :].tolist(),
        "padded": model.generate(**batch, **greedy)[:, -4:].tolist(),
        "lengths": lengths,
        "beams": beams,
        "ids": [tokenizer(text).input_ids for text in texts],
        "ends": ends,
        "length": tokenizer.model_max_length,
        "fp32": sorted(name for name, tensor in low.state_dict().items() if tensor.dtype == torch.float32),
        "finite": bool(low(tokens).logits.isfinite().all()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open(sys.argv[1]) as file:
        requests = json.load(file)
    answers = {name: answer(**request) for name, request in requests.items()}
    with open(sys.argv[2], "w") as file:
        json.dump(answers, file)
