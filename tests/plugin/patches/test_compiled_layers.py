"""--compile-layers: what it computes, how many graphs it makes, whom it reaches, and what it refuses."""

import copy
import logging
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.modules import gelu
from omegaconf import OmegaConf

from moa_fairseq.errors import UserError
from moa_fairseq.layers.losses import OF_ANY_FAMILY
from moa_fairseq.layers.routing import RoutingSums
from moa_fairseq.layers.running_statistics import running_statistics_of
from moa_fairseq.plugin.forward_context import collect_routings
from moa_fairseq.plugin.patches.compile_flag import FLAG, LAYERS, check
from moa_fairseq.plugin.patches.compiled_layers import can_compile, compile_layers

SYMBOLS = 40
WIDTHS = ("embed-dim", 16), ("ffn-embed-dim", 32), ("attention-heads", 4)
NO_DROPOUT = ("--dropout", 0, "--attention-dropout", 0, "--activation-dropout", 0)
SPARSE = ("--num-experts", 4, "--experts-per-token", 2, "--expert-dim", 8)
HEADS = ("--moh-shared-heads", 1, "--experts-per-token", 2)
SIGMA = (
    "--sigma-moe-num-experts",
    4,
    "--sigma-moe-experts-per-token",
    2,
    "--sigma-moe-expert-dim",
    8,
)
FAMILIES = {
    "moa": ("moa_transformer_tiny", *SPARSE),
    "moa, K = E": ("moa_transformer_tiny", "--num-experts", 2, "--experts-per-token", 2),
    "moa, bias rate, sigma-MoE": (
        "moa_transformer_tiny",
        *SPARSE,
        "--routing-bias-rate",
        0.1,
        *SIGMA,
    ),
    "mae": ("mae_transformer_tiny", "--gate-dropout", 0),
    "moh": ("moh_transformer_tiny", *HEADS),
    "gqe": ("gqe_transformer_tiny",),
    "namoh": ("namoh_transformer_tiny",),
    "switchhead": ("switchhead_transformer_tiny",),
    "dense": ("dense_transformer_tiny",),
    "fairseq's": ("transformer", "--activation-fn", "gelu"),
    "moa lm": ("moa_lm_tiny", *SPARSE, "--output-dropout", 0),
    "switchall lm": ("switchall_lm_tiny", "--output-dropout", 0),
    "fairseq's lm": ("transformer_lm_gpt2_tiny",),
    "moa masked": ("moa_roberta_tiny", *SPARSE),
    "fairseq's masked": ("roberta",),
}


