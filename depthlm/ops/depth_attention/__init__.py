"""The value mix of Depth-Attention."""
