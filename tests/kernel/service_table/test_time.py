"""A change that takes long postpones ServicePorts, but none that takes over a frontend."""

import itertools

import pytest

from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.errors import NotYet
from tests.kernel.service_table.samples import endpoint, entry, exposed, frontend, key, opened
from tests.support.service_maps import check_exact

pytestmark = pytest.mark.kernel


def test_the_rest_of_a_long_change_keeps_its_state_until_the_next_one(roomy: Maps) -> None:
    before = {key(f"s{n}"): exposed(n) for n in range(4)}
    after = {key(f"s{n}"): exposed(n, endpoints=3) for n in range(4)}
    with opened(roomy, itertools.count().__next__) as table:
        assert not table.apply(before, ())
        rejected = table.apply(after, (), seconds=1)
        assert rejected
        assert all(isinstance(each, NotYet) and each.postponed for each in rejected.values())
        check_exact(roomy, {**after, **{each: before[each] for each in rejected}}, table.usage())
        for _ in range(4):
            rejected = table.apply({each: after[each] for each in rejected}, (), seconds=1)
        assert not rejected
        check_exact(roomy, after, table.usage())


def test_a_frontend_that_changes_its_service_port_is_not_postponed(roomy: Maps) -> None:
    a, b = frontend("10.96.0.1"), frontend("10.96.0.2")
    to = [endpoint("10.1.0.1")], [endpoint("10.1.0.2")]
    before = {key("a"): entry([a], to[0]), key("b"): entry([b], to[1])}
    after = {key("a"): entry([b], to[0]), key("b"): entry([a], to[1])}
    with opened(roomy, itertools.count().__next__) as table:
        assert not table.apply(before, ())
        assert not table.apply(after, (), seconds=0)
        check_exact(roomy, after, table.usage())
