"""Catching attention: any PyTorch model's run, turned into attention calls."""

from manyheads.capture import probing as probing  # it registers itself as what proves things of models
