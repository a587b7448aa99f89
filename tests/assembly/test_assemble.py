"""Whether a target and a head are a pair, from their configs and tensor names alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle_ray.assembly import assemble as pair_module
from eagle_ray.assembly import costs, cpu_threads, load_models
from eagle_ray.assembly.assemble import build_engine, build_engine_from_config, build_in_thread
from eagle_ray.assembly.costs import cost_key
from eagle_ray.assembly.engine_sizes import PREFILL_TOKENS, EngineArgs
from eagle_ray.assembly.hub import check_models, model_limits
from eagle_ray.assembly.load_models import load_draft, load_target
from eagle_ray.assembly.model_memory import weight_bytes
from eagle_ray.assembly.placement import check_spread
from eagle_ray.config import ModelConfig, SpeculativeConfig
from eagle_ray.core.errors import ConfigError, UnfitDevice
from eagle_ray.core.sequence import Sequence
from eagle_ray.core.start_log import StartLog
from eagle_ray.engine.calibrate import TimeBudget, calibrate_costs
from eagle_ray.engine.engine import Engine
from eagle_ray.methods.combine.drafter import make_drafter
from eagle_ray.methods.medusa.checkpoint import save_path_heads
from eagle_ray.methods.medusa.heads import HydraHeads, MedusaHeads
from eagle_ray.models.gpu_linears import Fp8Linear, quantize_fp8
from eagle_ray.models.target import TargetModel
from eagle_ray.requests.parameters import SamplingParams
from eagle_ray.storage.cache_directory import cache_home
from tests.support.families import FAMILIES
from tests.support.gguf import Q8_0, toy_metadata, toy_tensors, write_gguf
from tests.support.jobs import PAIR
from tests.support.tokenizers import LFS_POINTER, write_tokenizer
from tests.support.toy_models import LLAMA, llama, run

PLAIN = SpeculativeConfig(method="none")


@pytest.fixture
def draft(tmp_path) -> Path:
    """A copy of the goldens' head, to break."""
    return Path(shutil.copytree(PAIR / "draft", tmp_path / "draft"))


def check(draft: Path | None, method: str = "eagle2") -> None:
    target = str(PAIR / "target")
    check_models(
        ModelConfig(target=target, draft=draft and str(draft)), SpeculativeConfig(method=method)
    )


def test_a_pair_passes_and_plain_decoding_needs_no_head(draft):
    check(draft)
    check_models(ModelConfig(), SpeculativeConfig())
    check(None, method="none")


def test_cost_key_depends_on_the_pair_and_not_on_its_path(tmp_path, draft):
    speculative, parts = SpeculativeConfig(method="eagle2", budget="uniform"), []
    for target in (PAIR / "target", Path(shutil.copytree(PAIR / "target", tmp_path / "elsewhere"))):
        pair = build_engine_from_config(
            ModelConfig(target=str(target), draft=str(draft)), speculative, EngineArgs(2)
        )
        parts.append(cost_key(pair.engine, speculative))
    assert parts[0] == parts[1] and parts[0]["device"]


def test_costs_are_kept_by_the_bits_of_the_weights(tmp_path):
    metadata = toy_metadata()
    mixed = toy_tensors(metadata)
    wide = {
        name: (Q8_0 if values.ndim == 2 else kind, values) for name, (kind, values) in mixed.items()
    }
    settings = SpeculativeConfig(method="ngram", budget="uniform")
    keys, teams = [], []
    for name, tensors, dtype in (
        ("mixed", mixed, "auto"),
        ("wide", wide, "auto"),
        ("wide", wide, "float32"),
    ):
        write_gguf(tmp_path / f"{name}.gguf", metadata, tensors)
        model = ModelConfig(target=str(tmp_path / f"{name}.gguf"), dtype=dtype)
        engine = build_engine_from_config(model, settings, EngineArgs(2)).engine
        teams.append(engine.uses_team)
        keys.append(cost_key(engine, settings))
    sizes = [key.pop("weight_bytes") for key in keys]
    assert [key.pop("team") for key in keys] == teams
    assert teams[1], (
        "it is all quantised; whether dense weights are the team's depends on the processor"
    )
    assert keys[0] == keys[1] and len(set(sizes)) == 3


