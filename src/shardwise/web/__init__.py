"""The local page: routes only; every page has a .json twin.

Answers: what does a browser get to see? Must not know: how anything is computed.
"""
