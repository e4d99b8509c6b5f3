"""Loads and calls user code, inside the child process.

The target may be:

- a function `f(inputs)`, or `f(inputs, parameters)`. A second parameter with this name gets one object per input, which is `{}`
  if the request had no parameters;
- a class. It is instantiated once, with its arguments. Then its method `setup(device)` is called if it exists. After that, the
  instance is called like a function. `device` is `cuda:0`, the only GPU that the process can see, or `cpu` if it sees none;
- either of them with an attribute `together`, which names the parameters that must be equal in a call, or is "all".
  If the second parameter is annotated as a mapping, it gets one mapping with the values of these parameters;
- either of them `async`. All calls share one event loop.

Annotations determine whether inputs and outputs are strings, JSON values, bytes or arrays (`array_kind.py`). An attribute `example`
is the warm-up input.

If user code raises anything, even SystemExit, this module raises Refusal during loading, and the same exception during a run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import CodeType
from typing import TYPE_CHECKING, Any

import msgspec

from headway.backends.process.values import (
    NoArrays,
    NoOutput,
    annotations_of,
    are_arrays,
    are_one_mapping,
    decoder,
    encoder,
    has_arrays,
    json_types,
    kind_of,
    kinds_of,
    list_of,
    octets_type,
    single_input,
)
from headway.core import arguments as class_arguments
from headway.core import parameters as json_parameters
from headway.model import ALL_PARAMETERS, PerCall, Signature, Value, ValueKind

if TYPE_CHECKING:
    import asyncio
    from traceback import TracebackException

    from _typeshed.importlib import PathEntryFinderProtocol

    from headway.backends.process.array_kind import ArrayKind

INSTALLED = ("site-packages", "dist-packages")
_MAX_TEXT = 500
_MAX_SHOWN = 60
_MAX_TRACE = 16_000


class Refusal(Exception):
    """The target can't be served. The message tells its author why. `trace` is user code's traceback, or empty."""

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.trace = trace


def describe(exc: BaseException) -> str:
    """Return the type and message of an exception as valid Unicode, truncated if long, even if its `__str__` raises."""
    try:
        text = str.__str__(str(exc))[:_MAX_TEXT]
    except BaseException:
        text = "(its message cannot be shown)"
    shown = f"{kind_of(exc)}: {text}" if text else kind_of(exc)
    return shown.encode("utf-8", "backslashreplace").decode()


def trace(exc: BaseException) -> str:
    """Return the traceback of user code's exception, without Headway's frames, as valid Unicode, truncated if long."""
    from traceback import TracebackException

    try:
        whole = TracebackException.from_exception(exc)
        _keep_own_frames(whole)
        text = "".join(whole.format())
    except BaseException:
        text = f"{kind_of(exc)}, whose traceback cannot be shown"
    if len(text) > _MAX_TRACE:
        text = f"{text[: _MAX_TRACE // 2]}\n  … (cut) …\n{text[-_MAX_TRACE // 2 :]}"
    return text.rstrip().encode("utf-8", "backslashreplace").decode()


def _keep_own_frames(whole: TracebackException | None) -> None:
    if whole is not None:
        own = os.path.dirname(__file__)  # noqa: PTH120
        whole.stack[:] = [frame for frame in whole.stack if not frame.filename.startswith((own, "<frozen importlib"))]
        _keep_own_frames(whole.__cause__)
        _keep_own_frames(whole.__context__)


class UserLoop:
    """Event loop for async targets. It is created when first needed, because asyncio is slow to import."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def finish(self, result: Any) -> Any:
        if not hasattr(type(result), "__await__"):
            return result
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(result))

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    def idle(self, fd: int) -> None:
        """Let the user's background tasks run until `fd` is readable."""
        if self._loop is None:
            return
        readable: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not readable.done():
                readable.set_result(None)

        self._loop.add_reader(fd, wake)
        try:
            self._loop.run_until_complete(readable)
        finally:
            self._loop.remove_reader(fd)


async def _awaited(result: Any) -> Any:
    return await result


