"""Replaces functions of the standard library by ones that fail, twice, and shows their calls.

The second time for good: another thread finds them to its end, and finders and hooks too.
"""

import os
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from unittest import mock

from tiny import STEPS, Trainer, say

NAMES = """
atexit.register builtins.open builtins.print collections.Counter contextlib.suppress copy.deepcopy
faulthandler.cancel_dump_traceback_later gc.collect gc.get_objects gzip.open inspect.signature
io.open json.JSONEncoder json.dumps json.loads linecache.getlines os.access os.close os.dup
os.fdopen os.fstat os.getcwd os.listdir os.mkdir os.open os.path.exists os.path.isfile os.replace
os.scandir os.stat os.statvfs os.unlink pathlib.Path pathlib.Path.exists pathlib.Path.glob
pathlib.Path.mkdir pathlib.Path.open pathlib.Path.stat pathlib.Path.unlink platform.machine
platform.system re.sub shutil.copyfileobj shutil.disk_usage shutil.rmtree signal.setitimer
signal.signal subprocess.Popen tempfile.NamedTemporaryFile tempfile.TemporaryFile
tempfile.gettempdir tempfile.mkdtemp threading.Event threading.Thread threading.enumerate
time.monotonic time.perf_counter time.process_time time.sleep time.strftime time.time
traceback.walk_stack uuid.uuid4
""".split()
called = set()


class Finder:
    @staticmethod
    def find_spec(name, *_):
        return ModuleSpec(name, None, is_package=True) if name == "made_up" else None


def audit(event, args):
    if event == "open" and set(str(args[1])) & set("wxa") or event == "os.mkdir":
        called.add(event)
        raise PermissionError(event)


def find(pause=time.sleep):
    """Ends the process once what the script has put in place is not there."""
    while pause(0.001) is None:
        try:
            sys.modules.pop("made_up", None)
            __import__("made_up")
            time.time()
        except ZeroDivisionError:
            continue
        except ImportError:
            pass
        os._exit(5)


trainer = Trainer()
say(trainer.step())
for for_good in (False, True):
    finds = threading.Thread(target=find, daemon=True), threading.Thread()
    made = [mock.patch(name, lambda *_, n=name, **__: called.add(n) or 1 / 0) for name in NAMES]
    for one in reversed(made):
        one.start()
    if for_good:
        sys.meta_path.insert(0, Finder)
        sys.addaudithook(audit)
        finds[0].start()
        threading._active[threading.get_ident()] = finds[1]  # as eventlet has it
    for _ in range(STEPS // 2):
        trainer.step()
    for one in () if for_good else made:
        one.stop()
    sys.stdout.write(f"{called - {'time.time'}} {trainer.step().hex()}\n")
sys.setrecursionlimit(70)
