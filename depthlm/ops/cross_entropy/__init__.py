"""The output layer of a decoder, fused with its loss."""
