"""A sample of the trained model in the log."""

import logging

import torch

from depthlm.config import Config
from depthlm.data import Corpus
from depthlm.evaluation import generate
from depthlm.training.engine import Engine, autocast

log = logging.getLogger("depthlm")


def log_sample(config: Config, engine: Engine, corpus: Corpus) -> None:
    """Log the model's continuation of training.sample; collective, since at ZeRO 3 no rank can compute alone."""
    prompt = config.training.sample
    if prompt is None:
        return
    tokens = torch.tensor([[corpus.tokenizer.end_of_text, *corpus.tokenizer.encode_batch([prompt])[0]]])
    generator = torch.Generator(engine.device).manual_seed(config.seed)
    # compiling for every length of a sample would take longer than the sample
    with engine.evaluated(), autocast(config, engine.device), torch.compiler.set_stance("force_eager"):
        sampled = generate(engine.model, tokens.to(engine.device), 64, temperature=0.7, top_k=50, generator=generator)
    log.info("a sample:\n%s", corpus.tokenizer.decode(sampled[0, 1:].tolist()))
