"""A training step on a GPU that is not there: fake tensors on `cuda`, and Triton kernels compiled for sm_90."""
