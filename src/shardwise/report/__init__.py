"""A plan or a run as text, JSON or HTML. Pure functions.

Answers: how is it told? Must not know: how it was found or where it goes.
"""
