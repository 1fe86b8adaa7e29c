"""The loop over the steps of a native call: it executes a list of commands per step. Also the barrier between phases.

    run(...)      for every step: compute the values of STEP, then call every command's kernel with its fields
    epochs(...)   for every epoch: its row order, its steps and its validation, all on the calling thread

A list of commands is in memory as pairs (kernel, fields), ended by a null pointer.
"""

from __future__ import annotations

from collections.abc import Callable

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import STEP, Kernel, Unit
from onelaunch.engines.cpu.plan.settings import CALL, CONTROL, SCALARS, TALLY

UNIT = Unit("driver")
# `before` is executed once, with the values of step 0. The number of steps and their first row and number are read from
# `call`, an array that the session fills before every native call.
RUN = Kernel("run", "ptr before, ptr commands, ptr call, i64 all_rows, i64 batch, ptr order, ptr scalars")
# Returns when every partition has passed as often. `flags` has the counter of every partition.
BARRIER = Kernel("barrier", "ptr own, list flags, i64 partitions, ptr control")
TICK = Kernel("tick", "ptr ticks, i64 counter")
# Whole epochs of one run, from number `first_epoch` on. `train` and `validate` are fields of RUN (validate may be null),
# `call` is what `train` reads. `scalars` has those of all steps. `losses` and `tallies` have the buffers of each partition;
# their content after each epoch goes to `all_losses` [partition][epoch][step] and `all_tallies` [epoch][partition][entry].
EPOCHS = Kernel(
    "epochs",
    "ptr train, ptr validate, ptr call, ptr row_order, ptr order, i64 rows, i64 bits, i64 seed, i64 steps, ptr scalars, "
    "i64 first_epoch, i64 count, i64 partitions, ptr losses, ptr tallies, ptr all_losses, ptr all_tallies",
)
FLUSH_BITS = 0x8040  # flush-to-zero and denormals-are-zero of x86's MXCSR


def emit(module: Module) -> None:
    module.kernel(RUN, _run)
    module.kernel(EPOCHS, _epochs)
    module.kernel(BARRIER, _barrier)
    module.kernel(TICK, _tick)


def _run(f: Function) -> None:
    count, first_row, first_step = (
        f.load("i64", f["call"], position, element="i64", hint=name) for position, name in enumerate(CALL)
    )
    step = f.op("ptr", f"alloca [{len(STEP)} x i64], align 64", "values")
    restore = flush_to_zero(f)

    def rows_from(row: Int) -> Value:
        return f.minimum(f.sub(f["all_rows"], row), f["batch"], "rows")

    def prepare(number: Value) -> None:
        first = f.i64(f.add(f.mul(number, f["batch"]), first_row, "first"))
        is_last = f.compare("eq", f.i64(f.add(number, 1)), count, "is_last")
        following = f.select(is_last, f.i64(0), rows_from(f.add(first, f["batch"])), "next_rows")
        values = {
            "j": number, "step": f.i64(f.add(first_step, number)), "first_row": first, "rows": rows_from(first),
            "next_rows": following, "order": f.at(f["order"], first, "i32"),
            "scalars": f.at(f["scalars"], f.mul(number, len(SCALARS))),
        }  # fmt: skip
        for position, name in enumerate(STEP):
            f.store(values[name], step, position, element="i64")

    prepare(f.i64(0))
    _execute(f, f["before"], step)

    def one(number: Int) -> None:
        prepare(f.i64(number))
        _execute(f, f["commands"], step)

    f.loop(count, one, index="step")
    restore()


def _epochs(f: Function) -> None:
    steps, null = f["steps"], Value("ptr", "null")
    run = f"run{f.module.suffix}"
    place = RUN.position("scalars")
    scalars_before = f.load("ptr", f["train"], place, element="i64", hint="scalars_before")

    def each_tally(body: Callable[[Int, Value, int], None]) -> None:
        def one(partition: Int) -> None:
            tally = f.load("ptr", f["tallies"], partition, element="i64", hint="tally")
            for entry in range(len(TALLY)):
                body(partition, tally, entry)

        f.loop(f["partitions"], one, index="partition")

    def epoch(number: Int) -> None:
        count = f.i64(f.add(f["first_epoch"], number, "epoch"))
        arguments = ", ".join(f"i64 {value.text}" for value in (f["rows"], f["bits"], f["seed"], count))
        f.emit(f"call void {f['row_order'].text}(ptr {f['order'].text}, {arguments})")
        for position, value in enumerate((steps, f.i64(0), f.i64(f.mul(count, steps)))):
            f.store(value, f["call"], position, element="i64")
        first = f.mul(number, steps, "first")
        f.store(f.at(f["scalars"], f.mul(first, len(SCALARS)), hint="scalars"), f["train"], place, element="i64")
        each_tally(lambda _, tally, entry: f.store(f.i64(0), tally, entry, element="i64"))
        f.call(run, f["train"], null)
        f.when(f.compare("ne", f["validate"], null), lambda: f.call(run, f["validate"], null))

        def keep(partition: Int, tally: Value, entry: int) -> None:
            position = f.add(f.mul(f.add(f.mul(number, f["partitions"]), partition), len(TALLY)), entry)
            f.store(f.load("i64", tally, entry, element="i64"), f["all_tallies"], position, element="i64")

        each_tally(keep)

        def keep_losses(partition: Int) -> None:
            losses = f.load("ptr", f["losses"], partition, element="i64", hint="losses")
            to = f.at(f["all_losses"], f.mul(f.add(f.mul(partition, f["count"]), number), steps), "double", "to")

            def one(step: Int) -> None:
                f.store(f.load("double", losses, step, element="double"), to, step, element="double")

            f.loop(steps, one, index="step")

        f.loop(f["partitions"], keep_losses, index="partition")

    f.loop(f["count"], epoch, index="epoch")
    f.store(scalars_before, f["train"], place, element="i64")


