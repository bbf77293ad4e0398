"""Hugging Face folders that a run can start from: Qwen3, OLMo2 and exports, under our names."""
