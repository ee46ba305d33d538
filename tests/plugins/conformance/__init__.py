"""The plugin library held to TensorRT's interfaces and to the operators' definitions.

No TensorRT and no GPU: harness.cpp plays the builder and the execution context with TensorRT's
public headers (scripts/toolchains.sh fetches them), and the emulation runs the kernels.

    build.py        compiles the library and the harness; heap.cpp counts the library's heap calls
    host.py         a library's creators and plugins, of either interface, as Python objects
    operations.py   each operator's random cases, definition and comparison
    execution.py    one call on device memory, and what every call must do and leave alone
"""
