"""Evaluation of trained models: losses on validation sets, tasks and text generation."""
