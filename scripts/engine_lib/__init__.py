"""What the scripts that run serving engines share. It imports no engine: `vllm_engine.py` and `sglang_engine.py` do.

models       models of real sizes, for weights of no meaning
checkpoints  small models with real weights, as files of several formats
made_up      weights of no meaning where an engine's dummy loader leaves bytes as they are
turns        engines as processes that start together and are timed one at a time
logprobs     engines' log probabilities next to those of the same weights in bf16
"""
