"""docs/transformers.md is complete, names what exists, and is true: every row with a name of ours has a test."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers

from batchjobs.errors import InvalidParameter, UsageError
from batchjobs.types import FinishReason
from workers.engine import Engine, EngineConfig, EngineOutput, EngineRequest, SamplingParams
from workers.engine.memory import HostMemory

TESTS = Path(__file__).parent
PAGE = TESTS.parents[1] / "docs" / "transformers.md"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [11, 12, 13, 14]]

HOMES = {
    "batchjobs.types": ["SamplingParams"],
    "workers.engine.batch": ["PackedBatch"],
    "workers.engine.cache": ["KVCache", "LayerGroup"],
    "workers.engine.config": ["EngineConfig"],
    "workers.engine.engine": ["Engine"],
    "workers.engine.graph_maker": ["CudaGraphMaker"],
    "workers.engine.graphs": ["DecodeGraphs"],
    "workers.engine.loop": ["EngineFull", "EngineLoop", "EngineStopped"],
    "workers.engine.offload": ["HostCache", "HostPool"],
    "workers.engine.page_tables": ["PageTables"],
    "workers.engine.pages": ["PagePool"],
    "workers.engine.pipeline": ["Pipeline"],
    "workers.engine.requests": ["EngineOutput", "EngineRequest", "EngineStats"],
    "workers.engine.runner": ["Runner"],
    "workers.engine.sampling_rows": ["SamplingRows"],
    "workers.engine.scheduler": ["Scheduled", "Scheduler"],
    "workers.engine.sequence": ["Sequence"],
    "workers.engine.streams": ["Streams"],
}
FAILURE_ONLY = {"EngineLoop.failure"}  # set when the loop is made, not on the class

# The first name of a row -> the tests that show it. Without "::" a test is in this file.
SHOWN_BY = {
    "ContinuousMixin": ["test_generate_gives_each_prompt_its_own_parameters"],
    "ContinuousMixin.generate_batch": [
        "test_generate_gives_each_prompt_its_own_parameters",
        "test_engine.py::test_generate_wants_one_sampling_or_one_each",
        "test_the_progress_bar_counts_finished_requests",
    ],
    "ContinuousMixin.init_continuous_batching": [
        "test_engine_loop.py::TestWithAModel::test_a_new_loop_goes_on_with_the_engine"
    ],
    "ContinuousMixin.continuous_batching_context_manager": [
        "test_engine_loop.py::TestLife::test_as_a_context_manager_it_finishes_everything",
        "test_engine_loop.py::TestLife::test_as_a_context_manager_it_cancels_after_an_error",
    ],
    "ContinuousMixin.destroy_cached_continuous_batching_manager": ["test_close_lets_go_of_the_device"],
    "ContinuousMixin.generation_config": ["test_generate_gives_each_prompt_its_own_parameters"],
    "ContinuousBatchingManager": [
        "test_engine_loop.py::TestWithAModel::test_every_request_of_every_thread_gets_one_outcome"
    ],
    "ContinuousBatchingManager.add_request": [
        "test_engine_loop.py::TestWithAModel::test_every_request_of_every_thread_gets_one_outcome"
    ],
    "ContinuousBatchingManager.add_requests": [
        "test_engine_loop_results.py::TestResults::test_they_come_as_they_end_and_end_with_the_last"
    ],
    "ContinuousBatchingManager.cancel_request": [
        "test_engine_loop.py::TestWithAModel::test_cancel_gives_the_tokens_so_far"
    ],
    "ContinuousBatchingManager.get_result": [
        "test_engine_loop_results.py::TestResult::test_it_is_waited_for_and_taken_once",
        "test_engine_loop_results.py::TestResults::test_two_readers_share_them",
    ],
    "ContinuousBatchingManager.request_id_iter": [
        "test_engine_loop_results.py::TestStream::test_each_token_comes_with_its_step",
        "test_engine_loop_results.py::TestStreamedTextOfAModel::test_the_pieces_are_the_answer",
    ],
    "ContinuousBatchingManager.register_result_handler": [
        "test_engine_loop_results.py::TestHandlers::test_one_that_is_registered_late_is_called_at_once"
    ],
    "ContinuousBatchingManager.start": ["test_engine_loop.py::TestLife::test_a_loop_runs_once"],
    "ContinuousBatchingManager.stop": [
        "test_engine_loop.py::TestStop::test_drop_ends_after_the_step_and_calls_no_handler",
        "test_engine_loop.py::TestStop::test_cancel_gives_each_its_partial_output",
        "test_engine_loop.py::TestStop::test_finish_accepts_nothing_more_and_finishes_everything",
        "test_engine_loop.py::TestWithAModel::test_a_new_loop_goes_on_with_the_engine",
    ],
    "ContinuousBatchingManager.join": [
        "test_engine_loop.py::TestStop::test_from_a_handler_it_ends_when_the_handler_has_returned"
    ],
    "ContinuousBatchingManager.is_running": [
        "test_engine_loop.py::TestLife::test_before_the_start_nothing_is_accepted"
    ],
    "ContinuousBatchingManager.pause": [
        "test_engine_loop.py::TestPause::test_no_token_is_made_and_everything_keeps_its_place",
        "test_engine_loop.py::TestPause::test_it_is_nested_and_shared",
    ],
    "ContinuousBatchingManager.warmup": [
        "test_engine_loop.py::TestLife::test_warmup_is_for_before_the_start",
        "test_pipeline.py::test_warming_up_makes_no_token_and_holds_no_page",
    ],
    "ContinuousBatchingManager.destroy": ["test_close_lets_go_of_the_device"],
    "OutputRouter": ["test_engine_loop_results.py::TestHandlers::test_every_handler_of_a_request_is_called_once"],
    "BackgroundThreadStatus": ["test_engine_loop.py::TestDeath::test_everybody_learns_at_once_and_why"],
    "ContinuousBatchProcessor": ["test_an_engine_can_be_stepped_by_hand"],
    "ContinuousBatchingConfig": ["test_a_setting_out_of_range_is_refused_with_its_name"],
    "ContinuousBatchingConfig.page_size": ["test_page_size_changes_the_pages_and_no_answer"],
    "ContinuousBatchingConfig.num_blocks": ["test_num_blocks_is_the_number_of_pages"],
    "ContinuousBatchingConfig.max_memory_percent": ["test_max_memory_percent_is_the_share_that_pages_take"],
    "ContinuousBatchingConfig.max_batch_tokens": [
        "test_max_batch_tokens_cuts_a_prompt_into_steps",
        "test_memory.py::test_rows_are_halved_until_a_step_fits_and_leaves_most_of_the_memory",
    ],
    "ContinuousBatchingConfig.max_requests_per_batch": ["test_max_requests_per_batch_limits_who_runs"],
    "ContinuousBatchingConfig.allow_block_sharing": ["test_allow_block_sharing_finds_the_prompt_again"],
    "ContinuousBatchingConfig.use_async_batching": ["test_use_async_batching_launches_a_step_ahead"],
    "ContinuousBatchingConfig.scheduler_type": ["test_scheduler_type_decides_who_starts_first"],
    "ContinuousBatchingConfig.safety_margin": [
        "test_scheduler.py::test_a_margin_of_pages_stays_free_for_those_that_run"
    ],
    "ContinuousBatchingConfig.return_logprobs": [
        "test_engine_equality.py::test_greedy_tokens_and_logprobs_equal_the_solo_run",
        "test_engine.py::test_top_logprobs_hold_the_best_tokens_of_the_model_itself",
    ],
    "ContinuousBatchingConfig.seed": ["test_seed_fixes_what_requests_without_one_draw"],
    "ContinuousBatchingConfig.cpu_offload_space": [
        "test_offload.py::test_offload_gives_the_same_tokens_without_computing_any_again",
        "test_offload.py::test_no_memory_is_taken_before_a_sequence_gives_way",
    ],
    "ContinuousBatchingConfig.cpu_offload_space_safety_threshold": [
        "test_offload.py::test_the_space_is_clamped_to_the_machine_and_to_what_is_useful"
    ],
    "ContinuousBatchingConfig.max_queue_size": [
        "test_engine_loop.py::TestLimit::test_a_full_queue_refuses",
        "test_engine_loop.py::TestLimit::test_a_caller_can_wait_for_room",
    ],
    "ContinuousBatchingConfig.per_request_processors": [
        "test_generate_gives_each_prompt_its_own_parameters",
        "test_sampler.py::test_rows_of_a_step_obey_their_own_settings_only",
    ],
    "ContinuousBatchingConfig.drop_unsupported_processors": ["test_a_parameter_that_cannot_be_used_is_refused"],
    "ContinuousBatchingConfig.use_cuda_graph": [
        "test_graphs.py::test_recorded_steps_give_the_tokens_of_generate",
        "test_graphs.py::test_graphs_are_made_where_they_are_wanted_and_can_be",
    ],
    "RequestState": ["test_requests_and_outputs_are_frozen"],
    "RequestState.request_id": ["test_an_output_tells_everything"],
    "RequestState.max_new_tokens": [
        "test_engine.py::test_a_length_stop_and_a_stop_token",
        "test_engine.py::test_texts_stop_strings_and_token_texts",
    ],
    "RequestState.streaming": ["test_pipeline.py::test_streamed_requests_tell_of_each_token_once"],
    "RequestState.num_children": ["test_choices.py::test_four_choices_differ_and_are_the_same_set_again"],
    "RequestState.logit_processor_kwargs": ["test_generate_gives_each_prompt_its_own_parameters"],
    "RequestState.is_cpu_offloaded": [
        "test_offload.py::test_offload_gives_the_same_tokens_without_computing_any_again"
    ],
    "RequestState.create_equivalent_initial_request": [
        "test_offload.py::test_where_the_space_is_full_the_rest_is_computed_again",
        "test_engine_equality.py::test_preemption_changes_nothing",
    ],
    "RequestState.record_timestamps": ["test_engine.py::test_token_times_count_from_the_start_and_never_go_back"],
    "RequestStatus": ["test_max_requests_per_batch_limits_who_runs", "test_an_output_tells_everything"],
    "GenerationOutput": ["test_requests_and_outputs_are_frozen"],
    "GenerationOutput.request_id": ["test_an_output_tells_everything"],
    "GenerationOutput.prompt_ids": ["test_an_output_tells_everything"],
    "GenerationOutput.generated_tokens": ["test_an_output_tells_everything"],
    "GenerationOutput.error": ["test_engine.py::test_an_id_outside_the_vocabulary_fails_that_request_only"],
    "GenerationOutput.status": ["test_an_output_tells_everything"],
    "GenerationOutput.created_time": ["test_an_output_tells_everything"],
    "GenerationOutput.timestamps": ["test_engine.py::test_token_times_count_from_the_start_and_never_go_back"],
    "FutureRequestState": ["test_max_batch_tokens_cuts_a_prompt_into_steps"],
    "create_warmup_future_states": ["test_pipeline.py::test_warming_up_makes_no_token_and_holds_no_page"],
    "get_device_and_memory_breakdown": ["test_page_size_changes_the_pages_and_no_answer"],
    "Scheduler": ["test_waiting.py::test_no_policy_changes_an_answer_or_forgets_a_request"],
    "Scheduler.set_request_cancellation": ["test_engine.py::test_cancel_gives_the_partial_answer_and_every_page_back"],
    "FIFOScheduler": ["test_waiting.py::test_fifo_keeps_the_order_and_who_gave_way_comes_first"],
    "PagedAttentionCache": ["test_engine_equality.py::test_greedy_tokens_and_logprobs_equal_the_solo_run"],
    "PagedAttentionCache.can_store_request_tokens": [
        "test_pages.py::test_idle_pages_are_found_until_they_are_evicted_the_end_of_the_oldest_chain_first"
    ],
    "PagedAttentionCache.search_prefix_match": [
        "test_pages.py::test_a_prefix_is_found_page_by_page",
        "test_engine.py::test_a_shared_prefix_is_computed_once_and_changes_nothing",
    ],
    "PagedAttentionCache.prepare_fork_request": ["test_choices.py::test_the_choices_share_the_pages_of_their_prompt"],
    "PagedAttentionCache.extend_read_and_write_indices": [
        "test_engine_equality.py::test_greedy_tokens_and_logprobs_equal_the_solo_run"
    ],
    "PagedAttentionCache.reset": ["test_pages.py::test_after_an_update_of_the_weights_nothing_is_found"],
    "PagedAttentionMemoryHandler": ["test_max_memory_percent_is_the_share_that_pages_take"],
    "CacheAllocator": ["test_cache_groups.py::test_every_layer_is_in_one_group"],
    "FullAttentionCacheAllocator": [
        "test_pages.py::test_a_prefix_needs_every_page_of_a_full_group_and_only_the_window_of_the_other"
    ],
    "SlidingAttentionCacheAllocator": [
        "test_cache_groups.py::test_a_long_answer_needs_no_more_pages_than_its_window",
        "test_cache_groups.py::test_a_prompt_longer_than_the_cache_runs_when_its_window_fits",
    ],
    "BlockLedger": ["test_pages.py::test_a_held_page_is_not_evicted_and_using_a_prefix_makes_it_young"],
    "CachePool": ["test_pages.py::test_no_page_leaks_with_windows_in_a_thousand_random_steps"],
    "compute_block_hash": ["test_pages.py::test_a_prefix_is_found_page_by_page"],
    "group_layers_by_attn_type": ["test_cache_groups.py::test_layers_of_one_kind_are_one_group"],
    "OffloadingManager": ["test_offload.py::test_offload_gives_the_same_tokens_without_computing_any_again"],
    "OffloadingManager.free_request_cpu_cache": [
        "test_offload.py::test_a_sequence_can_be_cancelled_while_its_pages_are_in_cpu_memory"
    ],
    "ContinuousBatchingLogitsProcessorList": ["test_sampler.py::test_rows_of_a_step_obey_their_own_settings_only"],
    "ContinuousBatchingLogitsProcessorList.check_kwargs": ["test_a_parameter_that_cannot_be_used_is_refused"],
    "ContinuousBatchingLogitsProcessorList.fill_defaults": [
        "test_sampler.py::test_rows_of_a_step_obey_their_own_settings_only"
    ],
    "ContinuousBatchingTemperatureLogitsWarper": ["test_sampler.py::test_filters_keep_what_the_textbook_keeps"],
    "ContinuousBatchingTopKLogitsWarper": ["test_sampler.py::test_filters_keep_what_the_textbook_keeps"],
    "ContinuousBatchingTopPLogitsWarper": ["test_sampler.py::test_filters_keep_what_the_textbook_keeps"],
    "ModelRunner": ["test_engine_equality.py::test_greedy_tokens_and_logprobs_equal_the_solo_run"],
    "ModelRunner.warmup": ["test_pipeline.py::test_warming_up_makes_no_token_and_holds_no_page"],
    "PagedAttentionArgs": ["test_engine_equality.py::test_greedy_tokens_and_logprobs_equal_the_solo_run"],
    "ContinuousBatchingIOs": ["test_engine_equality.py::test_greedy_tokens_and_logprobs_equal_the_solo_run"],
    "ContinuousBatchingAsyncIOs": ["test_pipeline.py::test_depth_one_and_two_give_the_same"],
    "HostDeviceIOPair": ["test_pipeline.py::test_the_next_step_runs_before_the_tokens_of_the_last_are_known"],
    "CudaGraphBuffer": ["test_graphs.py::test_recorded_steps_give_the_tokens_of_generate"],
    "create_device_stream": ["test_device_path.py::test_answers_are_those_of_generate"],
    "infer_max_single_request_tokens": ["test_engine.py::test_a_request_that_can_never_fit_the_cache_fails_at_once"],
    "check_cb_values_bounds": ["test_a_setting_out_of_range_is_refused_with_its_name"],
    "resolve_max_memory_percent": ["test_max_memory_percent_is_the_share_that_pages_take"],
    "decide_use_async_batching": ["test_use_async_batching_launches_a_step_ahead"],
    "decide_use_cuda_graphs": ["test_graphs.py::test_graphs_are_made_where_they_are_wanted_and_can_be"],
    "DistributedHelper": ["test_tensor_parallel.py::test_two_parts_give_the_whole_models_answers"],
}


# The table


@dataclass(frozen=True)
class Row:
    there: list[str]
    here: list[str]
    remark: str


def table() -> list[Row]:
    """Every row of the page. A name that begins with a dot belongs to the class named last."""
    rows = []
    for line in PAGE.read_text().splitlines():
        if not line.startswith("| `"):
            continue
        there, here, remark = (cell.strip() for cell in line.strip("|").split("|"))
        names, owner = [], ""
        for name in re.findall(r"`([^`]+)`", there):
            if not name.startswith("."):
                owner = name.split(".")[0]
            names.append(owner + name if name.startswith(".") else name)
        rows.append(Row(names, re.findall(r"`([^`]+)`", here), remark))
    return rows


def members(definition: ast.ClassDef) -> list[str]:
    names: list[str] = []
    for node in definition.body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [f"{definition.name}.{name}" for name in names if not name.startswith("_")]


def public_names() -> set[str]:
    """Classes, their methods and fields, and functions of the installed continuous batching, and its settings."""
    generation = Path(transformers.__file__).parent / "generation"
    found: set[str] = set()
    for path in (generation / "continuous_batching").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                found |= {node.name, *(members(node) if isinstance(node, ast.ClassDef) else [])}
    for node in ast.parse((generation / "configuration_utils.py").read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "ContinuousBatchingConfig":
            found |= {node.name, *members(node)}
    return found


def test_the_table_names_all_that_the_installed_version_has() -> None:
    named = [name for row in table() for name in row.there]
    twice = {name for name in named if named.count(name) > 1}
    there = public_names()
    assert len(there) > 300, "the modules of the installed version are not where they were"
    new, gone = sorted(there - set(named)), sorted(set(named) - there)
    assert not new, f"transformers {transformers.__version__} has what docs/transformers.md does not name: {new}"
    assert not gone, f"docs/transformers.md names what transformers {transformers.__version__} has not: {gone}"
    assert not twice, f"docs/transformers.md names twice: {sorted(twice)}"


def test_every_name_of_ours_exists() -> None:
    homes = {name: module for module, names in HOMES.items() for name in names}
    for row in table():
        for path in row.here:
            root, *rest = path.split(".")
            assert root in homes, f"{path} in the row of {row.there[0]}: not a known class"
            owner = getattr(importlib.import_module(homes[root]), root)
            for name in rest:
                is_field = name in getattr(owner, "__dataclass_fields__", {})
                assert path in FAILURE_ONLY or is_field or hasattr(owner, name), f"{path}: there is no {name}"


def test_a_row_names_something_of_ours_or_says_why_not() -> None:
    for row in table():
        if not row.here:
            assert re.match(r"None needed: |With the GPU path, not yet", row.remark), row.there[0]


@functools.cache
def names_in(file: str) -> set[str]:
    found = set()
    for node in ast.parse((TESTS / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def test_every_row_that_names_something_of_ours_is_shown_by_a_test() -> None:
    assert [row.there[0] for row in table() if row.here] == list(SHOWN_BY)
    for row, shown_by in SHOWN_BY.items():
        assert shown_by, row
        for test in shown_by:
            file, name = test.split("::", 1) if "::" in test else (Path(__file__).name, test)
            assert name in names_in(file), f"{row}: there is no test {test}"


# What the rows say


def make(folder: Path, **settings: object) -> Engine:
    chosen = {"device": "cpu", "page_size": 4, "num_blocks": 100} | settings
    return Engine(str(folder), EngineConfig(**chosen))  # type: ignore[arg-type]


def ids(outputs: list[EngineOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def run(engine: Engine) -> list[EngineOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_generate_gives_each_prompt_its_own_parameters(llama: Path) -> None:
    each = [
        GREEDY,
        SamplingParams(temperature=1.2, seed=3, top_k=5, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=4, top_p=0.8, max_tokens=11, repetition_penalty=1.3, ignore_eos=True),
    ]
    together = make(llama).generate(PROMPTS, each)
    alone = [make(llama).generate([prompt], own)[0] for prompt, own in zip(PROMPTS, each, strict=True)]
    assert ids(together) == ids(alone)
    assert [len(output.token_ids) for output in together] == [8, 6, 11]


def test_the_progress_bar_counts_finished_requests(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(llama).generate(PROMPTS, GREEDY, progress_bar=True)
    assert "3/3" in capsys.readouterr().err
    make(llama).generate(PROMPTS, GREEDY)
    assert "3/3" not in capsys.readouterr().err


def test_close_lets_go_of_the_device(llama: Path) -> None:
    before = threading.active_count()
    engine = make(llama, use_async_batching=True)
    engine.generate(PROMPTS, GREEDY)
    assert threading.active_count() == before + 1
    for _ in range(2):
        engine.close()
        assert threading.active_count() == before


def test_an_engine_can_be_stepped_by_hand(llama: Path) -> None:
    engine = make(llama, use_async_batching=True)
    engine.add(EngineRequest("a", (5, 6, 7), GREEDY))
    outputs = engine.step() + engine.settle() + run(engine)
    assert ids(outputs) == ids(make(llama).generate([[5, 6, 7]], GREEDY))
    assert (engine.has_work, engine.settle()) == (False, [])
    engine.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 0),
        ("num_blocks", 1),
        ("max_memory_percent", 1.5),
        ("safety_margin", -0.1),
        ("max_queue_size", -1),
        ("scheduler_type", "x"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


def test_page_size_changes_the_pages_and_no_answer(llama: Path) -> None:
    found = []
    for page_size in (4, 16):
        engine = make(llama, page_size=page_size)
        engine.add(EngineRequest("a", (5, 6, 7, 8, 9), GREEDY))
        engine.step()
        held = engine.stats().kv_usage_ratio * engine.pool.capacity
        found.append((round(held), ids(run(engine))))
    (small, first), (large, second) = found
    assert (small, large) == (2, 1)
    assert first == second


def test_num_blocks_is_the_number_of_pages(llama: Path) -> None:
    engine = make(llama, num_blocks=5)  # four pages of four tokens, beside the null page
    engine.add(EngineRequest("fits", (5,) * 9, GREEDY))
    engine.add(EngineRequest("does not", (5,) * 10, GREEDY))
    errors = {output.request_id: output.error for output in run(engine)}
    assert errors["fits"] is None
    assert errors["does not"] is not None
    assert errors["does not"].code == "kv_cache_too_small"


def test_max_memory_percent_is_the_share_that_pages_take(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "free_bytes", lambda self: 2**20)
    pages = {}
    for share in (0.25, 0.5, None):
        pages[share] = make(llama, num_blocks=None, max_memory_percent=share, page_size=16).runner.num_pages
    # A page holds 16 positions, in 2 layers keys and values of 2 heads of 8 numbers: 4 KiB.
    assert pages == {0.25: 64, 0.5: 128, None: 64}


def test_max_batch_tokens_cuts_a_prompt_into_steps(llama: Path) -> None:
    steps, answers = [], []
    for rows in (8, 32):
        engine = make(llama, max_batch_tokens=rows)
        answers.append(ids(engine.generate([[5 + n for n in range(32)]], SamplingParams(temperature=0, max_tokens=1))))
        steps.append(engine.stats().steps)
    assert steps == [4, 1]
    assert answers[0] == answers[1]


def test_max_requests_per_batch_limits_who_runs(llama: Path) -> None:
    engine = make(llama, max_requests_per_batch=2)
    for name in range(5):
        engine.add(EngineRequest(name, (5, 6, 7), GREEDY))
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (2, 3)
    assert len(run(engine)) == 5


def test_allow_block_sharing_finds_the_prompt_again(llama: Path) -> None:
    cached = []
    for sharing in (True, False):
        engine = make(llama, allow_block_sharing=sharing)
        prompt = list(range(5, 18))
        answers = [engine.generate([prompt], GREEDY)[0] for _ in range(2)]
        assert answers[0].token_ids == answers[1].token_ids
        cached.append([answer.cached_tokens for answer in answers])
    assert cached == [[0, 12], [0, 0]]


def test_use_async_batching_launches_a_step_ahead(llama: Path) -> None:
    answers = []
    for ahead, known in ((False, 1), (True, 0), (None, 1)):
        engine = make(llama, use_async_batching=ahead)
        engine.add(EngineRequest("a", (5, 6, 7), GREEDY, stream=True))
        engine.step()
        assert len(engine.take_deltas()) == known, "with a step in flight its token is known at the next one"
        answers.append(ids(run(engine)))
        engine.close()
    assert answers[0] == answers[1] == answers[2]


def test_scheduler_type_decides_who_starts_first(llama: Path) -> None:
    orders = {}
    for policy in ("fifo", "longest_first"):
        engine = make(llama, scheduler_type=policy, max_requests_per_batch=1)
        for name, length in (("short", 3), ("long", 30), ("middle", 10)):
            engine.add(EngineRequest(name, (7,) * length, GREEDY))
        orders[policy] = [output.request_id for output in run(engine)]
    assert orders == {"fifo": ["short", "long", "middle"], "longest_first": ["long", "middle", "short"]}


def test_seed_fixes_what_requests_without_one_draw(llama: Path) -> None:
    free = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    own = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True, seed=9)
    first, again, other = (ids(make(llama, seed=seed).generate([[5, 6]] * 3, [free, free, own])) for seed in (1, 1, 2))
    assert first == again
    assert first[:2] != other[:2]
    assert first[2] == other[2], "a request's own seed does not depend on the engine's"
    assert first[0] != first[1], "requests do not share a seed"


def test_a_parameter_that_cannot_be_used_is_refused() -> None:
    for name, value in (("temperature", -1), ("top_p", 0), ("top_k", -2), ("min_p", 2), ("n", 0)):
        with pytest.raises(InvalidParameter) as refused:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert refused.value.field == name
    with pytest.raises(TypeError, match="typical_p"):
        SamplingParams(typical_p=0.5)  # type: ignore[call-arg]


def test_requests_and_outputs_are_frozen(llama: Path) -> None:
    request = EngineRequest("a", (5, 6, 7), GREEDY)
    (output,) = make(llama).generate([[5, 6, 7]], GREEDY)
    for value, name in ((request, "prompt_ids"), (output, "text"), (GREEDY, "top_k")):
        with pytest.raises(AttributeError):
            setattr(value, name, None)


def test_an_output_tells_everything(llama: Path) -> None:
    engine = make(llama)
    engine.add(EngineRequest(("any", "hashable"), (5, 6, 7), GREEDY))
    engine.add(EngineRequest("empty", (), GREEDY))
    outputs = {output.request_id: output for output in run(engine)}
    output = outputs["any", "hashable"]
    assert (output.prompt_tokens, output.finish_reason, output.error) == (3, FinishReason.LENGTH, None)
    assert len(output.token_ids) == len(output.logprobs) == len(output.token_times) == 8
    assert output.first_token_at is not None
    assert output.started_at <= output.first_token_at <= output.finished_at
    failed = outputs["empty"]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error is not None
    assert failed.error.code == "empty_prompt"
