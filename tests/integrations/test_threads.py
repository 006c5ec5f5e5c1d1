"""One mixture that several threads, asyncio tasks and replicas call at the same time."""

import asyncio
import copy
import gc
import itertools
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from integrations.tiny_models import dense, mixture, tokens
from threads import THREADS, assert_same_in_threads

from moa_fairseq.errors import UserError
from moa_fairseq.integrations import hf
from moa_fairseq.integrations.heads import _COLLECTORS, balance_loss, collect_routings

INPUTS = [tokens(2, 9 + number, seed=number) for number in range(THREADS)]
routers = pytest.mark.parametrize("router", ("query-norm", "learned"))


@torch.no_grad()
def logits(model, number):
    return model(INPUTS[number]).logits


@pytest.mark.parametrize("kind, router", [("gpt2", "learned"), ("gemma3", "query-norm")])
def test_passes_in_threads_are_those_of_one(kind, router):
    model = mixture(kind, router=router)
    assert_same_in_threads(lambda number: logits(model, number))


@routers
@pytest.mark.parametrize("checkpoints", (False, True))
def test_gradients_and_routings_in_threads(router, checkpoints):
    """What a checkpoint computes again sees the pass of its own thread."""
    model = mixture(router=router, balance=1.0).train()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def run(number):
        with collect_routings(model) as routings:
            loss = model(INPUTS[number], labels=INPUTS[number]).loss
            found = torch.autograd.grad(loss, weights)
        return [*found, *(each.probs for each in routings)]

    assert_same_in_threads(run)


@pytest.mark.parametrize("elsewhere", (False, True))
def test_a_block_has_the_passes_of_its_own_task(elsewhere):
    """Also those that asyncio.to_thread runs in a copy of its context; no block is left open."""
    model = mixture()

    async def task(number):
        with collect_routings(model) as routings:
            for _ in range(3):
                if elsewhere:
                    await asyncio.to_thread(logits, model, number)
                else:
                    logits(model, number)
                    await asyncio.sleep(0.001 * (number % 3))
        assert [each.probs.size(0) for each in routings] == [INPUTS[number].numel()] * 6

    async def together():
        await asyncio.gather(*map(task, range(THREADS)))
        with collect_routings(model) as routings:
            await asyncio.gather(
                *(asyncio.to_thread(logits, model, number) for number in range(THREADS))
            )
        sizes = sorted(each.probs.size(0) for each in routings)
        assert sizes == sorted(ids.numel() for ids in INPUTS for _ in range(2))

    asyncio.run(together())


def test_a_block_ends_wherever_it_is_closed():
    """In another thread or task, and for a task that began inside it and goes on."""
    model = mixture()
    block = collect_routings(model)
    routings = block.__enter__()
    logits(model, 1)
    closing = threading.Thread(target=block.__exit__, args=(None, None, None))
    closing.start()
    closing.join()
    logits(model, 2)
    assert len(routings) == 2 and not _COLLECTORS.around()

    async def tasks():
        block = collect_routings(model)
        ended = asyncio.Event()

        async def go_on():
            await ended.wait()
            logits(model, 3)
            return _COLLECTORS.around()

        routings = block.__enter__()
        inside = asyncio.create_task(go_on())

        async def end():
            block.__exit__(None, None, None)

        await asyncio.create_task(end())
        ended.set()
        return routings, await inside, _COLLECTORS.around()

    assert asyncio.run(tasks()) == ([], (), ())


@routers
def test_a_failed_pass_leaves_nothing(router):
    model = mixture(router=router)
    fails = threading.local()

    def fail(*call):
        if getattr(fails, "now", False):
            raise ValueError("planted")

    attention = model.model.layers[1].self_attn
    attention.k_proj.register_forward_hook(fail)

    def remember(module, args, kwargs):
        fails.input = weakref.ref(kwargs["hidden_states"])

    attention.register_forward_pre_hook(remember, with_kwargs=True)
    turns = itertools.count()

    def run(number):
        fails.now = next(turns) % 2
        if fails.now:
            with pytest.raises(ValueError, match="planted"):
                logits(model, number)
            fails.now = False
            gc.collect()
            assert fails.input() is None
        return logits(model, number)

    assert_same_in_threads(run)


