"""From a kernel's text to a cubin: source, compiler, machine code, on-disk cache. Knows texts and cubins only."""
