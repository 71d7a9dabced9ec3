# ruff: noqa
"""Merges and renames modules of a checkout, as `merge_modules.toml` says. For one use: it goes away
when the map has been carried out.

    merge_modules.py CHECKOUT                       everything
    merge_modules.py CHECKOUT kombu_toc.model ...   the new modules of those packages
    merge_modules.py CHECKOUT --commit              one commit for each package, bottom up
    merge_modules.py CHECKOUT --plan                writes nothing: conflicts, circles, sizes
    merge_modules.py CHECKOUT --check               afterwards: each module is imported alone

A module's text moves as it stands. What changes: its imports, names that the map renames, what
names it from outside (imports, attributes, strings, documents, settings). The program refuses, with
the name and the place, where one name of a merged module would mean two things.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import os
import re
import subprocess
import sys
import textwrap
import time
import tomllib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PRODUCT = ("kombu_toc", "celery_toc")
BUILTINS = set(dir(builtins)) | {"__name__", "__file__", "__package__", "__doc__"}
#: Bottom up: the order of the commits.
ORDER = (
    "kombu_toc.model", "kombu_toc.scripts", "kombu_toc.metrics", "kombu_toc.client",
    "kombu_toc.center", "kombu_toc.consumer", "kombu_toc.transport", "kombu_toc.aio",
    "kombu_toc.notify", "kombu_toc.library", "kombu_toc.migrate", "kombu_toc.compat",
    "kombu_toc", "kombu_toc.http", "kombu_toc.http.page", "celery_toc.compat",
    "celery_toc.schedules", "celery_toc.app", "celery_toc.worker", "celery_toc.beat",
    "celery_toc.web", "celery_toc.django", "celery_toc.integrations", "celery_toc.cli",
    "celery_toc",
)  # fmt: skip


class Refused(Exception):
    """What the map must decide."""


# -- scopes: which names of a file mean what its top level, or a function's import, binds


class Scope:
    def __init__(self, kind, node, parent):
        self.kind, self.node, self.parent = kind, node, parent
        self.bound, self.globals = set(), set()

    def resolve(self, name, direct=True):
        if self.kind == "module":
            return self
        if name in self.globals:
            scope = self
            while scope.parent:
                scope = scope.parent
            return scope
        if (self.kind != "class" or direct) and name in self.bound:
            return self
        return self.parent.resolve(name, False)


@dataclass
class Ref:
    name: str
    node: ast.AST
    scope: Scope  # where it stands
    home: Scope  # what it means
    parent: ast.AST | None


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _bind(nodes, scope):
    """What those nodes bind in the scope, without what is nested."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            scope.bound.add(node.id)
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            scope.bound.add(node.name)
            todo += node.decorator_list
            continue
        elif isinstance(node, ast.Lambda):
            continue
        elif isinstance(node, COMPREHENSIONS):
            todo += [inner.target for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)]
            continue
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                scope.bound.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            scope.bound.add(node.name)
        elif isinstance(node, ast.Global):
            scope.globals.update(node.names)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            scope.bound.add(node.name)
        todo += ast.iter_child_nodes(node)


