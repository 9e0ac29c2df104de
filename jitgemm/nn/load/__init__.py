"""`load_`: a model filled from a quantised checkpoint.

load          the call
plan          what it would do: from config and headers, before anything changes
read          a layer of a checkpoint
read_experts  a layer's experts
names         a checkpoint under the names that the model has
"""
