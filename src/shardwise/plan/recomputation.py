"""How few layers must be recomputed for a step to fit.

With k of n layers checkpointed a step keeps the saved tensors of n - k layers and the inputs of k. Each layer after
the first (which saves less where nothing before it is trained) takes the same off the peak until another moment is
higher, where it takes off less: from one layer on the need is a convex line of straight pieces in k. A piece is known
by two of its points and lies below the line everywhere else, so where it crosses the limit is a lower bound of the
answer: mostly the answer itself.
"""

from collections.abc import Callable


def least_layers(layers: int, needs: Callable[[int], int], limit: int, start: int = 1) -> int | None:
    """The smallest k from 1 to `layers` - 1 with needs(k) <= `limit`, where needs(0) is above it; None: no such k.

    needs: bytes with k layers recomputed. start: a lower bound of the answer. The last layer is never worth it: its
    activations are what the backward pass begins with.
    """
    at, most = start, layers - 1
    while at <= most and needs(at) > limit:
        saved = needs(at) - needs(at + 1) if at < most else 0
        if saved <= 0:
            return None
        at = min(at + first_below(needs(at), saved, limit), most)
    return at if at <= most else None


def first_below(height: int, saved: int, limit: int) -> int:
    """How many times `saved` comes off `height` until it is `limit` or less."""
    return max(0, -((limit - height) // saved))


def none_too_many(count: int, needs: Callable[[int], int], limit: int) -> int:
    """`count`, or fewer where fewer do: engines' buffers make the line a little uneven."""
    while count > 1 and needs(count - 1) <= limit:
        count -= 1
    return count