class Names(ast.NodeVisitor):
    """All references of a tree, and its imports with their scopes."""

    def __init__(self, tree):
        self.refs, self.imports = [], []
        self.scope = Scope("module", tree, None)
        self.top = self.scope
        self.parents = []
        _bind(tree.body, self.scope)
        for statement in tree.body:
            self.visit(statement)

    def visit(self, node):
        self.parents.append(node)
        super().visit(node)
        self.parents.pop()

    def visit_Name(self, node):
        home = self.scope.resolve(node.id)
        parent = self.parents[-2] if len(self.parents) > 1 else None
        self.refs.append(Ref(node.id, node, self.scope, home, parent))

    def visit_Global(self, node):
        for name in node.names:
            self.refs.append(Ref(name, node, self.scope, self.top, None))

    def _import(self, node):
        self.imports.append((node, self.scope, self.parents[-2] if len(self.parents) > 1 else None))

    visit_Import = visit_ImportFrom = _import

    def _inside(self, kind, node, bodies, extra=()):
        outer, self.scope = self.scope, Scope(kind, node, self.scope)
        self.scope.bound.update(extra)
        _bind(bodies, self.scope)
        for part in bodies:
            self.visit(part)
        self.scope = outer

    def _arguments(self, args):
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        every += [a for a in (args.vararg, args.kwarg) if a]
        for argument in every:
            if argument.annotation:
                self.visit(argument.annotation)
        for default in [*args.defaults, *(d for d in args.kw_defaults if d)]:
            self.visit(default)
        return [argument.arg for argument in every]

    def _function(self, node):
        self.refs.append(Ref(node.name, node, self.scope, self.scope.resolve(node.name), None))
        for decorator in node.decorator_list:
            self.visit(decorator)
        names = self._arguments(node.args)
        if node.returns:
            self.visit(node.returns)
        self._inside("function", node, node.body, names)

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_Lambda(self, node):
        self._inside("function", node, [node.body], self._arguments(node.args))

    def visit_ClassDef(self, node):
        self.refs.append(Ref(node.name, node, self.scope, self.scope.resolve(node.name), None))
        for part in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(part)
        self._inside("class", node, node.body)

    def _comprehension(self, node):
        self.visit(node.generators[0].iter)
        rest = []
        for index, generator in enumerate(node.generators):
            rest += [generator.target, *([generator.iter] if index else []), *generator.ifs]
        rest += [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._inside("function", node, rest)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension


# -- text


class Text:
    """A file, and what is to be changed of it, by the places of its nodes."""

    def __init__(self, text):
        self.data = text.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.edits = {}

    def at(self, line, column):
        return self.starts[line - 1] + column

    def span(self, node):
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def edit(self, start, end, new):
        there = self.edits.get((start, end))
        if there is not None and there != new:
            raise Refused(f"two edits of one place: {there!r} and {new!r}")
        self.edits[start, end] = new

    def replace(self, node, new):
        self.edit(*self.span(node), new)

    def named(self, node, old, new):
        """The name in `def name`, `class name`, `global name`."""
        start = self.at(node.lineno, node.col_offset)
        match = re.compile(rb"\b%s\b" % old.encode()).search(self.data, start)
        self.edit(match.start(), match.end(), new)

    def lines(self, node):
        """The whole lines of a statement, with its trailing comment."""
        end = self.starts[node.end_lineno] if node.end_lineno < len(self.starts) else len(self.data)
        return self.starts[node.lineno - 1], end

    def result(self):
        data, last = b"", 0
        for (start, end), new in sorted(self.edits.items()):
            if start < last:
                continue  # inside something that is gone
            data += self.data[last:start] + new.encode()
            last = end
        return (data + self.data[last:]).decode()


# -- modules


@dataclass
class Module:
    name: str
    path: Path
    package: bool
    text: str
    tree: ast.Module = field(init=False)
    names: Names = field(init=False)

    def __post_init__(self):
        self.tree = ast.parse(self.text)
        self.names = Names(self.tree)

    @property
    def parent(self):
        return self.name if self.package else self.name.rpartition(".")[0]

    def absolute(self, node):
        """The module of a `from ... import`."""
        if not node.level:
            return node.module or ""
        base = self.parent.split(".")
        base = base[: len(base) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])


@dataclass
class Group:
    name: str
    olds: list[str]
    doc: str | None
    renames: dict[tuple[str, str], str]


def tracked(root, *patterns):
    out = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    return [Path(name) for name in out.split("\0") if name and (root / name).exists()]


def dotted(path):
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        return ".".join(parts[:-1]), True
    return ".".join(parts), False


def load(root):
    modules = {}
    for path in tracked(root, *(f"{top}/*.py" for top in PRODUCT)):
        name, package = dotted(path)
        modules[name] = Module(name, path, package, (root / path).read_text())
    return modules


def read_map(path, modules):
    groups, seen = [], {}
    for entry in tomllib.loads(path.read_text())["module"]:
        name = entry["name"]
        package = name.rpartition(".")[0]
        full = lambda old: old if old.startswith(PRODUCT) else f"{package}.{old}"  # noqa: E731
        olds = [full(old) for old in entry["from"]]
        there = [old for old in olds if old in modules]
        for old in set(olds) - set(there):
            print(f"map: {old} is not there (for {name})")
        renames = {}
        for key, new in entry.get("rename", {}).items():
            module, _, symbol = key.rpartition(".")
            if full(module) in modules:
                renames[full(module), symbol] = new
        for old in there:
            if seen.setdefault(old, name) != name:
                raise Refused(f"map: {old} is in {seen[old]} and in {name}")
            if modules[old].package:
                raise Refused(f"map: {old} is a package")
        if not there or (there == [name] and not renames):
            continue
        if name in modules and name not in there:
            raise Refused(f"map: {name} is a module, and not merged into the one of its name")
        groups.append(Group(name, there, entry.get("doc"), renames))
    return groups


# -- the plan


