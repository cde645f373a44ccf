"""view draws. It runs a model, and measures its heads, only through heads/effects."""

import ast
from pathlib import Path

import pytest

VIEW = Path(__file__).parents[2] / "src" / "manyheads" / "view"
# Modules that run models, or see their calls; of capture, sites are only names.
FORBIDDEN = {"manyheads.common.run_batch", "manyheads.heads.silence", "manyheads.heads.maps"}
NAMES = {
    "run", "silence", "gates", "watch", "maps", "see", "observed", "Interceptor", "count", "count_corpus",
    "roles", "diversity", "importance", "fisher", "Request", "silencing_curve", "pruning_curve", "compare",
    "head_means", "compare_quality", "probe_batch",
}  # fmt: skip
ALLOWED = {"manyheads.capture.site"}


def faults(source: str) -> list[str]:
    """What a module does that view leaves to others."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name for alias in node.names}
            ours = node.module.startswith("manyheads.") and not node.module.startswith("manyheads.view")
            if node.module in FORBIDDEN or (ours and names & NAMES and "effects" not in node.module):
                found.append(f"imports {sorted(names)} from {node.module}")
            if node.module.startswith("manyheads.capture") and node.module not in ALLOWED:
                found.append(f"imports {node.module}")
        if isinstance(node, ast.Attribute) and node.attr.startswith("register_"):
            found.append(f"calls {node.attr}")
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "model" or (
                called in ("forward", "generate") and isinstance(node.func, ast.Attribute)
            ):
                found.append(f"calls {ast.unparse(node.func)}")
    return found


@pytest.mark.parametrize(
    "path", sorted(VIEW.rglob("*.py")), ids=lambda path: path.relative_to(VIEW).as_posix()
)
def test_no_module_runs_hooks_or_silences_a_model(path):
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "from manyheads.common.run_batch import run",
        "from manyheads.heads.silence import silence",
        "from manyheads.heads.watch import watch",
        "from manyheads.heads.inspect import Counted, count",
        "from manyheads.heads.roles import roles",
        "from manyheads.surgery.silencing_curve import SHARES, silencing_curve",
        "from manyheads.capture.interceptor import Interceptor",
        "module.register_forward_hook(hook)",
        "live.model(batch)",
        "model(**batch)",
        "model.generate(ids)",
    ],
)
def test_the_check_sees_it(line):
    assert faults(line)
