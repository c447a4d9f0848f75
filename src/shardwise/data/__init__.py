"""From any file people have to exactly the right tokens and labels.

Answers: which token ids, which labels, how many steps? No tensors, no torch.
"""
