"""`quantize_`: Linears and experts, quantised where they stand; and a folder's model, into another folder.

quantize     the call, and what it returns
folder       `quantize_folder`: what `jitgemm quantize` does
calibration  what reaches the layers when the model runs
evaluate     what a layer's results lose, and a model's predictions: texts, perplexity, KL divergence
replaceable  which modules layers can stand for, and why not for others
choose       which of them the call takes, and why not the others
stacked      experts that a model stacks in two parameters
swap         a layer in a module's place
placeholder  what stands there while transformers loads the rest
"""
