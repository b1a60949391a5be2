"""Bugs with LoRA adapters whose bytes change while their names stay the same."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import ADAPTERS, HELD_ADAPTERS, Mutant, one

_TESTS = "tests/scheduler/test_adapters.py"

MUTANTS: dict[str, Mutant] = {
    "adapter_known_by_name": Mutant(
        "KV of an adapter is found by the adapter's name and path, although its bytes have changed.",
        one(
            ADAPTERS,
            "keys",
            "keys, digest = use.keys, use.digest",
            "keys, digest = use.keys, bytes(16)",
        ),
        by="every_read_is_right",
    ),
    "adapter_not_checked": Mutant(
        "A rank carries out jobs of an adapter that the rank no longer holds.",
        one(HELD_ADAPTERS, "checked", "if not plan.claims:", "if True:"),
        test=f"{_TESTS}::test_a_job_of_another_adapter_is_refused",
    ),
    "adapter_as_on_disk": Mutant(
        "An adapter that vLLM has loaded is identified by its files as they are now, not as they were loaded.",
        one(ADAPTERS, "_now", "if not use.lora.load_inplace:", "if False:"),
        test=f"{_TESTS}::test_digest_that_all_ranks_hold_overrides_that_of_the_files",
    ),
    "adapter_changed_on_the_way": Mutant(
        "A save counts for the adapter of its last step, though a part was computed with another adapter.",
        one(HELD_ADAPTERS, "_stands", "<= claim.since_step", "<= claim.since_step or True"),
        test=f"{_TESTS}::test_a_job_of_another_adapter_is_refused",
    ),
    "adapter_answer_too_early": Mutant(
        "The report of a step that began before vLLM loaded an adapter counts for the time after the loading.",
        one(ADAPTERS, "reported", "[rank] if step > asked.step else ()", "[rank]"),
        test=f"{_TESTS}::test_report_of_a_step_that_began_before_the_call_is_ignored",
    ),
    "adapter_bytes_not_read": Mutant(
        "Two adapters with files of equal size are taken for the same adapter.",
        one("kvpipe.threads.adapter_files", "digest_of", "digest.update(data)", "pass"),
        test=f"{_TESTS}::test_digest_of_an_adapter_depends_on_its_files_alone",
    ),
}
