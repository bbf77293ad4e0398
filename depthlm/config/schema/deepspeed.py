"""The keys of DeepSpeed: what is sharded or spread over the ranks, and how gradients are reduced."""

from dataclasses import dataclass
from typing import Any, Optional

from depthlm.fields import key


@dataclass
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
    offload: str = key(
        "none",
        "ZeRO 3: where weights and optimizer states are kept while not in use",
        choices=("none", "cpu"),
        on_resume="logged",
    )
    reduce_bucket_size: Optional[Any] = key(
        None,
        "gradient elements to reduce at once; null: 10M at ZeRO 0, else 500M",
        minimum=1,
        count=True,
        on_resume="free",
    )
    allgather_bucket_size: Any = key(
        "500M",
        "ZeRO 1 and 2: weight elements to gather at once after the update",
        minimum=1,
        count=True,
        on_resume="free",
    )
    prefetch_bucket_size: Any = key(
        "50M", "ZeRO 3: weight elements to gather ahead of their use", minimum=0, count=True, on_resume="free"
    )
    overlap_comm: bool = key(
        False, "ZeRO 1 and above: reduce gradients during the backward pass, as ZeRO 0 always does", on_resume="free"
    )
    communication_data_type: str = key(
        "auto",
        "dtype in which gradients are reduced over the ranks; auto: that of the weights",
        choices=("auto", "fp32", "bf16", "fp16"),
        on_resume="logged",
    )
