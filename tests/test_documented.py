"""What the documents list is what the code has: settings, metrics, and the files of the map."""

import random
import re
from dataclasses import fields
from enum import StrEnum
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from router.admission.dispatcher import Dispatcher
from router.config import RouterSettings
from router.edge.kv_metrics import KvCollector
from router.edge.metrics import RouterMetrics
from router.edge.placement_metrics import PlacementMetrics
from router.edge.sharing import Sharing
from router.edge.sharing_metrics import SharingCollector
from router.outcome import ContinuationOutcome, Outcome
from router.policy.interface import Policy
from router.state.replicas import ReplicaTable
from server.metrics import AgentMetrics
from server.settings import AgentSettings

ROOT = Path(__file__).resolve().parent.parent


def section(document: str, heading: str) -> str:
    text = (ROOT / "docs" / document).read_text()
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def first_column(text: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)


def metric_names(registry: CollectorRegistry) -> set[str]:
    """As they are exposed: counters end in `_total`, infos in `_info`."""
    suffixes = {"counter": "_total", "info": "_info"}
    return {family.name + suffixes.get(family.type, "") for family in registry.collect()}


def test_every_setting_of_the_router_is_documented_with_its_default() -> None:
    """An operator finds each setting in docs/config.md, and nothing there that does not exist."""
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", section("config.md", "Router"), flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(RouterSettings.__struct_fields__)
    defaults = RouterSettings()
    for name, shown in rows:
        value = getattr(defaults, name)
        if isinstance(value, bool):
            assert shown == str(value).lower(), name
        elif isinstance(value, int | float):
            assert shown == f"{value:.12g}", name
        elif value in ((), None, {}):
            assert shown in ("none", "the engines'"), name
        else:
            assert shown == f"`{value}`", name


def test_every_setting_of_the_agent_is_documented() -> None:
    """The same for whoever runs replicas."""
    assert sorted(first_column(section("config.md", "Replica agent"))) == sorted(field.name for field in fields(AgentSettings))


def test_every_route_of_the_admin_ports_is_documented() -> None:
    """docs/admin.md can be relied on: no route is missing there."""
    text = (ROOT / "docs" / "admin.md").read_text()
    for source in ("router/admin.py", "server/agent_api.py"):
        routes = re.findall(r'@(?:app|api)\.(get|post|delete)\("([^"]+)"', (ROOT / source).read_text())
        assert len(routes) >= 6
        for method, path in routes:
            documented = path.replace("{replica_id}", "{id}").replace("{rollout_id}", "{id}")
            assert f"{method.upper()} {documented}`" in text or f"{method.upper()} {documented} " in text, (method, path)


def test_every_metric_is_documented_and_no_other() -> None:
    """A dashboard can be written from docs/metrics.md alone."""
    registry = CollectorRegistry()
    RouterMetrics(registry, ReplicaTable())
    registry.register(KvCollector(ReplicaTable()))
    registry.register(PlacementMetrics(Dispatcher(Policy()), Policy()))
    sharing = Sharing("redis://127.0.0.1:1", Policy(), router="a", incarnation=1, rng=random.Random(0))
    registry.register(SharingCollector(sharing.report))
    exposed = {name for name in metric_names(registry) if "_process_" not in name}
    listed = set(first_column(section("metrics.md", "Router")))
    assert listed - {"intellect_router_process_*"} == exposed
    registry = CollectorRegistry()
    AgentMetrics(registry, version="1", preset="sim")
    assert set(first_column(section("metrics.md", "Replica agent"))) == metric_names(registry)


@pytest.mark.parametrize(
    ("metric", "outcomes"),
    [("intellect_router_requests_total", Outcome), ("intellect_router_continuations_total", ContinuationOutcome)],
)
def test_every_outcome_is_documented_and_no_other(metric: str, outcomes: type[StrEnum]) -> None:
    """Whoever sees a word on a dashboard finds it in the metric's row."""
    (meaning,) = re.findall(rf"^\| `{metric}` \|(?:[^|]*\|){{2}}([^|]*)\|", section("metrics.md", "Router"), flags=re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", meaning)) == set(outcomes)


def test_every_reason_against_a_continuation_is_explained() -> None:
    """A client's developer learns from docs/behavior.md why a broken answer did not go on."""
    words = set(re.findall(r"`([^`]+)`", section("behavior.md", "Continuation")))
    assert set(ContinuationOutcome) - {ContinuationOutcome.CONTINUED, ContinuationOutcome.ONLY_THE_END} <= words


def test_files_that_the_readme_names_exist() -> None:
    """A newcomer who follows the file map finds what it names."""
    rows = (ROOT / "README.md").read_text().partition("## File map")[2].partition("\n## ")[0]
    paths = re.findall(r"^\| `([^`]+)` \|", rows, flags=re.MULTILINE)
    assert len(paths) > 8
    for path in paths:
        assert list(ROOT.glob(path.rstrip("/"))), path


def test_links_between_documents_lead_somewhere() -> None:
    """No link in a document is dead."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(documents) > 6
    for document in documents:
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
