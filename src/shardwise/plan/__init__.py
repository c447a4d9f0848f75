"""Which recipe: enumerate, check by rules, estimate, fit, rank, explain; rejected ones included."""
