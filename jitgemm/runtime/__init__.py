"""What runs on a GPU: driver, devices, loaded kernels, prepared launches, dispatch."""
