"""A plan or a run as text, JSON or HTML. Pure functions."""
