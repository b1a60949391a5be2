"""Bugs in which a hit or a step cuts an image whose tokens attend to each other in both directions."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import PREFIXES, SCHEDULER, SCHEDULER_ROLE, SPANS, Mutant, one

_REAL, _CORE = "tests/vllm/test_spans.py::", "tests/scheduler/test_spans.py::"

MUTANTS: dict[str, Mutant] = {
    "spans_of_no_model": Mutant(
        "Images are treated as causal in every model.",
        one(SCHEDULER_ROLE, "_make_side", "spans_of=spans.spans_of(config)", "spans_of=None"),
        test=f"{_REAL}test_a_hit_ends_before_an_image_that_it_would_cut",
    ),
    "hit_ends_inside_a_span": Mutant(
        "A hit ends inside an image, so vLLM splits the rest of the image.",
        one(PREFIXES, "longest", "if self._spans_of is not None:", "if False:"),
        test=f"{_REAL}test_a_hit_ends_before_an_image_that_it_would_cut",
    ),
    "hit_ends_behind_the_start_of_a_span": Mutant(
        "A hit is shortened by only one unit, and still ends inside the image.",
        one(PREFIXES, "longest", "hashes, whole // self._unit)", "hashes, best - 1)\n            break"),
        test=f"{_CORE}test_a_hit_ends_before_the_span_that_it_would_cut",
    ),
    "cut_span_is_saved": Mutant(
        "KV that was computed over a cut image is saved under its ordinary key.",
        one(
            SCHEDULER,
            "_stop_at_cuts",
            "            tracked.saving.give_up()\n    except",
            "            pass\n    except",
        ),
        test=f"{_REAL}test_nothing_of_an_image_is_saved_that_vllm_has_cut",
    ),
    "cut_span_is_offered": Mutant(
        "vLLM's prefix cache gives KV that was computed over a cut image to other requests, which save it.",
        one(SPANS, "_offer_none", "blocks.forget(found)", "pass"),
        test=f"{_CORE}test_wrong_kv_leaves_the_engines_own_cache",
    ),
    "cut_span_is_right_from_its_start": Mutant(
        "No KV of a cut image is saved, though the first part came from vLLM's cache and is right.",
        one(SPANS, "plan_step", "first := max(start, whole)", "first := whole"),
        test=f"{_CORE}test_a_span_that_a_local_hit_cuts_is_wrong_from_where_its_rest_is_cut",
    ),
    "blocks_of_a_cut_span_are_shared": Mutant(
        "A request that got wrong blocks in the pass that cut an image saves the KV that it computes from them.",
        one(SPANS, "admitted", "if first is None or first >= request.num_tokens:", "if True:"),
        test=f"{_CORE}test_a_request_that_shares_wrong_blocks_saves_nothing",
    ),
}