class Plan:
    def __init__(self, root, modules, groups):
        self.root, self.modules, self.groups = root, modules, groups
        self.to = {old: group.name for group in groups for old in group.olds}
        self.renames = {key: new for group in groups for key, new in group.renames.items()}
        self.shown = {}
        self.group_of = {old: group for group in groups for old in group.olds}

    def new(self, module):
        return self.to.get(module, module)

    def symbol(self, module, name):
        """The name that a module's name has afterwards."""
        return self.renames.get((module, name), name)

    def is_module(self, name):
        return name in self.modules

    # -- imports

    def spec(self, module, node, alias):
        """(old module, name or None): what an alias of an import means."""
        if isinstance(node, ast.Import):
            return alias.name, None
        home = module.absolute(node) if module else node.module or ""
        if self.is_module(f"{home}.{alias.name}") and not self._defines(home, alias.name):
            return f"{home}.{alias.name}", None
        return home, alias.name

    def _defines(self, package, name):
        return package in self.modules and name in self.defined(self.modules[package])

    def defined(self, module):
        """Names that the top level binds by other statements than imports."""
        if not hasattr(module, "_defined"):
            scope = Scope("module", module.tree, None)
            _bind([n for n in module.tree.body if not is_import(n)], scope)
            for guarded in module.tree.body:
                if is_type_checking(guarded):
                    inner = Scope("module", module.tree, None)
                    _bind([n for n in guarded.body if is_import(n)], inner)
                    scope.bound -= inner.bound
            module._defined = scope.bound
        return module._defined

    def origin(self, home, name):
        """Where a name comes from that a module has only imported."""
        while name is not None and home in self.modules and not self.is_package(home):
            module = self.modules[home]
            if name in self.defined(module):
                break
            for node, scope, _ in module.names.imports:
                for alias in node.names:
                    if scope is module.names.top and (alias.asname or alias.name) == name:
                        if isinstance(node, ast.ImportFrom):
                            spec = self.spec(module, node, alias)
                            break
                else:
                    continue
                break
            else:
                break
            if spec[0] not in self.modules:
                break
            home, name = spec
        return home, name

    def line(self, at, spec, local):
        """An import as a statement in the module `at` (a dotted name; None: outside)."""
        module, name = spec
        if name is None:
            head, _, tail = self.new(module).rpartition(".")
            if not head:
                return f"import {tail}" + (f" as {local}" if local != tail else "")
            home, name, shown = head, tail, local
        else:
            home, name, shown = self.new(module), self.symbol(module, name), local
        text = name if name == shown else f"{name} as {shown}"
        return f"from {self.relative(at, home)} import {text}"

    def relative(self, at, home):
        if at is None or home.partition(".")[0] != at.partition(".")[0]:
            return home
        package = at if self.is_package(at) else at.rpartition(".")[0]
        here, there = package.split("."), home.split(".")
        common = 0
        while common < min(len(here), len(there)) and here[common] == there[common]:
            common += 1
        return "." * (len(here) - common + 1) + ".".join(there[common:])

    def is_package(self, name):
        return name in self.modules and self.modules[name].package


def is_import(node):
    return isinstance(node, (ast.Import, ast.ImportFrom))


def is_type_checking(node):
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        and not node.orelse
    )


def is_future(node):
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


# -- any file that is not merged: its imports, and what it says of names


def rename_refs(text, names, home, old, new, where):
    """Every reference to what `home` binds as `old`."""
    for ref in names.refs:
        if ref.name != old or ref.home is not home:
            continue
        if ref.scope.resolve(new).kind != "module" and ref.scope.resolve(new) is not home:
            raise Refused(f"{where}: {old} cannot become {new}, line {ref.node.lineno} binds that")
        if isinstance(ref.node, ast.Name):
            text.replace(ref.node, new)
        else:
            text.named(ref.node, old, new)


def follow_module(plan, text, names, home, local, module):
    """Attributes of a module that is imported, whose names have changed."""
    for ref in names.refs:
        if ref.name != local or ref.home is not home:
            continue
        parent = ref.parent
        if isinstance(parent, ast.Attribute):
            new = plan.symbol(module, parent.attr)
            if new != parent.attr:
                end = text.span(parent)[1]
                text.edit(end - len(parent.attr.encode()), end, new)
        elif isinstance(parent, ast.Call) and len(parent.args) > 1 and parent.args[0] is ref.node:
            second = parent.args[1]
            if isinstance(second, ast.Constant) and isinstance(second.value, str):
                new = plan.symbol(module, second.value)
                if new != second.value:
                    text.replace(second, f'"{new}"')


def rewrite_imports(plan, module, at, text, names, where, inner=frozenset()):
    """Follow what is imported; `inner`: old modules that are of this very module now."""
    for node, scope, parent in names.imports:
        if is_future(node) or not concerns(module, node):
            continue
        lines, gone, changed = [], 0, False
        for alias in node.names:
            spec = plan.spec(module, node, alias)
            local = alias.asname or alias.name.partition(".")[0]
            if isinstance(node, ast.Import) and not alias.asname:
                new = plan.new(alias.name)
                lines.append(f"import {new}")
                changed |= new != alias.name
                continue
            old_module, name = plan.origin(*spec)
            if old_module in inner:
                spec = old_module, name
                gone += 1
                absorb(plan, module, text, names, scope, spec, local, where)
                continue
            shown = local
            if name is None:
                follow_module(plan, text, names, scope, local, old_module)
                tail = plan.new(old_module).rpartition(".")[2]
                if alias.asname is None and tail != local and old_module in plan.modules:
                    if tail not in all_bound(names) and not any(r.name == tail for r in names.refs):
                        rename_refs(text, names, scope, local, tail, where)
                        shown = tail
                        scope.bound.add(tail)
                        if module is not None and scope is names.top:
                            plan.shown[module.name, local] = tail
            elif alias.asname is None or alias.asname == alias.name:
                new = plan.symbol(old_module, name)
                if new != name:
                    rename_refs(text, names, scope, local, new, where)
                    shown = new
                    if alias.asname:  # `as` the same: for those who import it from here
                        lines.append(
                            plan.line(at if node.level else None, spec, new) + f" as {new}"
                        )
                        changed = True
                        continue
            line = plan.line(at if node.level else None, spec, shown)
            if alias.asname and alias.asname == alias.name and " as " not in line:
                line += f" as {shown}"
            lines.append(line)
            changed |= line_changed(plan, module, at, node, alias, line)
        if scope is names.top and module is not None and inner:
            continue  # the head of a merged module is made anew
        if gone and not lines:
            body = getattr(parent, "body", [])
            start, end = text.lines(node)
            if [node] == body:
                text.replace(node, "pass")
            else:
                text.edit(start, end, "")
        elif gone or changed:
            indent = "\n" + " " * node.col_offset
            text.replace(node, indent.join(dict.fromkeys(lines)))


