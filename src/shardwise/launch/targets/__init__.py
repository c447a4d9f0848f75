"""One file per scheduler: what it runs (`render`), and how to submit, look and cancel.

Answers: what does this scheduler need to read? Must not know: training, plans, other schedulers.
"""