@pytest.fixture
def as_before():
    """torch's settings and its compiled code are of a process."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(), torch._functorch.config.patch():
        yield
    torch.compiler.reset()


def dictionary():
    words = Dictionary()
    for number in range(SYMBOLS - len(words)):
        words.add_symbol(f"w{number}")
    return words


def build(arch, *flags, layers=2):
    """A model in float64, without dropout, in training."""
    torch.manual_seed(1)
    sides = (
        ["decoder"]
        if "_lm" in arch
        else ["encoder"]
        if "roberta" in arch
        else ["encoder", "decoder"]
    )
    task = {1: "language_modeling" if "_lm" in arch else "masked_lm", 2: "translation"}[
        len(sides)
    ]
    line = ["data", "--task", task, "--arch", arch, *NO_DROPOUT]
    for side in sides:
        line += [f"--{side}-layers", layers]
        line += [word for name, value in WIDTHS for word in (f"--{side}-{name}", value)]
    line += ["--share-all-embeddings"] * (len(sides) == 2)
    words = dictionary()
    args = options.parse_args_and_arch(
        options.get_training_parser(), [str(word) for word in (*line, *flags)]
    )
    given = dict(
        source_dictionary=words,
        target_dictionary=words,
        dictionary=words,
        output_dictionary=words,
    )
    return ARCH_MODEL_REGISTRY[args.arch].build_model(args, Namespace(**given)).double().train()


def batch(number, rows, source, target, padded=True):
    g = torch.Generator().manual_seed(number)
    src, prev = (
        torch.randint(4, SYMBOLS, (rows, length), generator=g) for length in (source, target)
    )
    if padded:
        src[0, :2] = prev[0, -2:] = 1
    return src, prev


def update(model, src, prev):
    """Loss with the routers' own, all gradients, the routers' names, and what modules have observed."""
    model.zero_grad(set_to_none=True)
    with collect_routings() as routings:
        if hasattr(model, "classification_heads"):
            out = model(src)[0]
        else:
            out = (
                model(prev)[0]
                if not hasattr(model, "encoder")
                else model(src, src.ne(1).sum(1), prev)[0]
            )
    loss = out.square().mean()
    for sums in RoutingSums.by_kind([routing for _, routing in routings if routing.auxiliary]):
        loss = loss + sum(each(sums).sum() for each in OF_ANY_FAMILY.values())
    loss.backward()
    grads = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    seen = [statistics.pending.clone() for statistics in running_statistics_of(model)]
    return [loss.detach(), *grads, *seen], [name for name, _ in routings]


def compare(model, batches, tolerance, backend):
    expected = [update(model, *each) for each in batches]
    for statistics in running_statistics_of(model):
        statistics.forget()
    compile_layers(model, backend)
    for (wanted, names), each in zip(expected, batches):
        found, found_names = update(model, *each)
        assert found_names == names
        for a, b in zip(found, wanted):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.thorough(one_in=5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("as_before")
def test_compiled_layers_compute_the_same_in_few_graphs(family, caplog):
    """Ten shapes, with and without padding: output, losses, gradients, routings under their names, counts."""
    model = build(*FAMILIES[family], layers=3)
    caught = caplog.records
    shapes = [(3, 9, 7), (5, 6, 6), (2, 5, 8), *((rows, 4 + rows, 9) for rows in range(2, 9))]
    batches = [batch(i, *shape, padded=i != 1) for i, shape in enumerate(shapes)]
    compare(model, batches, 1e-12, "aot_eager")
    warned = [record.getMessage() for record in caught if record.levelno >= logging.WARNING]
    assert not [text for text in warned if FLAG in text]
    # the last layer of a decoder, which returns weights, is a kind of its own
    kinds = len({type(m) for m in model.modules() if isinstance(m, LAYERS)})
    kinds += hasattr(model, "encoder") and hasattr(model, "decoder")
    assert kinds <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * kinds


@pytest.mark.thorough(one_in=7)  # all families take half an hour
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("as_before")
def test_inductor_computes_the_same(family):
    """fairseq's gelu computes in float32, which Inductor rounds otherwise."""
    model = build(*FAMILIES[family], layers=1)
    rounded = any(getattr(module, "activation_fn", None) is gelu for module in model.modules())
    compare(
        model, [batch(1, 3, 9, 7), batch(2, 5, 6, 6)], 1e-8 if rounded else 1e-11, "inductor"
    )


@pytest.mark.parametrize(("before", "after"), [(8, 64), (100, 100)])
@pytest.mark.usefixtures("as_before")
def test_kinds_of_batches_have_room_for_graphs(before, after):
    """Past torch's own limit of 8, layers run as without the flag."""
    torch._dynamo.config.recompile_limit = before
    compile_layers(build("dense_transformer_tiny", layers=1), "eager")
    assert torch._dynamo.config.recompile_limit == after


def stub(monkeypatch):
    """What is compiled is noted, and called as it is."""
    compiled = []

    def stand_in(function=None, **options):
        def run(*args):
            compiled.append((type(args[0]).__name__, args))
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", stand_in)
    return compiled


@pytest.mark.usefixtures("as_before")
def test_only_a_training_pass_is_compiled_and_a_copy_has_its_own_weights(monkeypatch):
    compiled, model, (src, prev) = (
        stub(monkeypatch),
        build(*FAMILIES["moa"], layers=1),
        batch(1, 3, 9, 7),
    )
    given = list(model.state_dict())
    compile_layers(model)
    assert list(model.state_dict()) == given
    lengths = src.ne(1).sum(1)
    wanted, extra = model(src, lengths, prev)
    assert len(compiled) == 2
    plain = build(*FAMILIES["moa"], layers=1)
    plain.load_state_dict(model.state_dict())
    attention = plain(src, lengths, prev)[1]["attn"][0]
    torch.testing.assert_close(extra["attn"][0], attention)
    twin = copy.deepcopy(model)  # as of an average of the weights
    with torch.no_grad():
        for parameter in [*twin.encoder.layers.parameters(), *twin.decoder.layers.parameters()]:
            parameter *= 0.5
    torch.testing.assert_close(model(src, lengths, prev)[0], wanted)
    other = twin(src, lengths, prev)[0]
    assert len(compiled) == 6
    plain = build(*FAMILIES["moa"], layers=1)
    plain.load_state_dict(twin.state_dict())
    torch.testing.assert_close(other, plain(src, lengths, prev)[0])
    assert (other - wanted).abs().max() > 1e-3
    with torch.no_grad():
        model(src, lengths, prev)
    model.eval()(src, lengths, prev)
    assert len(compiled) == 6