def concerns(module, node):
    """Whether an import may be of a module of the product."""
    if isinstance(node, ast.Import):
        return any(alias.name.startswith(PRODUCT) for alias in node.names)
    if node.level:
        return module is not None
    return (node.module or "").partition(".")[0] in PRODUCT


def all_bound(names):
    bound = set(names.top.bound)
    for _, scope, _ in names.imports:
        while scope:
            bound |= scope.bound
            scope = scope.parent
    for ref in names.refs:
        scope = ref.scope
        while scope:
            bound |= scope.bound
            scope = scope.parent
    return bound


def line_changed(plan, module, at, node, alias, line):
    if isinstance(node, ast.Import):
        return line != f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
    name = alias.name + (f" as {alias.asname}" if alias.asname else "")
    return line != f"from {'.' * node.level}{node.module or ''} import {name}"


def absorb(plan, module, text, names, scope, spec, local, where):
    """An import of what is in the same module now: its uses name the thing itself."""
    old_module, name = spec
    if name is None:
        for ref in names.refs:
            if ref.name != local or ref.home is not scope or is_import(ref.node):
                continue
            if not isinstance(ref.parent, ast.Attribute):
                raise Refused(f"{where}: the module {local} is used as a value")
            new = plan.symbol(old_module, ref.parent.attr)
            if ref.scope.resolve(new).kind != "module":
                raise Refused(
                    f"{where}: {local}.{ref.parent.attr} in line {ref.node.lineno} would mean a "
                    f"local {new}"
                )
            text.replace(ref.parent, new)
        return
    new = plan.symbol(old_module, name)
    if new != local:
        for ref in names.refs:
            if ref.name == local and ref.home is scope:
                if ref.scope.resolve(new).kind != "module":
                    raise Refused(f"{where}: {local} in line {ref.node.lineno} is a local {new}")
                text.replace(ref.node, new)
    elif scope is not names.top:
        for ref in names.refs:  # bound by the import alone: the module's own from now on
            if ref.name == local and ref.home is scope and isinstance(ref.node, ast.Name):
                if not isinstance(ref.node.ctx, ast.Load):
                    raise Refused(f"{where}: {local} is bound again in line {ref.node.lineno}")


# -- a merged module


def entity(plan, group, old, name):
    """What a name of a module's top level means, after the merge."""
    module = plan.modules[old]
    if name in plan.defined(module):
        return ("defined", old, name)
    for node, scope, _ in module.names.imports:
        if scope is not module.names.top:
            continue
        for alias in node.names:
            if (alias.asname or alias.name.partition(".")[0]) != name:
                continue
            home, symbol = plan.spec(module, node, alias)
            if home in group.olds:
                if symbol is None:
                    return ("inner", home, None)
                return entity(plan, group, home, symbol)
            if isinstance(node, ast.Import) and not alias.asname:
                return ("imported", name, None)
            new = plan.new(home), symbol and plan.symbol(home, symbol)
            return ("imported", *new)
    return ("builtin", name, None) if name in BUILTINS else ("unknown", old, name)


def statement_of(module, name):
    found = []
    for node in module.tree.body:
        scope = Scope("module", module.tree, None)
        _bind([node], scope)
        if name in scope.bound:
            found.append(node)
    return found[0] if len(found) == 1 else None


def conflicts(plan, group):
    """Names that would mean two things; and statements that stand twice and may go once."""
    meaning, twice, problems = {}, set(), []
    for old in group.olds:
        module = plan.modules[old]
        names = {ref.name for ref in module.names.refs if ref.home is module.names.top}
        names |= module.names.top.bound
        for name in sorted(names):
            what = entity(plan, group, old, name)
            if what[0] in ("inner", "unknown"):
                continue
            if what[0] == "defined":
                after = plan.symbol(what[1], what[2])
            elif what[0] == "imported" and name in module.names.top.bound:
                after = name
                # a plain name that was renamed where it is defined
                if what[2] is not None and what[2] != name:
                    for node, scope, _ in module.names.imports:
                        for alias in node.names:
                            if (
                                scope is module.names.top
                                and alias.asname is None
                                and alias.name == name
                            ):
                                after = what[2]
            else:
                after = name
            before = meaning.setdefault(after, (what, old))
            if before[0] == what:
                continue
            if before[0][0] == what[0] == "defined":
                one = statement_of(plan.modules[before[0][1]], before[0][2])
                other = statement_of(plan.modules[what[1]], what[2])
                if one and other and same(one, other):
                    twice.add((what[1], what[2]))
                    continue
            if after in ("TYPE_CHECKING",) or after == "__all__":
                continue
            problems.append(
                f"{group.name}: {after} is {show(before[0])} in {before[1]}, {show(what)} in {old}"
            )
    return twice, problems


def same(one, other):
    return ast.dump(one) == ast.dump(other)


