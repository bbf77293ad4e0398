"""The default size of the buckets in which gradients are reduced."""

from depthlm.config.schema import DeepSpeed

# small enough that a model has several, of which all but the last are reduced during the backward pass
REPLICATED = 10_000_000
# DeepSpeed's own default
SHARDED = 500_000_000


def bucket_elements(sharding: DeepSpeed, stage: int) -> int:
    """Return how many gradient elements are reduced at once at a ZeRO stage, which need not be the configured one."""
    if sharding.reduce_bucket_size is not None:
        return int(sharding.reduce_bucket_size)
    return REPLICATED if stage == 0 else SHARDED
