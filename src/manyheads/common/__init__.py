"""The few helpers that every part of the package needs, once."""
