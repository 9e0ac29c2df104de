"""What runs on a GPU, and how a call meets PyTorch.

Files::

    driver         the CUDA driver: cubins, tensor maps, launches
    device         the GPUs of this machine, as the selector sees them
    loaded         the kernels that this process has loaded
    launch         a call's one way to the GPU, launches made beforehand, and what a thread remembers of both
    checks         what calls check of the tensors of a launch
    dispatch       at once, or through an op of `torch.library`
    torch_private  PyTorch's functions that are not public, with the public way next to each
"""
