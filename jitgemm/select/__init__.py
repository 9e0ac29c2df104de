"""Choosing a kernel for a problem and a device. Pure functions; no torch, no driver.

Files::

    choose     the choice
    legal      the kernels that exist
    registers  about how many registers a kernel takes
    cost       how long a kernel takes
    routings   how many rows experts get
    devices    figures of the GPUs
"""
