"""The core: arguments are checked, put into structs of the C ABI, and become calls of the shared library.

    options       the options of attention, from the argument list to the struct; the struct of a call
    checks        checks of single arguments
    fields        arrays into fields of structs
    structs       the structs of the C ABI
    library       loads the shared library; statuses become exceptions
    error_texts   the library's errors in the words of a Python caller
    forward       the forward pass, from arguments to results
    statistics    the same with max_score and key_sums
    launch        runs a filled struct: its stream, and its workspace in the size that the query of this call gives
    frameworks    the way up to torch/ and jax/, for calls that PyTorch or JAX must see
    prepared      a call as data (fa_call): filled structs with holes
    repeats       the shortcut for a call that repeats an earlier one
    recordings    many calls as one list
    queries       what a call would do, and which kernels there are
    files         helpers of all readers of files

All of it is without a framework, and none of it imports the public functions, which stand above.
"""
