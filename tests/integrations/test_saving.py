"""What is saved is read as a mixture or refused: never as a dense model without a word."""

import json
import os
import subprocess
import sys

import pytest
import torch
from integrations.tiny_models import DTYPE, VERSION, dense, mixture, mixtures_of, reload, tokens
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import moa_fairseq
from moa_fairseq.errors import UserError
from moa_fairseq.integrations import hf
from moa_fairseq.integrations.hf import to_mixture_of_heads

routers = pytest.mark.parametrize("router", ("query-norm", "learned"))


@torch.no_grad()
def logits(model, ids=None):
    return model(tokens() if ids is None else ids).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved mixture of a Llama; treat it as read-only."""
    place = tmp_path_factory.mktemp("mixture")
    mixture().save_pretrained(place)
    return place


@routers
def test_all_that_a_mixture_computes_with_is_saved(router):
    """from_pretrained fills what the weights have; another buffer would hold what lay in memory."""
    model = mixture(router=router)
    saved = model.state_dict()
    assert {name for name, _ in model.named_buffers() if ".mixture." in name} <= saved.keys()
    assert [
        saved[f"model.layers.{layer}.self_attn.mixture.sizes"].tolist() for layer in (0, 1)
    ] == [[2, 5, 1]] * 2


def test_the_stock_class_says_that_the_weights_are_no_dense_models(folder):
    options = {DTYPE: torch.float64, "output_loading_info": True}
    model, info = LlamaForCausalLM.from_pretrained(folder, **options)
    assert {f"model.layers.{layer}.self_attn.mixture.sizes" for layer in (0, 1)} == set(
        info["unexpected_keys"]
    )
    assert type(model) is LlamaForCausalLM
    torch.testing.assert_close(logits(model.eval()), logits(dense()), rtol=0, atol=1e-12)


PROGRAM = """
import sys, torch
from transformers import AutoModelForCausalLM
folder, dtype = sys.argv[1:]
try:
    AutoModelForCausalLM.from_pretrained(folder)
except ValueError as error:
    assert "moh_llama" in str(error)
else:
    raise SystemExit("read without the module")
case = torch.load(folder + "/case.pt", weights_only=False)  # a pickled model imports the module
model = AutoModelForCausalLM.from_pretrained(folder, **{dtype: torch.float64})
names = [type(each).__name__ for each in (model, case["model"])]
assert names == ["MoHLlamaForCausalLM", "MoHPhiForCausalLM"]
with torch.no_grad():
    for each, logits in zip((model, case["model"]), case["logits"]):
        torch.testing.assert_close(each(case["ids"]).logits, logits, rtol=0, atol=1e-12)
"""


def test_a_new_process_needs_the_import_and_no_remote_code(folder):
    other = mixture("phi", router="learned")
    case = {
        "model": other,
        "ids": tokens(),
        "logits": [logits(each) for each in (reload(folder), other)],
    }
    torch.save(case, folder / "case.pt")
    root = os.path.dirname(os.path.dirname(moa_fairseq.__file__))
    command = [sys.executable, "-P", "-c", PROGRAM, str(folder), DTYPE]
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_names_of_classes_are_found_or_not():
    assert hf.MoHQwen2Config.model_type == "moh_qwen2"
    assert issubclass(hf.MoHQwen2ForCausalLM, hf.MoHQwen2ForCausalLM.__mro__[1])
    assert hf.MoHGPT2LMHeadModel.config_class is hf.MoHGPT2Config
    for name in (
        "MoHNothing",
        "MoHLlamaModel",
        "MoHT5ForConditionalGeneration",
        "LlamaForCausalLM",
    ):
        assert not hasattr(hf, name)


def test_a_dense_folder_is_refused_by_the_mixtures_class(tmp_path):
    dense().save_pretrained(tmp_path)
    with pytest.raises(UserError):
        hf.MoHLlamaForCausalLM.from_pretrained(tmp_path)


def test_settings_of_another_version_are_refused(tmp_path):
    mixture().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["moh"]["temperature"] = 2
    path.write_text(json.dumps(config))
    with pytest.raises(UserError):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_other_models_of_the_same_config_stay_dense(tmp_path):
    model = dense()
    other = LlamaForCausalLM(model.config)
    to_mixture_of_heads(model, 2, 5)
    other.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == other.config.model_type == "llama"
    assert {id(m.config) for m in model.modules() if hasattr(m, "config")} == {id(model.config)}


@pytest.mark.parametrize(
    "options", ({"device_map": "cpu"}, {"low_cpu_mem_usage": True}, {"use_safetensors": True})
)
@routers
def test_ways_to_load(options, router, tmp_path):
    model = mixture(router=router)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    torch.testing.assert_close(
        logits(reload(tmp_path, **options)), logits(model), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("kind", ("Mixtral", "Qwen2Moe"))
def test_models_with_experts_are_saved_as_dense_ones(kind, tmp_path):
    """transformers 5 stacks their matrices and saves them apart, by model type; 4 reads nothing else."""
    experts = {
        "num_local_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    }
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    # Its experts take no float64
    model = mixture(kind, changes={**experts, **sizes, "dtype": torch.float32})
    names = []
    for folder, each in (("dense", dense(kind, **{**experts, **sizes})), ("mixture", model)):
        each.save_pretrained(tmp_path / folder)
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as weights:
            names.append({name for name in weights.keys() if ".mixture." not in name})  # noqa: SIM118
    assert names[0] == names[1]
    found = reload(tmp_path / "mixture", **{DTYPE: torch.float32})
    torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=1e-5)


def test_half_precision(tmp_path):
    """The learned router's weights are rounded with the others; it computes in float32."""
    mixture(router="learned").save_pretrained(tmp_path)
    model = reload(tmp_path, **{DTYPE: torch.bfloat16})
    weight = mixtures_of(model)[0].router.projection.weight
    assert weight.dtype == torch.bfloat16 and logits(model).dtype == torch.bfloat16
    seen = []
    mixtures_of(model)[0].router.projection.register_forward_hook(
        lambda *call: seen.append(call[2].dtype)
    )
    assert logits(model).isfinite().all() and seen == [torch.float32]


@pytest.mark.skipif(VERSION < (4, 52), reason="the method is not there")
def test_another_attention_implementation_keeps_the_mixture():
    model = mixture()
    plain = dense()
    before = logits(model)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)
    assert (logits(plain) - before).abs().max() > 1e-2
