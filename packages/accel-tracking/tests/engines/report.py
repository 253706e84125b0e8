"""A run that reports to one tracker, as a program of its own: `report.py TRACKER FOLDER PART INIT_KWARGS`.

Part `first` begins the run and leaves its state in `state.json`; part `second` goes on with it. Both print, as the last
line, what the library's own object is.
"""

import faulthandler
import json
import math
import sys
from pathlib import Path

import torch

from accel_tracking import LOGGER_TYPE_TO_CLASS, TrackerSet

LIMIT_S = 420.0
CONFIG = {"lr": 0.1, "optimizer": {"name": "sgd"}, "folder": Path("a/b"), "note": None, "api_key": "hush"}
PIXELS_HWC = torch.arange(4 * 5 * 3, dtype=torch.uint8).reshape(4, 5, 3) * 4


def first(trackers: TrackerSet) -> None:
    for step in range(3):
        trackers.log({"loss": torch.tensor(1.0 / (step + 1)), "train/count": step}, step=step)
    trackers.log({"remark": "halfway"}, step=3)
    trackers.log({"odd": math.nan}, step=4)
    trackers.log_images({"wrong": PIXELS_HWC}, step=5, dataformats="HWC")
    trackers.log_table("errors", columns=["is", "should"], data=[[1, 7], [2, 9]], step=6)


def second(trackers: TrackerSet) -> None:
    trackers.log({"loss": 0.125}, step=7)


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S)  # where a library hangs, before the test gives up
    name, folder, part, init_kwargs = sys.argv[1:]
    state = Path(folder) / "state.json"
    LOGGER_TYPE_TO_CLASS[name].timeout_s = LIMIT_S  # what is read back has to be complete, however busy the machine is
    trackers = TrackerSet(name, folder)
    if part == "second":
        trackers.load_state_dict(json.loads(state.read_text()))
    trackers.init("digits", CONFIG, {name: json.loads(init_kwargs)})
    {"first": first, "second": second}[part](trackers)
    library = type(trackers.get(name, unwrap=True))
    state.write_text(json.dumps(trackers.state_dict()))
    trackers.finish()
    print(f"{library.__module__}.{library.__qualname__}", flush=True)


if __name__ == "__main__":
    main()
