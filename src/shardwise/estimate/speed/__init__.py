"""How long a step takes: a roofline per layer and phase, collectives, overlap, offload, the update.

Answers: how many seconds, where they go, how sure that is. Must not know: torch, prices, which choice is best.
"""

from shardwise.estimate.speed.step import Program, SpeedEstimate, SpeedPart, estimate_speed, step_seconds

__all__ = ["Program", "SpeedEstimate", "SpeedPart", "estimate_speed", "step_seconds"]
