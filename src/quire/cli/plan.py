"""Plan how a model runs on less memory than it needs, before it runs.

quire plan hardware MODEL --output machine.json
quire plan offload MODEL --hardware machine.json --only-weights --output policy.json
quire plan offload MODEL --plan.gpu 16GiB --plan.cpu 200GiB --plan.disk 1500GiB --input-tokens 512 --output-tokens 32

hardware measures this machine for a model: reads and writes of the disk in --folder, copies in memory, the products and
the attention of a layer, and the output head. Then it generates with some of the weights on the disk, and fits what the
parts do not explain. It takes some minutes, and more if other programs are busy.

offload places weights, cache and activations on the tiers by a linear program, for each size of micro-batch and block.
It prints the placement with the highest throughput: its shares, the predicted tokens per second, the memory of every
tier, and what limits it. If nothing fits, it prints the missing memory. --hardware is a file of quire plan hardware, or
t4: the machine of FlexGen's paper, with the constants of its public code. With t4 MODEL may also be a config.json
without weights. --output writes the policy as JSON. --plot draws throughput over block size, and over the seconds until
a block is done.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from quire.arguments import Arguments
from quire.cli import plan_hardware, plan_offload
from quire.config import add_flags
from quire.errors import ConfigError

ACTIONS: dict[str, ModuleType] = {"offload": plan_offload, "hardware": plan_hardware}
SECTIONS = ("model", "cache", "retain", "offload", "attention", "scheduler", "runtime", "plan")


def add_arguments(parser: Arguments) -> None:
    """The arguments of the command. Flags of one action that are not given leave no trace in the namespace."""
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help="offload or hardware")
    parser.add_argument("model", metavar="MODEL", help="folder, .gguf file, hub id, smollm2, or a config.json")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the policy, or the profile, as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings; flags override it")
    for name, action in ACTIONS.items():
        action.add_arguments(parser.add_argument_group(name))
    add_flags(parser, SECTIONS)


def run(args: argparse.Namespace) -> int:
    """Plans or measures, and prints the result."""
    chosen = ACTIONS[args.action]
    for name, other in ACTIONS.items():
        for flag in other.DEFAULTS:
            if flag not in chosen.DEFAULTS and flag in args:
                raise ConfigError(f"--{flag.replace('_', '-')} is for quire plan {name}, not for {args.action}")
    found: int = chosen.run(argparse.Namespace(**{**chosen.DEFAULTS, **vars(args)}))
    return found
