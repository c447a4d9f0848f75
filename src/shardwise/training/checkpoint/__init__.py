"""Checkpoints: written by all ranks under a temporary name, published by one rename, found by step."""
