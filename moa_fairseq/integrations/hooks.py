"""The hooks that insert a mixture of heads into the calls of its attention.

Hooks on the attention read its input, and move the other hooks if an adapter or quantisation has replaced a
projection. Hooks on the projections read the queries, and weight the heads. The state of a call belongs to
its thread and is not stored on a module, because several threads may call the same module.
"""

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from moa_fairseq.errors import UserError
from moa_fairseq.layers.threads import PerThread


class Call:
    """The state of one call of an attention, which its hooks share.

    Args:
        attention: the attention, with a mixture.
        x: the input of the attention.
        outer: the call in the same thread that contains this call, if any.
        frame: the id of Python's frame of the call; None in a graph of torch.compile, which has no frames.
    """

    def __init__(self, attention: Any, x: Any, outer: "Call | None", frame: int | None):
        self.attention = attention
        self.input = x
        self.outer = outer
        self.frame = frame
        self.output = getattr(attention, attention.mixture.output)
        self.gates: Tensor | None = None  # [N, h]
        self.weighted = False


class _Calls:
    def __init__(self) -> None:
        self.innermost: Call | None = None


_ID = "mixture of heads"
_THREAD = PerThread(_Calls)
_attaching = threading.Lock()


def _frames_of(attention: Any) -> Iterator[int]:
    """The ids of the frames of all running calls of an attention in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is attention:
            yield id(frame)
        frame = frame.f_back


def _innermost_call(entered: int | None = None) -> Call | None:
    """The innermost running call of this thread. A KeyboardInterrupt ends a call without `_leave`.

    Args:
        entered: the id of the frame of the call that begins; an ended call may have had the same id.
    """
    calls = _THREAD.value
    call: Call | None = calls.innermost
    if not is_dynamo_compiling():
        while call is not None and call.frame is not None:
            if call.frame != entered and call.frame in _frames_of(call.attention):
                break
            call = call.outer
        calls.innermost = call
    return call


def attach(attention: Any) -> None:
    """Register the hooks of an attention with a `mixture`, and those of its projections.

    The hooks are functions that find the mixture through the module, so that a copy or replica of the model
    uses its own mixture.

    Args:
        attention: the library's module.
    """
    attention.register_forward_pre_hook(_enter, with_kwargs=True)
    # register_forward_hook(_leave, always_call=True) would number hooks, and torch.compile compile each layer
    attention._forward_hooks[_ID] = _leave
    attention._forward_hooks_always_called[_ID] = True
    _follow(attention)


def _follow(attention: Any) -> None:
    """Register the hooks on the projections that the attention has now."""
    mixture = attention.mixture
    output = getattr(attention, mixture.output)
    if _weight_heads not in output._forward_pre_hooks.values():
        _move_hook(output, "forward_pre_hook", _weight_heads)
    if mixture.router.reads_queries:
        queries = getattr(attention, mixture.queries)
        if _read_queries not in queries._forward_hooks.values():
            _move_hook(queries, "forward_hook", _read_queries)


def _move_hook(projection: nn.Module, kind: str, hook: Any) -> None:
    """Register a hook on a projection, and remove it from the modules inside, which an adapter may wrap."""
    with _attaching:
        if hook in getattr(projection, f"_{kind}s").values():  # another thread was faster
            return
        for module in projection.modules():
            hooks = getattr(module, f"_{kind}s")
            for number in [number for number, each in hooks.items() if each is hook]:
                del hooks[number]
        getattr(projection, f"register_{kind}")(hook)


def _enter(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mixture = attention.mixture
    x = kwargs.get("hidden_states", args[0] if args else None)
    if isinstance(x, torch.fx.Proxy):
        kind = type(attention).__name__
        raise UserError(
            f"torch.fx cannot trace into {kind}, a mixture of heads, whose hooks are no part of its graph. "
            f"Name it as a leaf: create_feature_extractor(…, tracer_kwargs={{'leaf_modules': [{kind}]}})."
        )
    _follow(attention)
    frame = None if is_dynamo_compiling() else next(_frames_of(attention), None)
    _THREAD.value.innermost = call = Call(attention, x, _innermost_call(frame), frame)
    if not mixture.router.reads_queries:
        mixture.route(call, x)


def _read_queries(projection: nn.Module, args: tuple[Any, ...], queries: Tensor) -> None:
    call = _innermost_call()
    if call is not None:
        mixture = call.attention.mixture
        if projection is getattr(call.attention, mixture.queries):
            if call.gates is not None:
                raise _called_again(call)
            mixture.route(call, queries[..., : mixture.width])


def _called_again(call: Call) -> UserError:
    name = f"{type(call.attention).__name__}.{call.attention.mixture.queries}"
    return UserError(
        f"{name} is called more than once in a call of its attention, and which queries choose the heads is "
        "not known: in a hook of your own call its method forward, which runs no hooks; or convert the dense "
        'model anew with router="learned".'
    )


def _weight_heads(projection: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Multiply the heads [..., h·D], which the output projection reads, by their gates."""
    heads, *rest = args
    call = _innermost_call()
    if call is None or call.output is not projection:
        raise UserError(
            f"The output projection of a mixture of heads (a {type(projection).__name__}) is called, but its "
            "attention is not, whose hooks choose the heads: call the attention as a module; switch off the "
            "patch, the fused kernels or the tracing that take its place."
        )
    mixture = call.attention.mixture
    name = f"{type(call.attention).__name__}.{mixture.output}"
    if heads is call.input:
        raise UserError(
            f"output={mixture.output!r} reads no heads, but what its attention reads: convert the dense "
            "model anew, with the name of the output projection."
        )
    if heads.size(-1) != mixture.width:
        raise UserError(
            f"{name} reads {heads.size(-1)} of its heads' {mixture.width} values: tensor parallelism does "
            "not combine with mixtures of heads. Load the model on one device."
        )
    if call.gates is None:
        raise UserError(
            f"{name} is called twice, or before {mixture.queries}, by which its heads are chosen: switch off "
            "the fused kernels or the patch that replaces the attention's call."
        )
    gates = call.gates.to(heads.dtype).view(*heads.shape[:-1], mixture.num_heads, 1)
    call.gates = None
    call.weighted = True
    return ((heads.unflatten(-1, (mixture.num_heads, -1)) * gates).flatten(-2), *rest)


def _leave(attention: Any, args: tuple[Any, ...], output: Any) -> None:
    """End the call. If the call has failed, there is no output."""
    call = _innermost_call()
    if call is None or call.attention is not attention:
        return  # it failed before it began
    _THREAD.value.innermost = call.outer
    if output is None:
        return
    if not call.weighted:
        raise UserError(
            f"{type(attention).__name__} passed over its {attention.mixture.output}, so that its heads were "
            "not weighted: switch off the fused kernels or the patch that replaces the call."
        )
    if call.gates is not None:
        raise _called_again(call)
