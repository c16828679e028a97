import subprocess
import sys

import pytest

SCRIPT = """
import importlib.util, logging, sys
assert importlib.util.find_spec("transformer_engine") is None
from nemo_offload_rl.backends.megatron.upstream import imports
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
imports.logger.addHandler(handler)
imports.logger.setLevel(logging.INFO)
AutoBridge = imports.import_auto_bridge()
assert imports.import_auto_bridge() is AutoBridge
assert len(records) == 1 and "transformer-engine is not installed" in records[0], records
assert [name for name in sys.modules if name.split(".")[0] == "transformer_engine"] == []
assert not [finder for finder in sys.meta_path if isinstance(finder, imports._Finder)]
from megatron.core.extensions.transformer_engine import HAVE_TE
assert not HAVE_TE
"""


@pytest.mark.processes
def test_bridge_is_imported_without_transformer_engine_and_nothing_takes_it_for_installed_afterwards():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
