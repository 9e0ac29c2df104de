"""What `scripts/benchmark.py` is made of, one job a module. Imports point downwards only:

run, host            the two measurements
checks, timing       is a result right; how long does it take
ours, torch_peers,   who takes part: each gives calls to time, and knows only its own library
other_peers, moe
contestant, data     what taking part means; the weights and activations all are given
compare, table,      what is made of the numbers
results, commit
ranks                calls of layers that several GPUs share
cells                shapes, formats, the floor: plain arithmetic, no torch
"""
