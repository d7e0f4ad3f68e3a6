"""What the user asked for: flags in, one frozen `Config` out.

Each option is declared once, as a field of `Config`: its flag, the kind of its value, its default and
its help stand together, and the command line is made from them. Nothing here reads a file, starts
anything or prints.
"""

from ebpfproxy.config.command import FlagsCommand, config_options, options
from ebpfproxy.config.settings import Config

__all__ = ["Config", "FlagsCommand", "config_options", "options"]
