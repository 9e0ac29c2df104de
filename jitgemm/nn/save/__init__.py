"""A folder of a model in floats, quantised, as a compressed-tensors checkpoint of the same names; see `jitgemm quantize`.

source      the folder that is read, and its model
places      which of its tensors a quantised layer's weight is
unfinished  the folder that is written, until it is complete: what an interrupted run left
folder      its files: shards, index, config, and what is copied
"""
