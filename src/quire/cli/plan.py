"""Plan how a model runs before it runs: on less memory than it needs, or on which instances of a cluster.

quire plan hardware MODEL --output machine.json
quire plan offload MODEL --hardware machine.json --only-weights --output policy.json
quire plan offload MODEL --plan.gpu 16GiB --plan.cpu 200GiB --plan.disk 1500GiB --input-tokens 512 --output-tokens 32
quire plan placement MODEL --cluster.file cluster.toml --trace requests.csv --slo.ttft 0.4 --slo.tpot 0.1 --rate 20 \\
    --output placement.json
quire plan auto MODEL --plan.memory 2GiB --plan.quality 0.01 --trace requests.csv --slo.ttft 2 --slo.tpot 0.1 \\
    --text sample.txt --output quire.toml

hardware measures this machine for a model: reads and writes of the disk in --folder, copies in memory, the products and
the attention of a layer, and the output head. Then it generates with some of the weights on the disk, and fits what the
parts do not explain. It takes some minutes, and more if other programs are busy. quire bench latency --tiers is the
same measurement.

offload places weights, cache and activations on the tiers by a linear program, for each size of micro-batch and block.
It prints the placement with the highest throughput: its shares, the predicted tokens per second, the memory of every
tier, and what limits it. If nothing fits, it prints the missing memory. --hardware is a file of quire plan hardware, or
t4: the machine of FlexGen's paper, with the constants of its public code. With t4 MODEL may also be a config.json
without weights. --output writes the policy as JSON. --plot draws throughput over block size, and over the seconds until
a block is done.

placement finds the instances with which all machines serve most requests of a trace within the latency targets, or with
--rate as many as that needs of those that serve most per GPU or machine: how many compute prompts, decode or do both,
and how each is divided. Options are simulated. Those on GPUs have modelled latencies, and MODEL may be a name such as
opt-66b; those on cores have the latencies of --latency, or of kept models of quire bench latency. The best placement is
simulated again as a whole. --output writes it for quire serve --cluster.placement and for quire simulate.

auto finds the settings that serve most requests of a trace within --plan.memory, of those that lose at most
--plan.quality: weights, codec, outlier slots, retention, roles and, of the best of these, the most running sequences.
With --tiers.disk or --tiers.memory it also finds whether to use that. Any other setting that is given is not searched.
Quality is measured with --text, and the steps of engines with engines, within --plan.seconds (default: 300). Both are
kept for later plans of this model, and windows that quire eval ppl has read count, too. What is not measured follows
from its parts, and says so. With --hardware NAME it plans for GPUs that need not be here, parallelism included, and all
of it is modelled. --plot draws goodput over quality. --output writes a file for quire serve --config.
"""

from __future__ import annotations

import argparse

from quire.arguments import Arguments
from quire.cli import plan_auto, plan_hardware, plan_offload, plan_placement, shared
from quire.config import add_flags

ACTIONS = {
    "offload": plan_offload,
    "hardware": plan_hardware,
    "placement": plan_placement,
    "auto": plan_auto,
}

SECTIONS = ("model", "cache", "retain", "offload", "attention", "scheduler", "runtime")
"""Settings of every plan. Plans for requests also have settings of tiers and latency targets."""


def add_arguments(parser: Arguments) -> None:
    """The arguments of every plan."""
    parser.add_argument("model", metavar="MODEL", help="folder, .gguf file, hub id, smollm2, or a config.json")
    parser.add_file("--output", text="write the result: JSON, with auto TOML")
    parser.add_switch("--json", text="print JSON")
    shared.add_config(parser)
    add_flags(parser, SECTIONS)


def run(args: argparse.Namespace) -> int:
    """Plans or measures, and prints the result."""
    found: int = ACTIONS[args.action].run(args)
    return found