@routers
@pytest.mark.parametrize("nested", (False, True))
def test_an_interrupted_pass_leaves_nothing(router, nested):
    """torch calls no hook after a KeyboardInterrupt, which may end a pass inside a pass."""
    model = mixture(router=router)
    interrupts = [False]
    wanted = logits(model, 0)
    heads = torch.ones(2, 9, 32, dtype=torch.float64)
    attention = model.model.layers[1].self_attn

    def interrupt(*call):
        if interrupts[0]:
            interrupts[0] = False
            raise KeyboardInterrupt

    def pass_inside(*call):
        handle.remove()
        interrupts[0] = True
        with pytest.raises(KeyboardInterrupt):
            logits(model, 3)

    attention.v_proj.register_forward_hook(interrupt)
    if nested:
        handle = attention.k_proj.register_forward_hook(pass_inside)
        torch.testing.assert_close(logits(model, 0), wanted, rtol=0, atol=0)
    else:
        interrupts[0] = True
        with pytest.raises(KeyboardInterrupt):
            logits(model, 0)
    for _ in range(2):
        with collect_routings(model) as routings:
            attention.q_proj(heads)
            with pytest.raises(UserError, match="attention is not"):
                attention.o_proj(heads)
        assert not routings
        torch.testing.assert_close(logits(model, 0), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("projection", ("q_proj", "k_proj", "o_proj"))
def test_a_hook_that_calls_the_queries_again_changes_no_heads(projection):
    model = mixture()
    hidden = torch.randn(2, 9, 32, dtype=torch.float64)
    attention = model.model.layers[0].self_attn
    going = []
    wanted = logits(model, 0)

    def call_again(*call):
        if not going:
            going.append(1)
            attention.q_proj(hidden)

    handle = getattr(attention, projection).register_forward_hook(call_again)
    with pytest.raises(UserError, match=r"LlamaAttention\.q_proj"):
        logits(model, 0)
    handle.remove()

    def call_forward(*call):
        attention.q_proj.forward(hidden)

    getattr(attention, projection).register_forward_hook(call_forward)
    torch.testing.assert_close(logits(model, 0), wanted, rtol=0, atol=0)  # the remedy


def test_a_pass_inside_a_pass():
    model = mixture()
    inside = []
    wanted = [logits(model, number) for number in (0, 3)]

    def call_again(*call):
        if not inside:
            inside.append(None)
            inside[0] = logits(model, 3)

    model.model.layers[1].self_attn.v_proj.register_forward_hook(call_again)
    outer = logits(model, 0)
    torch.testing.assert_close([outer, inside[0]], wanted, rtol=0, atol=0)


def replicas(model, count):
    """As torch.nn.parallel.replicate makes them, which needs GPUs."""
    modules = list(model.modules())
    copies = [
        [module._replicate_for_data_parallel() for module in modules] for _ in range(count)
    ]
    for index, module in enumerate(modules):
        for copied in copies:
            for name, child in module._modules.items():
                setattr(
                    copied[index], name, None if child is None else copied[modules.index(child)]
                )
            for name, weight in module._parameters.items():
                setattr(copied[index], name, None if weight is None else weight * 1)
    return [copied[0] for copied in copies]


@routers
def test_replicas_of_data_parallel_train_as_the_model(router):
    model = mixture(router=router, balance=1.0).train()

    def loss_of(module, number):
        return module(INPUTS[number], labels=INPUTS[number]).loss

    alone = [loss_of(model, number) for number in range(THREADS)]
    sum(alone).backward()
    wanted = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    with ThreadPoolExecutor(THREADS) as pool:
        losses = list(pool.map(loss_of, replicas(model, THREADS), range(THREADS)))
    torch.testing.assert_close(losses, alone, rtol=0, atol=1e-12)
    sum(losses).backward()
    torch.testing.assert_close(
        [weight.grad for weight in model.parameters()], wanted, rtol=0, atol=1e-12
    )
    outputs = [module(INPUTS[0]).logits for module in (model.eval(), replicas(model, 1)[0])]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)


def test_the_first_passes_with_an_adapter():
    """They find the projections replaced, and all of them have the hooks put on the new ones."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        target_modules=["q_proj", "o_proj"], init_lora_weights=False, lora_alpha=64
    )
    for seed in range(2):
        torch.manual_seed(seed)
        model = peft.get_peft_model(mixture(), settings).eval()
        alone = copy.deepcopy(model)
        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(logits, [model] * THREADS, range(THREADS)))
        wanted = [logits(alone, number) for number in range(THREADS)]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_models_are_converted_in_threads():
    for _ in range(5):
        hf._mixture_class.cache_clear()
        models = [dense(seed=seed) for seed in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda model: hf.to_mixture_of_heads(model, 2, 5), models))
        assert len({type(model) for model in found}) == 1
        pickle.dumps(found)


def test_what_another_thread_compiles_or_exports_takes_no_routing_away(monkeypatch):
    """torch's flag of a compilation is the whole process's."""
    model = mixture(router="learned", balance=1.0).train()
    x = tokens()
    alone = model(x, labels=x).loss
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with collect_routings(model) as routings:
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", False)
        loss = model(x, labels=x).loss
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert len(routings) == model.config.num_hidden_layers
    torch.testing.assert_close(loss, alone, rtol=0, atol=0)


def test_a_model_in_its_own_block_is_not_held_to_another_ones_checkpoints():
    """A teacher in training mode runs without gradients: its routings are not in the block of the student."""
    student = mixture(balance=0).train()
    teacher = mixture(seed=3, balance=0).train()
    with collect_routings(student) as routings:
        logits(teacher, 1)
        student(INPUTS[0])
    assert len(routings) == 2 and balance_loss(routings).requires_grad
    with pytest.raises(UserError, match="use_reentrant"), collect_routings(student):
        logits(student, 0)


@routers
def test_dynamic_quantisation(router):
    """torch copies the hooks of a projection to what takes its place."""
    model = mixture(router=router, changes={"dtype": torch.float32})
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert type(quantised.model.layers[0].self_attn.o_proj) is not torch.nn.Linear
    plain = dense(dtype=torch.float32)
    without = torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear})
    rounding = (logits(without, 0) - logits(plain, 0)).norm()
    assert (logits(quantised, 0) - logits(model, 0)).norm() < 3 * rounding
    assert (logits(quantised, 0) - logits(without, 0)).norm() > 3 * rounding
