#!/usr/bin/env bash
# Installs a wheel of this package into an empty environment, and uses it there from an empty folder.
#
#   bash scripts/try_wheel.sh WHEEL                      the layers
#   bash scripts/try_wheel.sh WHEEL hf                   and a model in transformers
#   bash scripts/try_wheel.sh WHEEL recipes,fairseq      and the commands, with the recipes and the papers' numbers
#   PYTHON=python3.13 bash scripts/try_wheel.sh WHEEL
set -euo pipefail
export PYTHONUTF8=1

[ -f "${1:-}" ] || { echo "try_wheel.sh: error: '${1:-}' is not a file: give a wheel (--help is in the script)." >&2; exit 1; }
wheel=$(readlink -f "$1") extras=${2:-}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/env"
python=$place/env/bin/python
"$python" -m pip install --quiet --disable-pip-version-check "$wheel${extras:+[$extras]}"
mkdir "$place/empty"
cd "$place/empty"
"$python" - <<'END'
import torch
from moa_fairseq.layers import MixtureOfAttention

layer = MixtureOfAttention(16, num_experts=4, experts_per_token=2, expert_dim=8, self_attention=True)
assert layer(torch.randn(2, 5, 16)).shape == (2, 5, 16)
END
case ,$extras, in *,hf,*)
  "$python" - <<'END'
import dataclasses

import torch
from moa_fairseq.integrations.mixture_transformer import MixtureTransformerConfig
from moa_fairseq.layers.transformer import StackSettings
from transformers import AutoModelForCausalLM

experts = {"num_experts": 4, "experts_per_token": 2, "expert_dim": 8}
stack = StackSettings("moa", experts, 20, 1, 16, 32, 2, 4, causal=True)
config = MixtureTransformerConfig(decoder_stack=dataclasses.asdict(stack), pad_token_id=1, eos_token_id=2)
AutoModelForCausalLM.from_config(config).save_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
assert model.generate(torch.tensor([[4, 5]]), max_new_tokens=3).size(0) == 1
END
esac
case ,$extras, in *,fairseq,*)
  "$place/env/bin/moa-fairseq" recipe quickstart_moa --dry-run --gpus 0 > plan.txt
  grep -q "arch moa_transformer_base" plan.txt
  "$place/env/bin/moa-fairseq" compare | grep -q SwitchHead
esac
echo "try_wheel.sh: ${wheel##*/}${extras:+[$extras]} works with $("$python" --version)"