class Target:
    """A loaded target. `name` is the target as the user wrote it, and `source` is its file.

    Attributes:
        per_call: parameters that apply to a whole call.
        takes_mapping: True if it takes the parameters as one mapping.
        takes_views: True if it takes bytes as views, which are valid until the batch ends.
        one_call: True if each batch should be a single call.

    Raises:
        Refusal: `call` can't be called with a list of inputs, or its example is invalid.
    """

    def __init__(self, call: Callable[..., Any], name: str, source: str, loop: UserLoop, module: object = None) -> None:
        self.source, self.name = source, name
        self.call, self.module = call, module
        self._loop = loop
        self.takes_parameters, self._by_name, first = _parameters_of(call, name)
        hints = annotations_of(call)
        example = getattr(call, "example", None)
        example = None if callable(example) else example
        try:
            self.arrays = _arrays_of(call, hints, first)
            if self.arrays is not None and self.arrays.takes:
                from headway.backends.process.array_kind import example_of

                takes = gives = ValueKind.TENSORS
                value: Value | None = example_of(call, self.arrays)
            else:
                if single := single_input(call, hints.get(first)):
                    raise Refusal(
                        f"target {name}: its parameter {first} is annotated {single}, but a target gets a list of inputs. "
                        f"Write {first}: list[{single}], and return a list with one output for each."
                    )
                takes, gives = kinds_of(hints, first, example)
                gives = gives if self.arrays is None else ValueKind.TENSORS
                value = _example(example, takes, name, first)
        except NoArrays as exc:
            raise Refusal(f"target {name}: {exc}.") from None
        self.per_call = per_call_of(call, name, self.takes_parameters)
        self.takes_mapping = are_one_mapping(hints.get("parameters")) and self.takes_parameters
        if self.takes_mapping and not self.per_call:
            raise Refusal(
                f"target {name}: its parameter parameters is annotated as one mapping, but the inputs of a call may have different "
                "parameters. List the parameters that all inputs of a call must share in the attribute together, e.g. together = "
                '("temperature",); or set together = "all"; or annotate it as list[dict].'
            )
        sees = () if not self.takes_parameters else self.per_call if self.takes_mapping else ALL_PARAMETERS
        self.signature = Signature(takes, gives, value, sees=sees, per_call=self.per_call)
        if (kind := self.arrays) is not None:
            self.signature = msgspec.structs.replace(
                self.signature, inputs=kind.inputs, outputs=kind.outputs, together=kind.together
            )
        self.one_call = getattr(call, "one_call", False) is True
        octets = octets_type(hints.get(first))
        self.takes_views = takes is ValueKind.BYTES and octets is memoryview
        self._decode = decoder(takes, octets, json_types(hints.get(first)))

    def read(self, inputs: list[Value]) -> tuple[list[Any], dict[int, str]]:
        """Return the inputs as user code gets them. For those that can't be passed to it, return the reasons by place."""
        if self.signature.takes is ValueKind.TEXT and {str}.issuperset(map(type, inputs)):
            return inputs, {}
        readable, refused = [], {}
        for place, value in enumerate(inputs):
            try:
                readable.append(self._decode(value))
            except ValueError as exc:
                refused[place] = str(exc)
        return readable, refused

    def run(self, inputs: list[Any], parameters: list[bytes] | None) -> object:
        """Call user code with one batch. Raises whatever it raises. `parameters` has JSON for each input, or b"" if it has none."""
        if not self.takes_parameters:
            return self._loop.finish(self.call(inputs))
        decoded: object
        if self.takes_mapping:
            decoded = self._values(parameters[0]) if parameters else {}
        else:
            decoded = [self._parameters(text) for text in parameters or [b""] * len(inputs)]
        if self._by_name:
            return self._loop.finish(self.call(inputs, parameters=decoded))
        return self._loop.finish(self.call(inputs, decoded))

    def calls(self, parameters: list[bytes] | None) -> dict[bytes, list[int]]:
        """Return which inputs may share a call: their places, by the call's parameters as JSON. {} means that all may."""
        if not self.per_call or not parameters or parameters.count(parameters[0]) == len(parameters):
            return {}
        from headway.core.call_parameters import values_of  # Few targets need it.

        known = {text: values_of(text, self.per_call) for text in set(parameters)}
        groups: dict[bytes, list[int]] = {}
        for place, text in enumerate(parameters):
            groups.setdefault(known[text], []).append(place)
        return groups if len(groups) > 1 else {}

    def _values(self, text: bytes) -> Any:
        """Return the parameters of an input that apply to the whole call, in canonical form: the same for all its inputs."""
        from headway.core.call_parameters import values_of

        values = values_of(text, self.per_call)
        return json_parameters.decode(values) if values else {}

    def _parameters(self, text: bytes) -> Any:
        """Return the parameters of an input. Those that apply to the whole call come first, in canonical form."""
        parameters: Any = json_parameters.decode(text) if text else {}
        if self.per_call and text:
            values = self._values(text)
            return values | parameters | values
        return parameters


