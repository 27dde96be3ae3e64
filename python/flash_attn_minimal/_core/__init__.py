"""The core: arguments are checked, put into structs of the C ABI, and become calls of the shared library."""
