"""From a recipe to what starts the ranks. Training never runs inside the process of the command line.

Answers: which processes, with which environment, and how did they end? Must not know: torch, models, data.
"""

from shardwise.launch.local import Failure, Outcome, start

__all__ = ["Failure", "Outcome", "start"]
