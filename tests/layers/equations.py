"""The papers' equations, every expert and every head written out: what attentions are compared with.

Each takes a module in float64, query x [B, T, C], key y [B, S, C], a mask [T, S], a padding [B, S] and token
ids [B, T]; it gives [B, T, C].
"""

import math

import torch

HASH_BITS = 2**64


def drawn(module, scale=0.4):
    """The module with normal weights: biases, gates and small routers matter, too."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
    return module


def splitmix(number):
    """splitmix64 in Python's unbounded integers; the sign is the leading bit."""
    number = (number + 0x9E3779B97F4A7C15) % HASH_BITS
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % HASH_BITS
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % HASH_BITS
    number ^= number >> 31
    return number - HASH_BITS if number >= HASH_BITS // 2 else number


def hashed(ids, salt, experts, per_token):
    """The experts with the largest scrambled numbers, the largest first: ids [B, T] → [B, T, K]."""

    def choose(token):
        numbers = [splitmix(splitmix(token + salt) + expert) for expert in range(experts)]
        return sorted(range(experts), key=lambda expert: -numbers[expert])[:per_token]

    return torch.tensor([[choose(token) for token in row] for row in ids.tolist()])


def attend(q, k, v, mask, padding):
    """Softmax(q·kᵀ/√D)·v for q [B, H, T, D], k and v [B, H, S, D]; and the weights."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
    scores = scores if mask is None else scores + mask
    scores = (
        scores if padding is None else scores.masked_fill(padding[:, None, None], -math.inf)
    )
    weights = torch.softmax(scores, -1)
    return weights @ v, weights


def gated(module, results, x, heads=slice(None)):
    """Results [B, H, T, D] times σ(x W_θ) of these heads (arXiv 2505.06708)."""
    if module.head_gate is None:
        return results
    weight = module.head_gate.projection.weight.unflatten(
        0, (module.head_gate.heads, -1)
    )  # [heads, 1 or D, C]
    return results * torch.sigmoid(torch.einsum("btc,hdc->bhtd", x, weight[heads]))


def speeds(positions, length):
    """The angle per position of each of the R / 2 pairs in a text of so many positions, and YaRN's factor."""
    base = positions.base
    dim = positions.rotary_dim
    scaling = positions.scaling
    kind = None if scaling is None else scaling.rope_type
    if kind == "dynamic":
        trained = scaling.original_max_position_embeddings
        factor = scaling.factor
        base *= (factor * max(length, trained) / trained - (factor - 1)) ** (dim / (dim - 2))
    result = [base ** (-2 * j / dim) for j in range(dim // 2)]
    if kind == "linear":
        return [theta / scaling.factor for theta in result], 1.0
    if kind != "yarn":
        return result, 1.0
    # the pairs that turn 32 times and once in the trained length
    trained = scaling.original_max_position_embeddings
    ends = [
        dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (32, 1)
    ]
    low = max(math.floor(ends[0]), 0)
    high = min(math.ceil(ends[1]), dim - 1)
    share = [min(max((j - low) / (high - low), 0), 1) for j in range(dim // 2)]
    mixed = [theta * (1 - r + r / scaling.factor) for theta, r in zip(result, share)]
    return mixed, 0.1 * math.log(scaling.factor) + 1


def rotated(module, x):
    """Su et al. Eq. 34 on x [..., T, D] at positions 0, 1, …, pair by pair, where the module has it.

    Pair j of the R rotated numbers is (x_j, x_{j + R/2}); those behind them stay.
    """
    if module.positions is None:
        return x
    angles, factor = speeds(module.positions, x.size(-2))
    pairs = len(angles)
    columns = list(x.unbind(-1))
    for j, speed in enumerate(angles):
        angle = torch.arange(x.size(-2), dtype=x.dtype) * speed
        one = columns[j]
        other = columns[j + pairs]
        columns[j] = factor * (one * angle.cos() - other * angle.sin())
        columns[j + pairs] = factor * (one * angle.sin() + other * angle.cos())
    return torch.stack(columns, -1)


def placed(module, x, side):
    """Queries or keys [..., T, D], or all heads of them, normalised and rotated."""
    norm = module.query_key_norm
    if norm is None:
        return rotated(module, x)
    weight = getattr(norm, side).weight
    axes = (-3, -1) if norm.over_all_heads else -1

    def normalised(x):
        x = x / (x.square().mean(axes, keepdim=True) + 1e-6).sqrt()
        if weight is None:
            return x
        return x * (weight.view(-1, 1, x.size(-1)) if norm.over_all_heads else weight)

    return (
        normalised(rotated(module, x))
        if norm.after_rotation
        else rotated(module, normalised(x))
    )


def into_heads(x, weight, bias, heads):
    """x [B, T, C], weight [H·D, C] → [B, H, T, D]"""
    rows = x @ weight.t() if bias is None else x @ weight.t() + bias
    return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


def chosen_of(probs, per_token, token_hash, ids):
    """1 where a token has an expert, [B, T, E]."""
    if token_hash is not None:
        index = hashed(ids, int(token_hash.salt), probs.size(-1), per_token)
    else:
        index = probs.topk(per_token, -1).indices
    return torch.zeros_like(probs).scatter(-1, index, 1.0)


def moa_gates(module, x, ids):
    """MoA Eq. 7-9 and the controls of a router: [B, T, E], zero where an expert is not chosen."""
    router = module.router
    k = module.experts_per_token
    experts = module.num_experts
    logits = x @ router.projection.weight.t()
    probs = (
        torch.softmax(logits, -1) if router.activation == "softmax" else torch.sigmoid(logits)
    )
    chosen = chosen_of(probs, k, router.token_hash, ids)
    gate = probs * chosen
    if k < experts:
        total = gate.sum(-1, keepdim=True)
        gate = (
            gate / {"none": 1.0, "full": total, "detached": total.detach()}[router.renormalize]
        )
    if router.gate_values == "uniform":
        return chosen / k
    return gate if router.gate_values == "learned" else chosen / k + gate - gate.detach()


def moa(module, x, y, mask, padding, ids):
    """MoA Eq. 6, 10-12: Σ_i gate_i · concat_p(head p of expert i) · W_i^o, expert by expert."""
    return moa_with_weights(module, x, y, mask, padding, ids)[0]


def moa_with_weights(module, x, y, mask, padding, ids):
    """Also the attention weights of each expert's first head, [B, E, T, S]."""
    p = dict(module.named_parameters())
    heads = module.heads_per_expert
    gate = moa_gates(module, x, ids)
    width = heads * module.expert_dim
    own = module.key_heads > module.heads_per_expert
    total = 0.0
    weights = []
    for i in range(module.num_experts):
        rows = slice(i * width, (i + 1) * width) if own else slice(None)
        biases = [
            None if f"{n}_proj.bias" not in p else p[f"{n}_proj.bias"][rows] for n in "kv"
        ]
        k, v = (
            into_heads(y, p[f"{n}_proj.weight"][rows], bias, heads)
            for n, bias in zip("kv", biases)
        )
        bias = p["q_experts.bias"][i] if "q_experts.bias" in p else None
        q = placed(module, into_heads(x, p["q_experts.weight"][i], bias, heads), "queries")
        k = placed(module, k, "keys")
        results, weight = attend(q, k, v, mask, padding)
        results = gated(module, results, x, slice(i * heads, (i + 1) * heads))
        out = results.transpose(1, 2).flatten(2) @ p["out_experts.weight"][i]
        out = out + p["out_experts.bias"][i] if "out_experts.bias" in p else out
        total = total + gate[..., i : i + 1] * out
        weights.append(weight[:, 0])
    return total, torch.stack(weights, 1)


def switchhead(module, x, y, mask, padding, ids):
    """SwitchHead Eq. 7-10 for every expert densely."""
    p = dict(module.named_parameters())
    heads = module.num_heads
    experts = module.num_experts
    dim = module.head_dim

    def gates(router, inputs):  # [B, T, H, E]
        s = torch.sigmoid(inputs @ router.projection.weight.t()).unflatten(-1, (heads, experts))
        return s * torch.zeros_like(s).scatter(
            -1, s.topk(module.experts_per_token, -1).indices, 1.0
        )

    destination = gates(module.router, x) if module.router is not None else None
    source = module.router if module.shares_selection else module.source_router
    source = gates(source, y) if source is not None else None

    def into(letter, inputs, gate):
        weight = p[f"{letter}_proj.weight"]
        if letter not in module.experts:
            return into_heads(inputs, weight, None, heads)
        return torch.einsum(
            "bthe,btc,hedc->bhtd", gate, inputs, weight.view(heads, experts, dim, -1)
        )  # Eq. 9

    q = into("q", x, destination)
    k = into("k", y, source)
    v = into("v", y, source)
    q = placed(module, q, "queries")
    k = placed(module, k, "keys")
    results = gated(module, attend(q, k, v, mask, padding)[0], x)
    if "o" not in module.experts:
        return results.transpose(1, 2).flatten(2) @ p["out_proj.weight"].t()
    weight = p["out_proj.weight"].view(heads, experts, dim, -1)
    return torch.einsum("bthe,bhtd,hedc->btc", destination, results, weight)  # Eq. 10


def moh_gates(module, x, ids):
    """Gates [B, T, H] by MoH Eq. 5-6, or the released code line for line; P; the choice of routed heads."""
    shared_heads = module.shared_heads
    k = module.experts_per_token
    heads = module.num_heads
    if module.router.reads_queries:  # section 4.4, gates straight through
        norms = module.q_proj(x).unflatten(-1, (heads, -1))[..., shared_heads:, :].norm(dim=-1)
        gates = torch.softmax(norms / norms.std(-1, keepdim=True).detach(), -1)
        mask = chosen_of(gates, k, None, ids)
        ones = torch.ones_like(x[..., :shared_heads])
        through = {"routed": 1.0, "chosen": mask}[module.router.straight_through]  # Eq. 10
        return torch.cat([ones, mask + through * (gates - gates.detach())], -1), gates, mask
    two_stages = 0 < shared_heads < heads
    sizes = [
        heads - shared_heads,
        shared_heads if shared_heads > 1 else 0,
        2 if two_stages else 0,
    ]
    routed, shared, stage = (x @ module.router.projection.weight.t()).split(sizes, -1)
    shared = torch.softmax(shared if shared_heads != 1 else torch.zeros_like(x[..., :1]), -1)
    gates = torch.softmax(routed, -1)
    mask = chosen_of(gates, k, module.router.token_hash, ids)
    alpha = torch.softmax(stage, -1) if two_stages else torch.ones_like(x[..., :2])
    if module.router.scaling == "paper":
        return (
            torch.cat([alpha[..., :1] * shared, alpha[..., 1:] * gates * mask], -1),
            gates,
            mask,
        )
    routed_gates = gates * mask
    denominator = routed_gates.sum(-1, keepdim=True).clamp(min=torch.finfo(gates.dtype).eps)
    routed_gates = routed_gates / denominator * k
    alpha = alpha * 2 if two_stages else alpha
    return (
        torch.cat([alpha[..., :1] * shared * shared_heads, alpha[..., 1:] * routed_gates], -1),
        gates,
        mask,
    )


def moh(module, x, y, mask, padding, ids):
    """MoH Eq. 4: every head, weighted by its gate."""
    return dense(module, x, y, mask, padding, ids, moh_gates(module, x, ids)[0])


def dense(module, x, y, mask, padding, ids, weight=None):
    """fairseq's attention, its heads times weight [B, T or 1, H]; head h reads key head h mod G."""
    p = {name: getattr(module, f"{name}_proj") for name in ("q", "k", "v", "out")}
    q = into_heads(x, p["q"].weight, p["q"].bias, module.num_heads)
    k, v = (into_heads(y, p[n].weight, p[n].bias, module.key_heads) for n in "kv")
    q = placed(module, q, "queries")
    k = placed(module, k, "keys")
    k, v = (z[:, [h % module.key_heads for h in range(module.num_heads)]] for z in (k, v))
    results = gated(module, attend(q, k, v, mask, padding)[0], x).transpose(
        1, 2
    )  # [B, T, H, D]
    results = results if weight is None else results * weight.unsqueeze(-1)
    return p["out"](results.flatten(2))


def latent(module, x, y, mask, padding, ids):
    """DeepSeek-V2 Eq. 9-19 head by head: q_i = [q^C_i; q^R_i], k_i = [k^C_i; k^R], values of the latent."""
    size = module.rotary_dim
    queries = module.q_proj.weight.unflatten(0, (module.num_heads, -1))  # [H, R + D, C]
    up = [
        z.weight.unflatten(0, (module.num_heads, -1)) for z in (module.k_proj, module.v_proj)
    ]  # [H, D, d_c]
    c = y @ module.latent_proj.weight[size:].t()
    shared = y @ module.latent_proj.weight[:size].t()
    if module.latent_norm is not None:
        c = c / (c.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.latent_norm.weight
    heads = []
    for q, of_keys, of_values in zip(queries, *up):
        q = torch.cat([x @ q[size:].t(), rotated(module, x @ q[:size].t())], -1).unsqueeze(1)
        k = torch.cat([c @ of_keys.t(), rotated(module, shared)], -1).unsqueeze(1)
        heads.append(attend(q, k, (c @ of_values.t()).unsqueeze(1), mask, padding)[0])
    results = gated(module, torch.cat(heads, 1), x)
    return module.out_proj(results.transpose(1, 2).flatten(2))


def namoh(module, x, y, mask, padding, ids):
    """NAMOH token by token: a query reads the tokens that chose the same head; zeros if there are none."""
    p = dict(module.named_parameters())
    gate = moa_gates(module, x, ids)
    source = module.source_router or module.router
    chosen = chosen_of(
        torch.softmax(y @ source.projection.weight.t(), -1), module.experts_per_token, None, ids
    )
    none = x.new_zeros(module.num_experts, 1)
    q_bias, k_bias, v_bias, out_bias = (
        p.get(f"{name}.bias", none) for name in ("q_experts", "k_proj", "v_proj", "out_experts")
    )

    def head(i, b, t):
        seen = chosen[b, :, i] > 0
        seen = seen if mask is None else seen & (mask[t] == 0)
        seen = seen if padding is None else seen & ~padding[b]
        q = placed(module, x[b] @ p["q_experts.weight"][i].t() + q_bias[i], "queries")[t]
        k = placed(module, y[b] @ p["k_proj.weight"][i].t() + k_bias[i], "keys")[seen]
        v = y[b, seen] @ p["v_proj.weight"][i].t() + v_bias[i]
        result = torch.softmax(k @ q / q.size(0) ** 0.5, 0) @ v
        result = gated(
            module, result.view(1, 1, 1, -1), x[b, t].view(1, 1, -1), slice(i, i + 1)
        ).flatten()
        return gate[b, t, i] * (result @ p["out_experts.weight"][i] + out_bias[i])

    tokens = [(b, t) for b in range(x.size(0)) for t in range(x.size(1))]
    total = [
        sum(head(i, *at) for i in range(module.num_experts) if gate[(*at, i)] != 0)
        for at in tokens
    ]
    return torch.stack(total).view_as(x)


def gqe_gates(module, x):
    """[B, T, G, M]: the chosen heads' probabilities, divided by their sum; and the chosen, [B, T, G, k]."""
    router = module.router
    groups = module.groups
    probs = torch.softmax((x @ router.projection.weight.t()).unflatten(-1, (groups, -1)), -1)
    index = probs.topk(router.experts_per_token, -1).indices
    # K = M: nothing is chosen
    index = index.sort(-1).values if index.size(-1) == probs.size(-1) else index
    gate = probs * torch.zeros_like(probs).scatter(-1, index, 1.0)
    total = gate.sum((-1, -2), keepdim=True)
    divisor = {"full": total, "detached": total.detach(), "none": torch.ones_like(total)}[
        router.renormalize
    ]
    return gate / divisor, index


def gqe(module, x, y, mask, padding, ids):
    """GQE head by head: Concat(o, Σ w·o, s)·W_O, or each head times a matrix of its own."""
    p, (gate, index) = dict(module.named_parameters()), gqe_gates(module, x)
    shared = module.shared_heads
    groups = module.groups
    size = module.router.num_experts

    def linear(rows, name, at=slice(None), transposed=False):
        weight = p[f"{name}.weight"][at]
        bias = p.get(f"{name}.bias")
        out = rows @ (weight if transposed else weight.t())
        return out if bias is None else out + bias[at]

    k, v = (
        into_heads(y, p[f"{n}.weight"], p.get(f"{n}.bias"), groups)
        for n in ("k_proj", "v_proj")
    )
    k = placed(module, k, "keys")

    def head(number, keys, values):
        q = placed(module, linear(x, "q_experts", number), "queries").unsqueeze(1)
        found = attend(q, keys.unsqueeze(1), values.unsqueeze(1), mask, padding)[
            0
        ]  # [B, 1, T, D]
        return gated(module, found, x, slice(number, number + 1)).squeeze(1)

    always = [head(0, k.mean(1), v.mean(1))] if shared else []
    results = [
        [head(shared + g * size + m, k[:, g], v[:, g]) for m in range(size)]
        for g in range(groups)
    ]
    if module.output == "experts":
        total = sum(linear(one, "out_experts", 0, True) for one in always)
        for g, m in ((g, m) for g in range(groups) for m in range(size)):
            out = linear(results[g][m], "out_experts", shared + g * size + m, True)
            total = total + gate[..., g, m, None] * out
        return total
    weighted = [
        [gate[..., g, m, None] * results[g][m] for m in range(size)] for g in range(groups)
    ]
    slots = list(always)
    for g in range(groups):
        # [B, T, M, D]
        heads = torch.stack(weighted[g] if module.output == "weighted" else results[g], -2)
        for rank in range(index.size(-1)):
            place = index[..., g, rank, None, None].expand(*heads.shape[:2], 1, heads.size(-1))
            slots.append(heads.gather(2, place).squeeze(2))
    if module.output == "paper":
        slots.append(sum(one for group in weighted for one in group))
    return linear(torch.cat(slots, -1), "out_proj")
