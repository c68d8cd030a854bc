"""Who may import whom, and what the package must neither load nor shadow."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A key is a module or a room (a folder with everything in it); the longest that fits counts.
# Modules at the top that are not named belong to the job, which may import all but the shell.
# Imports inside functions and for type checkers count too: an arrow is an arrow.
OURS: dict[str, set[str]] = {
    "errors": set(),
    "shard": {"errors"},
    "config_values": set(),
    "metrics": set(),
    "summary": set(),
    "request": {"errors", "metrics"},
    "config": {"errors", "config_values", "request", "shard"},
    "engine": {"errors", "metrics", "request", "config", "attention", "models", "engine"},
    "engine/block_allocator": {"errors"},
    "engine/sampler": {"request", "engine", "kernels"},
    "engine/model_runner": {"errors", "attention", "engine", "kernels"},
    "engine/likely_tokens": {"kernels"},
    "attention": {"errors", "attention", "kernels"},
    "models": {"errors", "config", "attention", "models", "kernels"},
    "text": {"errors", "metrics", "request", "config", "data", "text"},
    "data": {"errors", "metrics", "request", "config", "shard", "data"},
    "kernels": {"kernels"},
    "progress": {"metrics", "config", "summary"},
    "cli_help": {"config"},
    "cli_options": {"config", "cli_help"},
    "cli_output_options": {"config", "cli_help"},
    "doctor_options": {"cli_help"},
    "dry_run": {"config", "errors", "shard", "data", "text"},
    "bench": {"", "errors", "request", "config", "engine", "text", "data"}
    | {"assembly", "generation", "bench"},
    "bench/options": {"bench/config", "bench/suite", "cli_help"},
    "bench/suite": {"", "config", "errors", "bench/config"},
    "bench/cpu_ceilings": {"kernels", "bench/timed_kernels"},
    "bench/timed_kernels": {"attention", "kernels"},
    "bench/cpu_phases": {"bench"},
    "bench/cpu_sweep": {"bench/suite", "cpu_defaults", "request"},
    "bench/cpu_runs": {"errors", "config", "request", "engine", "attention", "kernels", "bench"}
    | {"assembly", "cpu_defaults", "engine_setup", "generation"},
    "bench/cpu_suite": {"errors", "config", "kernels", "bench", "cpu_defaults"},
    "bench/device_clock": set(),
    "bench/gpu_suite": {"errors", "config", "bench", "models", "engine_setup"},
    "bench/gpu_kernels": {"errors", "attention", "kernels", "bench"},
    "bench/gpu_engine": {"errors", "config", "request", "engine", "models", "bench"}
    | {"assembly", "engine_setup"},
    "": {"api", "config", "request"},
}
SHELL = ("cli", "dry_run", "progress", "__main__")
"""Beginnings of the names of modules that import the job and that nothing else imports."""

HEAVY: dict[str, set[str]] = {
    "torch": {
        "attention",
        "models",
        "kernels",
        "engine_checks",
        "engine_setup",
        "runner_setup",
        "doctor",
        "bench/cpu_ceilings",
        "bench/device_clock",
        "bench/timed_kernels",
        "bench/gpu_engine",
        "bench/gpu_kernels",
        "bench/gpu_suite",
        "engine/kv_cache",
        "engine/sampler",
        "engine/likely_tokens",
        "engine/model_runner",
        "engine/device",
        "engine/device_runner",
        "engine/device_sampler",
        "engine/input_buffer",
        "engine/memory_profile",
    },
    "transformers": {"models", "text"},
    "datasets": {"data"},
    "triton": {"kernels"},
}
"""Which modules and rooms may import what takes seconds to load."""

MODELLING = {
    "models/attention_hook",
    "models/gguf_cache",
    "models/hf_model",
    "models/loading",
    "models/padded_generate",
    "models/random_models",
}
"""The files that know transformers' models: what a new version of it can break is in these."""

NOT_MODELLING = {
    "PreTrainedTokenizerBase",
    "PreTrainedTokenizerFast",
    "AutoTokenizer",
    "PreTrainedConfig",
    "logging",
}
"""What others may use of transformers."""

MODELLING_ATTRIBUTES = {
    "_supports_attention_backend",
    "_is_stateful",
    "set_attn_implementation",
    "get_output_embeddings",
    "get_text_config",
    "generation_config",
}
"""Of transformers' models and configs, used by these files and their two helpers only."""


def modules() -> dict[str, Path]:
    """Every source file by its name, as `engine/scheduler`; the package itself is empty."""
    found = {}
    for folder, prefix in ((ROOT / "cbatch_cli", ""), (ROOT / "kernels", "kernels/")):
        for path in folder.rglob("*.py"):
            name = path.relative_to(folder).with_suffix("").as_posix()
            found[prefix + name.removesuffix("__init__").removesuffix("/")] = path
    return found


