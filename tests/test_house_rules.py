"""Rules that the whole package keeps; each failure says which file breaks which."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import loopline
from loopline import Callback, Event, Trainer
from loopline.core.event import SEAMS

PACKAGE = Path(loopline.__file__).parent
ROOT = PACKAGE.parents[1]
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = ["loopline", *sorted(found.name for found in pkgutil.walk_packages([str(PACKAGE)], "loopline."))]
MODULES = [name for name in MODULES if not name.endswith("__main__")]
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
BLOCK = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)

# what every module may have at its top without offering it
ORDINARY = {"logger", "F", "T"}


def test_a_callbacks_methods_are_the_seams_in_their_order():
    methods = [name.removeprefix("on_") for name in vars(Callback) if name.startswith("on_") and name != "on_error"]
    assert methods == list(SEAMS)


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_offers_is_sorted(name):
    module = importlib.import_module(name)
    offered = getattr(module, "__all__", [])
    assert list(offered) == sorted(set(offered))


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_offers_is_there(name):
    module = importlib.import_module(name)
    assert [offered for offered in getattr(module, "__all__", []) if not hasattr(module, offered)] == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_offers_every_public_name_that_it_defines(name):
    module = importlib.import_module(name)
    defined = _defined(ast.parse(inspect.getsource(module)))
    public = {d for d in defined if not d.startswith("_")} - ORDINARY
    if name == "loopline.core.event":
        public -= {seam.upper() for seam in SEAMS}  # the module says so beside its __all__
    assert sorted(public - set(getattr(module, "__all__", []))) == []


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_says_in_a_sentence_what_it_is(name):
    module = importlib.import_module(name)
    silent = [offered for offered in getattr(module, "__all__", []) if not _says(getattr(module, offered))]
    assert silent == []


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_belongs_in_it(name):
    said = (importlib.import_module(name).__doc__ or "").strip().splitlines()
    assert said
    assert said[0].endswith((".", ":", "?"))


def test_the_door_offers_what_it_says():
    assert sorted(set(dir(loopline)) & set(loopline.__all__)) == loopline.__all__


def test_a_trainer_has_at_most_twelve_settings():
    settings = [field.name for field in dataclasses.fields(Trainer) if field.init]
    assert len(settings) <= 12, settings


def test_the_trainer_stays_small():
    assert len((PACKAGE / "trainer.py").read_text(encoding="utf-8").splitlines()) <= 350


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.relative_to(PACKAGE).parts[0] != "cli"],  # a command's output is its job
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_nothing_prints_but_the_commands(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    prints = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
    assert prints == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_to_do_names_its_issue(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    bare = [line for line in lines if re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", line)]
    assert bare == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_keeps_a_container_that_anyone_could_change(path):
    """A table in capitals is a constant; anything else at the top of a module would be shared by all runs."""
    kept = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ) if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp):
                if not (name.isupper() or name == "__all__"):
                    kept.append(name)
    assert kept == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_python_on_a_page_runs(page, tmp_path, monkeypatch):
    """The blocks of one page share their names, in order, as a reader would type them in."""
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in BLOCK.finditer(text):
        above = text.count("\n", 0, block.start(1))
        exec(compile("\n" * above + block[1], str(page), "exec"), names)  # the line numbers are those of the page


def _defined(tree):
    """The names that a module's own statements make at its top."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def _says(given):
    """Whether a class or function has a docstring of its own whose first line is a sentence; other values need none."""
    if isinstance(given, Event):
        return given.doc.endswith(".")
    if not (inspect.isclass(given) or inspect.isfunction(given)):
        return True
    said = (given.__dict__.get("__doc__") if inspect.isclass(given) else given.__doc__) or ""
    by_dataclass = inspect.isclass(given) and said.startswith(f"{given.__name__}(")
    first = said.strip().split("\n\n")[0]
    return not by_dataclass and first.endswith((".", ":", "`", "?"))


def test_every_callback_is_found_in_the_room_that_is_named_for_it():
    from loopline import callbacks

    rooms = callbacks._ROOMS
    found = {name: getattr(callbacks, name).__module__ for name in callbacks.__all__}
    assert found == {name: f"loopline.callbacks.{rooms[name]}" for name in rooms}
