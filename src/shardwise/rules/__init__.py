"""Which combinations are legal, on which versions, and why: one function each, with a link."""
