"""How many random examples a test tries."""

import hypothesis

ALL, SAMPLE = "all", "sample"
"""The profiles of hypothesis. They have no deadline, because a busy machine is no failure."""
_ALL, _SAMPLED = 100, 25

hypothesis.settings.register_profile(ALL, deadline=None, max_examples=_ALL)
hypothesis.settings.register_profile(SAMPLE, deadline=None, max_examples=_SAMPLED)


def examples(many: int) -> int:
    """`many` with the profile ALL, a quarter of them with the profile SAMPLE.

    >>> examples(hypothesis.settings().max_examples) <= _ALL
    True
    """
    return many * hypothesis.settings().max_examples // _ALL