def show(what):
    kind, home, name = what
    return {"builtin": "a builtin"}.get(kind, f"{kind} ({home}{'.' + name if name else ''})")


def in_order(plan, group):
    """Those first whose names others need while they are imported."""
    needs = {old: set() for old in group.olds}
    for old in group.olds:
        module = plan.modules[old]
        for node in module.tree.body:
            for inner in [node] if is_import(node) else ():
                for alias in inner.names:
                    home, _ = plan.spec(module, inner, alias)
                    if home in needs and home != old:
                        needs[old].add(home)
    order = []
    while needs:
        ready = [old for old in needs if not needs[old] - set(order)]
        if not ready:
            raise Refused(f"{group.name}: {', '.join(needs)} import each other")
        order.append(ready[0])
        del needs[ready[0]]
    return order


def merge(plan, group, twice):
    """The text of a merged module."""
    imports, typing, bodies, exported = [], [], [], []
    typed = {}
    inner = frozenset(group.olds)
    runtime = set()
    docs = {}
    order = in_order(plan, group)
    for old in order:
        module = plan.modules[old]
        where = f"{group.name} ({old})"
        text = Text(module.text)
        docs[old] = ast.get_docstring(module.tree) or ""
        # its own names
        for (home, name), new in group.renames.items():
            if home == old:
                if name not in plan.defined(module):
                    raise Refused(f"{where}: the map renames {name}, which is not defined there")
                rename_refs(text, module.names, module.names.top, name, new, where)
        rewrite_imports(plan, module, group.name, text, module.names, where, inner)
        body = module.tree.body
        for index, node in enumerate(body):
            if index == 0 and isinstance(node, ast.Expr) and docs[old]:
                text.edit(*text.lines(node), "")
            elif is_import(node):
                comment = trailing(text, node)
                if not is_future(node):
                    for line in head_lines(plan, module, group, node, inner):
                        imports.append(line + comment)
                        runtime.add(line)
                text.edit(*text.lines(node), "")
            elif is_type_checking(node):
                rest = [part for part in node.body if not is_import(part)]
                for part in node.body:
                    if is_import(part):
                        for line in head_lines(plan, module, group, part, inner):
                            typing.append(line)
                        text.edit(*text.lines(part), "")
                if not rest:
                    text.edit(*text.lines(node), "")
            else:
                bound = Scope("module", None, None)
                _bind([node], bound)
                if bound.bound == {"__all__"}:
                    exported.append(ast.literal_eval(node.value))
                    text.edit(*text.lines(node), "")
                elif bound.bound and all((old, name) in twice for name in bound.bound):
                    text.edit(*text.lines(node), "")
        bodies.append((old, text.result().strip("\n")))
    typing = [line for line in dict.fromkeys(typing) if line not in runtime]
    needed = [line for line in dict.fromkeys(imports)]
    if len(group.olds) == 1 and not group.doc:
        doc = docs[order[0]] + ("\n" if "\n" in docs[order[0]] else "")
    elif not group.doc:
        main = group.name if group.name in group.olds else group.olds[0]
        lines = textwrap.wrap(" ".join(docs[main].split("\n\n")[0].split()), 92)
        doc = "\n".join(lines[:3])
    else:
        doc = group.doc.strip()
    out = [f'"""{doc}"""', "", "from __future__ import annotations", "", *needed, ""]
    if typing:
        out += ["if TYPE_CHECKING:", *(f"    {line}" for line in typing), ""]
    if exported:
        names = list(dict.fromkeys(name for one in exported for name in one))
        out += [f"__all__ = ({', '.join(map(repr, names))},)", ""]
    for old, body in bodies:
        if not body.strip():
            continue
        if len(bodies) > 1:
            out += ["", f"# -- {title(docs[old], old)}"]
            rest = docs[old].partition("\n\n")[2]
            if rest:  # what the module said of itself
                out += ["#", *(f"# {line}".rstrip() for line in rest.splitlines())]
            out += [""]
        out += [body, ""]
    return "\n".join(out)


def title(doc, old):
    """The line above what one module was: the first sentence that it had, if it fits."""
    first = " ".join(doc.split("\n\n")[0].split())
    first = re.split(r"(?<=[a-z`)])[.:] ", first)[0].rstrip(".:").replace("`", "")
    first = re.sub(r":\w+:(?=\S)", "", first)
    if len(first) > 92:
        first = re.split(r"[:;,] ", first)[0]
    if not first or len(first) > 92:
        first = old.rpartition(".")[2].replace("_", " ")
    return first[0].lower() + first[1:] if first[1:2].islower() else first


def trailing(text, node):
    start, end = text.span(node)[1], text.lines(node)[1]
    comment = text.data[start:end].decode().strip()
    return f"  {comment}" if comment.startswith("#") else ""


def head_lines(plan, module, group, node, inner):
    for alias in node.names:
        spec = plan.origin(*plan.spec(module, node, alias))
        local = alias.asname or alias.name.partition(".")[0]
        if isinstance(node, ast.Import) and not alias.asname:
            yield f"import {plan.new(alias.name)}"
            continue
        if spec[0] in inner:
            continue
        shown = local
        if spec[1] is None:
            shown = shown_module(plan, module, spec, local, alias)
        elif alias.asname is None:
            shown = plan.symbol(*spec)
        line = plan.line(group.name, spec, shown)
        if alias.asname and alias.asname == alias.name and " as " not in line:
            line += f" as {shown}"
        yield line


