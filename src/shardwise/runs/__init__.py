"""What a run leaves behind: the run folder, its events, its summary.

Answers: what happened? Must not know: how training works.
"""
