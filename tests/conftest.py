"""Compile each function once for all tests, also for those that start a script as a process of its own."""

import atexit
import os
import shutil
import tempfile

import pytest

if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers of a parallel run share it
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder  # read when jax is imported
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


@pytest.fixture(autouse=True)
def compile_quickly(request):
    """Half of the time of quick tests was XLA's optimisation of code that runs for an instant. Slow ones need it."""
    import jax

    jax.config.update("jax_disable_most_optimizations", request.node.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_functions():
    """All tests together have more of them than Linux maps into one process (65,530 areas of memory): a crash."""
    import jax

    yield
    jax.clear_caches()
