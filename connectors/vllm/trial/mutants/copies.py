"""Copies on a device that go too early, too many at once, the slow way, or after all is lost."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import Mutant, one

_ENGINE, _TABLES = "kvpipe.transfer.cuda:CudaEngine", "kvpipe.transfer.tables:Tables"
_CUDA, _WAVES = "tests/transfer/test_cuda.py", "tests/transfer/test_waves.py"

MUTANTS: dict[str, Mutant] = {
    "every_async_load_is_under_way": Mutant(
        "Loads that nobody waits for fill the bus, and those that a forward waits for come behind.",
        one(_ENGINE, "_go_on", "if ahead >= WAVES_AHEAD:", "if ahead >= len(self._layout.views) * WAVES_AHEAD:"),
        test=f"{_WAVES}::test_loads_without_readers_let_those_with_readers_pass",
    ),
    "async_loads_are_forgotten": Mutant(
        "A load that nobody waits for stops when its first waves have landed.",
        one(_ENGINE, "_look", "self._go_on()", "pass"),
        test=f"{_WAVES}::test_a_load_without_readers_is_queued_two_waves_ahead_of_the_bus",
    ),
    "a_table_in_use_is_overwritten": Mutant(
        "The kernel moves the pages of another plan, whose table of rows came later.",
        one(_TABLES, "upload", "self._lent[0].table() is None", "len(self._lent) > 1"),
        test="tests/transfer/test_tables.py::test_a_table_is_what_it_was_when_it_was_asked_for",
    ),
    "slots_that_are_not_pinned": Mutant(
        "Slots are used that could not be pinned: every plan that has one blocks the forward.",
        one("kvpipe.transfer.ready:Readier", "_next", "if not self._claim(pool.base + low, high - low):",
            "if not self._claim(pool.base + low, high - low) and False:"),
        test=f"{_CUDA}::test_slots_that_cannot_be_pinned_are_not_used",
    ),
    "the_watchdog_asks_the_device": Mutant(
        "A thread that CUDA does not know asks for an event while a graph is captured, and spoils it.",
        one(_ENGINE, "abandon", "return ticket.over",
            "return ticket.over or (isinstance(ticket.mark, OrderingPoint) and ticket.mark.landed.query())"),
        test=f"{_CUDA}::test_giving_up_asks_nothing_of_the_device",
    ),
    "a_dead_context_is_asked_again": Mutant(
        "After an error that sticks every wave is tried, and logged with a traceback.",
        one(_ENGINE, "_trouble", "self._lost = True", "pass"),
        test=f"{_CUDA}::test_a_dead_context_is_reported_once",
    ),
    "pinning_goes_on_at_the_end": Mutant(
        "A process ends, or a pool goes, while the driver pins memory for a thread.",
        one("kvpipe.transfer.pinning:Pins", "end", "self._ended = True", "pass"),
        test=f"{_CUDA}::test_nothing_is_pinned_after_the_end",
    ),
    "saves_by_when_they_land": Mutant(
        "A save goes the way that lands first, though compute waits until its blocks are read.",
        one("kvpipe.transfer.calibrate", "choose", "ways[mover].read.of(*counts[mover])", "landed[mover]"),
        test="tests/transfer/test_calibrate.py::test_a_save_goes_the_way_that_frees_its_blocks",
    ),
}  # fmt: skip
