"""Which combinations are legal, on which versions, and why: one function each, with a link.

Answers: can this recipe run on this model and this machine? Must not know: how much memory it takes, torch.
"""

from shardwise.rules.check import RULES, check, problems
from shardwise.rules.problem import Problem, Situation, situation

__all__ = ["RULES", "Problem", "Situation", "check", "problems", "situation"]
