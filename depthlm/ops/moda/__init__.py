"""The depth part of MoDA, and its merge with attention over the sequence."""
