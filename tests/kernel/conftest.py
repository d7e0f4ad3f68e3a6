"""The clusters that kernel tests share, because a lab takes a second and an agent's first start two.

A test with the fixture `cluster` runs once for each backend; `@pytest.mark.backends("ebpf")` limits it to
some. A test with the fixture `two_nodes` or `uplinks` runs once for each configuration of the agents in WAYS;
`@pytest.mark.ways("ebpf-off")` limits it to some.
"""

import contextlib
from collections.abc import Iterator

import pytest

from ebpfproxy.bench.load import Load
from ebpfproxy.errors import Unsupported
from ebpfproxy.lab import Lab, PodNetwork
from ebpfproxy.model.address import Family
from tests.kernel.cluster import EACH_SYNC, Cluster
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.kernel.nat_testbed import Testbed, nat_testbeds
from tests.kernel.two_nodes import TwoNodes
from tests.kernel.uplinks import Uplinks

# Tests wait for each change: netfilter's modes would delay each sync by a second.
_AT_ONCE = "--iptables-min-sync-period=0s"
# Tests wait between datagrams of a flow.
_UDP_TIMEOUT = "--udp-timeout=3m"
MODES = {
    "ebpf": ("ebpf", ()),
    "nftables": ("nftables", (_AT_ONCE,)),
    "iptables": ("iptables", (_AT_ONCE, "--iptables-backend=legacy")),
    "ipvs": ("ipvs", ("--iptables-backend=legacy",)),
    "userspace": ("userspace", (_UDP_TIMEOUT,)),
}
"""By backend: the mode and the agent's flags."""
# The kernel rounds up the size of an LRU map: it never has exactly this size.
_EBPF = "--ebpf-flows-max=300001"
WAYS = {
    "ebpf-on": ("ebpf", (_EBPF, "--socket-lb=on")),
    "ebpf-off": ("ebpf", (_EBPF, "--socket-lb=off")),
    "ebpf-host": ("ebpf", (_EBPF, "--socket-lb=host")),
    "nftables": ("nftables", (_AT_ONCE,)),
    "iptables": ("iptables", (_AT_ONCE, "--iptables-backend=legacy")),
    "iptables-nft": ("iptables", (_AT_ONCE, "--iptables-backend=nft")),
    "ipvs": ("ipvs", ("--iptables-backend=legacy",)),
    "userspace": ("userspace", (_UDP_TIMEOUT,)),
}
"""By configuration: the mode and the agents' flags."""
UPLINK_WAYS = ("ebpf-on", "ebpf-off", "nftables", "iptables")
USUAL_WAYS = ("ebpf-on", "ebpf-off", "nftables", "iptables", "ipvs", "userspace")

_SHARED = {"cluster", "two_nodes", "uplinks", "target"}
"""The fixtures of clusters that all tests share."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "backends(*names): the backends that a test runs with; default: all")
    config.addinivalue_line("markers", "ways(*names): the configurations of WAYS that a test runs with")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cluster" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("backends")
        wanted = mark.args if mark else tuple(MODES)
        metafunc.parametrize("cluster", wanted, indirect=True, scope="session")
    if "two_nodes" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("ways")
        wanted = mark.args if mark else USUAL_WAYS
        metafunc.parametrize("two_nodes", wanted, indirect=True, scope="session")
    if "uplinks" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("ways")
        wanted = mark.args if mark else UPLINK_WAYS
        metafunc.parametrize("uplinks", wanted, indirect=True, scope="session")


def _sync_period(request: pytest.FixtureRequest) -> str:
    return f"--sync-period={request.config.getoption('sync_period')}"


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One node with a running agent for all tests. Each test has its own Services."""
    skip_without_ipvs(request.param)
    mode, flags = MODES[request.param]
    with Lab("test-shared", 1) as lab, Cluster(lab, mode) as shared:
        shared.start(EACH_SYNC, _sync_period(request), *flags)
        yield shared


_awake: dict[str, Cluster] = {}
"""By fixture, the shared clusters that tests have used and whose agents run."""


