"""What it will take: memory, time, money. Pure arithmetic on facts.

Answers: how many bytes at the peak, how many seconds, how many dollars, and by which formula.
Must not know: torch, files, which choice is best.
"""
