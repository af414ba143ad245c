"""What an update refuses, and that the old model is bit for bit as before; and the full reload of another shape."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig

from batchjobs.errors import UsageError
from tests.support.cases import case
from tests.support.engines import make, prompts
from tests.support.models import FAMILIES, save_chat_model, save_model, save_random
from tests.support.updates import (
    are_same,
    bits,
    fresh,
    greedy,
    is_empty,
    made,
    old,
    other_family,
    request,
    run,
    step_until,
)
from workers.engine import Engine, EngineOutput, UpdateRefused, runner
from workers.engine.cache import KVCache
from workers.engine.comparison import weights
from workers.engine.runner import Runner

__all__ = ["old", "other_family"]

PROMPT = prompts(1, seed=5)[0]
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return save_model("llama", tmp_path / "new", seed=1)


def save_like(folder: Path, **changes: object) -> None:
    save_random(LlamaConfig(**{**FAMILIES["llama"].to_dict(), **changes}), folder, seed=1)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the weight file of a folder."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _configure(folder: Path, **changes: object) -> None:
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **changes}))


# What is done to a good checkpoint, and what is said then.
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncate, "cannot load the model"),
    "missing": (lambda f: f.rename(f.with_name("elsewhere")), "no such folder"),
    "shape": (lambda f: edit(f, lambda t: t.update({NORM: torch.ones(31)})), rf"{NORM} is \(31,\) in its weights"),
    "absent": (lambda f: edit(f, lambda t: t.pop(NORM) is None), rf"incomplete: 1 weights are missing, such as {NORM}"),
    "nan": (lambda f: edit(f, lambda t: t[NORM].fill_(torch.nan)), rf"its weight {NORM} holds numbers that are not"),
    "inf": (lambda f: edit(f, lambda t: t[NORM][3:4].fill_(torch.inf)), rf"its weight {NORM} holds numbers that are"),
}
OTHER: dict[str, tuple[Callable[[Path], object], str]] = {
    "hidden size": (lambda f: save_like(f, hidden_size=48), "hidden_size 48, not 32"),
    "layers": (lambda f: save_like(f, num_hidden_layers=3), "num_hidden_layers 3, not 2"),
    "vocabulary": (lambda f: save_like(f, vocab_size=98), "vocab_size 98, not 97"),
    "rope theta": (
        lambda f: _configure(f, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
        r"rope_parameters.rope_theta 5000.0, not 10000.0",
    ),
    "context": (lambda f: _configure(f, max_position_embeddings=512), "max_position_embeddings 512, not 256"),
}


@cache
def _undisturbed(folder: Path) -> list[EngineOutput]:
    """An answer, and the same one again with its beginning in the cache."""
    engine = make(folder)
    return [engine.generate([PROMPT], greedy(12))[0] for _ in range(2)]


class TestBeforeTheFirstWrite:
    @pytest.mark.parametrize("name", BROKEN)
    @case("A-eng-02")
    def test_a_broken_checkpoint(self, old: Path, new: Path, name: str) -> None:
        change, reason = BROKEN[name]
        change(new)
        self._check(old, new, "restart", reason)

    @pytest.mark.parametrize("name", OTHER)
    @pytest.mark.parametrize("policy", ["recompute", "keep"])
    @case("A-eng-02")
    def test_another_shape(self, old: Path, new: Path, name: str, policy: str) -> None:
        change, reason = OTHER[name]
        change(new)
        self._check(old, new, policy, reason)

    def test_another_architecture(self, old: Path, other_family: Path) -> None:
        self._check(old, other_family, "recompute", "its architecture is Gemma2ForCausalLM, not LlamaForCausalLM")

    def _check(self, old: Path, new: Path, policy: str, reason: str) -> None:
        """Between two tokens of an answer, which comes out as if nothing had happened. So does the next one."""
        engine = make(old)
        engine.add(request("it", PROMPT, greedy(12)))
        step_until(engine, lambda: made(engine, "it") == 5)
        before, version = bits(engine), engine.model_version
        with pytest.raises(UsageError, match=reason) as caught:
            engine.update_model(str(new), inflight=policy)
        assert "\n" not in str(caught.value)
        assert are_same(bits(engine), before)
        outputs = (run(engine)["it"], engine.generate([PROMPT], greedy(12))[0])
        for output, wanted in zip(outputs, _undisturbed(old), strict=True):
            assert (output.token_ids, output.logprobs) == (wanted.token_ids, wanted.logprobs)
            assert [span.version for span in output.version_spans] == [version]
        assert (engine.model_version, engine.model_name) == (version, old.name)
        assert is_empty(engine)

    def test_the_running_weights_are_not_those_in_the_file(self, old: Path, new: Path) -> None:
        """Who overwrites a checkpoint in place must not overwrite the model that was loaded from it."""
        engine = make(new)
        before = bits(engine)
        file = new / "model.safetensors"
        size = file.stat().st_size
        with file.open("r+b") as stream:
            stream.seek(size // 2)
            stream.write(bytes(size // 2))
        assert are_same(bits(engine), before)


class TestVocabularies:
    def test_another_vocabulary_of_the_same_size(self, tmp_path: Path) -> None:
        first, second = (save_chat_model(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
        file = second / "tokenizer.json"
        known = json.loads(file.read_text())
        vocabulary = known["model"]["vocab"]
        vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
        file.write_text(json.dumps(known))
        engine = make(first)
        wanted = engine.generate(["A and B"], greedy(8))[0]
        with pytest.raises(UpdateRefused, match=r"its vocabulary is another one: '[AB]' is token"):
            engine.update_model(str(second))
        assert engine.generate(["A and B"], greedy(8))[0].token_ids == wanted.token_ids

    def test_an_added_token(self, tmp_path: Path) -> None:
        first, second = (save_chat_model(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
        tokenizer = AutoTokenizer.from_pretrained(second)
        tokenizer.add_tokens(["<|more|>"], special_tokens=True)
        tokenizer.save_pretrained(second)
        with pytest.raises(UpdateRefused, match=r"'<\|more\|>' is token 259, not no token"):
            make(first).update_model(str(second))

    def test_no_tokenizer_any_more(self, tmp_path: Path) -> None:
        first, second = (save_chat_model(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
        for file in second.glob("tokenizer*"):
            file.unlink()
        with pytest.raises(UpdateRefused, match="it has no tokenizer"):
            make(first).update_model(str(second))

    def test_what_changes_no_logit_may_differ(self, old: Path, new: Path) -> None:
        _configure(
            new, _name_or_path="x", transformers_version="4.1", eos_token_id=7, attention_dropout=0.5, use_cache=False
        )
        known = json.loads((new / "config.json").read_text())
        _configure(new, rms_norm_eps=known["rms_norm_eps"] * (1 + 1e-8))  # as a .gguf file has it
        engine = make(old)
        assert engine.stage(str(new)).why_not_hot is None


class TestSmoke:
    @pytest.mark.parametrize("how", ["wrong", "nan", "raises"])
    @pytest.mark.parametrize("policy", ["recompute", "keep", "restart"])
    def test_what_fails_after_the_write_is_taken_back(
        self, old: Path, new: Path, monkeypatch: pytest.MonkeyPatch, how: str, policy: str
    ) -> None:
        engine = make(old)
        engine.add(request("it", PROMPT, greedy(12)))
        step_until(engine, lambda: made(engine, "it") == 5)
        before, smoke, calls = bits(engine), Runner.smoke, []

        def broken(runner: Runner, ids: list[int]) -> torch.Tensor:
            calls.append(are_same(bits(engine), before))
            logits = smoke(runner, ids)
            if calls == [True]:  # the old weights' own answer
                return logits
            if how == "raises":
                raise MemoryError("the device is full")
            logits = logits.clone()
            logits[0, 0] = torch.nan if how == "nan" else logits.abs().max() * 2
            return logits

        monkeypatch.setattr(Runner, "smoke", broken)
        said = {"wrong": "gave other logits", "nan": "gave logits that are not finite", "raises": "failed: MemoryError"}
        with pytest.raises(UpdateRefused, match=rf"the smoke prompt {said[how]}.*; the old weights are back"):
            engine.update_model(str(new), inflight=policy)
        assert calls == [True, False]  # the second one saw the new weights
        assert are_same(bits(engine), before)
        wanted, output = fresh(old, PROMPT, 12), run(engine)["it"]
        assert (output.token_ids, output.logprobs) == (wanted.token_ids, wanted.logprobs)
        assert len(output.version_spans) == 1
        monkeypatch.undo()
        engine.update_model(str(new))  # and it can be tried again
        assert engine.generate([PROMPT], greedy(8))[0].token_ids == fresh(new, PROMPT, 8).token_ids

    @pytest.mark.parametrize("page_size", [1, 3, 16])
    @pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss", "mistral"])
    def test_a_good_update_passes_it(self, tmp_path: Path, family: str, page_size: int) -> None:
        """Tied weights, sinks, windows, experts; pages of one token and of many."""
        first, second = (save_model(family, tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
        engine = make(first, page_size=page_size)
        tied = engine.runner.model.get_output_embeddings().weight is engine.runner.model.get_input_embeddings().weight
        engine.update_model(str(second))
        assert engine.generate([PROMPT], greedy(6))[0].token_ids == fresh(second, PROMPT, 6).token_ids
        model = engine.runner.model
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied

    def test_half_precision(self, old: Path, new: Path) -> None:
        engine = make(old, dtype="bfloat16")
        staged = engine.stage(str(new))
        engine.update_model(staged)
        assert {tensor.dtype for tensor in weights(engine.runner.model).values()} == {torch.bfloat16}
        assert (
            engine.generate([PROMPT], greedy(4))[0].token_ids
            == make(new, dtype="bfloat16").generate([PROMPT], greedy(4))[0].token_ids
        )


class TestReload:
    @pytest.mark.parametrize("policy", ["finish", "restart"])
    @pytest.mark.parametrize("is_async", [False, True])
    def test_an_engine_of_another_architecture(
        self, old: Path, other_family: Path, policy: str, is_async: bool
    ) -> None:
        engine = make(old, use_async_batching=is_async)
        engine.generate([PROMPT], greedy(8))
        steps = engine.stats().steps
        staged = engine.stage(str(other_family))
        assert staged.why_not_hot is not None
        report = engine.update_model(staged, inflight=policy)
        assert (report.is_reload, report.new_model) == (True, other_family.name)
        assert engine.stats().steps == steps
        output = engine.generate([PROMPT], greedy(20))[0]
        assert (output.token_ids, output.cached_tokens) == (fresh(other_family, PROMPT, 20).token_ids, 0)
        assert [span.version for span in output.version_spans] == [engine.model_version] == [report.new_version]
        assert is_empty(engine)
        engine.update_model(staged, inflight=policy)  # it holds the old model now
        assert engine.generate([PROMPT], greedy(8))[0].token_ids == fresh(old, PROMPT, 8).token_ids
        engine.close()

    def test_what_has_begun_is_finished_first(self, old: Path, other_family: Path) -> None:
        engine = make(old)
        engine.add(request("it", PROMPT, greedy(12)))
        step_until(engine, lambda: made(engine, "it") == 5)
        report = engine.update_model(str(other_family), inflight="finish")
        assert report.finished == 1
        assert run(engine)["it"].token_ids == fresh(old, PROMPT, 12).token_ids

    @pytest.mark.parametrize("policy", ["finish", "restart"])
    def test_not_with_requests_of_the_old_model(self, old: Path, other_family: Path, policy: str) -> None:
        engine = make(old, max_requests_per_batch=1)
        engine.add(request("it", PROMPT, greedy(12)))
        engine.add(request("waiting", PROMPT, greedy(3)))
        step_until(engine, lambda: made(engine, "it") == 5)
        with pytest.raises(UpdateRefused, match="the engine has requests that were made for"):
            engine.update_model(str(other_family), inflight=policy)
        outputs = run(engine)
        assert outputs["it"].token_ids == fresh(old, PROMPT, 12).token_ids
        assert outputs["waiting"].token_ids == fresh(old, PROMPT, 3).token_ids

    @pytest.mark.parametrize("how", ["no memory", "smoke"])
    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_failure_puts_the_old_model_back(
        self, old: Path, other_family: Path, monkeypatch: pytest.MonkeyPatch, how: str, is_async: bool
    ) -> None:
        engine = make(old, use_async_batching=is_async)
        before, staged = bits(engine), engine.stage(str(other_family))
        engine.generate([PROMPT], greedy(3))
        if how == "no memory":
            self._fail_once(monkeypatch, Runner, "__init__", 1)
        else:
            self._fail_once(monkeypatch, Runner, "smoke", 2)
        with pytest.raises(UpdateRefused, match="the device is full; the old model is back"):
            engine.update_model(staged, inflight="restart")
        assert are_same(bits(engine), before)
        wanted, output = fresh(old, PROMPT, 12), engine.generate([PROMPT], greedy(12))[0]
        assert (output.token_ids, output.logprobs, output.cached_tokens) == (wanted.token_ids, wanted.logprobs, 0)
        assert engine.model_name == old.name
        assert is_empty(engine)
        engine.update_model(staged, inflight="restart")
        assert engine.generate([PROMPT], greedy(8))[0].token_ids == fresh(other_family, PROMPT, 8).token_ids
        engine.close()

    @pytest.mark.parametrize("how", ["half made", "smoke", "other logits"])
    @pytest.mark.parametrize("is_async", [False, True])
    def test_what_failed_is_gone_before_the_old_model_needs_the_room(
        self, old: Path, other_family: Path, monkeypatch: pytest.MonkeyPatch, how: str, is_async: bool
    ) -> None:
        engine = make(old, use_async_batching=is_async)
        staged = engine.stage(str(other_family))
        pages, alive = [weakref.ref(tensor) for tensor in engine.runner.cache.tensors], []
        make_cache = KVCache.__init__

        def noted(cache: KVCache, *args: object, **options: object) -> None:
            alive.append(sum(page() is not None for page in pages))
            make_cache(cache, *args, **options)  # type: ignore[arg-type]
            pages.extend(map(weakref.ref, cache.tensors))

        monkeypatch.setattr(KVCache, "__init__", noted)
        if how == "other logits":
            monkeypatch.setattr("workers.engine.update.smoke_fault", lambda *_: "the smoke prompt gave other logits")
        else:
            self._fail_once(monkeypatch, *((runner, "host_cache", 1) if how == "half made" else (Runner, "smoke", 2)))
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(UpdateRefused, match="the old model is back"):
                engine.update_model(staged, inflight="restart")
        finally:
            gc.enable()
        assert alive == [0, 0]  # when the new model's pages were made, and when the old one's were again
        assert engine.generate([PROMPT], greedy(8))[0].token_ids == fresh(old, PROMPT, 8).token_ids
        engine.close()

    def _fail_once(self, monkeypatch: pytest.MonkeyPatch, where: object, name: str, at: int) -> None:
        original, calls = getattr(where, name), []

        def broken(*args: object) -> object:
            calls.append(name)
            if len(calls) == at:
                raise MemoryError("the device is full")
            return original(*args)

        monkeypatch.setattr(where, name, broken)

    def test_a_model_that_no_engine_can_run_is_refused_when_it_is_staged(self, old: Path, tmp_path: Path) -> None:
        folder = save_model("llama", tmp_path / "m", seed=0)
        _configure(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
        engine: Engine = make(old)
        with pytest.raises(UsageError, match="uses dynamic RoPE"):
            engine.stage(str(folder))
