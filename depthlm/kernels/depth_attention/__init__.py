"""The mix over depth of Depth-Attention."""
