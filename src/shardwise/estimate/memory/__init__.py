"""Peak memory of one rank, term by term.

Answers: how many bytes are allocated at the peak, in which phase, and what they are. Must not know: torch.
"""
