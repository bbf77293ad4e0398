"""The training engine: DeepSpeed, its configuration and its workarounds."""
