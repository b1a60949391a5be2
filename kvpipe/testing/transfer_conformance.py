"""The suite that every transfer engine must pass. The suite tests the protocol of `kvpipe/transfer/base.py`.

A test module of an engine has a subclass of `TransferConformance`, which defines how the engine's world is made:

    @pytest.mark.parametrize("kind", ["npu"])
    class TestNpu(TransferConformance):
        def world(self, kind, **options):
            return world(kind, engine=make_npu, where="npu", **options)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpipe.protocol.messages import Kind
from kvpipe.testing.logged import capture_logs
from kvpipe.testing.overriding import not_overridden
from kvpipe.testing.transfer_programs import loads_are_right, saves_are_right, schedules, slots_are_right, tables
from kvpipe.testing.transfer_worlds import BLOCKS, GEOMETRY, LAYERS, PAGE_BYTES, World, job_rows, make_job, value_of
from kvpipe.testing.waiting import WAIT_S
from kvpipe.transfer.base import NO_JOBS, Direction, Ticket

__all__ = ["TransferConformance"]

EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
TABLE = {0: [0, 1, 5], 1: [7, 2]}
ELSEWHERE = {0: [2, 3, 4], 1: [0, 1]}
"""A table with as many blocks as `TABLE`, but other blocks."""


class TransferConformance:
    """The tests of a transfer engine. `kind` is the value with which the subclass is parametrized."""

    def world(self, kind: str, **options: Any) -> AbstractContextManager[World]:  # noqa: ARG002  (subclasses use them)
        """Set up an engine, a cache and a pool. `options` are those of `kvpipe.testing.transfer_worlds.world`."""
        not_overridden(self, "world", "an engine with a cache and a pool, by `kvpipe.testing.transfer_worlds.world`")

    @pytest.mark.parametrize("dense", [True, False], ids=["dense", "strided"])
    @EXAMPLES
    @given(table=tables, into=tables, schedule=schedules)
    def test_what_was_saved_is_what_is_loaded(
        self, kind: str, table: dict[int, list[int]], into: dict[int, list[int]], schedule: list[int], *, dense: bool
    ) -> None:
        """Loaded blocks contain the bytes that were saved, even if the source was overwritten after the save.

        No other block is changed.
        """
        with self.world(kind, dense=dense, schedule=schedule) as w:
            for cache in w.caches:
                cache.copy_(torch.randint(1, 256, cache.shape, dtype=torch.uint8))
            into = {group: (into[group] * PAGE_BYTES)[: len(mine)] for group, mine in table.items()}
            into = {group: list(dict.fromkeys(mine)) for group, mine in into.items()}
            table = {group: mine[: len(into[group])] for group, mine in table.items()}
            before = [cache.cpu().clone() for cache in w.caches]
            save, load = make_job(1, job_rows(0, table)), make_job(2, job_rows(0, into), Kind.LOAD_SYNC)
            for layer in range(LAYERS):
                last = w.submit(Direction.SAVE, layer, [save], layer)
                w.let_run()
            w.drain()
            assert w.engine.fence(last, WAIT_S)
            for layer in range(LAYERS):
                for block in into[GEOMETRY.layers[layer][0]]:
                    w.write_block(layer, block, 0)
            for layer in range(LAYERS):
                last = w.submit(Direction.LOAD, layer, [load], layer)
                w.let_run()
            assert w.engine.guard_read(last, WAIT_S)
            w.drain()
            for layer in range(LAYERS):
                group = GEOMETRY.layers[layer][0]
                expected = before[layer].clone()
                expected[into[group]] = before[layer][table[group]]
                assert torch.equal(w.caches[layer].cpu(), expected)

    @EXAMPLES
    @given(table=tables, schedule=schedules)
    def test_a_save_reads_what_its_step_wrote(
        self, kind: str, table: dict[int, list[int]], schedule: list[int]
    ) -> None:
        """A save reads bytes that compute wrote before `submit`, not bytes that compute writes after the fence."""
        with self.world(kind, schedule=schedule) as w:
            assert saves_are_right(w, table)

    @EXAMPLES
    @given(table=tables, schedule=schedules)
    def test_a_guarded_reader_sees_the_load(self, kind: str, table: dict[int, list[int]], schedule: list[int]) -> None:
        """Compute reads loaded bytes after `guard_read`. Reads queued before the submission get the old bytes."""
        with self.world(kind, schedule=schedule) as w:
            assert loads_are_right(w, table)

    @EXAMPLES
    @given(table=tables, schedule=schedules)
    def test_slots_are_ordered_by_the_host(self, kind: str, table: dict[int, list[int]], schedule: list[int]) -> None:
        """A load that begins after the host has waited for the save gets the saved bytes in every order of streams."""
        with self.world(kind, schedule=schedule) as w:
            assert slots_are_right(w, table)

    @EXAMPLES
    @given(directions=st.lists(st.sampled_from(Direction), max_size=20), schedule=schedules)
    def test_tickets_complete_in_order_and_once(
        self, kind: str, directions: list[Direction], schedule: list[int]
    ) -> None:
        """The sink receives every ticket exactly once, in the order of submission within each direction."""
        with self.world(kind, schedule=schedule) as w:
            jobs = {d: [make_job(d + 1, job_rows(d, TABLE))] for d in Direction}
            submitted: dict[Direction, list[Ticket]] = {d: [] for d in Direction}
            for i, direction in enumerate(directions):
                submitted[direction].append(w.submit(direction, i % LAYERS, jobs[direction], i))
                w.let_run()
            w.drain()
            assert len(w.completed) == len(directions)
            for tickets in submitted.values():
                assert [t for t in w.completed if t in tickets] == tickets
            assert all(t.failed == NO_JOBS for t in w.completed)

    @EXAMPLES
    @given(bad=st.integers(0, LAYERS - 1), direction=st.sampled_from(Direction), schedule=schedules)
    def test_a_bad_copy_fails_its_own_jobs_only(
        self, kind: str, bad: int, direction: Direction, schedule: list[int]
    ) -> None:
        """`submit` does not raise for an impossible copy. All jobs of the copy's ticket fail, and no others."""
        with capture_logs(), self.world(kind, schedule=schedule) as w:
            jobs = [make_job(n, job_rows(n, TABLE)) for n in (1, 2)]
            tickets = []
            for layer in range(LAYERS):
                tickets.append(w.submit(direction, LAYERS + 1 if layer == bad else layer, jobs, layer))
                w.let_run()
            order = w.engine.fence if direction is Direction.SAVE else w.engine.guard_read
            assert all(order(ticket, WAIT_S) for ticket in tickets)
            w.drain()
            assert w.completed == tickets
            assert [t.failed for t in tickets] == [frozenset({1, 2}) if k == bad else NO_JOBS for k in range(LAYERS)]

    @EXAMPLES
    @given(schedule=schedules)
    def test_what_is_given_up_touches_nothing(self, kind: str, schedule: list[int]) -> None:
        """After `abandon` returns True, the copy changes no byte.

        `abandon` returns True for every copy that has ended.
        """
        with self.world(kind, schedule=schedule) as w:
            w.pool.tensor.fill_(9)
            load = make_job(1, job_rows(0, TABLE), Kind.LOAD_ASYNC)
            tickets = [w.submit(Direction.LOAD, layer, [load], layer) for layer in range(LAYERS)]
            w.let_run()
            then = {k: w.caches[k].cpu().clone() for k, ticket in enumerate(tickets) if w.engine.abandon(ticket)}
            w.drain()
            assert all(torch.equal(w.caches[layer].cpu(), bytes_then) for layer, bytes_then in then.items())
            assert all(w.engine.abandon(ticket) for ticket in tickets)

    def test_a_ticket_may_have_several_layers(self, kind: str) -> None:
        """All layers of a ticket are copied before the ticket is complete."""
        with self.world(kind) as w:
            for layer in range(LAYERS):
                for block in TABLE[GEOMETRY.layers[layer][0]]:
                    w.write_block(layer, block, value_of(0, layer, block))
            save, load = make_job(1, job_rows(0, TABLE)), make_job(2, job_rows(0, ELSEWHERE), Kind.LOAD_SYNC)
            assert w.engine.fence(w.submit_all(Direction.SAVE, [save]), WAIT_S)
            w.drain()
            assert w.engine.fence(w.submit_all(Direction.LOAD, [load]), WAIT_S)
            w.drain()
            for layer, cache in enumerate(w.caches):
                group = GEOMETRY.layers[layer][0]
                assert cache[TABLE[group]].any()
                assert torch.equal(cache[ELSEWHERE[group]], cache[TABLE[group]])

    def test_caches_may_move(self, kind: str) -> None:
        """Bytes saved from caches at one address can be loaded into caches attached later at another address."""
        with self.world(kind) as w:
            save, load = make_job(1, job_rows(0, TABLE)), make_job(2, job_rows(0, ELSEWHERE), Kind.LOAD_SYNC)
            for turn, (direction, job) in enumerate([(Direction.SAVE, save), (Direction.LOAD, load)]):
                if turn:
                    before = w.caches
                    w.attach()
                for layer in range(LAYERS):
                    for block in TABLE[GEOMETRY.layers[layer][0]] if not turn else ():
                        w.write_block(layer, block, value_of(0, layer, block))
                    last = w.submit(direction, layer, [job], layer)
                assert w.engine.fence(last, WAIT_S)
                w.drain()
            for layer, (old, new) in enumerate(zip(before, w.caches, strict=True)):
                group = GEOMETRY.layers[layer][0]
                expected = torch.zeros_like(new)
                expected[ELSEWHERE[group]] = old[TABLE[group]]
                assert expected.any()
                assert torch.equal(new, expected)

    @EXAMPLES
    @given(schedule=schedules)
    def test_shutdown_finishes_what_was_submitted(self, kind: str, schedule: list[int]) -> None:
        """After `shutdown` every ticket is complete and all bytes are copied, and later submissions fail.

        A second `shutdown` changes nothing.
        """
        with self.world(kind, schedule=schedule) as w:
            for layer in range(LAYERS):
                for block in range(BLOCKS):
                    w.write_block(layer, block, 1 + layer)
                w.submit(Direction.SAVE, layer, [make_job(1, job_rows(0, TABLE))], layer)
                w.submit(Direction.LOAD, layer, [make_job(2, job_rows(1, ELSEWHERE))], layer)
            w.let_run()
            w.engine.shutdown()
            w.engine.shutdown()
            assert len(w.completed) == 2 * LAYERS
            assert all(t.done and not t.failed for t in w.tickets)
            for layer in range(LAYERS):
                group = GEOMETRY.layers[layer][0]
                for _, slot, page, _ in (row for row in job_rows(0, TABLE) if row[0] == group):
                    assert w.slot_page(layer, slot, page).eq(1 + layer).all()
            late = w.submit(Direction.SAVE, 0, [make_job(3, job_rows(0, TABLE))])
            assert late.done
            assert late.failed == {3}
