"""What the plan needs to know of a translated connection or flow."""

import typing

from ebpfproxy.model.address import Address

FrontendAddress = tuple[Address, int]
"""Address and port of a frontend. The address of a NodePort is unspecified, as in `Frontend`."""


class TrackedConnection(typing.Protocol):
    """Where the client sends its packets, and which address and port answers."""

    @property
    def destination(self) -> Address: ...
    @property
    def destination_port(self) -> int: ...
    @property
    def reply_source(self) -> Address: ...
    @property
    def reply_source_port(self) -> int: ...
