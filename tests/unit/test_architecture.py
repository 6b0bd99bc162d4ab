"""The layers of the package: each module imports only what stands below it."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import ddpkit

PACKAGE = Path(ddpkit.__file__).parent

# Module -> what it stands on: it may import these, and whatever these stand on. A new module needs
# a row here, and a line in docs/architecture.md.
STANDS_ON = {
    "errors": "",
    "variables": "errors",
    "slurm": "variables",
    "mpi": "variables",
    "topology": "slurm mpi",
    "serialize": "errors",
    "sockets": "",
    "store": "topology sockets",
    "control": "topology serialize",
    "watch": "control",
    "pending": "",
    "network": "store wording",
    "search": "store",
    "rendezvous": "control network search attempts",
    "group": "rendezvous watch pending consequence attempts links",
    "agree": "group",
    "nested": "",
    "reduce": "group nested",
    "delivery": "agree",
    "collect": "delivery nested",
    "state_names": "",
    "wording": "",
    "additions": "",
    "backward": "additions errors wording",
    "completeness": "agree wording",
    "buffers": "agree wording",
    "wrapper": "state_names backward buffers completeness",
    "meeting": "",
    "mover": "meeting",
    "entrance": "mover nested",
    "wrap": "wrapper entrance",
    "split": "plan entrance group wording",
    "accumulation": "reduce agree windows",
    "permutation": "errors",
    "randomness": "",
    "digest": "",
    "windows": "",
    "sampler": "permutation randomness windows",
    "worker_signals": "",
    "serving": "sampler worker_signals",
    "stream": "serving digest",
    "recipe": "sampler group",
    "lockstep": "group",
    "prefetch": "nested",
    "loader": "stream recipe lockstep prefetch agree",
    "durable": "",
    "snapshot": "wrap nested",
    "series": "",
    "checkpoint": "nested durable snapshot series randomness agree",
    "preempt": "agree worker_signals",
    "console": "group",
    "seeding": "group permutation randomness",
    "replicas": "wrap",
    "partition": "",
    "blocks": "errors",
    "rehearsal": "blocks meeting nested randomness",
    "plan": "partition rehearsal",
    "cgroup": "",
    "threads": "cgroup",
    "attempts": "",
    "links": "topology sockets",
    "consequence": "errors",
    "launch": "group threads preempt",
    "entry": "launch agree",
    "testing": "entry replicas",
    "rank_mark": "errors",
    "rank_body": "testing",
    "pytest_plugin": "rank_mark rank_body",
    "doctor": "entry network threads wording",
    "__main__": "doctor",
}


def allowed_imports(module: str) -> set[str]:
    direct = set(STANDS_ON[module].split())
    return direct.union(*map(allowed_imports, direct))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def room(module: str) -> str:
    """Return the row of the table that a module belongs to: all of `launch` is one room."""
    return module.split(".")[0]


def source_files() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


MODULES = source_files()


def imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Find what a module imports when it runs, deferred imports included, as dotted names."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test).endswith("TYPE_CHECKING"):
        for statement in tree.orelse:
            yield from imported_names(statement, package)
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    if isinstance(tree, ast.ImportFrom):
        base = package.split(".")[: -(tree.level - 1) or None] if tree.level else []
        source = ".".join([*base, tree.module] if tree.module else base)
        yield from (f"{source}.{alias.name}" for alias in tree.names)
    for node in ast.iter_child_nodes(tree):
        yield from imported_names(node, package)


def imports_of(module: str) -> set[str]:
    """Find the modules of this package that a module imports; "" stands for the package itself."""
    path = MODULES[module]
    is_package = path.name == "__init__.py"
    parent = module if is_package else module.rpartition(".")[0]
    names = imported_names(ast.parse(path.read_text()), f"ddpkit.{parent}".rstrip("."))
    return {nearest_module(name) for name in names if name.split(".")[0] == "ddpkit"}


def nearest_module(name: str) -> str:
    """Return the module that a dotted name belongs to: `ddpkit.errors.GroupError` to `errors`."""
    inner = name.removeprefix("ddpkit").removeprefix(".")
    while inner not in MODULES:
        inner = inner.rpartition(".")[0]
    return inner


def test_every_module_has_a_row_and_every_row_a_module() -> None:
    assert {room(module) for module in MODULES} - {""} == STANDS_ON.keys()


def test_imports_go_downward_only() -> None:
    wrong = [
        f"{module} imports {imported or '__init__'}"
        for module in MODULES.keys() - {""}
        for imported in imports_of(module)
        if room(imported) != room(module) and room(imported) not in allowed_imports(room(module))
    ]
    assert wrong == []


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module: imports_of(module) - {module} for module in MODULES.keys() - {""}}
    graphlib.TopologicalSorter(graph).prepare()


def test_the_reader_of_imports_sees_every_form() -> None:
    source = """
import ddpkit.errors
from ddpkit import store as stores
from ddpkit.group import get_rank
from . import job
from .. import topology
from ..control import Channel
def later():
    from .report import text
if TYPE_CHECKING:
    import ddpkit.testing
else:
    import ddpkit.agree
"""
    assert list(imported_names(ast.parse(source), "ddpkit.launch")) == [
        "ddpkit.errors",
        "ddpkit.store",
        "ddpkit.group.get_rank",
        "ddpkit.launch.job",
        "ddpkit.topology",
        "ddpkit.control.Channel",
        "ddpkit.launch.report.text",
        "ddpkit.agree",
    ]


def test_no_module_is_named_like_a_public_function() -> None:
    assert MODULES.keys() & set(ddpkit.__all__) == set()
