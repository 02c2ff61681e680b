"""Make the documentation's pages into a site: ``make docs`` calls this, and then mkdocs.

The repository's documents are copied as they lie, so their links hold in the site, on a code host and in an editor.
PLACES has those that lie elsewhere in the site. Drawings of docs/images become part of their pages, so that they
have the colours of the page. Added are pages that follow from the code: the reference of the Python names and that
of the commands. The former has the docstrings of a copy of the package, in which their marks are Markdown.

    python docs/site.py build/site-source
"""

from __future__ import annotations

import argparse
import ast
import html
import os.path
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import paddle_flexckpt as fc
from paddle_flexckpt.cli.main import build_parser

_PARSER = build_parser()
(_ACTION,) = (each for each in _PARSER._actions if isinstance(each, argparse._SubParsersAction))
_COMMANDS = {each.dest: each.help for each in _ACTION._choices_actions}
ROOT = Path(__file__).resolve().parents[1]
#: What documents link to, besides each other.
COPIED = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "docs", "patches", "examples")
LINKED = (
    "benchmarks/results/scaling.md",
    "benchmarks/results/table.md",
    "paddle_flexckpt/testing/cpu_world/__init__.py",
    "tests/device/plugin/README.md",
)
#: Of a copy of the package; hidden, so that mkdocs does not publish it. mkdocs.yml names it too.
CODE = ".code"
#: Documents that have another place in the site.
PLACES = {"docs/index.md": "index.md", "README.md": "overview.md"}
#: By document of the site, what mkdocs and its theme are told of it. Tags are words to search for, which are not shown.
META = {
    "index.md": "hide: [navigation, toc]\nsearch: {boost: 0.5}",
    "overview.md": "search: {boost: 0.5}",
    "docs/coming_from.md": "tags: [no_dist]\nsearch: {boost: 1.2}",
    "docs/cpu.md": "search: {boost: 1.5}",
    # `check` is also how `checkpoint` begins, which all pages have.
    "docs/guide.md": "tags: [Paddle, S3, changed, check, inference, layer, part, partial, rename, single, size, "
    "some, stage, stages, strategy, version, who, world]\n"
    "search: {boost: 1.1}",
    "docs/aoa.md": "tags: [huggingface, lm_head, tie_word_embeddings, tied, torch, transpose]",
    "docs/cli.md": "tags: [bigger, disk, expected, size]",
    "docs/manager.md": "tags: [SIGTERM, before, dataloader, finished, rollback, slurm, requeue]",
    "docs/model_rules.md": "tags: [GQA, config.json, num_hidden_layers, num_key_value_heads]",
    "docs/survive.md": "tags: [lost, memory, node]\nsearch: {boost: 1.2}",
    "docs/rehearsal.md": "tags: [estimate, long, time]",
    "docs/migration.md": "tags: [huggingface, migrate, pdparams, pytorch]\nsearch: {boost: 1.1}",
    "docs/troubleshooting.md": "tags: [AdamW, AssertionError, changed, corrupted, crash, different, directory, extra, "
    "found, git, GPUs, hang, layers, learning, leftovers, lfs, mp_degree, mp_num, noticed, nranks, number, only, "
    "PermissionError, pointer, rank, rate, renamed, repair, restored, rng, SGD, space, square, transposed, "
    "truncated, unfinished, vocabulary, writing, wrong]\n"
    "search: {boost: 1.2}",
    # These answer few questions, with the words of many.
    **dict.fromkeys(
        (
            "docs/api/errors.md",
            "docs/api/index.md",
            "docs/api/names-that-paddle-has-too.md",
            "docs/api/tools.md",
            "docs/extending.md",
            "docs/format.md",
            "docs/glossary.md",
            "docs/reliability.md",
            "examples/semi_auto/README.md",
            "examples/tensor_parallel_lm/README.md",
            "patches/README.md",
        ),
        "search: {boost: 0.3}",
    ),
    # These do not have what a user looks for: history, tables of numbers, how it is built and proved; or have it again.
    **dict.fromkeys(
        (
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "benchmarks/results/table.md",
            "docs/api/options.md",
            "docs/benchmarks.md",
            "docs/design.md",
            "benchmarks/results/scaling.md",
            "tests/device/plugin/README.md",
        ),
        "search: {exclude: true}",
    ),
}
#: What the page of a subject says before its names.
LEADS = {
    "The state of a run": "Save and load model, optimizer, schedule, scaler, random numbers and the position in the "
    "data: in one call, or as the steps of a run, with [the manager](../manager.md).",
    "Shards": "Save, load and move shards that you describe, or that layers and optimizers describe after `install()`. "
    "[By task](../guide.md) has examples.",
    "Whole tensors, for others": "Read and write whole tensors: in memory, as safetensors, or as other programs do. "
    "See [Converting](../migration.md) and [Weights from training to generation](../weight_sync.md).",
    "Statements": "Make, invert and explain [AOA statements](../aoa.md), by which the tensors of one state become "
    "those of another.",
    "Checkpoints at hand": "List, compare and verify checkpoints, and [rehearse](../rehearsal.md) loads. Most of this "
    "is [a command](../cli.md), too.",
    "Errors": "All ranks raise the same error. The code in its text (`FC101`) leads to a section of "
    "[Troubleshooting](../troubleshooting.md).",
    "Options": "The entry of each call has its options. These classes are for code that passes them on.",
    "Reports": "The results of calls. [Progress, reports, observers](../telemetry.md) shows what they are good for.",
    "Observers and progress": "[Progress, reports, observers](../telemetry.md) has examples.",
    "Tools": "Functions for programs that look into checkpoints. They are public in their modules.",
    "Names that Paddle has too": "Paddle's own package for checkpoints has these names, and they mean the same here. "
    "They are names of `paddle_flexckpt` that `dir()` does not list.",
}
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_PICTURE = re.compile(r"^!\[([^\]]*)\]\((\S*images/[^)\s]+\.svg)\)$", re.M)
_ESCAPED = re.compile(r"(?m)^\|.*\\\|.*$")
_ROLE = re.compile(r":(attr|class|data|func|meth|mod):`~?([\w.]+)`")
# A name or a command in a text; before it, what stays as it is: code, headings, and links with their texts.
_NAMED = re.compile(
    r"^ *```.*?^ *```$|^#[^\n]*|<pre.*?</pre>|<figure.*?</figure>|\[[^\]]*\](?:\([^)\n]*\)|\[[^\]\n]*\])"
    r"|`(?:fc\.(?P<name>\w+)(?:\([^`\n]*\))?|flexckpt (?P<command>\w+)[^`\n]*)`|`[^`\n]*`",
    re.M | re.S,
)
_STYLE = re.compile(r"<style>.*?</style>\n?", re.S)
#: Names that are public in a module of their own: what functions of the package take and return.
MORE = {
    "Options": [
        "paddle_flexckpt.saving.save_options.SaveOptions",
        "paddle_flexckpt.manager.whole_run.RunSaveOptions",
        "paddle_flexckpt.transfer.options.LoadOptions",
        "paddle_flexckpt.manager.restore.RunOptions",
        "paddle_flexckpt.loading.peers.ReshardOptions",
        "paddle_flexckpt.transfer.options.ExportOptions",
        "paddle_flexckpt.loading.publishing.PublishOptions",
        "paddle_flexckpt.loading.fastdeploy_snapshots.SnapshotOptions",
        "paddle_flexckpt.loading.weight_channel.ChannelOptions",
        "paddle_flexckpt.loading.weight_publisher.PublisherOptions",
    ],
    "Reports": [
        *(f"paddle_flexckpt.report.{name}" for name in [*fc._MOVED["report"], "PublishReport"]),
        "paddle_flexckpt.manager.RestoreReport",
        "paddle_flexckpt.manager.whole_run.RunReport",
        "paddle_flexckpt.run_state.ExtraStateReport",
        "paddle_flexckpt.rollout.local_copy.ApplyReport",
        "paddle_flexckpt.rollout.push_reports.ComparedWeightsReport",
        "paddle_flexckpt.rollout.push_reports.PushReport",
        "paddle_flexckpt.tools.comparison.DiffReport",
        "paddle_flexckpt.tools.rehearsal.RehearsalReport",
    ],
    "Observers and progress": [
        "paddle_flexckpt.observers.Event",
        "paddle_flexckpt.observers.Observation",
        "paddle_flexckpt.observers.ScalarObserver",
        "paddle_flexckpt.observers.PrometheusObserver",
        "paddle_flexckpt.progress.Progress",
        "paddle_flexckpt.progress.Meter",
    ],
    "Tools": [
        "paddle_flexckpt.tools.digests.digest_checkpoint",
        "paddle_flexckpt.tools.holders.find_holders",
        "paddle_flexckpt.loading.state_digests.digest_state_dict",
        "paddle_flexckpt.tools.tensor_reader.TensorReader",
    ],
}