def per_call_of(call: object, name: str, takes_parameters: bool) -> PerCall:
    """Return the parameters that apply to a whole call, from the target's attribute `together`. Raises Refusal if the
    attribute is invalid, or the target takes no parameters. A method named `together` is ignored."""
    names = getattr(call, "together", ())
    if callable(names) or names == ():
        return ()
    if names == (ALL_PARAMETERS,):
        raise Refusal(
            f'target {name}: its attribute together names one parameter, "all". For all parameters, write together = "all".'
        )
    if names != ALL_PARAMETERS and not (
        isinstance(names, tuple) and all(isinstance(parameter, str) for parameter in names)
    ):
        such = (names,) if isinstance(names, str) else tuple(map(str, names)) if isinstance(names, list | set) else ()
        raise Refusal(
            f"target {name}: its attribute together is {str(names)[:_MAX_SHOWN]!r}, of type {kind_of(names)}. It must name the parameters that apply to "
            f'a whole call: write together = {such or ("temperature",)}, or together = "all".'
        )
    if not takes_parameters:
        raise Refusal(
            f"target {name}: its attribute together names parameters, but it takes none. Add a second argument named parameters, "
            "or remove together."
        )
    return names if names == ALL_PARAMETERS else tuple(sorted(set(names)))


def _arrays_of(call: Callable[..., Any], hints: Mapping[str, Any], first: str) -> ArrayKind | None:
    """Return a target's ArrayKind, or None if it uses no arrays; then numpy isn't imported."""
    attributes = getattr(call, "inputs", None), getattr(call, "outputs", None)
    hinted = any(map(has_arrays, hints.values())) or any(isinstance(attribute, Mapping) for attribute in attributes)
    if not hinted and not are_arrays(getattr(call, "example", None)):
        return None
    from headway.backends.process.array_kind import kind_of_arrays

    return kind_of_arrays(call, hints, first)


def _example(example: object, takes: ValueKind, name: str, first: str) -> Value | None:
    if example is None:
        return None
    try:
        return encoder(takes)(example)
    except NoOutput as exc:
        problem = str(exc).replace(" for this input", "")
        such = list_of(example) if exc.mend else ""
        mend = (
            f"Write {first}: {such} if its inputs are like that, or another example" if such else "Set it to an input"
        )
        raise Refusal(f"target {name}: its attribute example is {problem} like its inputs. {mend}.") from None


def _parameters_of(call: Callable[..., Any], name: str) -> tuple[bool, bool, str]:
    """Return True if a target takes parameters, True if it takes them only by name, and the name of its first parameter."""
    import inspect

    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return False, False, ""
    own = list(signature.parameters.values())
    second = own[1] if len(own) > 1 and own[1].name == "parameters" else None
    by_name = second is not None and second.kind is second.KEYWORD_ONLY
    try:
        if by_name:
            signature.bind(None, parameters=None)
        else:
            signature.bind(*[None] * (1 if second is None else 2))
    except TypeError:
        raise Refusal(
            f"target {name}: its signature is {signature}. "
            "It should take one argument, the list of inputs, and optionally a second one named parameters."
        ) from None
    return second is not None, by_name, own[0].name


class SourceLoader(SourceFileLoader):
    """Loader that ignores cached bytecode. Python trusts bytecode whose source still has the same size and modification
    time (in whole seconds), so it might load an outdated version of a file that was saved twice within a second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_from_source(folder: str) -> None:
    """From now on, import modules in and below `folder` with SourceLoader. Installed packages and the standard library still
    use bytecode: they are large, and nobody edits them while a service runs."""
    root = os.path.join(os.path.realpath(folder), "")  # noqa: PTH118
    library = os.path.join(os.path.realpath(os.path.dirname(os.__file__)), "")  # noqa: PTH118, PTH120
    make = FileFinder.path_hook(
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (SourceLoader, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )

    def within(path: str) -> bool:
        place = os.path.join(os.path.realpath(path), "")  # noqa: PTH118
        if not place.startswith(root) or place.startswith(library):
            return False
        return not any(f"{os.sep}{name}{os.sep}" in place for name in INSTALLED)

    def hook(path: str) -> PathEntryFinderProtocol:
        if not within(path):
            raise ImportError(path)
        return make(path)

    sys.path_hooks.insert(0, hook)
    for path in [path for path in sys.path_importer_cache if within(path)]:
        del sys.path_importer_cache[path]


def load(kind: str, place: str, attribute: str, loop: UserLoop, arguments: str = "", folder: str = "") -> Target:
    """Import, instantiate and set up a target. `kind` is `module` or `file`, and `place` the module's name or the file's
    path. `attribute` may be dotted. `arguments` are those of a class; see `core.arguments`. A module is imported from
    `folder`, by default the working directory. Raises Refusal if the target can't be served."""
    name = f"{place}:{attribute}"
    module = subject = _import(kind, place, name, folder)
    for part in attribute.split("."):
        try:
            subject = getattr(subject, part)
        except AttributeError:
            raise Refusal(f"target {name}: {place} has no {part!r}. {_meant(subject, part)}") from None
    return prepare(subject, name, getattr(module, "__file__", None) or "", loop, arguments, module)


