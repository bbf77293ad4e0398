"""The training protocol of a configuration, in words."""

from depthlm.config.schema import Config, run_steps
from depthlm.counts import count_text
from depthlm.optimizers.build import arguments


def protocol_texts(config: Config) -> dict[str, str]:
    """Return the protocol by name: size, data, length, batch, optimizer, schedule, precision, budget."""
    training, optimizer, schedule = config.training, config.optimizer, config.schedule
    steps = run_steps(config)
    batch = training.batch_size * training.sequence_length
    if schedule.warmup_steps is not None:
        warmup = f"{schedule.warmup_steps:,} steps of warm-up"
    else:
        warmup = f"{100 * (schedule.warmup_ratio or 0):.3g}% of the steps as warm-up"
    used, betas = arguments(optimizer), " and ".join(f"{beta:g}" for beta in optimizer.betas)
    floor = "" if schedule.name in ("constant", "inverse_sqrt") else f", down to {schedule.min_lr_ratio:g} of the peak"
    return {
        "size": config.size.name,
        "backbone": config.backbone.name,
        "data": f"{config.data.name}, tokenizer {config.data.tokenizer}",
        "tokens": f"{training.max_epochs} epochs" if steps is None else count_text(steps * batch),
        "steps": f"{training.max_epochs} epochs" if steps is None else f"{steps:,}",
        "batch": f"{training.batch_size:,} sequences of {training.sequence_length:,} = {count_text(batch)} tokens",
        "optimizer": optimizer.name
        + (f", betas {betas}" if "betas" in used else "")
        + f", weight decay {optimizer.weight_decay:g}, gradient clipping {training.gradient_clipping:g}",
        "peak learning rate": f"{optimizer.lr:.4g}",
        "schedule": f"{schedule.name}, {warmup}{floor}",
        "precision": config.precision.name,
        "budget": config.budget.name,
    }
