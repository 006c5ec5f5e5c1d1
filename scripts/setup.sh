#!/usr/bin/env bash
# Makes a Python environment in which `fairseq-train --user-dir moa_fairseq` and `moa-fairseq` work.
#
#   bash scripts/setup.sh              in .venv of this project, or in the active virtual environment
#   PYTHON=python3.12 bash scripts/setup.sh
#   bash scripts/setup.sh --integrations
#                                      transformers and timm without fairseq, in .venv-integrations: transformers 5
#                                      cannot be imported beside the torchaudio that fairseq brings. Python may be
#                                      newer here. TRANSFORMERS="transformers==4.48.3" makes .venv-integrations-4.48.3
#                                      as well, which shares all but that version.
#   bash scripts/setup.sh --zero-shot  lm_eval beside all of this, in .venv-zero-shot: it shares what the ordinary
#                                      environment has, whose pinned packages stay as they are.
#
# On a Mac or aarch64, where PyPI has no wheel of fairseq, fairseq is built from source, which takes a C++ compiler and some
# minutes; FAIRSEQ=source asks for that elsewhere.
# A torch that is already there is kept (that of the Python it is made with is shared, in a virtual environment
# too), else torch==2.13.0 is installed; TORCH="torch==2.7.1" asks for another. A fairseq that is already there
# is kept too. Running it again takes no time; after a change of the requirements it installs what is new.
set -euo pipefail
export PYTHONSAFEPATH=1 PYTHONUTF8=1   # nothing is imported from the working directory

[ "${1:-}" = "--help" ] && { sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 0; }
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd -P)   # also through a link to it
torch_pin=${TORCH:-torch==2.13.0}

fail() { echo "setup.sh: error: $*" >&2; exit 1; }
case $# in 0) ;; 1) [[ $1 =~ ^--(integrations|zero-shot)$ ]] ;; *) false ;; esac \
  || fail "'$*' is neither --integrations nor --zero-shot: give one of them, or nothing (--help explains them)."

