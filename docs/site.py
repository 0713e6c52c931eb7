"""Build the documentation site from the Markdown of the repository, and write docs/api-reference.md.

mkdocs.yml uses this file as a hook. Pages keep their place in the repository, so that the links between them are
the same there and on the site; files that a page links to are copied.

usage: python docs/site.py docs/api-reference.md
"""

import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
NETWORK_SCRIPT = "https://unpkg.com/iframe-worker/shim"
PAGES = ("*.md", "docs/*.md", "recipes/**/*.md", "examples/**/*.md")


def pages():
    """Return the pages of the site, relative to the repository."""
    return sorted(path.relative_to(ROOT) for pattern in PAGES for path in ROOT.glob(pattern))


def linked(page):
    """Return the other files of the repository that a page links to or shows."""
    for _, _, target, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        path = (ROOT / page).parent / target
        if "://" not in target and path.is_file() and path.suffix != ".md":
            yield path.resolve().relative_to(ROOT)


def on_config(config):
    """Leave pages out of the menu that do not exist, and list those it does not name."""
    present = {page.as_posix() for page in pages()}
    named = set()

    def kept(entries):
        for entry in entries:
            title, target = next(iter(entry.items()))
            if isinstance(target, list):
                yield {title: list(kept(target))}
            elif target in present:
                named.add(target)
                yield entry

    config.nav = list(kept(config.nav))
    rest = sorted(present - named)
    if rest:
        config.nav.append({"More": rest})
    return config


def on_files(files, config):
    """Replace the files of docs/ by those of the repository, under their path in it."""
    from mkdocs.structure.files import File, Files

    wanted = [*pages(), *dict.fromkeys(file for page in pages() for file in linked(page))]
    wanted += [Path("docs/site.css"), Path("docs/site.js")]
    theme = [file for file in files if not (file.abs_src_path or "").startswith(config.docs_dir)]
    own = [File.generated(config, path.as_posix(), abs_src_path=str(ROOT / path)) for path in wanted]
    return Files(theme + own)


def on_post_page(output, page, **_):
    """Use docs/site.js in place of the script that the theme loads from the network."""
    return output.replace(NETWORK_SCRIPT, "../" * page.url.count("/") + "docs/site.js")


def on_post_template(output_content, template_name, **_):
    """Do the same on the page for unknown addresses, which only a server shows."""
    return output_content.replace(NETWORK_SCRIPT, "/docs/site.js")


def on_page_markdown(markdown, page, **_):
    """Show links to folders as plain text: a site has no listing of them."""
    here = (ROOT / page.file.src_uri).parent

    def shown(link):
        image, text, target, _ = link.groups()
        is_folder = "://" not in target and (here / target).is_dir()
        return text if is_folder and not image else link[0]

    return _lists(LINK.sub(shown, markdown))


def _lists(markdown):
    """Write lists as Python-Markdown reads them: after an empty line, with four spaces before what belongs to an item."""
    lines, is_code, is_numbered = [], False, False
    for line in markdown.splitlines():
        is_item = re.match(r"(-|\d+\.) ", line) and not is_code
        before = lines[-1] if lines else ""
        is_text = before.lstrip().startswith(("|", "```")) or before[:1] not in ("", " ", "-", *"123456789")
        is_table = line.lstrip().startswith("|") and before.lstrip()[:1] not in ("", "|") and not is_code
        if (is_item and is_text) or is_table:
            lines.append("")
        if line and not line.startswith(" ") and not is_code:
            is_numbered = bool(re.match(r"\d+\. ", line))
        is_code ^= line.lstrip().startswith("```")
        lines.append(f" {line}" if is_numbered and line.startswith("   ") else line)
    return "\n".join(lines)


def reference():
    """Return the public Python interface as Markdown, from signatures and docstrings."""
    import arriero

    parts = [
        "# API reference",
        "<!-- Generated from the docstrings of src/arriero by `make docs`; do not edit. -->",
        "The names of the package `arriero`. [api.md](api.md) explains them with code that runs.",
    ]
    for name in sorted(arriero.__all__, key=str.lower):
        value = getattr(arriero, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
            parts += [f"## {name}", inspect.cleandoc(ast.get_docstring(node) or "")]
            parts += [f"```python\n{_skeleton(node, is_outermost=True)}\n```"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _skeleton(node, is_outermost=False):
    """Return the source of a function or class without the bodies of functions and without private names."""
    text = ast.get_docstring(node)
    document = [] if is_outermost or not text else [ast.Expr(ast.Constant(text))]
    body = []
    for each in node.body if isinstance(node, ast.ClassDef) else []:
        target = each.targets[0] if isinstance(each, ast.Assign) else getattr(each, "target", None)
        name = getattr(each, "name", getattr(target, "id", "_"))
        if not name.startswith("_"):
            is_field = isinstance(each, ast.AnnAssign | ast.Assign)
            body.append(each if is_field else ast.parse(_skeleton(each)).body[0])
    node.body = document + body or [ast.Expr(ast.Constant(...))]
    return ast.unparse(node)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
