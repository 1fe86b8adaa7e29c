"""A small builder of LLVM IR, as text: the functions of a module, each built once, with counted loops in SSA form.

`Function` is one function under construction: instructions.py emits its straight-line code, this file loops and branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onelaunch.engines.cpu.code.instructions import Instructions, Int, Value, int_text
from onelaunch.engines.cpu.code.kernel import STEP, Kernel
from onelaunch.engines.cpu.plan.target import Target


class Module:
    """Functions by name, each built once: all callers that need the same kernel call the same function."""

    def __init__(self, target: Target, suffix: str = "") -> None:
        """`suffix` is appended to the names of public functions."""
        self.target, self.suffix = target, suffix
        self.declarations: dict[str, None] = {}
        self.functions: dict[str, Function] = {}

    def function(self, name: str, parameters: str, make: Callable[[Function], None], *, public: bool = False) -> str:
        """The name of a function whose body `make` emits if it is new. The name must cover all that the body depends on."""
        if name not in self.functions:
            function = self.functions[name] = Function(self, name, parameters, public=public)
            make(function)
        return name

    def kernel(self, kernel: Kernel, make: Callable[[Function], None]) -> None:
        """A public function whose body finds the kernel's fields and step values by name, as if they were arguments."""

        def body(f: Function) -> None:
            f.load_fields(kernel, *kernel.fields)
            f.load_step(*kernel.step)
            make(f)

        self.function(kernel.name, "ptr %fields, ptr %step", body, public=True)

    def text(self) -> str:
        width = self.target.lanes * 32
        widths = f'"min-legal-vector-width"="{width}" "prefer-vector-width"="{width}"'
        attributes = f"attributes #0 = {{ noinline nounwind {widths} }}"
        parts = [*self.declarations, *(function.text() for function in self.functions.values()), attributes]
        return "\n".join(parts) + "\n"


class Function(Instructions):
    def __init__(self, module: Module, name: str, parameters: str, *, public: bool) -> None:
        super().__init__(module.target, module.declarations)
        self.module, self.name, self.parameters, self.public = module, name, parameters, public
        self.block = "entry"
        self.arguments: dict[str, Value] = {}
        for parameter in filter(None, (part.strip() for part in parameters.split(","))):
            type_, *_, variable = parameter.split()
            self.arguments[variable[1:]] = Value(type_, variable)

    def __getitem__(self, argument: str) -> Value:
        return self.arguments[argument]

    def load_fields(self, kernel: Kernel, *names: str) -> None:
        """Load fields of a kernel, whose address is the argument `fields`; they are then found by name."""
        for name in names:
            type_ = "ptr" if kernel.fields[name] == "list" else kernel.fields[name]
            value = self.load(type_, self["fields"], kernel.position(name), element="i64", hint=name)
            self.arguments[name] = value

    def load_step(self, *names: str) -> None:
        """Load values of the step, whose address is the argument `step`; they are then found by name."""
        for name in names:
            position = list(STEP).index(name)
            self.arguments[name] = self.load(STEP[name], self["step"], position, element="i64", hint=name)

    def text(self) -> str:
        kind, suffix = ("", self.module.suffix) if self.public else ("internal ", "")
        body = "\n".join(self.lines)
        return f"define {kind}void @{self.name}{suffix}({self.parameters}) #0 {{\nentry:\n{body}\n  ret void\n}}\n"

    def loop(
        self, stop: Int, body: Callable[..., Sequence[Value] | None], *, start: Int = 0, step: int = 1,
        carry: Sequence[Value] = (), index: str = "i",
    ) -> list[Value]:  # fmt: skip
        """`for i in range(start, stop, step)`; `body(i, *carry)` returns the next carried values, if there are any.

        Returns the carried values after the loop. A loop of constant length 0 or 1 becomes straight-line code.
        """
        carry = list(carry)
        constant = isinstance(start, int) and isinstance(stop, int)
        if constant and stop <= start:  # type: ignore[operator]
            return carry
        if constant and stop - start <= step:  # type: ignore[operator]
            return list(body(start, *carry) or ())
        label = self._fresh(index)
        before = self.block
        after_values = []
        if not constant:
            inside = self.op("i1", f"icmp slt i64 {int_text(start)}, {int_text(stop)}", "any")
            self.emit(f"br i1 {inside.text}, label %{label}.body, label %{label}.end")
        else:
            self.emit(f"br label %{label}.body")
        self._open(f"{label}.body")
        header = len(self.lines)
        counter = Value("i64", f"%{label}")
        phis = [Value(value.type, "%" + self._fresh(f"{index}.carry")) for value in carry]
        self.lines += [""] * (1 + len(carry))
        results = list(body(counter, *phis) or ())
        assert len(results) == len(carry), f"the body of loop {label} in {self.name} must return its carried values"
        following = self.op("i64", f"add nuw nsw i64 {counter.text}, {step}", "next")
        self.lines[header] = (
            f"  {counter.text} = phi i64 [ {int_text(start)}, %{before} ], [ {following.text}, %{self.block} ]"
        )
        for position, (phi, first, last) in enumerate(zip(phis, carry, results, strict=True)):
            self.lines[header + 1 + position] = (
                f"  {phi.text} = phi {phi.type} [ {first.text}, %{before} ], [ {last.text}, %{self.block} ]"
            )
        again = self.op("i1", f"icmp slt i64 {following.text}, {int_text(stop)}", "again")
        latch = self.block
        self.emit(f"br i1 {again.text}, label %{label}.body, label %{label}.end")
        self._open(f"{label}.end")
        for first, last in zip(carry, results, strict=True):
            if constant:
                after_values.append(last)
            else:
                merged = f"phi {first.type} [ {first.text}, %{before} ], [ {last.text}, %{latch} ]"
                after_values.append(self.op(first.type, merged, f"{index}.out"))
        return after_values

    def when(self, condition: Value, body: Callable[[], None]) -> None:
        label = self._fresh("when")
        self.emit(f"br i1 {condition.text}, label %{label}, label %{label}.end")
        self._open(label)
        body()
        self.emit(f"br label %{label}.end")
        self._open(f"{label}.end")

    def either(self, condition: Value, first: Callable[[], None], second: Callable[[], None]) -> None:
        """`first()` where the condition holds, `second()` where it does not."""
        label = self._fresh("either")
        self.emit(f"br i1 {condition.text}, label %{label}, label %{label}.else")
        for name, body in ((label, first), (f"{label}.else", second)):
            self._open(name)
            body()
            self.emit(f"br label %{label}.end")
        self._open(f"{label}.end")

    def repeat_while(self, condition: Callable[[Value], Value], body: Callable[[Value], None]) -> None:
        """`while condition(count): body(count)`, where `count` starts at 0."""
        label = self._fresh("while")
        before = self.block
        self.emit(f"br label %{label}")
        self._open(label)
        count = Value("i64", f"%{label}.count")
        header = len(self.lines)
        self.lines.append("")
        holds = condition(count)
        self.emit(f"br i1 {holds.text}, label %{label}.body, label %{label}.end")
        self._open(f"{label}.body")
        body(count)
        following = self.op("i64", f"add i64 {count.text}, 1", "next")
        self.lines[header] = f"  {count.text} = phi i64 [ 0, %{before} ], [ {following.text}, %{self.block} ]"
        self.emit(f"br label %{label}")
        self._open(f"{label}.end")

    def _open(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block = label
