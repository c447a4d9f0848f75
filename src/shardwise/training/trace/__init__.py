"""The same training step on fake tensors: every storage's birth and death, recorded without a GPU.

Answers: which bytes live when. Must not know: what a plan is, or what a byte costs.
"""