TROUBLES = "docs/troubleshooting.md"


def main(argv: list[str] | None = None) -> None:
    """Write the site's sources to a directory, which is emptied first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="where to write")
    output = parser.parse_args(argv).output
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    for name in (*COPIED, *LINKED):
        source, target = ROOT / name, output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    for path in (ROOT / "paddle_flexckpt").rglob("*.py"):
        target = output / CODE / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(markdown(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, text in reference(output / CODE).items():
        (output / "docs" / "api" / name).parent.mkdir(exist_ok=True)
        (output / "docs" / "api" / name).write_text(text, encoding="utf-8")
    (output / "docs" / "commands.md").write_text(commands(), encoding="utf-8")
    for path in output.rglob("*.md"):
        name = path.relative_to(output).as_posix()
        text = page(path.read_text(encoding="utf-8"), name, output)
        path.unlink()
        (output / PLACES.get(name, name)).write_text(text, encoding="utf-8")


def page(text: str, name: str, root: Path) -> str:
    """Return a document as the site has it: its links, its drawings, and what is said of it."""
    place = PLACES.get(name, name)

    def link(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(name), found[2]))
        if place == name and target not in PLACES:
            return found[0]
        target = os.path.relpath(PLACES.get(target, target), os.path.dirname(place) or ".")
        return f"{found[1]}{target}{found[3]}"

    def picture(found: re.Match[str]) -> str:
        drawn = _STYLE.sub("", (root / os.path.dirname(name) / found[2]).read_text(encoding="utf-8"))
        drawn = drawn.replace("<svg ", f'<svg role="img" aria-label="{html.escape(found[1])}" ', 1)
        return f'<figure class="drawing">\n{drawn}</figure>'

    def row(found: re.Match[str]) -> str:
        # A code host takes the backslash away; here it would be shown.
        return re.sub(r"`[^`]+`", lambda code: code[0].replace(r"\|", "|"), found[0])

    def named(found: re.Match[str]) -> str:
        if found["name"] in fc._HOME:
            return f"[{found[0]}][paddle_flexckpt.{found['name']}]"
        if found["command"] in _COMMANDS:
            return (
                f"[{found[0]}]({os.path.relpath('docs/commands.md', os.path.dirname(place) or '.')}#{found['command']})"
            )
        return found[0]

    text = _ESCAPED.sub(row, _LINK.sub(link, _PICTURE.sub(picture, text)))
    if place == TROUBLES:
        text = with_texts(text, texts_of_errors(ROOT / "paddle_flexckpt"))
    if not place.startswith(("docs/api/", "docs/commands")):
        text = _NAMED.sub(named, text)
    return f"---\n{META[place]}\n---\n\n{text}" if place in META else text


def texts_of_errors(package: Path) -> dict[str, list[str]]:
    """Return the beginnings of the texts of errors and warnings, by their code, without what is put in."""
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem" and node.args:
                codes = [each.value for each in node.keywords if each.arg == "code"]
                text, code = _literal(node.args[0]), _literal(codes[0]) if codes else ""
            elif isinstance(node, (ast.Constant, ast.JoinedStr)):
                text, code = (*re.split(r"Remedy \((FC\d{3})\)", _literal(node), maxsplit=1), "", "")[:2]
            else:
                continue
            text = text.split("; ")[0].strip(" .,:;")
            if code and len(text.split()) > 2:
                found.setdefault(code, set()).add(text)
    return {code: sorted(texts) for code, texts in found.items()}


def _literal(node: ast.AST) -> str:
    """Return a text of the source, with ``...`` for each value that is put in; "" for another expression."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(each) if isinstance(each, ast.Constant) else "..." for each in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def with_texts(page: str, texts: dict[str, list[str]]) -> str:
    """Return the page of troubles, with the texts of each section's errors at its end, folded up."""

    def section(found: re.Match[str]) -> str:
        items = "".join(f"<li>{html.escape(each)}</li>" for each in texts.get(found[1], []))
        fold = f"<details><summary>Texts of these errors</summary><ul>{items}</ul></details>\n\n"
        return f"{found[0].rstrip()}\n\n{fold}" if items else found[0]

    return re.sub(r"^## (FC\d{3}) .*?(?=^<a id=|^## |\Z)", section, page, flags=re.MULTILINE | re.DOTALL)


