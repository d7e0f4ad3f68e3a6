"""Random faults of the API server: closed connections, errors, garbage, silence, and lost history.

After each series the agent's state is equal to what a new list returns.
"""

import pathlib
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ebpfproxy.api.connection import Timing
from ebpfproxy.api.event import ENDPOINT_SLICE, NODE, SERVICE, Event
from ebpfproxy.api.tracker import Tracker
from ebpfproxy.api.watch import ApiSource, load_configuration
from tests.support.apiserver import ApiServer, make_endpoint, make_node, make_service, make_slice

TIMING = Timing(
    retry_first=0.005,
    retry_last=0.02,
    expired=0.02,
    early=0.005,
    refresh=0.0,
    connect=2,
    answer=2,
    watch_shortest=1,
    watch_longest=2,
    silence=0.6,
    bookmark_silence=0.6,
)
SOON = 30.0
PER_SERIES = 25
STATUSES = (200, 400, 401, 404, 410, 429, 500, 503, 504)
GARBAGE = (
    b"{\n",
    b"null\n",
    b"[]\n",
    b"\xff\xfe\x00\n",
    b'{"type":"ADDED"}\n',
    b'{"type":"ADDED","object":null}\n',
    b'{"type":"MODIFIED","object":{}}\n',
    b'{"type":"BOOKMARK","object":{"kind":"Service","metadata":{}}}\n',
    b'{"type":"BOOKMARK","object":{"kind":"Service","metadata":{"resourceVersion":"x"}}}\n',
    b'{"type":"NEITHER","object":{"kind":"Service","metadata":{"name":"a"}}}\n',
    b'{"type":"ERROR","object":{"kind":"Status","code":500,"message":"injected"}}\n',
    b'{"type":"ERROR","object":{"kind":"Status","code":410,"message":"injected"}}\n',
    b'{"type":"ERROR","object":17}\n',
)
NAMES = [f"svc-{number}" for number in range(12)]


class Follower:
    """An API source with a tracker, as in the agent."""

    def __init__(self, kubeconfig: str) -> None:
        self._tracker = Tracker(0.0)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.failures: list[BaseException] = []
        self._source = ApiSource(load_configuration(kubeconfig, "", TIMING), "node-1", self._put)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._source.run(self._stop)
        except BaseException as failure:
            self.failures.append(failure)

    def _put(self, event: Event) -> None:
        with self._lock:
            self._tracker.fold(event)

    def state(self) -> object:
        """What a sync would apply. None before the first lists have ended."""
        with self._lock:
            if self._tracker.lacking & {SERVICE, ENDPOINT_SLICE, NODE}:
                return None
            state = self._tracker.drain().state
            slices = {name: {each.name: each for each in of} for name, of in state.slices.items()}
            return dict(state.services), slices, state.node

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(SOON)
        assert not self._thread.is_alive()


class Disturber:
    """Changes objects and injects faults."""

    def __init__(self, server: ApiServer, seed: str) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._exists: set[str] = set()
        self.faults: dict[str, int] = {}
        server.bookmark_every = 0.1
        server.put(make_node("node-1"))

    def change(self) -> None:
        """Create, change or delete a Service and its EndpointSlice."""
        name = self._random.choice(NAMES)
        if name in self._exists and self._random.random() < 0.3:
            self._exists.discard(name)
            self._server.delete("Service", "default", name)
            self._server.delete("EndpointSlice", "default", name)
            return
        self._exists.add(name)
        count = self._random.randrange(4)
        address = f"10.96.1.{NAMES.index(name) + 1}"
        self._server.put(make_service(name, clusterIP=address, clusterIPs=[address]))
        endpoints = [make_endpoint(f"10.128.0.{self._random.randrange(1, 200)}") for _ in range(count)]
        self._server.put(make_slice(name, name, endpoints))

    def disturb(self) -> None:
        fault = self._random.choice(self._faults())
        self.faults[fault.__name__] = self.faults.get(fault.__name__, 0) + 1
        fault()

    def pause(self) -> None:
        """Wait: no time, or as long as requests and lists take."""
        time.sleep(self._random.choice((0, 0.002, 0.02)))

    def end(self) -> None:
        """Serve without faults."""
        server = self._server
        server.delay, server.chunk, server.break_streams_after = 0.0, 0, None
        server.close_watches = server.gone_as_status = server.close_connections = False
        server.chunked = server.watch_cache = True
        server.streaming_lists = "served"
        server.fail_nothing()

    def _faults(self) -> list[Callable[[], None]]:
        return [
            self._drop,
            self._end_watches,
            self._answer_errors,
            self._send_garbage,
            self._compact,
            self._freeze,
            self._restart,
            self._change_settings,
            self._expire_tokens,
        ]

    def _drop(self) -> None:
        self._server.drop_connections()

    def _end_watches(self) -> None:
        self._server.end_watches()

    def _answer_errors(self) -> None:
        status = self._random.choice(STATUSES)
        headers = {"Retry-After": "0"} if status == 429 else {}
        self._server.fail(self._random.randint(1, 3), status, headers)

    def _send_garbage(self) -> None:
        self._server.inject(self._random.choice(GARBAGE))

    def _compact(self) -> None:
        self._server.compact()
        self._server.drop_connections()

    def _freeze(self) -> None:
        self._server.freeze()

    def _restart(self) -> None:
        self._server.stop()
        time.sleep(self._random.uniform(0, 0.02))
        self._server.start()

    def _change_settings(self) -> None:
        choose, server = self._random.choice, self._server
        server.chunk = choose((0, 1, 7))
        server.break_streams_after = choose((None, 1, 5))
        server.close_connections = choose((True, False))
        server.chunked = choose((True, False))
        server.watch_cache = choose((True, False))
        server.gone_as_status = choose((True, False))
        server.close_watches = choose((True, False, False))
        server.streaming_lists = choose(("served", "rejected", "ignored"))
        server.delay = choose((0.0, 0.0, 0.01))

    def _expire_tokens(self) -> None:
        self._server.expire_continue_tokens()


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


def test_after_any_faults_of_the_api_server_the_state_equals_a_new_list(
    server: ApiServer, tmp_path: pathlib.Path, pytestconfig: pytest.Config
) -> None:
    seed, wanted = pytestconfig.getoption("faults_seed"), pytestconfig.getoption("faults")
    kubeconfig = tmp_path / "kubeconfig"
    server.write_kubeconfig(kubeconfig)
    disturber = Disturber(server, f"{seed}/api")
    done = 0
    with Follower(str(kubeconfig)) as follower:
        while done < wanted:
            for _ in range(PER_SERIES):
                disturber.change()
                disturber.disturb()
                done += 1
                disturber.pause()
            disturber.end()
            compare(follower, str(kubeconfig), f"seed {seed}, after {done} faults")
    print(f"seed {seed}: {done} faults of the API server: {disturber.faults}")


def compare(follower: Follower, kubeconfig: str, what: str) -> None:
    """Wait until the follower has the state that a new source lists."""
    with Follower(kubeconfig) as fresh:
        deadline = time.monotonic() + SOON
        while True:
            assert not follower.failures, f"{what}: the source ended"
            expected, found = fresh.state(), follower.state()
            if expected and found == expected:
                return
            assert time.monotonic() < deadline, f"{what}: {found} is not {expected}"
            time.sleep(0.01)
