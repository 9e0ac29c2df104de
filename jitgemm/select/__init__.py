"""Choosing a kernel for a problem and a device. Pure functions; no torch, no driver.

Files::

    choose     the choice
    shapes     the kernels that exist
    registers  about how many registers a kernel takes
    model      how long a kernel takes
    loads      how many rows experts get
    devices    figures of the GPUs
"""
