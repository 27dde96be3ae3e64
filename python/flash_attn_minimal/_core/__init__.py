"""What all functions share, from the arguments of a call to the shared library."""