def prepare(subject: Any, name: str, source: str, loop: UserLoop, arguments: str = "", module: object = None) -> Target:
    """Instantiate and set up a target, given a function, class or callable object. Raises Refusal."""
    if isinstance(subject, type):
        subject = _build(subject, name, loop, arguments)
    elif arguments:
        raise Refusal(
            f"target {name}: it is not a class, but only a class takes arguments. Leave them out, or name a class."
        )
    elif not callable(subject):
        raise Refusal(f"target {name}: it is of type {type(subject).__name__}. Name a function or a class.")
    return Target(subject, name, source, loop, module)


def _import(kind: str, place: str, name: str, folder: str) -> Any:
    try:
        if kind == "file":
            return _import_file(place)
        sys.path.insert(0, folder or os.getcwd())  # noqa: PTH109
        import_from_source(sys.path[0])
        return importlib.import_module(place)
    except ModuleNotFoundError as exc:
        if kind == "module" and exc.name is not None and f"{place}.".startswith(f"{exc.name}."):
            raise Refusal(
                f"target {name}: there is no module {exc.name!r} in the working directory or on the Python path. "
                "Start Headway in the module's folder, or set PYTHONPATH."
            ) from None
        raise _raised(
            name, "importing it", exc, f" Headway runs on {sys.executable}; install what it imports there."
        ) from None
    except ImportError as exc:
        if kind == "file" and "relative import" in str(exc):
            raise _no_package(place, name) from None
        raise _raised(name, "importing it", exc) from None
    except BaseException as exc:
        raise _raised(name, "importing it", exc) from None


def _no_package(place: str, name: str) -> Refusal:
    """Return the refusal for a file with a relative import. It suggests the module's full name."""
    root, file = os.path.split(os.path.abspath(place))  # noqa: PTH100
    parts = [file.removesuffix(".py")]
    while True:
        root, folder = os.path.split(root)
        parts.insert(0, folder)
        if not folder or not os.path.exists(os.path.join(root, "__init__.py")):  # noqa: PTH110, PTH118
            break
    module = f"{'.'.join(parts)}:{name.rpartition(':')[2]}"
    return Refusal(
        f"target {name}: it has a relative import, but a file given by path is in no package. "
        f"Name the module instead: {module}, with {root} as the working directory or on PYTHONPATH."
    )


def _raised(
    name: str, doing: str, exc: BaseException, hint: str = " The log has the traceback; fix it there."
) -> Refusal:
    return Refusal(f"target {name}: {doing} raised {describe(exc)}.{hint}", trace(exc))


def _import_file(place: str) -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    folder, file = os.path.split(os.path.abspath(place))  # noqa: PTH100
    stem = file.removesuffix(".py")
    sys.path.insert(0, folder)
    import_from_source(folder)
    taken = stem in sys.modules or stem in sys.stdlib_module_names or not stem.isidentifier()
    module_name = f"target_{stem}" if taken else stem
    spec = spec_from_file_location(module_name, place, loader=SourceLoader(module_name, place))
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is not Python source")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _meant(where: object, part: str) -> str:
    import difflib

    near = difflib.get_close_matches(part, dir(where), 1)
    return f"Did you mean {near[0]!r}?" if near else "Name a function or class that it defines."


def _build(cls: type, name: str, loop: UserLoop, arguments: str) -> Any:
    positional, named = class_arguments.read(arguments)
    given = f"with ({class_arguments.shown(arguments)})" if arguments else "without arguments"
    try:
        instance = cls(*positional, **named)
    except BaseException as exc:
        raise _misfit(cls, name, given, positional, named) or _raised(name, f"building it {given}", exc) from None
    if not callable(instance):
        raise Refusal(f"target {name}: the class has no __call__. Give it one that takes the list of inputs.")
    setup = getattr(instance, "setup", None)
    if setup is not None:
        device = "cuda:0" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu"
        try:
            loop.finish(setup(device))
        except BaseException as exc:
            raise _raised(name, f"setup({device!r})", exc) from None
    return instance


def _misfit(cls: type, name: str, given: str, positional: list[Any], named: dict[str, Any]) -> Refusal | None:
    import inspect

    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*positional, **named)
    except TypeError as exc:
        return Refusal(
            f"target {name}: it cannot be built {given}: {exc}; its signature is {signature}. Write the arguments in "
            f"the target, for example {name}(NAME='value')."
        )
    return None
