"""The file of a golden case: the rule that it verifies, then the input and the expected texts in sections.

A section begins with a line `=== NAME ===` and ends before the next such line or at the end of the file.
"""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

INPUTS = ("cluster.yaml", "node.yaml")
"""The sections that people write. All others are expected texts, which `--update-goldens` rewrites."""

_HEADER = re.compile(r"^=== (.*) ===\n", re.MULTILINE)


class CaseError(Exception):
    """A case's file has no rule, or not the sections that it must have."""


class CaseFile(NamedTuple):
    """`rule` is the text before the first section, `sections` the texts by name, in the file's order.

    All texts are exact, with their line ends, so that `format_case` reproduces the file byte for byte.
    """

    rule: str
    sections: dict[str, str]


def parse_case(text: str) -> CaseFile:
    r"""Split a case's file. CaseError if the rule is missing or two sections have the same name.

    >>> parse_case("A rule.\n\n=== node.yaml ===\n=== plan ===\nnode\n\nend\n")
    CaseFile(rule='A rule.\n\n', sections={'node.yaml': '', 'plan': 'node\n\nend\n'})
    >>> parse_case("=== plan ===\n")
    Traceback (most recent call last):
    tests.golden.case_file.CaseError: the file must begin with the rule that the case verifies
    """
    rule, *parts = _HEADER.split(text)
    if not rule.strip():
        raise CaseError("the file must begin with the rule that the case verifies")
    names, texts = parts[::2], parts[1::2]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CaseError(f"two sections have the same name: {', '.join(twice)}")
    return CaseFile(rule, dict(zip(names, texts, strict=True)))


def format_case(case: CaseFile) -> str:
    r"""The inverse of `parse_case`.

    >>> text = "A rule.\n=== b ===\n1\n=== a ===\n"
    >>> format_case(parse_case(text)) == text
    True
    """
    return case.rule + "".join(f"=== {name} ===\n{text}" for name, text in case.sections.items())


def section_text(case: CaseFile, name: str) -> str:
    r"""The text of one section. CaseError if it is missing.

    >>> section_text(parse_case("A rule.\n=== plan ===\nnode\n"), "plan")
    'node\n'
    """
    if name not in case.sections:
        raise CaseError(f"missing section: {name}")
    return case.sections[name]


def with_expected_text(case: CaseFile, name: str, text: str) -> CaseFile:
    r"""Replace the expected text `name`, or append it if it is missing. CaseError if `name` is input.

    >>> case = parse_case("A rule.\n=== plan ===\nold\n=== flows ===\nkept\n")
    >>> format_case(with_expected_text(case, "plan", "new\n"))
    'A rule.\n=== plan ===\nnew\n=== flows ===\nkept\n'
    >>> format_case(with_expected_text(case, "ebpf", "new\n"))
    'A rule.\n=== plan ===\nold\n=== flows ===\nkept\n=== ebpf ===\nnew\n'
    """
    if name in INPUTS:
        raise CaseError(f"section {name} is input and is never rewritten")
    return case._replace(sections={**case.sections, name: text})


def check_sections(found: Collection[str], outputs: Sequence[str], rules: Sequence[str]) -> None:
    """CaseError unless `found` are the inputs, then the `outputs`, then all `rules` or none, in this order.

    >>> check_sections(["cluster.yaml", "node.yaml", "plan"], ["plan"], ["ipvs"])
    >>> check_sections(["cluster.yaml", "plam"], ["plan"], [])
    Traceback (most recent call last):
    tests.golden.case_file.CaseError: missing sections: node.yaml, plan; unknown sections: plam
    >>> check_sections(["cluster.yaml", "plan", "node.yaml"], ["plan"], [])
    Traceback (most recent call last):
    tests.golden.case_file.CaseError: the order of sections must be: cluster.yaml, node.yaml, plan
    """
    known = [*INPUTS, *outputs, *(rules if set(rules) & set(found) else ())]
    missing = [name for name in known if name not in found]
    unknown = [name for name in found if name not in known]
    faults = [
        f"{fault} sections: {', '.join(names)}"
        for fault, names in (("missing", missing), ("unknown", unknown))
        if names
    ]
    if faults:
        raise CaseError("; ".join(faults))
    if list(found) != known:
        raise CaseError(f"the order of sections must be: {', '.join(known)}")
