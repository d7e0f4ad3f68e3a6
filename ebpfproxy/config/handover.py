"""What a process hands over to the program that replaces it: contents of the configuration file.

execve(2) keeps the process and its open files. The contents are in a memfd whose number is in the
environment. So a restart with a changed file can return to the content with which the agent worked.
"""

import json
import os
from collections.abc import MutableMapping
from typing import NamedTuple

_VARIABLE = "EBPFPROXY_HANDOVER_FD"
_ENCODING = "latin-1"  # any bytes as text


class Handover(NamedTuple):
    """Contents of the configuration file.

    - `content`: the content with which the agent worked before the restart.
    - `rejected`: a content with which a start has failed, None without one.
    """

    content: bytes
    rejected: bytes | None = None


def give(handover: Handover, environment: MutableMapping[str, str] = os.environ) -> None:
    """Leave the contents for the program that replaces this one. Raises OSError."""
    texts = {name: value and value.decode(_ENCODING) for name, value in handover._asdict().items()}
    fd = os.memfd_create("ebpfproxy-handover", 0)  # without MFD_CLOEXEC
    with open(fd, "wb", closefd=False) as file:
        file.write(json.dumps(texts).encode())
    environment[_VARIABLE] = str(fd)


def take(environment: MutableMapping[str, str] = os.environ) -> Handover | None:
    """Return what the previous program left, and remove it. None if it left nothing that can be read."""
    number = environment.pop(_VARIABLE, "")
    if not number.isdecimal():
        return None
    try:
        with open(int(number), "rb") as file:
            file.seek(0)
            texts = json.load(file)
        values = {name: value and str(value).encode(_ENCODING) for name, value in texts.items()}
        return Handover(**values)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
