"""From a kernel's text to a cubin. Knows texts and cubins only.

Files::

    source        a kernel as text, and its key
    nvrtc         the compiler
    sass          yield hints in machine code
    cache         the cache on disk
    entry         one kernel of the cache as one file
    compile_many  many kernels, in threads
"""