def shown_module(plan, module, spec, local, alias):
    return plan.shown.get((module.name, local), local)


# -- what names modules in strings, documents and settings


class Words:
    def __init__(self, plan):
        self.plan = plan
        self.dotted = re.compile(r"(?<![\w.@-])(?:kombu_toc|celery_toc)(?:\.[A-Za-z_]\w*)+")
        self.path = re.compile(r"(?<![\w.-])(?:kombu_toc|celery_toc)(?:/\w+)+(?:\.py)?\b(?![.*/])")
        self.froms = re.compile(
            r"(?m)^(?P<head>[ \t>]*(?:['\"])?)from (?P<home>(?:kombu_toc|celery_toc)(?:\.\w+)*) import "
            r"(?P<names>\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)"
        )

    def one(self, match):
        parts = match.group().split(".")
        for length in range(len(parts), 1, -1):
            old = ".".join(parts[:length])
            if old in self.plan.modules:
                rest = parts[length:]
                if rest and not self.plan.is_package(old):
                    rest[0] = self.plan.symbol(old, rest[0])
                return ".".join([self.plan.new(old), *rest])
        return match.group()

    def file(self, match):
        found = match.group()
        end = ".py" if found.endswith(".py") else ""
        old = found.removesuffix(".py").replace("/", ".")
        if self.plan.new(old) == old:
            return found
        return self.plan.new(old).replace(".", "/") + end

    def imported(self, match):
        home, lines = match["home"], defaultdict(list)
        changed = False
        for item in match["names"].split(", "):
            name, _, local = item.partition(" as ")
            whole = f"{home}.{name}"
            if whole in self.plan.to:
                new_home, _, new = self.plan.new(whole).rpartition(".")
                local = local or name
            else:
                new_home, new = home, self.plan.symbol(home, name)
                local = local or name
            changed |= (new_home, new) != (home, name)
            lines[new_home].append(new if new == local else f"{new} as {local}")
        if not changed:
            return match.group()
        parts = [f"from {where} import {', '.join(names)}" for where, names in lines.items()]
        return match["head"] + ("\n" + match["head"]).join(parts)

    def __call__(self, text):
        text = self.froms.sub(self.imported, text)
        text = self.dotted.sub(self.one, text)
        return self.path.sub(self.file, text)


def roles(plan, old_module, text):
    """References of docstrings, such as :class:`.registry.Registry`."""

    def one(match):
        target = match["target"]
        dots = len(target) - len(target.lstrip("."))
        base = old_module.parent.split(".")
        names = target.lstrip(".").split(".")
        for up in range(dots - 1 if dots else 0, len(base)):
            prefix = base[: len(base) - up]
            for length in range(len(names), 0, -1):
                old = ".".join([*prefix, *names[:length]])
                if old in plan.modules and not plan.is_package(old):
                    new = plan.new(old)
                    rest = names[length:]
                    if rest:
                        rest[0] = plan.symbol(old, rest[0])
                    if new == old and rest == names[length:]:
                        return match.group()
                    own = plan.new(old_module.name)
                    if new == own and rest:
                        return f":{match['role']}:`{match['tilde']}{'.'.join(rest)}`"
                    short = "." + ".".join([*new.split(".")[len(prefix) :], *rest])
                    return f":{match['role']}:`{match['tilde']}{short}`"
        return match.group()

    pattern = r":(?P<role>\w+):`(?P<tilde>~?)(?P<target>\.[\w.]+)`"
    return re.sub(pattern, one, text)


# -- circles


def edges(plan):
    for module in plan.modules.values():
        for node, scope, parent in module.names.imports:
            if is_future(node):
                continue
            for alias in node.names:
                home, name = plan.spec(module, node, alias)
                while home and home not in plan.modules:
                    home = home.rpartition(".")[0]
                if home:
                    yield module.name, home, node.lineno


def circles(plan):
    """Of siblings at any depth, all imports counted, as import-linter does."""
    graph = defaultdict(lambda: defaultdict(list))
    for importer, imported, line in edges(plan):
        a, b = plan.new(importer), plan.new(imported)
        if a == b:
            continue
        one, two = a.split("."), b.split(".")
        depth = 0
        while depth < min(len(one), len(two)) and one[depth] == two[depth]:
            depth += 1
        if depth == 0 or depth >= min(len(one), len(two)):
            continue
        x, y = ".".join(one[: depth + 1]), ".".join(two[: depth + 1])
        graph[x][y].append(f"{importer}:{line} -> {imported}")
    out = []
    for group in components(graph):
        if len(group) > 1:
            lines = [f"circle: {', '.join(sorted(group))}"]
            for x in sorted(group):
                for y in sorted(group):
                    if graph[x].get(y):
                        lines.append(f"    {x} -> {y}: {'; '.join(graph[x][y][:4])}")
            out.append("\n".join(lines))
    return out


