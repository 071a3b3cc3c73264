"""Models: checkpoints, tokenizers and the dense decoders that run on them.

Knows weights, token ids and tensors; knows neither the cache nor attention, which it reaches through `plan.StepPlan`.
"""
