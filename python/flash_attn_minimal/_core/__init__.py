"""Shared by all functions, from the arguments of a call to the shared library."""