def components(graph):
    index, low, stack, on, out = {}, {}, [], set(), []
    sys.setrecursionlimit(10000)

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        on.add(node)
        for other in list(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in on:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = []
            while True:
                other = stack.pop()
                on.discard(other)
                group.append(other)
                if other == node:
                    break
            out.append(group)

    for node in list(graph):
        if node not in index:
            visit(node)
    return out


# -- a run


def run(root, packages, plan_only=False):
    modules = load(root)
    groups = read_map(HERE / "merge_modules.toml", modules)
    if packages:
        groups = [group for group in groups if group.name.rpartition(".")[0] in packages]
    plan = Plan(root, modules, groups)
    problems, twice = [], {}
    for group in groups:
        again, found = conflicts(plan, group)
        twice[group.name] = again
        problems += found
    merged = {}
    for group in groups:
        try:
            merged[group.name] = merge(plan, group, twice[group.name])
        except Refused as exc:
            problems.append(str(exc))
    problems += circles(plan)
    others = {}
    for module in modules.values():
        if module.name in plan.to:
            continue
        try:
            others[module.path] = follow(plan, module, module.path, module.text)
        except Refused as exc:
            problems.append(str(exc))
    outside = [path for path in tracked(root, "*.py") if path.parts[0] not in PRODUCT]
    for path in outside:
        text = (root / path).read_text()
        try:
            others[path] = follow(plan, None, path, text)
        except SyntaxError:
            others[path] = Words(plan)(text)
        except Refused as exc:
            problems.append(str(exc))
    if problems:
        print("\n".join(problems))
    size = {name: len(text.splitlines()) for name, text in merged.items()}
    for name, lines in sorted(size.items(), key=lambda one: one[1]):
        if plan_only and not 100 <= lines <= 700:
            print(f"size: {name} {lines}")
    after = {plan.new(name) for name in modules}
    print(f"{len(modules)} modules become {len(after)}; {len(groups)} are merged or renamed")
    if problems:
        raise SystemExit(f"refused: {len(problems)} problems")
    if plan_only:
        return plan
    write(root, plan, merged, others)
    return plan


def follow(plan, module, path, text):
    """A file that is not merged."""
    if module is None and not re.search(r"kombu_toc|celery_toc", text):
        return text
    tree, names = (module.tree, module.names) if module else (ast.parse(text), None)
    names = names or Names(tree)
    edited = Text(text)
    own = module.name if module else None
    rewrite_imports(plan, module, own, edited, names, str(path))
    if module is not None:
        places(plan, module, edited)
    new = edited.result()
    if module is not None:
        new = roles(plan, module, new)
    return Words(plan)(new)


def places(plan, module, text):
    """The tables of names that are loaded when they are first used."""
    for node in module.tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Dict)
            and getattr(node.targets[0], "id", "") == "_PLACES"
        ):
            for value in node.value.values:
                new = plan.new(f"{module.name}.{value.value}").removeprefix(f"{module.name}.")
                if new != value.value:
                    text.replace(value, f'"{new}"')


def write(root, plan, merged, others):
    git = lambda *words: subprocess.run(
        ["git", *words], cwd=root, check=True, stdout=subprocess.DEVNULL
    )  # noqa: E731
    words = Words(plan)
    for group in plan.groups:
        target = Path(group.name.replace(".", "/") + ".py")
        largest = max(group.olds, key=lambda old: len(plan.modules[old].text))
        if group.name in group.olds:
            largest = group.name
        for old in group.olds:
            path = plan.modules[old].path
            if old == largest:
                if path != target:
                    git("mv", str(path), str(target))
            else:
                git("rm", "-q", "--cached", str(path))
                (root / path).unlink()
        text = merged[group.name]
        for old in group.olds:
            text = roles(plan, plan.modules[old], text)
        (root / target).write_text(narrowed(words(text)))
    for path, text in others.items():
        if (root / path).read_text() != text:
            (root / path).write_text(narrowed(text) if path.parts[0] in PRODUCT else text)
    for path in tracked(root):
        if (
            path.suffix
            in (".md", ".sh", ".yml", ".yaml", ".toml", ".cfg", ".ini", ".json", ".js", ".lua", "")
            or path.name == ".importlinter"
        ):
            if "performance" in path.parts or path.name == "CHANGELOG.md":
                continue
            file = root / path
            try:
                text = file.read_text()
            except UnicodeDecodeError:
                continue
            if path.name == "architecture.md":
                new = architecture(plan, text)
            else:
                new = words(text)
            if path.name in (".importlinter", "pyproject.toml"):
                new = deduplicated(new)
            if new != text:
                file.write_text(new)
    bin = Path(root) / ".venv" / "bin"
    ruff = bin / "ruff" if (bin / "ruff").exists() else "ruff"
    subprocess.run([ruff, "check", "--fix", "-q", "."], cwd=root)
    subprocess.run([ruff, "format", "-q", "."], cwd=root)
    git("add", "-A")


