"""Generic netlink: the message type of a family, and the header of its requests.

Sources: include/uapi/linux/genetlink.h; net/netlink/genetlink.c. The kernel loads the module of a family when
it is looked up (net-pf-16-proto-16-family-NAME).
"""

import struct

from ebpfproxy.linux.netlink import netlink

NETLINK_GENERIC = 16
HEAD = struct.Struct("=BBxx")  # struct genlmsghdr: cmd, version

_CONTROLLER = 0x10  # GENL_ID_CTRL
_GET_FAMILY = 3  # CTRL_CMD_GETFAMILY
_FAMILY_ID, _FAMILY_NAME = 1, 2  # CTRL_ATTR_*
_U16 = struct.Struct("=H")


def family(name: str) -> int:
    """The message type of the family. It changes when its module is unloaded and loaded again.

    Raises OSError, with ENOENT if the kernel has no such family.
    """
    wanted = netlink.attribute(_FAMILY_NAME, name.encode() + b"\0")
    answers = netlink.get(NETLINK_GENERIC, _CONTROLLER, HEAD.pack(_GET_FAMILY, 1) + wanted)
    (number,) = _U16.unpack(dict(netlink.attributes(answers[0], HEAD.size))[_FAMILY_ID])
    return int(number)
