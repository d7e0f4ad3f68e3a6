"""What the user asked for: flags and a KubeProxyConfiguration in, one frozen `Config` out.

Each option is declared once, as a field of `Config`: its flag, its field in the file, the kind of its
value, its default and its help stand together, and the command line and the file are read by them.
Nothing here starts anything or prints.
"""

from ebpfproxy.config.command import FlagsCommand, config_options, loaded_options, options
from ebpfproxy.config.load import Loaded
from ebpfproxy.config.settings import Config

__all__ = ["Config", "FlagsCommand", "Loaded", "config_options", "loaded_options", "options"]
