"""A comparison with made-up figures, for tests of its formats."""

from ebpfproxy.bench import compare_cases
from ebpfproxy.bench.results import Collector, Comparison, Environment, LeftOut, Method

MODES = ("none", "ebpf", "nftables", "kube-proxy-iptables")
SERVICES = (1, 1000)

ENVIRONMENT = Environment(
    kernel="6.18.0",
    cpu="A CPU <2.5 GHz>",
    cores=2,
    governor="",
    memory_gib=24.0,
    load_begin=0.1,
    load_end=2.0,
    began="2026-01-01T00:00:00Z",
    ended="2026-01-01T00:10:00Z",
    versions={"ebpfproxy": "0.3.0", "kube-proxy": "v1.34.0"},
)


def comparison() -> Comparison:
    """All cases, in all of MODES, with SERVICES. Each mode costs 10 % more than the one before."""
    method = Method(
        command="ebpfproxy bench compare '--cases=<all>'",
        modes=MODES,
        cases=compare_cases.NAMES,
        services=SERVICES,
        endpoints=3,
        rounds=3,
        seconds=0.1,
        starts=2,
        changes=5,
        limit=30.0,
    )
    figures = []
    for services in SERVICES:
        collector = Collector(services, MODES)
        for at, mode in enumerate(MODES):
            for turn in range(3):
                samples = [(10.0 + number) * (1 + at / 10) * (1 + services / 5000) for number in range(20)]
                for name, case in compare_cases.TRAFFIC.items():
                    collector.add(name, case.metric, mode, turn, samples)
                for name, metric in compare_cases.OF_STARTS.items():
                    if mode != "none":
                        collector.add(name, metric, mode, turn, samples)
        figures += collector.figures()
    return Comparison(ENVIRONMENT, method, tuple(figures), (LeftOut("ipvs", 1000),))
