"""What a plugin library offers: its creators, their names and attributes."""

from __future__ import annotations

from edgepool.exporter.lower import PLUGIN_ATTRIBUTES
from edgepool.ops.registry import operators
from tests.plugins.conformance.host import FIELD_TYPES, Creator, Host
from tests.plugins.conformance.operations import OPERATIONS, Operation


def test_every_operator_has_one(host: Host) -> None:
    assert set(host.creators) == set(operators()) == set(OPERATIONS)


def test_identity_is_that_of_exported_nodes(creator: Creator, operation: Operation) -> None:
    assert creator.interface == creator.host.interface
    assert creator.version == PLUGIN_ATTRIBUTES["plugin_version"]
    if creator.interface == 2:  # what a registry sets
        creator.namespace = PLUGIN_ATTRIBUTES["plugin_namespace"]
    assert creator.namespace == PLUGIN_ATTRIBUTES["plugin_namespace"]
    plugin = creator.made(operation.attributes(operation.example))
    for same in (plugin, plugin.cloned(), plugin.attached(), plugin.recreated()):
        assert same.identity() == f"edgepool::{operation.name}:1"


def test_announces_the_attributes(creator: Creator, operation: Operation) -> None:
    """A parser passes on what is announced, and nothing else."""
    expected = [(a.name, FIELD_TYPES[a.kind]) for a in operation.operator.attributes]
    assert sorted(creator.fields) == sorted(expected)


def test_outputs_are_those_of_the_operator(creator: Creator, operation: Operation) -> None:
    plugin = creator.made(operation.attributes(operation.example))
    assert plugin.outputs() == len(operation.operator.outputs)