# refuse_foreign ENVIRONMENT: one that is linked or copied from another checkout would import this one from then on, and
# what is no environment would be deleted when one is made in its place.
refuse_foreign() {
  local stamp=$1/.moa_fairseq_setup link other= remedy
  remedy="To make one of its own, delete it here (of a link that takes the link alone), and run this again: rm -rf '$1'"
  if [ ! -e "$stamp" ]; then
    if [ -L "$1" ]; then
      fail "$1 is a link to $(readlink "$1"), a folder that setup.sh did not make and would change. $remedy."
    fi
    if [ "$1" != "${VIRTUAL_ENV:-}" ] && [ ! -e "$1/pyvenv.cfg" ] && [ -n "$(ls -A "$1" 2>/dev/null)" ]; then
      fail "$1 exists and is not a virtual environment: move it to another place, and run this again."
    fi
    for link in "$1"/lib/python*/site-packages/moa_fairseq; do # of a set-up that did not end
      if [ -L "$link" ]; then other=$(dirname "$(readlink "$link")"); fi
    done
    if [ -z "$other" ]; then return 0; fi
  else
    other=$(sed -n 2p "$stamp")
    if [ ! -d "$other" ]; then # as it was written once, with more behind it on this line
      other=${other%% torch*}
      other=${other%% /*}
    fi
  fi
  if [ "$other" -ef "$root" ]; then return 0; fi
  if [ "$1" = "${VIRTUAL_ENV:-}" ]; then
    remedy="To make one of its own, deactivate this one and run this again"
  fi
  fail "$1 was set up for ${other:-another checkout}, whose commands would run the code of $root from then on. $remedy."
}

# find_python [NEWEST]: fairseq has wheels for 3.11 and 3.12
find_python() {
  local candidate candidates=(python3 python3.12 python3.11 python) newest=${1:-12}
  for candidate in "${PYTHON:-${candidates[@]}}"; do
    if "$candidate" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $newest))" 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 to 3.$newest found${PYTHON:+ at PYTHON=$PYTHON}: install one, or name it with PYTHON=/path/to/python3.11."
}

# make_beside VENV BASE PACKAGES…: an environment that shares what the one with the Python BASE has, and has PACKAGES
# of its own in front of that
make_beside() {
  local venv=$1 base=$2 python=$1/bin/python wanted site
  shift 2
  wanted=$(cat "$root/setup.py" "$root/scripts/setup.sh" | cksum; echo "$root"; echo "$base $*")
  [ "$(cat "$venv/.moa_fairseq_setup" 2>/dev/null)" = "$wanted" ] && return
  "$base" -m venv --clear "$venv" || fail "cannot make a virtual environment (Debian: apt install python3-venv)."
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  (cd / && "$base" -c 'import site; print(*site.getsitepackages(), sep="\n")') > "$site/shared_with_the_project.pth"
  "$python" -m pip install --quiet --disable-pip-version-check "$@" || fail "pip could not install $*."
  ln -sfn "$root/moa_fairseq" "$site/moa_fairseq"
  printf '%s' "$wanted" > "$venv/.moa_fairseq_setup"
  echo "setup.sh: ready. Activate it with: source $venv/bin/activate"
}

if [ "${1:-}" = "--integrations" ] && [ -n "${TRANSFORMERS:-}" ]; then
  venv=$root/.venv-integrations-${TRANSFORMERS##*==}
  refuse_foreign "$venv"
  TRANSFORMERS='' bash "$root/scripts/setup.sh" --integrations
  make_beside "$venv" "$root/.venv-integrations/bin/python" "$TRANSFORMERS"
  exit 0
fi
if [ "${1:-}" = "--integrations" ]; then
  venv=$root/.venv-integrations
  python=$venv/bin/python
  pins=$root/scripts/requirements-integrations.txt
  refuse_foreign "$venv"
  wanted=$(cat "$pins" "$root/scripts/setup.sh" | cksum; echo "$root"; echo "$torch_pin")
  [ "$(cat "$venv/.moa_fairseq_setup" 2>/dev/null)" = "$wanted" ] && exit 0
  "$python" -m pip --version >/dev/null 2>&1 || "$(find_python 14)" -m venv --clear "$venv" \
    || fail "cannot make a virtual environment (Debian: apt install python3-venv)."
  for words in "$torch_pin" "--requirement $pins"; do
    # shellcheck disable=SC2086  # an option and its value
    "$python" -m pip install --quiet --disable-pip-version-check $words || fail "pip could not install $words."
  done
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  # The package index's torchvision is built for CUDA. Beside another torch its operators are not there, and without
  # their names neither timm nor transformers can be imported. Nothing here calls them.
  if ! (cd / && "$python" -c 'import torchvision') 2>/dev/null; then
    { echo 'import torch'
      echo 'named = torch.library.Library("torchvision", "DEF")'
      for name in nms qnms; do
        echo "named.define('$name(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')"
      done
      cat "$site/torchvision/__init__.py"; } > "$venv/torchvision.py"
    mv "$venv/torchvision.py" "$site/torchvision/__init__.py"
  fi
  ln -sfn "$root/moa_fairseq" "$site/moa_fairseq"
  printf '%s' "$wanted" > "$venv/.moa_fairseq_setup"
  echo "setup.sh: ready. Activate it with: source $venv/bin/activate"
  exit 0
fi
if [ "${1:-}" = "--zero-shot" ]; then
  venv=$root/.venv-zero-shot
  refuse_foreign "$venv"
  bash "$root/scripts/setup.sh"
  make_beside "$venv" "${VIRTUAL_ENV:-$root/.venv}/bin/python" -e "$root[zero-shot]"
  exit 0
fi
if [ -n "${VIRTUAL_ENV:-}" ]; then
  venv=$VIRTUAL_ENV
else
  venv=$root/.venv
fi
refuse_foreign "$venv"
python=$venv/bin/python made=
has() { (cd / && "$python" -c "import $1") 2>/dev/null; }
# other scripts would take a .venv without torch for a finished one
trap '[ -z "$made" ] || has torch || rm -rf "$venv"' EXIT
stamp=$venv/.moa_fairseq_setup
wanted=$(cat "$root/setup.py" "$root/scripts/requirements.txt" "$root/scripts/setup.sh" | cksum; echo "$root"; echo "$torch_pin")
case ${FAIRSEQ:-$(uname -sm)} in "Linux x86_64") from_source= ;; *) from_source=yes ;; esac
if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && [ -x "$venv/bin/moa-fairseq" ]; then
  exit 0
fi

if "$python" -m pip --version >/dev/null 2>&1; then
  :
elif [ -n "${VIRTUAL_ENV:-}" ] || "$python" -c '' 2>/dev/null; then
  # yours (uv makes such environments): add pip, touch nothing else
  "$python" -m ensurepip >/dev/null 2>&1 && "$python" -m pip --version >/dev/null 2>&1 \
    || fail "the environment $venv has no pip: install pip into it (Debian: apt install python3-venv), or deactivate or delete it."
else
  base=$(find_python)
  share=$(cd / && "$base" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null) || share=
  echo "setup.sh: making $venv with $base${share:+, sharing its torch}"
  made=yes
  "$base" -m venv --clear ${share:+--system-site-packages} "$venv" \
    || fail "cannot make a virtual environment (Debian: apt install python3-venv)."
  # what the base has of a virtual environment of its own, the new one does not see
  if [ -n "$share" ] && ! has torch; then
    echo "$share" > "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/shared_torch.pth"
  fi
fi
install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

if has torch; then
  echo "setup.sh: keeping $("$python" -c 'import torch; print("torch", torch.__version__)')"
else
  echo "setup.sh: installing $torch_pin"
  install "$torch_pin" || fail "pip could not install $torch_pin: see docs/troubleshooting.md (V100s need another build)."
fi

if has fairseq && ! "$python" -m pip show -q ve-fairseq 2>/dev/null; then
  echo "setup.sh: keeping the fairseq that is there; installing only what the plugin lacks"
  install setuptools && install --no-build-isolation -e "$root[recipes,test]"
else
  pins=$root/scripts/requirements.txt
  if [ -n "$from_source" ]; then
    built=$(mktemp -d)
    if ! has fairseq; then
      echo "setup.sh: building fairseq (ve-fairseq) from source"
      bash "$root/scripts/fairseq_wheel.sh" "$built" "$python" || fail "fairseq was not built; the lines above say why."
    fi
    sed '/^ve-fairseq==/,/[^\\]$/d' "$pins" > "$built/requirements.txt"
    pins=$built/requirements.txt
  fi
  echo "setup.sh: installing fairseq (ve-fairseq) and the other requirements, pinned and hashed"
  install --no-deps --require-hashes -r "$pins" \
    || fail "the pinned requirements could not be installed; the lines above say which."
  [ -z "$from_source" ] || has fairseq || install --no-deps "$built"/*.whl
  install --no-deps --no-build-isolation -e "$root"
fi

# fairseq looks for a relative --user-dir in the working directory and beside itself: with this link
# `--user-dir moa_fairseq` works from every directory.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
ln -sfn "$root/moa_fairseq" "$site/moa_fairseq"
has moa_fairseq || { (cd / && "$python" -c 'import moa_fairseq; moa_fairseq.register()'); fail "moa_fairseq cannot be imported; see above."; }
printf '%s' "$wanted" > "$stamp"
echo "setup.sh: ready. Activate it with: source $venv/bin/activate"