def test_cost_key_ignores_kv_tokens_unless_they_are_too_few(draft):
    model, speculative = (
        ModelConfig(target=str(PAIR / "target"), draft=str(draft)),
        SpeculativeConfig(method="eagle2", budget="uniform"),
    )
    keys = [
        cost_key(
            build_engine_from_config(model, speculative, EngineArgs(2, kv_tokens=tokens)).engine,
            speculative,
        )
        for tokens in (4096, 4352, 256)
    ]
    assert keys[0] == keys[1] != keys[2]


def test_trees_over_a_cache_in_fp8_equal_plain_decoding_over_one():
    """Greedy and sampled, prompts of several blocks in chunks; costs are kept apart from those of another cache."""
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, temperature=t, seed=5)
        for t in (0.0, 0.0, 0.8, 0.8)
    ]
    prompts = [list(range(5, 5 + n)) for n in (3, 70, 41, 9)]
    outputs, keys = {}, []
    for kv_dtype in ("auto", "fp8"):
        for method in ("none", "eagle2"):
            args = EngineArgs(3, 160, kv_dtype=kv_dtype, prefill_tokens=32)
            settings = SpeculativeConfig(method=method, budget="uniform")
            engine = build_engine_from_config(
                ModelConfig(draft="embedded:tiny"), settings, args
            ).engine
            sequences = run(engine, prompts, params)
            outputs[kv_dtype, method] = [s.output_ids for s in sequences]
        keys.append(cost_key(engine, settings))
        assert engine.target.cache.keys.dtype == (args.stored_kv or torch.float32)
        assert min(s.stats.mean_acceptance_length for s in sequences) > 1
    assert outputs["fp8", "none"] == outputs["fp8", "eagle2"] != outputs["auto", "none"]
    assert outputs["auto", "none"] == outputs["auto", "eagle2"]
    assert keys[0] != keys[1]


def test_fp8_weights_are_refused_where_nothing_multiplies_them():
    with pytest.raises(
        ConfigError, match=r"model\.quantization: fp8 is for GPUs, and the model is loaded on a CPU"
    ):
        load_target(ModelConfig(quantization="fp8", device="cpu"))


def test_embedding_and_lm_head_of_an_fp8_target_are_not_rounded():
    target = llama()
    dense = weight_bytes(target)
    projections = sum(
        p.numel() for name, p in target.named_parameters() if name.endswith("_proj.weight")
    )
    outputs = sum(len(p) for name, p in target.named_parameters() if name.endswith("_proj.weight"))
    quantize_fp8(target.base_model.layers)
    kinds = {type(module).__name__ for module in target.modules() if hasattr(module, "in_features")}
    assert kinds == {"Fp8Linear", "Linear"} and type(target.lm_head).__name__ == "Linear"
    counts = sum(x.arrivals.nbytes for x in target.modules() if isinstance(x, Fp8Linear))
    assert weight_bytes(target) == dense - 3 * projections + 4 * outputs + counts


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size"])
def test_a_head_of_another_size_is_refused_with_both_numbers(draft, key):
    raw = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(raw | {key: 7}))
    with pytest.raises(
        ConfigError, match=rf"model\.draft: .* {key} is 7 and the target's is {raw[key]}"
    ):
        check(draft)


@pytest.mark.parametrize("method", ["eagle1", "sequoia"])
def test_other_trees_are_drawn_with_the_same_head(draft, method):
    check(draft, method)


def test_a_draft_model_has_the_targets_tokens(tmp_path):
    llama(vocab_size=512).save_pretrained(tmp_path / "same")
    check(tmp_path / "same", "draft_model")
    llama().save_pretrained(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"model\.draft: .* vocab_size is 97 and the target's is 512"
    ):
        check(tmp_path / "other", "draft_model")


@pytest.mark.parametrize(("heads", "method"), [(MedusaHeads, "medusa"), (HydraHeads, "hydra")])
def test_path_heads_are_of_the_targets_width_and_method(tmp_path, heads, method):
    own = dict(own_lm_head=True) if heads is MedusaHeads else {}
    save_path_heads(heads(2, 1, 64, 512, **own), tmp_path / "same")
    check(tmp_path / "same", method)
    save_path_heads(heads(2, 1, 32, 512, **own), tmp_path / "other")
    with pytest.raises(
        ConfigError, match=rf"model\.draft: .* not {method.title()} heads .*32\), wanted .*64\)"
    ):
        check(tmp_path / "other", method)
    with pytest.raises(ConfigError, match=rf"model\.draft: .*holds neither {method}_lm_head"):
        check(PAIR / "draft", method)


