"""LoRA adapters whose bytes change under one name."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import ADAPTERS, HELD_ADAPTERS, Mutant, one

_TESTS = "tests/scheduler/test_adapters.py"

MUTANTS: dict[str, Mutant] = {
    "adapter_known_by_name": Mutant(
        "KV of an adapter is found by its name and path, whatever its bytes are by now.",
        one(
            ADAPTERS,
            "keys",
            "keys, digest = use.keys, use.digest",
            "keys, digest = use.keys, bytes(16)",
        ),
        by="every_read_is_right",
    ),
    "adapter_not_checked": Mutant(
        "A rank carries out jobs of an adapter that it does not hold any more.",
        one(HELD_ADAPTERS, "checked", "if not plan.claims:", "if True:"),
        test=f"{_TESTS}::test_a_job_of_another_adapter_is_refused",
    ),
    "adapter_as_on_disk": Mutant(
        "What an adapter's files are by now counts for what vLLM has loaded long ago.",
        one(ADAPTERS, "_now", "if not use.lora.load_inplace:", "if False:"),
        test=f"{_TESTS}::test_ranks_know_better_than_files",
    ),
    "adapter_changed_on_the_way": Mutant(
        "A save counts for the adapter of its last step, though others have computed some of it.",
        one(HELD_ADAPTERS, "_stands", "<= claim.since_step", "<= claim.since_step or True"),
        test=f"{_TESTS}::test_a_job_of_another_adapter_is_refused",
    ),
    "adapter_answer_too_early": Mutant(
        "A step that was under way when vLLM loaded an adapter answers what the ranks hold after it.",
        one(ADAPTERS, "reported", "[rank] if step > asked.step else ()", "[rank]"),
        test=f"{_TESTS}::test_a_step_that_was_under_way_is_no_answer",
    ),
    "adapter_bytes_not_read": Mutant(
        "Adapters of equal size are taken for the same.",
        one("kvpipe.adapter_files", "digest_of", "digest.update(data)", "pass"),
        test=f"{_TESTS}::test_bytes_count_and_nothing_else",
    ),
}
