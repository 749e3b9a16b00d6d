"""Pipelines as tables."""
