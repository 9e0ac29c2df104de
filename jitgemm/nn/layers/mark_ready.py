"""mark_ready: lets a model's GEMMs start before the kernel before them ends, where no layer of jitgemm.nn did so."""

from __future__ import annotations

import torch

from jitgemm.nn.layers.packed import Packed
from jitgemm.nn.quantize.replaceable import check_model
from jitgemm.weight import ready


def mark_ready(model: torch.nn.Module) -> list[str]:
    """Waits for the GPUs that hold a model's packed weights; GEMMs then read them before the kernel ahead of them ends.

    The layers of jitgemm.nn do so whenever their weight is replaced, moved or loaded. This is for modules whose weights
    no layer made, such as `torch.export.load(file).module()`, and for weights that were written past their version
    counter (`jitgemm.W4Weight` says by what): it is to be called again behind such a write, before the next GEMM. To be
    called when the weights are where they stay: copies and moves are other tensors. A weight that is written in place
    through PyTorch later is waited for again.

    Returns:
        Names of the buffers that are ready now: all uint8 ones, as packed weights are.

    Raises:
        TypeError: model is no module.
        RuntimeError: a CUDA graph is being captured on a GPU of the model, so that nothing can be waited for.
        ValueError: a buffer is an inference tensor, which does not tell when it is written.
    """
    check_model(model)
    records = [
        (f"{name}.{child}" if name else child, module, tensor)
        for name, module in model.named_modules()
        for child, tensor in module._buffers.items()
        if tensor is not None and tensor.dtype == torch.uint8
    ]
    for name, _, tensor in records:
        if tensor.is_inference():
            raise ValueError(
                f"{name}: expected a tensor that tells when it is written, got an inference tensor; make the model "
                "outside of torch.inference_mode()"
            )
    for device in {tensor.device for _, _, tensor in records if tensor.is_cuda}:
        if ready.capturing(device):
            raise RuntimeError("mark_ready: expected no CUDA graph to be captured meanwhile, as it waits for the GPU")
        torch.cuda.synchronize(device)  # writes on other streams too
    for _, module, tensor in records:
        if isinstance(module, Packed):
            module._bind()
        else:
            ready.wait(tensor)
    return [name for name, _, _ in records]
