"""Choosing a kernel for a problem and a device. Pure functions; no torch, no driver.

Files::

    choose   the choice
    legal    the kernels that exist
    cost     how long a kernel takes
    devices  figures of the GPUs
    ranked   what explains a choice: every kernel with its prediction
"""
