"""Preparation of token files: from raw text to complete folders of shards."""
