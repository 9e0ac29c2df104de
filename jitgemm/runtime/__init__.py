"""What runs on a GPU, and how a call meets PyTorch.

Files::

    driver         the CUDA driver: cubins, tensor maps, launches
    device         the GPUs of this machine, as the selector sees them
    loaded         the kernels that this process has loaded
    launch         a call's one way to the GPU, what its launch has addresses of, and what a thread remembers
    dispatch       at once, or through an op of `torch.library`
    torch_private  PyTorch's functions that are not public, with the public way next to each
"""
