"""What runs the step: each engine translates the recipe into its library's terms, and nothing else.

Engines do not know each other. The loop knows only `protocol.Engine`.
"""