def markdown(code: str) -> str:
    """Return a module whose docstrings are Markdown: names link to where the reference has them."""
    there = {each.rpartition(".")[2]: each for names in MORE.values() for each in names}
    there |= {name: f"paddle_flexckpt.{module}.{name}" for name, module in fc._HOME.items()}

    def role(found: re.Match[str]) -> str:
        owner, _, name = found[2].rpartition(".")
        place = there.get(owner.rpartition(".")[2] if found[1] == "meth" else name)
        return f"[`{name}`][{place}]" if place else f"`{name}`"

    def document(found: re.Match[str]) -> str:
        title = (ROOT / found[0]).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").partition(":")[0]
        return f"[{title}](../{found[1]}.md)"

    code = re.sub(r"(?<![\w/`])docs/(\w+)\.md", document, _ROLE.sub(role, code))
    # A colon that announces code stays; two, which announce it to other tools, do not.
    return re.sub(r"(?m)^ *::\n\n", "", re.sub(r"(?m)(?<=\w)::$", ":", code))


def reference(code: Path) -> dict[str, str]:
    """Return the pages of all public names by file name, and a page that lists them.

    Args:
        code: The directory of the package whose docstrings are Markdown.
    """
    names = {
        title: [f"paddle_flexckpt.{name}" for each in modules.values() for name in each]
        for title, modules in fc.SUBJECTS.items()
    }
    *own, of_paddle = names
    names |= MORE
    listed = ["# Python reference", "All public names, by subject. Those of `paddle_flexckpt` itself come first."]
    pages = {}
    for title in (*own, *MORE, of_paddle):
        file = re.sub(r"\W+", "-", title.lower()) + ".md"
        # A name with capitals is also found without them.
        words = [name.lower() for _, _, name in (each.rpartition(".") for each in names[title]) if not name.islower()]
        head = [f"---\ntags: [{', '.join(words)}]\n---"] if words and f"docs/api/{file}" not in META else []
        # No caller makes a report.
        more = ", show_signature: false, separate_signature: false" if title == "Reports" else ""
        entries = [f"::: {path}\n    options: {{heading: {shown(path)}{more}}}" for path in names[title]]
        pages[file] = "\n\n".join([*head, f"# {title}", LEADS[title], *entries]) + "\n"
        rows = (
            (f"<a id={path}></a>[`{path.rpartition('.')[2]}`]({file}#{path})", sentence(path, code))
            for path in names[title]
        )
        listed += [f"## [{title}]({file})", _table("name", rows)]
    return {"index.md": "\n\n".join(listed) + "\n", **pages}


