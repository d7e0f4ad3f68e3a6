"""Whether this kernel has usable flowtables. Many lack them; tests/vm runs other kernels."""

import pytest

from ebpfproxy.backends.nftables import flowtables

needs_flowtables = pytest.mark.skipif(
    not flowtables.probe().present, reason="this kernel has no usable flowtables"
)
