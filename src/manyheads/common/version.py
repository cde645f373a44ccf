"""The version of this package, which files on disk name."""

__version__ = "0.1.0"
