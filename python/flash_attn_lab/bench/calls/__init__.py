"""Calls with options, for the suites sweep and prices.

call.py    a call as a line of words, its sizes; how calls are drawn
make.py    the arrays of a call, made with ours and with every peer that takes it
judge.py   the float64 answer, and how far from it an answer may be
"""
