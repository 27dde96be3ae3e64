"""Models measured: what 4-bit weights cost them, and how fast they are with flash and with standard attention.

quality.py          errors of matrices and blocks, perplexity, and which matrices are to stay wider
quality_report.py   the result as tables, JSON and a picture
measure.py          the command line of both: python -m flash_attn_lab quality MODEL
standard.py         devices on which a model runs with standard attention
compare.py          the same text with flash and with standard attention, in turns: python -m flash_attn_lab compare
"""
