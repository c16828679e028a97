import subprocess
import sys

import pytest

SCRIPT = """
import importlib.util, logging, sys
assert importlib.util.find_spec("transformer_engine") is None
from nemo_offload_rl.backends.megatron.upstream import bridge_import
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
bridge_import.logger.addHandler(handler)
bridge_import.logger.setLevel(logging.INFO)
AutoBridge = bridge_import.import_auto_bridge()
assert bridge_import.import_auto_bridge() is AutoBridge
assert len(records) == 1 and "transformer-engine is not installed" in records[0], records
assert [name for name in sys.modules if name.split(".")[0] == "transformer_engine"] == []
assert not [finder for finder in sys.meta_path if isinstance(finder, bridge_import._Finder)]
from megatron.core.extensions.transformer_engine import HAVE_TE
assert not HAVE_TE
"""


@pytest.mark.processes
def test_bridge_is_imported_without_transformer_engine_and_nothing_takes_it_for_installed_afterwards():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
