"""`headway …` as a pod starts it, with its service account in another folder: in_a_pod.py FOLDER ARGUMENT …"""

from __future__ import annotations

import sys
from pathlib import Path

from headway.__main__ import main
from headway.scaling.kubernetes.account import ServiceAccount

if __name__ == "__main__":
    ServiceAccount.__init__.__defaults__ = (Path(sys.argv.pop(1)),)
    main()