@pytest.fixture(autouse=True)
def _no_services_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove a test's Services from a shared cluster. Otherwise each change takes longer than the previous
    one, because iptables-restore reads and writes the complete tables."""
    with contextlib.ExitStack() as stack:
        for name in _SHARED & set(request.fixturenames):
            shared: Cluster = request.getfixturevalue(name)
            shared.wake()
            _awake[name] = shared
            stack.enter_context(shared.temporary())
        yield


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the tests of a file, shared clusters rest that the next test does not use."""
    if nextitem and nextitem.path == item.path:
        return
    for name in _awake.keys() - set(getattr(nextitem, "fixturenames", ())):
        _awake.pop(name).rest()


@pytest.fixture(scope="module")
def _restartable() -> Iterator[Cluster]:
    with Lab("test-rough", 2) as lab:
        yield Cluster(lab)


@pytest.fixture
def restartable(_restartable: Cluster) -> Iterator[Cluster]:
    """A node for tests that start and end the agent. Pins of previous tests still exist."""
    try:
        yield _restartable
    finally:
        with contextlib.suppress(ProcessLookupError):
            _restartable.end()
        _restartable.remove_files()
        _restartable.mode = "ebpf"


@pytest.fixture(scope="module")
def testbeds() -> Iterator[dict[Family, Testbed]]:
    """A client, a node that translates, and pods, by family: see nat_testbed.py."""
    with nat_testbeds() as created:
        yield created


@pytest.fixture(scope="session")
def _pair() -> Iterator[TwoNodes]:
    """One lab for all configurations, because each lab compiles and loads the programs again."""
    with Lab("test-pair", 61, PodNetwork.ROUTED) as lab, TwoNodes(lab) as pair:
        yield pair
        assert pair.bad_checksums() == {}


@pytest.fixture(scope="session")
def two_nodes(_pair: TwoNodes, request: pytest.FixtureRequest) -> TwoNodes:
    """Two nodes with running agents and routed pods, for all tests. Each test has its own Services."""
    skip_without_ipvs(request.param)
    _pair.mode, flags = WAYS[request.param]
    _pair.flags = (_sync_period(request), *flags)
    _pair.forget_connections()
    _pair.start()
    return _pair


@pytest.fixture(scope="session")
def _uplinks() -> Iterator[Uplinks]:
    with Lab("test-uplinks", 73, PodNetwork.ROUTED) as lab, Uplinks(lab) as uplinks:
        yield uplinks


@pytest.fixture(scope="session")
def uplinks(_uplinks: Uplinks, request: pytest.FixtureRequest) -> Uplinks:
    """A node with two uplinks and a running agent, for all tests. Each test has its own Services."""
    _uplinks.mode, flags = WAYS[request.param]
    _uplinks.flags = (_sync_period(request), *flags)
    _uplinks.start()
    return _uplinks


@pytest.fixture
def tunnel(two_nodes: TwoNodes, request: pytest.FixtureRequest) -> Iterator[PodNetwork]:
    """Within the test, the pods of the two nodes use this kind of tunnel."""
    kind: PodNetwork = request.param
    try:
        two_nodes.lab.backbone.join(kind)
    except Unsupported:
        pytest.skip(f"this kernel has no {kind.name}")
    yield kind
    two_nodes.lab.backbone.join(PodNetwork.ROUTED)


@pytest.fixture(scope="module")
def _restartable_pair() -> Iterator[TwoNodes]:
    with Lab("test-rough-pair", 65, PodNetwork.ROUTED) as lab:
        yield TwoNodes(lab)


@pytest.fixture
def restartable_pair(_restartable_pair: TwoNodes) -> Iterator[TwoNodes]:
    """Two nodes for tests that start and end the first node's agent; see `restartable`."""
    try:
        yield _restartable_pair
    finally:
        with contextlib.suppress(ProcessLookupError):
            _restartable_pair.end()
        _restartable_pair.remove_files()
        _restartable_pair.mode = "ebpf"


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    return Load(tmp_path_factory.mktemp("load"))
