"""The version of this package, which files on disk name: that of the git tag it was built from."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("manyheads")
except PackageNotFoundError:  # a source folder on the path, never installed
    __version__ = "0.1.dev0"
