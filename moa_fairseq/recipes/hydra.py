"""The same experiment for `fairseq-hydra-train`: its config, derived from the recipe's fairseq-train line.

fairseq itself turns a command line into the config that it trains with; what differs from its defaults is
written down. hydra composes a config before the plugin is imported, so that nobody fills in defaults for
what only the plugin knows: its models, criterions and tasks are written with all their values.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Optional

import yaml

from moa_fairseq.files import atomic_write
from moa_fairseq.recipes.preflight import check_train_command, full_config

# Sections whose class is chosen by name.
CHOSEN = ("task", "model", "criterion", "optimizer", "lr_scheduler")
# Defaults of these depend on the machine, and the batch on them.
ALWAYS = {"distributed_training": ("distributed_world_size",)}
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
    full = full_config(args)
    config: Dict[str, Any] = {}
    for field in dataclasses.fields(FairseqConfig):
        section, values = field.name, full._get_node(field.name)
        if isinstance(values, argparse.Namespace) or values is None or not hasattr(values, "_get_node"):
            values = getattr(values, "_val", values)
        if section == "model":
            config[section] = _model_values(args, values)
        elif OmegaConf.is_config(values):
            plain = OmegaConf.to_container(values, resolve=True, enum_to_str=True)
            kept = _chosen(section, plain) if section in CHOSEN else _changed(section, plain, _default(field))
            if kept:
                config[section] = kept
    return config


def _default(field: dataclasses.Field) -> Any:
    """fairseq's default of a fixed section: its builds hold a class, an instance or a factory there."""
    made_by = field.default if field.default is not dataclasses.MISSING else field.default_factory
    return made_by() if callable(made_by) else made_by


def _changed(section: str, values: Dict[str, Any], default: Any) -> Dict[str, Any]:
    """The values that are no default and do not follow from another section."""
    kept = {}
    for key, value in values.items():
        standard = _plain(getattr(default, key, None))
        if key in ALWAYS.get(section, ()) or (value != standard and not _follows(standard)):
            kept[key] = value
    return kept


def _chosen(section: str, values: Dict[str, Any]) -> Dict[str, Any]:
    """A section with a class: of fairseq's own what is no default, of the plugin's everything."""
    name = values["_name"]
    dataclass = _dataclass(section, name)
    default = dataclass() if dataclass else None
    if default is not None and _class_of(section, name).__module__.startswith("fairseq."):
        return {"_name": name, **_changed(section, values, default)}
    standards = {key: _plain(getattr(default, key, None)) for key in values}
    return {key: standards[key] if _follows(standards[key]) else value for key, value in values.items()}


def _model_values(args: argparse.Namespace, values: Any) -> Dict[str, Any]:
    """The model's own flags, each with its value from the command line or the arch function."""
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
    from omegaconf import OmegaConf

    if OmegaConf.is_config(values):  # a model with a dataclass
        return OmegaConf.to_container(values, resolve=True, enum_to_str=True)
    parser, of_arch = argparse.ArgumentParser(), argparse.Namespace()
    ARCH_MODEL_REGISTRY[args.arch].add_args(parser)
    ARCH_CONFIG_REGISTRY[args.arch](of_arch)
    own = {action.dest for action in parser._actions if action.dest != "help"} | set(vars(of_arch))
    return {
        "_name": args.arch,
        **{key: _plain(getattr(args, key)) for key in sorted(own) if hasattr(args, key)},
    }


def _dataclass(section: str, name: str) -> Optional[type]:
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    if section == "task":
        return TASK_DATACLASS_REGISTRY.get(name)
    return REGISTRIES[section]["dataclass_registry"].get(name)


def _class_of(section: str, name: str) -> type:
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_REGISTRY

    return TASK_REGISTRY[name] if section == "task" else REGISTRIES[section]["registry"][name]


def _plain(value: Any) -> Any:
    """Enumerations by their text, tuples as lists: what YAML can hold."""
    from enum import Enum

    if isinstance(value, Enum):
        return str(value.value)
    return list(value) if isinstance(value, tuple) else value


def _follows(standard: Any) -> bool:
    """True for a default such as ${common.fp16}, which hydra takes from there."""
    return isinstance(standard, str) and standard.startswith("${")
