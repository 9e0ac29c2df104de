"""`fuse_`: norms, quantisers and projections of a block in fewer kernels.

fuse   the call and its recipes
fused  the modules that it puts into a model
check  the check of a recipe on three tokens
"""
