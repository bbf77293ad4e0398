"""Training in a pipeline: layers are spread over ranks, which send only tensors that the receiver does not have."""
