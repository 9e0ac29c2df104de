"""`load_`: a model filled from a quantised checkpoint.

load                the call and its steps
plan                what it would do: from config and headers, before anything changes
plan_layers         what becomes of quantised layers
layer_source        where a layer is and how it is read
experts_source      the same of a layer's experts
transformers_names  a checkpoint under the names that the model has
"""
