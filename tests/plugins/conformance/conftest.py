"""The plugin library, through each interface; every operator."""

from __future__ import annotations

import pytest

from tests.plugins import emulated
from tests.plugins.conformance import build
from tests.plugins.conformance.host import Creator, Host
from tests.plugins.conformance.operations import OPERATIONS, Operation


@pytest.fixture(scope="session")
def v3() -> Host:
    """IPluginV3, of TensorRT 10 and later."""
    return Host(build.plugin_library(emulated.KIND, 3), 3)


@pytest.fixture(scope="session")
def v2() -> Host:
    """IPluginV2DynamicExt, of TensorRT 8."""
    return Host(build.plugin_library(emulated.KIND, 2), 2)


@pytest.fixture(scope="session", params=["v3", "v2"])
def host(request: pytest.FixtureRequest) -> Host:
    """Each of both."""
    host: Host = request.getfixturevalue(request.param)
    return host


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> Operation:
    return OPERATIONS[request.param]


@pytest.fixture
def creator(host: Host, operation: Operation) -> Creator:
    host.messages()
    host.library.imitate(87)
    return host.creators[operation.name]
