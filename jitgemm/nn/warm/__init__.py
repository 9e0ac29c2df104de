"""Compiling what a model's layers can need, before the first call.

warm     `warmup`, of a model in memory
ahead    a model as it will be loaded, without its data
formats  the layers that it will have, from the headers of its files
"""
