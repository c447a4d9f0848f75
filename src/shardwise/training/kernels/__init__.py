"""How a layer's arithmetic is done with less memory and time: norms, gated MLPs, adapted linears, attention.

Each kernel is an autograd function that says what it saves. It knows no recipe and no engine; `install` puts kernels
into the modules whose formula they reproduce, and says what it left alone and why.
"""
