"""Build, see, measure and cut the attention heads of any transformer."""

__version__ = "0.1.0"