def _execute(f: Function, commands: Value, step: Value) -> None:
    def function(position: Int) -> Value:
        return f.load("ptr", commands, f.mul(position, 2), element="i64", hint="function")

    def body(position: Value) -> None:
        fields = f.load("ptr", commands, f.add(f.mul(position, 2), 1), element="i64", hint="fields")
        f.emit(f"call void {function(position).text}(ptr {fields.text}, ptr {step.text})")

    f.repeat_while(lambda position: f.compare("ne", function(position), Value("ptr", "null"), "more"), body)


def flush_to_zero(f: Function) -> Callable[[], None]:
    """On x86, treat numbers below 1e-38 as zero, until the returned function is called.

    Adam's squares decay into that range, where each operation costs a hundred cycles (784-128-128-128-10, batch 32:
    728 µs per step without it, 241 with it).
    """
    if f.module.target.triple.split("-")[0] != "x86_64":
        return lambda: None
    before, during = (f.op("ptr", "alloca i32, align 4", name) for name in ("before", "during"))
    f.intrinsic("void", "x86.sse.stmxcsr", before)
    changed = f.op("i32", f"or i32 {f.load('i32', before).text}, {FLUSH_BITS}", "mode")
    f.store(changed, during)
    f.intrinsic("void", "x86.sse.ldmxcsr", during)

    def restore() -> None:
        f.intrinsic("void", "x86.sse.ldmxcsr", before)

    return restore


def _barrier(f: Function) -> None:
    """Release and acquire: what one partition writes before its barrier is visible to all after theirs."""
    control = f["control"]
    mine = f.i64(f.add(f.load("i64", f["own"]), 1, "mine"))
    f.emit(f"store atomic i64 {mine.text}, ptr {f['own'].text} release, align 8")
    max_spins = f.load("i64", control, CONTROL.index("spins_before_yield"), element="i64", hint="max_spins")
    yield_thread = f.load("ptr", control, CONTROL.index("yield_thread"), element="i64", hint="yield_thread")
    abandoned = f.at(control, CONTROL.index("abandoned"), "i64", "abandoned")

    def other(number: Int) -> None:
        theirs = f.load("ptr", f["flags"], number, element="i64", hint="theirs")

        def behind(_: Value) -> Value:
            seen = f.op("i64", f"load atomic i64, ptr {theirs.text} acquire, align 8", "seen")
            late = f.compare("slt", seen, mine, "behind")
            left = f.op("i64", f"load atomic i64, ptr {abandoned.text} monotonic, align 8", "left")
            return f.op("i1", f"and i1 {late.text}, {f.compare('eq', left, f.i64(0)).text}", "wait")

        def wait(spins: Value) -> None:
            _pause(f)
            f.when(f.compare("sgt", spins, max_spins), lambda: f.emit(f"call void {yield_thread.text}()"))

        f.repeat_while(behind, wait)

    f.loop(f["partitions"], other, index="other")


def _pause(f: Function) -> None:
    """Tell the processor that this is a spin loop."""
    architecture = f.module.target.triple.split("-")[0]
    if architecture == "x86_64":
        f.intrinsic("void", "x86.sse2.pause")
    elif architecture.startswith(("aarch64", "arm64")):
        f.intrinsic("void", "aarch64.hint", Value("i32", "1"))


def _tick(f: Function) -> None:
    """Add the clock ticks since the last tick to a counter; `ticks[0]` is the time of the last one."""
    now = f.intrinsic("i64", "readcyclecounter", hint="now")
    past = f.op("i64", f"sub i64 {now.text}, {f.load('i64', f['ticks']).text}", "past")
    total = f.add(past, f.load("i64", f["ticks"], f["counter"], element="i64"), "total")
    f.store(f.i64(total), f["ticks"], f["counter"], element="i64")
    f.store(now, f["ticks"])
