"""The packages' imports go one way only (see ARCHITECTURE.md), so that each part can be read and installed alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each package may import of ours.
ARROWS = {
    "protocol": {"protocol"},
    "router": {"protocol", "router"},
    "server": {"protocol", "server"},
    "intellect": {"protocol", "router", "server", "intellect"},
    "loadtests": {"protocol", "router", "server", "intellect", "loadtests"},
}
# Inside the router, from the innermost ring outwards. A module imports its own ring and those before it.
ROUTER_RINGS = [
    {"router.types", "router.outcome", "router.errors", "router.ids", "router.model_alias"},
    {"router.policy", "router.admission", "router.request", "router.stream"},
    {"router.state", "router.config"},
    {"router.edge"},
    {"router.exchange", "router.auth", "router.cors", "router.attempts", "router.stored_responses"},
    {
        "router.reply",
        "router.request_body",
        "router.continuing",
        "router.journal",
        "router.placing",
        "router.placement_request",
    },
    {"router.relay"},
    {"router.forwarding"},
    {"router.stored_forwarding"},
    {"router.proxy", "router.rollout_runner"},
    {"router.openapi", "router.openapi_schemas"},
    {"router.api", "router.admin"},
    {"router.app"},
    {"router.workers"},
    {"router.sim"},  # nothing of the router knows of it
]
# What the simulator may use of the router: what decides, and nothing that acts.
SIMULATED = ("protocol", "router.types", "router.policy", "router.admission", "router.sim")
# A pure ring neither waits nor reads a clock nor does I/O.
PURE = ("router/policy", "router/admission", "router/request", "router/stream", "router/state")
IMPURE_MODULES = {"asyncio", "time", "socket", "httpx", "os", "logging"}


def imports_of(path: Path) -> set[str]:
    """Full names of the modules that a file imports, those inside functions and TYPE_CHECKING included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where an arrow goes"
            assert node.module is not None
            found.add(node.module)
    return found


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def ring_of(module: str) -> int | None:
    for number, ring in enumerate(ROUTER_RINGS):
        if any(module == name or module.startswith(name + ".") for name in ring):
            return number
    return None


@pytest.mark.parametrize("package", sorted(ARROWS))
def test_a_package_imports_only_those_before_it(package: str) -> None:
    """A client can use protocol alone; the router runs where neither the server's nor the trainer's dependencies are."""
    ours = set(ARROWS)
    assert modules(package), package
    for path in modules(package):
        wrong = {name for name in imports_of(path) if (top := name.split(".")[0]) in ours and top not in ARROWS[package]}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_the_rings_of_the_router_point_inwards() -> None:
    """Placement and accounting can be read, tested and simulated without a socket."""
    for path in modules("router"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name == "router":
            continue
        own = ring_of(name)
        assert own is not None, f"{name} belongs to no ring; add it to ROUTER_RINGS"
        for imported in imports_of(path):
            other = ring_of(imported)
            assert other is None or other <= own, f"{name} imports {imported}, which lies further out"


def test_the_simulator_uses_only_what_decides() -> None:
    """A run on virtual time touches no socket, no clock and no state of a running router."""
    for path in modules("router/sim"):
        ours = {name for name in imports_of(path) if name.split(".")[0] in ARROWS}
        wrong = {name for name in ours if not any(name == allowed or name.startswith(allowed + ".") for allowed in SIMULATED)}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_policy_and_state_do_no_io_and_read_no_clock() -> None:
    """The same decision can be made again from the same values."""
    for folder in PURE:
        for path in modules(folder):
            assert not imports_of(path) & IMPURE_MODULES, path


def test_only_the_modules_named_for_it_touch_vllm() -> None:
    """A new vLLM release is met in one place."""
    for package in ARROWS:
        for path in modules(package):
            uses = {name for name in imports_of(path) if name.split(".")[0] in ("vllm", "torch")}
            allowed = package == "server" and (path.name.startswith("vllm_") or path.name == "smollm2.py")
            assert not uses or allowed, f"{path.relative_to(ROOT)} imports {uses}"


def test_the_router_starts_without_torch_or_vllm() -> None:
    """The router installs and runs on a machine that has no engine."""
    code = "import sys, router.app; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
