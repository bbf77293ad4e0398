"""Operators over depth with hand-written backward passes. They read the tensors of a stream without copying them."""

# the allowed values of `kernels=`
CHOICES = ("auto", "triton", "torch")
