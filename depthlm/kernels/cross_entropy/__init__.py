"""The output layer of a decoder together with its loss."""
