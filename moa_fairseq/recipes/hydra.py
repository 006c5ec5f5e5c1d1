"""The same experiment for `fairseq-hydra-train`: its config, derived from the recipe's fairseq-train line.

fairseq itself turns a command line into the config that it trains with; what differs from its defaults is
written down. hydra composes a config before the plugin is imported, so that nobody fills in defaults for
what only the plugin knows: its models, criterions and tasks are written with all their values.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import yaml

from moa_fairseq.files import atomic_write
from moa_fairseq.recipes.preflight import check_train_command, full_config

# Sections whose class is chosen by name.
CHOSEN = ("task", "model", "criterion", "optimizer", "lr_scheduler")
PATHS = {"common": ("user_dir",), "checkpoint": ("save_dir",), "task": ("data",)}


def write_hydra(command: List[str], folder: Path, name: str, header: str) -> List[str]:
    """Write `<folder>/<name>.yaml` for a fairseq-train line; returns the fairseq-hydra-train line.

    header: comment on top. Paths become absolute, because hydra changes the working directory. Raises
    UserError when fairseq does not accept the command.
    """
    config = hydra_config(command)
    for section, names in PATHS.items():
        for key in names:
            config[section][key] = str(Path(config[section][key]).resolve())
    config = {"hydra": {"run": {"dir": str(Path(config["checkpoint"]["save_dir"]).parent)}}, **config}
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        stream.write("".join(f"# {line}\n" for line in header.splitlines()))
        yaml.safe_dump(config, stream, sort_keys=False, allow_unicode=True)
    return ["fairseq-hydra-train", "--config-dir", str(folder.resolve()), "--config-name", name]


def hydra_config(command: List[str]) -> Dict[str, Any]:
    """The config of a `fairseq-train` line as plain data, without fairseq's own defaults."""
    from fairseq.dataclass.configs import FairseqConfig
    from omegaconf import OmegaConf

    args = check_train_command(command)
    full, defaults = full_config(args), _plain(OmegaConf.structured(FairseqConfig))
    config: Dict[str, Any] = {}
    for section, default in defaults.items():
        values = full[section]
        if section == "model":
            config[section] = _plain(values) if OmegaConf.is_config(values) else _model_values(args)
        elif OmegaConf.is_config(values):
            values = _plain(values, resolve=True)
            known = section not in CHOSEN
            if not known:
                known, default = _registered(section, values["_name"])
            config[section] = _written(values, default or {}, known)
    # Its default depends on the machine, and the batch on it.
    config["distributed_training"]["distributed_world_size"] = (
        full.distributed_training.distributed_world_size
    )
    return {section: values for section, values in config.items() if values}


def _plain(config: Any, resolve: bool = False) -> Dict[str, Any]:
    """A config as YAML can hold it; resolve: with values in place of references such as ${common.fp16}."""
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(config, resolve=resolve, enum_to_str=True)
    return plain


def _written(values: Dict[str, Any], defaults: Dict[str, Any], known: bool) -> Dict[str, Any]:
    """What has to be written of a section.

    known: hydra fills in the defaults, so that only other values are written; else all of them. A default
    that refers to another section is left to hydra.
    """
    written = {}
    for key, value in values.items():
        default = defaults.get(key)
        refers = isinstance(default, str) and default.startswith("${")
        if not known:
            written[key] = default if refers else value
        elif value != default and not refers:
            written[key] = value
    return written


def _registered(section: str, name: str) -> Tuple[bool, Dict[str, Any]]:
    """Whether hydra knows the class of that name, and the defaults of its settings."""
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
    from omegaconf import OmegaConf

    classes, settings = TASK_REGISTRY, TASK_DATACLASS_REGISTRY
    if section != "task":
        classes, settings = (REGISTRIES[section][kind] for kind in ("registry", "dataclass_registry"))
    found: Optional[type] = settings.get(name)
    if found is None:
        return False, {}
    return classes[name].__module__.startswith("fairseq."), _plain(OmegaConf.structured(found))


def _model_values(args: argparse.Namespace) -> Dict[str, Any]:
    """The flags of a model without settings of its own, each with its value from the line or the arch."""
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    parser, of_arch = argparse.ArgumentParser(), argparse.Namespace()
    ARCH_MODEL_REGISTRY[args.arch].add_args(parser)
    ARCH_CONFIG_REGISTRY[args.arch](of_arch)
    own = {action.dest for action in parser._actions if action.dest != "help"} | set(vars(of_arch))
    values = {key: getattr(args, key) for key in sorted(own) if hasattr(args, key)}
    lists = {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
    return {"_name": args.arch, **values, **lists}
