"""A folder of a model in floats, quantised, with the same names. `jitgemm.nn.quantize.folder` runs the steps.

model_folder  the folder that is read: config, headers, its model and tokenizer
tensor_map    which of its tensors each quantised layer replaces
resume        the folder that is written, until it is complete: stages that an interrupted run finished
export        the files that are written: shards, index, config, and what is copied
"""