E3 = PAIR.parent / "pair_e3"


def check_e3(method: str, target: Path = E3) -> None:
    model = ModelConfig(target=str(target / "target"), draft=str(E3 / "draft"))
    check_models(model, SpeculativeConfig(method=method))


def test_eagle2_accepts_both_head_generations_and_eagle3_its_own(draft):
    check_e3("eagle2")
    check_e3("eagle3")
    with pytest.raises(
        ConfigError,
        match=r"model\.draft: .* is an EAGLE-1/2 head: set speculative\.method to eagle2",
    ):
        check(draft, "eagle3")


def test_a_target_of_too_few_layers_for_eagle3_is_refused(draft):
    with pytest.raises(
        ConfigError, match=r"model\.draft: .* 7 layers or more, and the target has 4 .*pair_fit"
    ):
        check_e3("eagle3", target=PAIR)


def test_head_without_a_tensor_is_refused_before_loading(draft):
    save_file({"fc.weight": torch.ones(64, 128)}, draft / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"model\.draft: .* missing layers\.0\.mlp\.down_proj\.weight"
    ):
        check(draft)


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("config.json", None),
        ("config.json", b"{"),
        ("model.safetensors", None),
        ("model.safetensors", b"short"),
    ],
)
def test_files_that_are_missing_or_damaged_are_named(draft, file, data):
    (draft / file).unlink() if data is None else (draft / file).write_bytes(data)
    with pytest.raises(
        ConfigError,
        match=r"model\.draft: .*draft(/model\.safetensors)? (cannot be read|has no config\.json)",
    ):
        check(draft)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_git_lfs_pointer_in_place_of_a_heads_file_is_named(draft, file):
    (draft / file).write_text(LFS_POINTER)
    with pytest.raises(
        ConfigError, match=rf"model\.draft: .*{file} is a Git LFS pointer, not the file itself. Run"
    ):
        check(draft)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (
            "model.safetensors",
            LFS_POINTER,
            r"model\.target: .*model\.safetensors is a Git LFS pointer",
        ),
        ("config.json", LFS_POINTER, r"model\.target: .*config\.json is a Git LFS pointer"),
        (
            "generation_config.json",
            "{",
            r"model\.target: .*generation_config\.json cannot be read as JSON",
        ),
        (
            "tokenizer.json",
            "{}",
            r"model\.target: the tokenizer in .* cannot be read from tokenizer\.json",
        ),
        (
            "chat_template.jinja",
            "{% if",
            r"model\.target: the chat template in .* is not a Jinja template",
        ),
    ],
)
def test_target_with_unreadable_files_is_refused_at_the_start(tmp_path, file, content, words):
    target = Path(shutil.copytree(PAIR / "target", tmp_path / "target"))
    write_tokenizer(target, chat_template=None)
    (target / file).write_text(content)
    model = ModelConfig(target=str(target), draft=None)
    for refuse in (check_models, build_engine_from_config):
        with pytest.raises(ConfigError, match=words) as error:
            refuse(model, SpeculativeConfig(method="none"))
        assert "\n" not in str(error.value)


