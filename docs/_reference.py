"""mkdocs hook: writes the API reference, a page for each topic, from the package's own table of public names.

`megacpp_compile/__init__.py` is read as text, never imported, so that pages build without torch; a name that moves to
another module takes its page along.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megacpp_compile"
TOPICS = {
    "Compiling": ("backend", "Config", "compile", "enable"),
    "Rules": ("register", "unregister", "Match", "MatchFailure", "register_lowering"),
    "Reports": ("record", "Report", "explain"),
    "Memory": ("CheckpointingPolicy", "apply_checkpoints", "estimate", "Estimate", "fit", "Fit"),
    "Launching": ("launch_record", "LaunchRecord"),
    "Precision": ("PrecisionPlan", "replace_linears", "te_layer_spec", "NativeLayerSpec",
                  "scaling_state", "load_scaling_state", "cached_weight_casts"),
    "Ops a model calls": ("attention", "attention_capability", "sparse_mla", "equal_split"),
    "Attention": ("enable_fa4", "disable_fa4", "uses_dense_fa4", "Validity", "last_attention", "observed_attention"),
    "Decoding": ("MLAKVCache", "latent_attention", "use_latent_cache", "ServingConfig"),
    "Sharding": ("ShardingPlan", "sharded_sequences"),
    "Resuming": ("check_resume",),
    "Compiling once": ("save_cache", "load_cache", "save_compiled", "load_compiled", "CompileCache"),
}
# Modules that bring another package along, or are for loops around it, and so no attributes of this one.
INTEGRATIONS = ("integrations.transformers.MegacppCallback", "integrations.training.prepare")
COMMANDS = ("explain", "compile", "estimate", "plan", "passes", "tags", "doctor", "evidence")


def public_names() -> dict[str, str]:
    """Public name -> dotted path of its definition's module and name, for all of `__all__`.

    Raises ValueError where `__all__` and the lazy table disagree, or a name has no topic or two.
    """
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text())
    assigned = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names, home = ast.literal_eval(assigned["__all__"]), ast.literal_eval(assigned["_HOME"])
    listed = [name for topic in TOPICS.values() for name in topic]
    if set(names) != set(home) or sorted(listed) != sorted(names):
        odd = set(names) ^ set(home) | set(names) ^ set(listed) | {name for name in listed if listed.count(name) > 1}
        raise ValueError(f"{PACKAGE}.__all__, its _HOME and TOPICS in {Path(__file__).name} disagree: {sorted(odd)}")
    # A module that stands for a function of another name, as `backend` for `megacpp`, is imported under its alias.
    renamed = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    return {name: f"{PACKAGE}.{home[name]}.{renamed.get(name, name)}" for name in names}


def pages() -> dict[str, str]:
    """File name below reference/ -> Markdown."""
    homes, made = public_names(), {}
    index = ["# API reference", "", "Everything public is an attribute of `megacpp_compile`, loaded on first use.", ""]
    for topic, names in TOPICS.items():
        file = topic.lower().replace(" ", "_") + ".md"
        entries = [directive(homes[name], heading=f"{PACKAGE}.{name}", toc_label=name) for name in names]
        made[file] = "\n".join([f"# {topic}", "", *entries])
        index.append(f"- [{topic}]({file}): " + ", ".join(f"`{name}`" for name in names))
    entries = [directive(f"{PACKAGE}.{path}", heading=f"{PACKAGE}.{path}") for path in INTEGRATIONS]
    made["trainers.md"] = "\n".join(["# Trainers", "", *entries])
    whole = directive(f"{PACKAGE}.errors", show_root_heading="false", show_root_toc_entry="false", show_bases="true")
    made["errors.md"] = "\n".join(["# Errors", "", whole])
    made["command_line.md"] = command_line()
    index += ["- [Trainers](trainers.md)", "- [Errors](errors.md)", "- [Command line](command_line.md)"]
    made["index.md"] = "\n".join(index) + "\n"
    return made


def directive(path: str, **options: str) -> str:
    """mkdocstrings' for one object."""
    lines = [f"::: {path}", "    options:", *(f"      {key}: {value}" for key, value in options.items()), ""]
    return "\n".join(lines)


def command_line() -> str:
    """What `--help` says, of `megacpp` and of each command."""
    parts = ["# Command line", ""]
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    for command in ("", *COMMANDS):
        arguments = [sys.executable, "-m", f"{PACKAGE}.cli", *command.split(), "--help"]
        done = subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd=ROOT, check=True)
        parts += [f"## megacpp {command}".rstrip(), "", "```text", done.stdout.rstrip(), "```", ""]
    return "\n".join(parts)


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs once it knows the files of docs/."""
    from mkdocs.structure.files import File

    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Called by mkdocs with each page's HTML: the theme's helper for searches in a folder is a file, not fetched."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "../" * page.url.count("/") + "folder_search.js")
