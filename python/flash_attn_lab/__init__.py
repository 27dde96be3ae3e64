"""The laboratory: how the library is measured and tried. No wheel holds it; it runs from a checkout, or from an
editable install.

    bench             the kernels against peers and against each other: suites, tables, pictures
    context_parallel  the same across ranks
    experiments       one question each, its measurement, and a page with the answer
    fuzz              random calls of every function, and programs of calls, against float64

`python -m flash_attn_lab COMMAND` runs each. Only ladder and the tests import this package.
"""

PROGRAM = "python -m flash_attn_lab"
