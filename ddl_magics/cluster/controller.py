"""ipyparallel's controller, ending when its notebook's kernel does.

Run as `python -m ddl_magics.cluster.controller`.
"""

from __future__ import annotations

from ipyparallel.controller.app import IPController

from ddl_magics import lease

if __name__ == "__main__":
    lease.end_with_owner()
    IPController.launch_instance()
