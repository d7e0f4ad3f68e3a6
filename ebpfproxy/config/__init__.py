"""The configuration: reads flags and a KubeProxyConfiguration file into one frozen `Config`.

Each option is declared once, as a field of `Config`, with its flag, its field in the file, its type, default
and help. The parsers of the command line and of the file use these declarations. This package prints nothing
and starts nothing.

`backends`, `http`, `api` and the layers above them may import this package. It imports `plan`, `linux`,
`model`, `log` and `errors`.

Read first: `settings.py`, then `load.py`.
"""

from ebpfproxy.config.command import FlagsCommand, config_options, loaded_options, options
from ebpfproxy.config.load import Loaded
from ebpfproxy.config.settings import Config

__all__ = ["Config", "FlagsCommand", "Loaded", "config_options", "loaded_options", "options"]
