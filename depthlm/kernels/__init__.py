"""Operators over depth, forward and backward by hand: the history of a stream is read where it lies, never stacked."""

# what `kernels=` may be
CHOICES = ("auto", "triton", "torch")