@pytest.mark.usefixtures("as_before")
def test_checkpointed_activations_are_those_of_the_compiled_layer(monkeypatch):
    compiled = stub(monkeypatch)
    each = batch(1, 3, 9, 7)
    wanted = update(build(*FAMILIES["moa"], layers=1), *each)
    model = build(*FAMILIES["moa"], "--checkpoint-activations", layers=1)
    compile_layers(model)
    found = update(model, *each)
    assert found[1] == wanted[1] and len(compiled) == 4  # each twice
    for a, b in zip(found[0], wanted[0]):
        torch.testing.assert_close(a, b)


def test_a_switch_that_turns_torchs_compiler_off_is_named(monkeypatch, caplog):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert not can_compile(torch.device("cpu"))
    assert "TORCHDYNAMO_DISABLE" in caplog.text


def test_code_that_another_user_may_have_compiled_is_not_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    assert not can_compile(torch.device("cpu"))
    assert str(tmp_path) in caplog.text and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("as_before")
def test_what_cannot_be_compiled_runs_as_it_is_and_says_why(monkeypatch, caplog):
    each = batch(1, 3, 9, 7)
    model = build(*FAMILIES["moa"], layers=1)
    wanted = update(model, *each)

    def fail(*_):
        raise torch._dynamo.exc.Unsupported("no such thing")

    monkeypatch.setattr(torch, "compile", lambda function=None, **options: fail)
    assert not can_compile(torch.device("cpu")) and "no such thing" in caplog.text
    caplog.clear()
    compile_layers(model)
    for _ in range(2):
        found = update(model, *each)
        for a, b in zip(found[0], wanted[0]):
            assert torch.equal(a, b)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2 and all("no such thing" in record.getMessage() for record in warned)


@pytest.mark.parametrize(
    ("arch", "task"),
    [
        ("moa_transformer_tiny", "translation"),
        ("transformer", "translation"),
        ("transformer_lm", "language_modeling"),
    ],
)
def test_the_flag_reaches_the_trainer_of_any_model(arch, task):
    for flags, expected in (((), False), (("--compile-layers",), True)):
        line = ["data", "--task", task, "--arch", arch, *flags]
        args = options.parse_args_and_arch(options.get_training_parser(), line)
        cfg = convert_namespace_to_omegaconf(args)
        assert getattr(cfg.optimization, "compile_layers", False) is expected


def settings(**changed):
    args = options.parse_args_and_arch(
        options.get_training_parser(),
        ["data", "--task", "translation", "--arch", "transformer"],
    )
    cfg = convert_namespace_to_omegaconf(args)
    OmegaConf.set_struct(cfg, False)
    for name, value in changed.items():
        OmegaConf.update(cfg, name.replace("__", "."), value)
    return cfg


@pytest.mark.parametrize(
    ("changed", "task", "named"),
    [
        (
            {"distributed_training__ddp_backend": "fully_sharded"},
            {},
            "--ddp-backend fully_sharded",
        ),
        ({"model__quant_noise_pq": 0.1}, {}, "--quant-noise-pq"),
        ({"model__quant_noise_scalar": 0.1}, {}, "--quant-noise-scalar"),
        ({"common__quantization_config_path": "x.yaml"}, {}, "--quantization-config-path"),
        ({}, {"alternates": True}, "--bcd alternate"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(changed, task, named):
    model = build("transformer", layers=1)
    check(settings(), SimpleNamespace(), model)
    with pytest.raises(UserError, match=named):
        check(settings(**changed), SimpleNamespace(**task), model)


def test_a_model_without_layers_is_refused_and_so_are_fairseqs_checkpoints():
    with pytest.raises(UserError, match="none of its layers is"):
        check(settings(), SimpleNamespace(), torch.nn.Linear(2, 2))
    flags = ("--checkpoint-activations",)
    with pytest.raises(UserError, match="--checkpoint-activations"):
        check(
            settings(model__checkpoint_activations=True),
            SimpleNamespace(),
            build("transformer", *flags),
        )
    check(
        settings(model__checkpoint_activations=True),
        SimpleNamespace(),
        build("dense_transformer_tiny", *flags),
    )