def narrowed(text):
    """Lines of prose that a longer name has made too long are broken: comments and docstrings."""
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node):
            prose.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    out = []
    for number, line in enumerate(text.split("\n"), 1):
        indent = line[: len(line) - len(line.lstrip())]
        if len(line) <= 100 or (number not in prose and not line.lstrip().startswith("# ")):
            out.append(line)
            continue
        mark = "# " if line.lstrip().startswith("# ") else ""
        body = line.strip().removeprefix(mark)
        kept = {"break_long_words": False, "break_on_hyphens": False}
        out += [
            f"{indent}{mark}{part}" for part in textwrap.wrap(body, 99 - len(indent + mark), **kept)
        ]
    return "\n".join(out)


def deduplicated(text):
    """Lists of settings, one module a line."""
    out, seen = [], set()
    for line in text.splitlines():
        item = re.fullmatch(r'\s+"?((?:kombu_toc|celery_toc)[\w.]*)"?,?', line)
        if item:
            if item[1] in seen:
                continue
            seen.add(item[1])
        else:
            seen = set()
        out.append(line)
    return "\n".join(out) + "\n"


def architecture(plan, text):
    """The page of the parts: rows of files that are one now are one row."""
    words = Words(plan)
    out, room, rows = [], None, {}
    names = defaultdict(set)
    for old in plan.to:
        names[old.rpartition(".")[2]].add(old)

    def bare(match, package):
        found = names.get(match[1], set())
        for home in (package, *(("kombu_toc.center",) if not package else ())):
            if home and f"{home}.{match[1]}" in plan.modules:
                return f"`{plan.new(f'{home}.{match[1]}').rpartition('.')[2]}.py`"
        if len(found) != 1 or any(
            m.endswith(f".{match[1]}") for m in plan.modules if m not in found
        ):
            return match.group()
        old = next(iter(found))
        new = plan.new(old)
        if package or new.startswith("kombu_toc.center."):
            return f"`{new.rpartition('.')[2]}.py`"
        return f"`{new.replace('.', '/')}.py`"

    def in_room(match):
        for top in PRODUCT:
            old = f"{top}.{match[1].replace('/', '.')}"
            if old in plan.to:
                return f"`{plan.new(old).removeprefix(top + '.').replace('.', '/')}.py`"
        return match.group()

    def renamed(match):
        if match[1] in plan_names:
            return "`" + plan_names[match[1]] + match[2]
        return match.group()

    plan_names = {
        name: new
        for (_, name), new in plan.renames.items()
        if name[0].isupper() and not name.isupper()
    }

    package = None
    for line in text.splitlines():
        heading = re.match(r"#+ (.*)", line)
        if heading:
            package, rows = None, {}
            of = re.match(r"Parts of (?:the )?(\w+(?:/\w+)*)", heading[1])
            if of:
                package = next(
                    (f"{top}.{of[1].replace('/', '.')}" for top in PRODUCT
                     if f"{top}.{of[1].replace('/', '.')}" in plan.modules), None)  # fmt: skip
        changed = words(line)
        changed = re.sub(r"`((?:\w+/)+\w+)\.py`", in_room, changed)
        changed = re.sub(r"`([A-Z]\w+)([`.])", renamed, changed)
        changed = re.sub(r"`(\w+)\.py`", lambda m: bare(m, package), changed)
        row = re.match(r"\| ((?:`\w+\.py`(?:, | and )?)+) \| (.*) \|$", changed)
        if row and package:
            files = list(dict.fromkeys(re.findall(r"`\w+\.py`", row[1])))
            there = next((rows[f] for f in files if f in rows), None)
            if there is not None:
                old_files, said = out[there]
                out[there] = (list(dict.fromkeys([*old_files, *files])), f"{said}; {row[2]}")
                for f in files:
                    rows[f] = there
                continue
            for f in files:
                rows[f] = len(out)
            out.append((files, row[2]))
            continue
        out.append(changed)
    lines = [
        line if isinstance(line, str) else f"| {', '.join(line[0])} | {line[1]} |" for line in out
    ]
    return "\n".join(lines) + "\n"


def check(root):
    """Import each module alone, in a process of its own."""
    python = root / ".venv" / "bin" / "python"
    every = [dotted(path)[0] for path in tracked(root, *(f"{top}/*.py" for top in PRODUCT))]
    every = [m for m in every if not m.endswith("__main__") and ".migrations" not in m]

    def alone(module):
        done = subprocess.run(
            [python, "-c", f"import {module}"], cwd=root, capture_output=True, text=True
        )
        return module, done.returncode, done.stderr.strip().splitlines()[-1:]

    failed = 0
    with ThreadPoolExecutor(2) as pool:
        for module, code, said in pool.map(alone, every):
            if code:
                failed += 1
                print(f"{module}: {' '.join(said)}")
    print(f"{len(every)} modules imported alone, {failed} failed")
    return failed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--commit", action="store_true")
    given = parser.parse_args()
    root = given.root.resolve()
    start = time.time()
    if given.check:
        sys.exit(bool(check(root)))
    if given.commit:
        for package in given.packages or ORDER:
            print(f"== {package}")
            run(root, [package])
            staged = subprocess.run(["git", "diff", "--cached", "--quiet"], cwd=root).returncode
            if staged:
                subprocess.run(
                    ["git", "commit", "-q", "-m", f"{package}: one module for one concept"],
                    cwd=root, check=True,
                )  # fmt: skip
    else:
        run(root, given.packages, given.plan)
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