def imported_names(path: Path, *, for_type_checkers: bool) -> set[str]:
    """The dotted names that a file imports anywhere in it."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if for_type_checkers or not is_typing:
            nodes.extend(ast.iter_child_nodes(node))
    return names


def our_imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, by their names in `modules()`."""
    known, found = modules(), set()
    for name in imported_names(path, for_type_checkers=True):
        package, _, rest = name.partition(".")
        if package in ("cbatch_cli", "cbatch_kernels"):
            rest = ("kernels/" if package == "cbatch_kernels" else "") + rest.replace(".", "/")
            # `from cbatch_cli.config import EngineConfig` names the module config.
            found.add(rest if rest in known else rest.rpartition("/")[0])
    return found


def fits(name: str, rooms: set[str]) -> bool:
    return any(name == room or (room and name.startswith(room + "/")) for room in rooms)


@pytest.mark.parametrize("name", sorted(modules()))
def test_arrows(name: str) -> None:
    path, imports = modules()[name], our_imports(modules()[name])
    rooms = [room for room in OURS if fits(name, {room})]
    if rooms:
        allowed = OURS[max(rooms, key=len)]
        assert {other for other in imports if not fits(other, allowed)} == set()
    elif not name.startswith(SHELL):
        assert "/" not in name, f"{name} is in no room; say above what it may import"
        assert {other for other in imports if other.startswith(SHELL)} == set()
    loaded = imported_names(path, for_type_checkers=False)
    packages = {imported.partition(".")[0] for imported in loaded}
    assert {heavy for heavy in packages & set(HEAVY) if not fits(name, HEAVY[heavy])} == set()


def test_few_files_know_transformers_models() -> None:
    users = {
        name
        for name, path in modules().items()
        for imported in imported_names(path, for_type_checkers=True)
        if imported.startswith("transformers.") and imported.split(".")[1] not in NOT_MODELLING
    }
    assert users == MODELLING


def test_few_files_use_attributes_of_transformers_models() -> None:
    users = {
        name
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in MODELLING_ATTRIBUTES
    }
    helpers = {"models/context_length", "models/fused_head", "models/fusion"}
    assert users <= MODELLING | helpers


def test_no_cycle_of_imports() -> None:
    graph = {name: our_imports(path) - {name, ""} for name, path in modules().items() if name}
    graphlib.TopologicalSorter(graph).prepare()


def loaded_by(statement: str, *, cwd: Path = ROOT) -> set[str]:
    """The top-level packages that a new interpreter holds after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules, file=sys.__stdout__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize(
    "statement",
    [
        "import cbatch_cli; cbatch_cli.SamplingParams, cbatch_cli.EngineConfig",
        "from cbatch_cli.cli import main; assert main(['--help']) == 0",
        "from cbatch_cli.cli import main; assert main(['run', '--help']) == 0",
        "from cbatch_cli.cli import main; assert main(['run', 'a', '--dump-config']) == 0",
        "from cbatch_cli.cli import main; assert main(['doctor', '--help']) == 0",
        "from cbatch_cli.cli import main; assert main(['bench', '--help']) == 0",
        "from cbatch_cli.cli import main; assert main(['doctor', '--ops']) == 2",
    ],
)
def test_the_shell_loads_nothing_heavy(statement: str) -> None:
    assert not loaded_by(statement) & {"torch", "transformers", "datasets", "pyarrow", "rich"}


@pytest.mark.parametrize("command", ["status", "merge"])
def test_looking_at_outputs_loads_no_torch(command: str) -> None:
    statement = f"from cbatch_cli.cli import main; assert main(['{command}', 'a.parquet']) == 2"
    assert not loaded_by(statement) & {"torch", "transformers", "datasets"}


def test_help_loads_no_pydantic() -> None:
    """It would take as long as all the rest of the help."""
    assert "pydantic" not in loaded_by("from cbatch_cli.cli import main; main(['run', '--help'])")


def test_scheduling_and_data_load_no_torch() -> None:
    rooms = {"errors", "metrics", "request", "config", "engine/scheduler", "data"}
    names = [name.replace("/", ".") for name in modules() if fits(name, rooms)]
    statement = "\n".join(f"import cbatch_cli.{name}" for name in sorted(names))
    assert not loaded_by(statement) & {"torch", "transformers"}


def test_our_kernels_do_not_shadow_the_distribution_of_that_name() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    statement = (
        "import kernels, transformers, cbatch_kernels.reference\n"
        "from transformers import AutoModelForCausalLM\n"
        "assert 'site-packages' in kernels.__file__, kernels.__file__"
    )
    assert "cbatch_kernels" in loaded_by(statement, cwd=ROOT)


def test_every_folder_of_sources_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.parent for path in modules().values()} - {ROOT / "kernels"}
    names = {folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in folders}
    assert names | {"cbatch_kernels"} <= set(project["tool"]["setuptools"]["packages"])


def test_public_names_load_on_first_use() -> None:
    import cbatch_cli
    from cbatch_cli.request import SamplingParams

    assert cbatch_cli.SamplingParams is SamplingParams
    assert set(cbatch_cli.__all__) == set(dir(cbatch_cli))
    assert all(hasattr(cbatch_cli, name) for name in cbatch_cli.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        cbatch_cli.Enigne  # noqa: B018