def shown(path: str) -> str:
    """Return a name as the documents write it."""
    return path if path.count(".") > 1 else path.replace("paddle_flexckpt", "fc")


def sentence(path: str, code: Path) -> str:
    """Return the first sentence about a name, for a table."""
    module, _, name = path.rpartition(".")
    if module == "paddle_flexckpt":
        module = f"{module}.{fc._HOME[name]}"
    file = code / module.replace(".", "/")
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    # The last one is the function itself, which follows its overloads.
    for each in reversed(ast.parse(file.read_text(encoding="utf-8")).body):
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each.name == name:
            first = re.split(r"(?<=[a-z`)\]])\.\s", ast.get_docstring(each), maxsplit=1)[0].rstrip(".")
            return f"{' '.join(first.split())}."
        if isinstance(each, ast.ImportFrom) and name in (alias.name for alias in each.names):
            return sentence(f"{each.module}.{name}", code)
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name:
            return f"`{ast.unparse(each.value)}`, by another name."
    raise LookupError(f"{path} is not in {file}")


def commands() -> str:
    """Return the page of all commands, from their own help."""
    parts = ["# Commands", "`flexckpt COMMAND --help` prints this. The exit status of wrong usage is 2, of Ctrl-C 130."]
    parts.append(_table("command", ((f"[`{name}`](#{name})", line) for name, line in _COMMANDS.items())))
    for name, each in _ACTION.choices.items():
        arguments = (_argument(argument) for argument in each._actions if argument.dest != "help")
        parts += [f"## {name}", each.description or f"{_COMMANDS[name][0].upper()}{_COMMANDS[name][1:]}."]
        parts += [f"```text\n{each.format_usage()}```", _table("argument", arguments)]
        if each.epilog:
            parts.append("\n".join(["```bash", each.epilog.replace("example: ", "", 1), "```"]))
    return "\n\n".join(parts) + "\n"


def _argument(argument: argparse.Action) -> tuple[str, str]:
    """Return how an argument of a command is written, and its help."""
    value = argument.metavar or ("" if argument.nargs == 0 else argument.dest.upper())
    if argument.choices and not argument.metavar:
        value = "{" + ",".join(map(str, argument.choices)) + "}"
    written = " ".join([", ".join(argument.option_strings), str(value)]).strip()
    return f"`{written}`", html.escape(argument.help or "", quote=False).replace("*", r"\*")


def _table(head: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and what is said of them."""
    lines = [f"| {head} | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows)])


if __name__ == "__main__":
    main(sys.argv[1:])