def test_an_engine_ends_answers_at_the_tokenizers_eos_too(tmp_path, caplog):
    target = Path(shutil.copytree(PAIR / "target", tmp_path / "target"))
    write_tokenizer(target)  # the tokenizer's EOS is 1
    (target / "generation_config.json").write_text('{"eos_token_id": 4}')
    with caplog.at_level("INFO", "eagle_ray"):
        bundle = build_engine_from_config(
            ModelConfig(target=str(target), draft=None), PLAIN, EngineArgs(1)
        )
    assert (
        "an answer also ends at the tokenizer's EOS, <|eos|>, which no config names"
        in caplog.messages
    )
    assert bundle.engine.target.eos_ids == bundle.tokenizer.eos_ids == {1, 4}
    assert TargetModel(load_target(ModelConfig(target=str(target), draft=None)), 1, 64).eos_ids == {
        1,
        4,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_refused():
    for refuse in (lambda model: build_engine_from_config(model, PLAIN), load_target):
        with pytest.raises(
            ConfigError,
            match=r"model\.device: cuda, and torch sees no GPU .*set model.device to auto",
        ):
            refuse(ModelConfig(device="cuda"))


def test_engine_that_requires_kernels_is_refused_without_them(monkeypatch):
    """Before its weights are read if kernels are off, and after its graphs are captured if these are."""
    model = ModelConfig(device="cpu", max_model_len=64)
    asked = model, PLAIN, EngineArgs(2), 1, True
    with (
        monkeypatch.context() as patched,
        pytest.raises(UnfitDevice, match=r"kernels are off \(cpu is no CUDA device\)"),
    ):
        patched.setattr(pair_module, "build_engine_from_config", None)
        build_in_thread(*asked)
    monkeypatch.setattr(load_models, "why_not", lambda device: None)
    monkeypatch.setattr(Engine, "fallbacks", {"graphs": "capturing failed"})
    with pytest.raises(
        UnfitDevice,
        match=r"graphs are off \(capturing failed\).*`eagle-ray doctor` on that machine",
    ):
        build_in_thread(*asked)
    assert build_in_thread(model, PLAIN, EngineArgs(2), 1).engine.fallbacks


def test_a_missing_head_is_asked_for():
    with pytest.raises(ConfigError, match=r"model\.draft: missing"):
        check(None)


@pytest.mark.parametrize(
    ("settings", "is_calibrated", "is_coupled"),
    [
        ({}, True, True),
        ({"budget": "uniform"}, False, False),
        ({"ranking": "published"}, False, False),
        ({"ranking": "calibrated"}, True, False),
        ({"budget": "uniform", "ranking": "coupled"}, True, True),
        ({"budget": "uniform", "ranking": "calibrated"}, True, False),
    ],
)
def test_ranking_decides_which_corrections_the_drafter_applies(settings, is_calibrated, is_coupled):
    model, speculative = (
        ModelConfig(),
        SpeculativeConfig(method="eagle2", max_depth=3, top_k=2, **settings),
    )
    causal_lm = load_target(model, EngineArgs(1))
    drafter = make_drafter(
        speculative, TargetModel(causal_lm, 1, 64), load_draft(model, speculative, causal_lm)
    )
    ranking = drafter.ranking
    assert (ranking.calibration is not None, ranking.coupling is not None) == (
        is_calibrated,
        is_coupled,
    )


@pytest.mark.parametrize(("slots", "rows"), [(1, 8), (32, 32)])
def test_threads_are_chosen_by_a_pass_of_several_rows(monkeypatch, slots, rows):
    """One row may gain nothing from a second thread where prompts and drafts are half as fast without it."""
    passes = []
    monkeypatch.setattr(cpu_threads, "run_linears", lambda model, num_rows: passes.append(num_rows))
    monkeypatch.setattr(cpu_threads, "tune_num_threads", lambda run, min_speedup: run())
    load_target(ModelConfig(device="cpu"), EngineArgs(slots))
    assert passes == [rows]


def test_layers_that_transformers_runs_wrongly_are_not_spread():
    check_spread(FAMILIES["gemma2"], 2)
    with pytest.raises(
        ConfigError, match=r"^execution.gpus_per_actor: 2, .* 'llama4_text', .* Set it to 1\.$"
    ):
        check_spread(FAMILIES["llama4_text"], 2)


def target_with_config(tmp_path: Path, **config: object) -> ModelConfig:
    """A directory of nothing but a target's config."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    return ModelConfig(target=str(tmp_path))


@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "llava"])
def test_unsupported_target_family_is_refused_before_the_start(tmp_path, family):
    with pytest.raises(ConfigError, match=rf"model\.target: unsupported model_type .{family}.[:.]"):
        check_models(
            target_with_config(tmp_path, model_type=family), SpeculativeConfig(method="none")
        )


def test_target_of_unknown_quantizer_is_refused_before_the_start(tmp_path):
    model = target_with_config(
        tmp_path, model_type="llama", quantization_config={"quant_method": "guesswork"}
    )
    with pytest.raises(ConfigError, match=r"model\.target: .*quantised \(guesswork\)"):
        check_models(model, SpeculativeConfig(method="none"))


def test_rotations_that_move_bound_the_length(tmp_path):
    """Past its original positions dynamic scaling turns every earlier one otherwise."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    said = dict(model_type="llama", rope_parameters=rope, max_position_embeddings=100)
    model = target_with_config(tmp_path, **said)
    assert model_limits(model).max_model_len == 100
    assert model_limits(model.model_copy(update={"max_model_len": 100})).max_model_len == 100
    with pytest.raises(
        ConfigError, match=r"max_model_len: 101 is more than the 100 .* before its rotary scaling"
    ):
        model_limits(model.model_copy(update={"max_model_len": 101}))


@pytest.mark.parametrize(
    ("own", "limit", "guaranteed"), [(131_072, 131_072, 4096), (2048, 2048, 2048)]
)
def test_without_a_length_the_targets_own_is_the_limit(tmp_path, own, limit, guaranteed):
    model = target_with_config(tmp_path, model_type="llama", max_position_embeddings=own)
    assert (model_limits(model).max_model_len, model_limits(model).guaranteed) == (
        limit,
        guaranteed,
    )
    assert model_limits(model).longest(None) == guaranteed
    chosen = model_limits(model.model_copy(update={"max_model_len": 1000}))
    assert chosen.max_model_len == chosen.guaranteed == chosen.longest(None) == 1000


@pytest.mark.parametrize(
    ("asked", "most"), [(32, 32), ({"cpu": 48, "cuda": 1}, 48), (PREFILL_TOKENS, 200)]
)
def test_a_step_computes_as_many_prompt_tokens_as_asked_for(asked, most):
    engine = build_engine(
        llama(), None, PLAIN, EngineArgs(2, 256, kv_tokens=None, prefill_tokens=asked)
    )
    sequence = Sequence(
        "long", [1 + i % 50 for i in range(200)], SamplingParams(max_tokens=3, ignore_eos=True)
    )
    engine.add(sequence)
    engine.step()
    assert engine.counters.num_prefill_tokens == most
    while engine.has_work:
        engine.step()
    assert engine.counters.num_prefill_tokens == 200 and len(sequence.output_ids) == 3


def test_an_engine_takes_prompts_of_more_than_4096_tokens():
    """As many as its cache holds; the limit is cut where it does not hold the target's."""
    toy = llama(max_position_embeddings=8192)
    plain = SpeculativeConfig(method="none")
    engine = build_engine(toy, None, plain, EngineArgs(2, 8192, kv_tokens="auto", guaranteed=4096))
    sequence = Sequence(
        "long", [1 + i % 50 for i in range(5000)], SamplingParams(max_tokens=3, ignore_eos=True)
    )
    engine.add(sequence)
    while engine.has_work:
        engine.step()
    assert len(sequence.output_ids) == 3
    assert engine.max_model_len == 8192
    assert (
        build_engine(
            toy, None, plain, EngineArgs(2, 8192, kv_tokens=6016, guaranteed=4096)
        ).max_model_len
        == 6015
    )


class RecordingStartLog(StartLog):
    """Keeps what each part of a start would tell."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def part(self, name: str, line: str):
        self.lines.append(line)
        return super().part(name, line)


def parts_of_start(draft: Path) -> list[str]:
    start = RecordingStartLog()
    model = ModelConfig(
        target=str(PAIR / "target"), draft=str(draft), device="cpu", max_model_len=128
    )
    build_engine_from_config(model, SpeculativeConfig(), EngineArgs(2), start)
    return [line.partition(":")[0] for line in start.lines]


def test_start_logs_its_parts_and_measures_only_uncached_costs(draft, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_RAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        costs, "calibrate_costs", lambda *args: calibrate_costs(*args, TimeBudget(0.0))
    )
    first = parts_of_start(draft)
    assert first[0] == "reading the target's weights" and first[-1] == "measuring the cost of steps"
    assert any(line.startswith("making kernels") for line in first)
    assert parts_of_start(draft) == first[:-1]
    (kept,) = cache_home().glob("costs/*.json")
    kept.write_text("{")
    assert parts_of_start(draft) == first
