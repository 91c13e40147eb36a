"""What the evaluator refuses."""


class UnknownLayer(Exception):
    """A layer, or a way of using one, that the evaluator has no rule for."""


class BadFeed(ValueError):
    """An input is missing, unknown, or has another type or shape than the network's."""
