"""The part of a verifier's log that explains why a program was rejected.

The kernel writes the reason last, before a line of statistics: print_verification_stats() in
kernel/bpf/verifier.c (Linux 6.12). bcc prints the log between lines of its own (libbpf.c of bcc 0.26).
"""

_LINES = 5
_WIDTH = 200  # characters of a line
_STATISTICS = ("processed ", "verification time ", "stack depth ", "max_states_per_insn ")
_OF_BCC = ("bpf: ", "HINT: ")


def last_lines(log: str) -> tuple[str, ...]:
    """The last lines before the statistics, with the reason last. At most 5 lines of at most 200 characters.

    >>> start = "bpf: Failed to load program: Permission denied\\n0: (61) r0 = *(u32 *)(r1 +24)\\n"
    >>> end = "R0 invalid mem access 'scalar'\\nprocessed 2 insns (limit 1000000)\\n\\nHINT: see docs\\n"
    >>> last_lines(start + end)
    ('0: (61) r0 = *(u32 *)(r1 +24)', "R0 invalid mem access 'scalar'")
    >>> last_lines("")
    ()
    """
    lines = [line.strip() for line in log.splitlines()]
    ends = next((at for at, line in enumerate(lines) if line.startswith(_STATISTICS[0])), len(lines))
    reported = [line for line in lines[:ends] if line and not line.startswith((*_STATISTICS, *_OF_BCC))]
    return tuple(line[:_WIDTH] for line in reported[-_LINES:])


def is_complete(log: str) -> bool:
    """Whether the log has its end, the statistics. A program without capabilities has no log at all.

    >>> is_complete("0: R1=ctx\n1: (61) r0 = *(u32")
    False
    """
    return not log or any(line.startswith(_STATISTICS[0]) for line in log.splitlines()[-5:])
